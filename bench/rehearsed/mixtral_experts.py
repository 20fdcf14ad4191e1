"""A Mixtral with its router's loss: sizes of products follow from routing."""

import torch
from transformers import MixtralConfig, MixtralForCausalLM

config = MixtralConfig(
    hidden_size=512, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4,
    vocab_size=8000, num_local_experts=8, output_router_logits=True,
)  # fmt: skip
model = MixtralForCausalLM(config).to("cuda", torch.bfloat16)
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
for _ in range(8):
    tokens = torch.randint(0, 8000, (4, 512), device="cuda")
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
