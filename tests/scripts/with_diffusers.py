"""Re-creates diffusers' unconditional training: a UNet learns to tell noise, through accelerate."""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from diffusers import DDPMScheduler, UNet2DModel
from diffusers.optimization import get_cosine_schedule_with_warmup

torch.manual_seed(14)
model = UNet2DModel(
    sample_size=16, in_channels=3, out_channels=3, layers_per_block=1, block_out_channels=(32, 64, 96),
    down_block_types=("DownBlock2D", "AttnDownBlock2D", "DownBlock2D"),
    up_block_types=("UpBlock2D", "AttnUpBlock2D", "UpBlock2D"), norm_num_groups=8, attention_head_dim=8,
)  # fmt: skip
noise_scheduler = DDPMScheduler(num_train_timesteps=100)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
schedule = get_cosine_schedule_with_warmup(optimizer, num_warmup_steps=2, num_training_steps=8)
images = torch.utils.data.DataLoader(torch.randn(6, 3, 16, 16), batch_size=2)
accelerator = Accelerator(cpu=not torch.cuda.is_available())
model, optimizer, images, schedule = accelerator.prepare(model, optimizer, images, schedule)
for epoch in range(1):
    for clean in images:
        noise = torch.randn(clean.shape, device=clean.device)
        times = torch.randint(0, 100, (clean.shape[0],), device=clean.device)
        with accelerator.accumulate(model):
            found = model(noise_scheduler.add_noise(clean, noise, times), times, return_dict=False)[0]
            loss = F.mse_loss(found, noise)
            accelerator.backward(loss)
            norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        print(epoch, loss.item(), norm.item(), schedule.get_last_lr())
model.eval()
image = torch.randn(1, 3, 16, 16)
with torch.no_grad():
    for time in (99, 50, 0):
        image = noise_scheduler.step(model(image, time).sample, time, image).prev_sample
print(image.double().sum().item())
