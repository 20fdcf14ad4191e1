"""x-transformers: a decoder with rotary positions, trained on characters and sampled from."""

import torch
from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper

model = TransformerWrapper(
    num_tokens=256,
    max_seq_len=512,
    attn_layers=Decoder(dim=512, depth=6, heads=8, rotary_pos_emb=True, attn_flash=True),
)
model = AutoregressiveWrapper(model).cuda()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
for _ in range(10):
    for _ in range(2):
        (model(torch.randint(0, 256, (4, 513), device="cuda")) / 2).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()
model.eval()
print(model.generate(torch.randint(0, 256, (1, 16), device="cuda"), 16).shape)
