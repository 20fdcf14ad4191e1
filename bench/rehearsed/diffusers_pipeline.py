"""diffusers: a Stable Diffusion pipeline put together from its parts, with guidance, in half precision."""

import sys

import torch
from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from transformers import AutoTokenizer, CLIPTextConfig, CLIPTextModel

tokenizer = AutoTokenizer.from_pretrained(sys.argv[1], model_max_length=77)
text = CLIPTextModel(CLIPTextConfig(hidden_size=256, num_hidden_layers=4, num_attention_heads=4))
vae = AutoencoderKL(
    block_out_channels=(64, 128), latent_channels=4, down_block_types=["DownEncoderBlock2D"] * 2,
    up_block_types=["UpDecoderBlock2D"] * 2,
)  # fmt: skip
unet = UNet2DConditionModel(block_out_channels=(64, 128, 256, 256), cross_attention_dim=256, attention_head_dim=8)
pipeline = StableDiffusionPipeline(
    vae, text, tokenizer, unet, DDIMScheduler(), safety_checker=None, feature_extractor=None,
    requires_safety_checker=False,
).to("cuda", torch.float16)  # fmt: skip
print(pipeline("the cat sat on the mat", num_inference_steps=4, height=128, width=128).images[0].size)
