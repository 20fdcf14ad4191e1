"""diffusers' transformer of images under Accelerate: training on noise, and sampling."""

from __future__ import annotations

import torch
from _settings import kept, moved, optimizer, settings, without_gradients
from accelerate import Accelerator
from diffusers import AutoencoderKL, DiTTransformer2DModel

given = settings()
WIDE = ("optimizer", "states", "gradients", "loading")
accelerator = Accelerator(mixed_precision="bf16" if "bfloat16 autocast" in given else "no")
if given.case == "decoding":
    model = AutoencoderKL(
        block_out_channels=(64, 128), latent_channels=4, down_block_types=["DownEncoderBlock2D"] * 2,
        up_block_types=["UpDecoderBlock2D"] * 2,
    )  # fmt: skip
else:
    heads, layers = (16, 6) if given.case in WIDE else (6, 6)
    model = DiTTransformer2DModel(num_attention_heads=heads, attention_head_dim=64, num_layers=layers, sample_size=32)
if "checkpointing" in given:
    model.enable_gradient_checkpointing()
model = moved(model, given)
dtype = next(model.parameters()).dtype


def inputs():
    latents = torch.randn(given.batch, 4, 32, 32, device="cuda", dtype=dtype)
    times = torch.randint(0, 1000, (given.batch,), device="cuda")
    return latents, times, torch.randint(0, 1000, (given.batch,), device="cuda")


def train():
    global model
    if given.case == "gradients":
        updates = torch.optim.SGD(model.parameters(), lr=1e-4, foreach=False)
    elif given.case == "states":
        updates = torch.optim.AdamW(model.parameters(), fused=True)
    else:
        updates = optimizer(model.parameters(), given)
    model, updates = accelerator.prepare(model, updates)
    model.train()
    for _ in range(5):
        latents, times, classes = inputs()
        found = model(latents, times, classes).sample[:, :4]
        accelerator.backward((found.float() - latents).square().mean())
        updates.step()
        updates.zero_grad()


def sample():
    model.eval()
    outputs = []
    with without_gradients(given):
        for _ in range(30 if given.case == "outputs" else 2):
            if given.case == "decoding":
                image = model.decode(torch.randn(given.batch, 4, 64, 64, device="cuda", dtype=dtype)).sample
            else:
                image = model(*inputs()).sample
            if given.case == "outputs":
                outputs.append(kept(image.repeat(1, 8, 4, 4), given))


if given.case in ("evaluation", "decoding"):
    sample()
elif given.case in ("outputs", "loading"):
    with torch.no_grad():
        sample()
else:
    train()
