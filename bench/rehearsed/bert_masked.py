"""BERT with masked words, chosen on the GPU, and a schedule with warm-up."""

import torch
from transformers import BertConfig, BertForMaskedLM, get_linear_schedule_with_warmup

model = BertForMaskedLM(BertConfig(num_hidden_layers=6)).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5)
schedule = get_linear_schedule_with_warmup(optimizer, 2, 10)
for _ in range(10):
    tokens = torch.randint(200, 30000, (8, 256), device="cuda")
    attention, labels = torch.ones_like(tokens), tokens.clone()
    attention[:, 200:] = 0
    masked = torch.bernoulli(torch.full(labels.shape, 0.15, device="cuda")).bool()
    labels[~masked] = -100
    tokens[masked] = 103
    loss = model(input_ids=tokens, attention_mask=attention, labels=labels).loss
    loss.backward()
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
