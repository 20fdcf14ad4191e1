"""Text of a decoder with a static cache."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

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
print(model.generate(ids, max_new_tokens=5, do_sample=False, cache_implementation="static").tolist())
