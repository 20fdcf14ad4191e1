"""A pipeline of diffusers."""

import warnings

import torch
from diffusers import DDPMPipeline, DDPMScheduler, UNet2DModel

warnings.simplefilter("ignore")

torch.manual_seed(0)
unet = UNet2DModel(
    sample_size=8,
    in_channels=3,
    out_channels=3,
    layers_per_block=1,
    block_out_channels=(32, 64),
    down_block_types=("DownBlock2D", "AttnDownBlock2D"),
    up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    norm_num_groups=8,
)
p = DDPMPipeline(unet, DDPMScheduler())
p.set_progress_bar_config(disable=True)
print(
    p(batch_size=1, generator=torch.Generator().manual_seed(0), num_inference_steps=3, output_type="np")
    .images.astype("float64")
    .sum()
)
