"""denoising-diffusion-pytorch: its Trainer over a folder of images, with an average of the weights."""

import sys

from denoising_diffusion_pytorch import GaussianDiffusion, Trainer, Unet

model = Unet(dim=64, dim_mults=(1, 2, 4, 8), flash_attn=True)
diffusion = GaussianDiffusion(model, image_size=64, timesteps=1000, sampling_timesteps=5)
trainer = Trainer(
    diffusion, sys.argv[1], train_batch_size=8, train_lr=8e-5, train_num_steps=6, gradient_accumulate_every=2,
    ema_decay=0.995, amp=True, calculate_fid=False, save_and_sample_every=5, num_samples=4,
)  # fmt: skip
trainer.train()
