"""A loop of its own over a decoder and its cache."""

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

past = None
cur = ids
with torch.inference_mode():
    for _ in range(4):
        out = model(input_ids=cur, past_key_values=past, use_cache=True)
        past = out.past_key_values
        cur = out.logits[:, -1:].argmax(-1)
        print(cur.tolist())
