"""transformers: a chat template, a batch of padded prompts, sampling and beams."""

import sys

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(sys.argv[1], padding_side="left")
config = AutoConfig.from_pretrained(sys.argv[1])
model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).cuda().eval()
chats = [[{"role": "user", "content": text}] for text in ("the cat sat", "a dog ran to the house and the mat")]
prompts = tokenizer.apply_chat_template(
    chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
).to("cuda")
for options in ({"do_sample": True, "top_p": 0.9, "top_k": 50}, {"num_beams": 4}, {"cache_implementation": "static"}):
    print(tokenizer.batch_decode(model.generate(**prompts, max_new_tokens=12, **options)))
