"""vit-pytorch: a vision transformer of two patch sizes that attend to one another."""

import torch
from vit_pytorch.cross_vit import CrossViT

model = CrossViT(
    image_size=256, num_classes=1000, depth=2, sm_dim=192, sm_patch_size=16, sm_enc_depth=2, sm_enc_heads=8,
    sm_enc_mlp_dim=2048, lg_dim=384, lg_patch_size=64, lg_enc_depth=3, lg_enc_heads=8, lg_enc_mlp_dim=2048,
    cross_attn_depth=2, cross_attn_heads=8, dropout=0.1, emb_dropout=0.1,
).cuda()  # fmt: skip
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for _ in range(10):
    logits = model(torch.randn(8, 3, 256, 256, device="cuda"))
    loss = torch.nn.functional.cross_entropy(logits, torch.randint(0, 1000, (8,), device="cuda"))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
