"""vector-quantize-pytorch: a residual quantizer in an autoencoder of images."""

import torch
from torch import nn
from vector_quantize_pytorch import ResidualVQ

encode = nn.Sequential(nn.Conv2d(3, 64, 4, 2, 1), nn.GELU(), nn.Conv2d(64, 256, 4, 2, 1)).cuda()
decode = nn.Sequential(nn.ConvTranspose2d(256, 64, 4, 2, 1), nn.GELU(), nn.ConvTranspose2d(64, 3, 4, 2, 1)).cuda()
quantize = ResidualVQ(dim=256, codebook_size=512, num_quantizers=4, kmeans_init=True).cuda()
optimizer = torch.optim.AdamW([*encode.parameters(), *decode.parameters()], lr=3e-4)
for _ in range(8):
    images = torch.rand(8, 3, 64, 64, device="cuda")
    latents = encode(images)
    quantized, indices, commit = quantize(latents.flatten(2).transpose(1, 2))
    loss = (decode(quantized.transpose(1, 2).view_as(latents)) - images).abs().mean() + 0.25 * commit.sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(indices.unique().numel())
