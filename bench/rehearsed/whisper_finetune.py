"""Whisper fine-tuned under autocast, its encoder frozen."""

import torch
from transformers import WhisperConfig, WhisperForConditionalGeneration

model = WhisperForConditionalGeneration(WhisperConfig(encoder_layers=4, decoder_layers=4, d_model=384)).cuda()
model.freeze_encoder()
scaler = torch.amp.GradScaler()
optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad])
for _ in range(8):
    sound, labels = torch.randn(4, 80, 3000, device="cuda"), torch.randint(0, 1000, (4, 64), device="cuda")
    with torch.autocast("cuda", torch.float16):
        loss = model(input_features=sound, labels=labels).loss
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
