"""diffusers: a diffusion transformer trained on flow matching with an average of its weights."""

import torch
from diffusers import DiTTransformer2DModel, FlowMatchEulerDiscreteScheduler
from diffusers.training_utils import EMAModel, compute_density_for_timestep_sampling

model = DiTTransformer2DModel(num_attention_heads=6, attention_head_dim=64, num_layers=6, sample_size=32).cuda()
model.enable_gradient_checkpointing()
noises, average = FlowMatchEulerDiscreteScheduler(), EMAModel(model.parameters())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for _ in range(8):
    latents, classes = torch.randn(8, 4, 32, 32, device="cuda"), torch.randint(0, 1000, (8,), device="cuda")
    chosen = (compute_density_for_timestep_sampling("logit_normal", 8, 0.0, 1.0) * 1000).long()
    times, noise = noises.timesteps[chosen].cuda(), torch.randn_like(latents)
    part = (times / 1000).view(-1, 1, 1, 1)
    with torch.autocast("cuda", torch.bfloat16):
        found = model((1 - part) * latents + part * noise, times, classes).sample[:, :4]
        loss = ((found - (noise - latents)) ** 2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    average.step(model.parameters())
