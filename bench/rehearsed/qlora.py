"""QLoRA: a base model of 4 bits by bitsandbytes, adapters by PEFT, paged states."""

import sys

import bitsandbytes as bnb
import torch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import AutoConfig, AutoModelForCausalLM

model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(sys.argv[1]), dtype=torch.bfloat16)
for module in list(model.modules()):
    for name, child in list(module.named_children()):
        if isinstance(child, torch.nn.Linear) and name != "lm_head":
            four = bnb.nn.Linear4bit(child.in_features, child.out_features, bias=False, quant_type="nf4",
                                     compute_dtype=torch.bfloat16)  # fmt: skip
            four.load_state_dict(child.state_dict())
            setattr(module, name, four)
model.is_loaded_in_4bit = True
model = prepare_model_for_kbit_training(model.cuda())
model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"))
optimizer = bnb.optim.PagedAdamW8bit(model.parameters(), lr=2e-4)
for _ in range(10):
    tokens = torch.randint(0, 200, (2, 256), device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
