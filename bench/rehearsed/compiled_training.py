"""torch.compile around a transformer and FlexAttention in it."""

import torch
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x, mask):
        batch, length, width = x.shape
        parts = self.qkv(self.norm(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        return x + self.out(flex_attention(*parts, block_mask=mask).transpose(1, 2).reshape(batch, length, width))


def near(batch, head, query, key):
    return (query >= key) & (query - key < 128)


block = torch.compile(Block(512, 8).cuda())
mask = create_block_mask(near, None, None, 512, 512, device="cuda")
optimizer = torch.optim.AdamW(block.parameters(), fused=True)
for _ in range(6):
    block(torch.randn(4, 512, 512, device="cuda"), mask).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
