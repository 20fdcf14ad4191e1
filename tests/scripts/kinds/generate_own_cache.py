"""Calls of a decoder with a cache that the program holds."""

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
model = LlamaForCausalLM(
    LlamaConfig(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=6,
        num_attention_heads=4,
        vocab_size=2000,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
    )
).eval()
ids = torch.randint(5, 500, (2, 8))


cache = DynamicCache()
with torch.no_grad():
    for step in range(3):
        out = model(ids[:, step * 2 : step * 2 + 2], past_key_values=cache, use_cache=True)
print(cache.get_seq_length(), out.logits.double().sum().item())
