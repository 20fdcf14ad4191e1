"""diffusers: the training loop of text-to-image with LoRA in the UNet, latents from a frozen autoencoder."""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from diffusers import AutoencoderKL, DDPMScheduler, UNet2DConditionModel
from diffusers.optimization import get_scheduler
from diffusers.training_utils import compute_snr
from peft import LoraConfig

accelerator = Accelerator(mixed_precision="fp16", gradient_accumulation_steps=2)
vae = AutoencoderKL(
    block_out_channels=(64, 128), latent_channels=4, down_block_types=["DownEncoderBlock2D"] * 2,
    up_block_types=["UpDecoderBlock2D"] * 2,
)  # fmt: skip
unet = UNet2DConditionModel(block_out_channels=(64, 128, 256, 256), cross_attention_dim=256, attention_head_dim=8)
noises = DDPMScheduler()
for one in (vae, unet):
    one.requires_grad_(False)
vae.to("cuda", torch.float16)
unet.to("cuda", torch.float16)
unet.add_adapter(LoraConfig(r=8, target_modules=["to_k", "to_q", "to_v", "to_out.0"]))
adapters = [one for one in unet.parameters() if one.requires_grad]
for one in adapters:
    one.data = one.data.float()
optimizer = torch.optim.AdamW(adapters, lr=1e-4)
schedule = get_scheduler("cosine", optimizer, num_warmup_steps=2, num_training_steps=10)
unet, optimizer, schedule = accelerator.prepare(unet, optimizer, schedule)
for _ in range(12):
    with accelerator.accumulate(unet):
        pixels = torch.randn(4, 3, 128, 128, device="cuda", dtype=torch.float16)
        latents = vae.encode(pixels).latent_dist.sample() * vae.config.scaling_factor
        noise, times = torch.randn_like(latents), torch.randint(0, 1000, (4,), device="cuda").long()
        words = torch.randn(4, 77, 256, device="cuda", dtype=torch.float16)
        found = unet(noises.add_noise(latents, noise, times), times, words, return_dict=False)[0]
        snr = compute_snr(noises, times)
        weights = torch.stack([snr, 5 * torch.ones_like(times)], 1).min(1)[0] / snr
        loss = (F.mse_loss(found.float(), noise.float(), reduction="none").mean([1, 2, 3]) * weights).mean()
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(adapters, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
