"""PEFT: adapters of five kinds on the same base model, one after the other."""

import sys

import torch
from peft import AdaLoraConfig, IA3Config, LoHaConfig, LoraConfig, PrefixTuningConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

linear = ["q_proj", "v_proj"]
for config in (
    LoraConfig(task_type="CAUSAL_LM", target_modules=linear, use_dora=True),
    AdaLoraConfig(task_type="CAUSAL_LM", target_modules=linear, total_step=10, tinit=1, tfinal=5, deltaT=1),
    IA3Config(task_type="CAUSAL_LM", target_modules=[*linear, "down_proj"], feedforward_modules=["down_proj"]),
    LoHaConfig(task_type="CAUSAL_LM", target_modules=linear),
    PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=16),
):
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(sys.argv[1])).cuda()
    model = get_peft_model(model, config)
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-3)
    for step in range(3):
        tokens = torch.randint(0, 200, (2, 128), device="cuda")
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        if isinstance(config, AdaLoraConfig):
            model.base_model.update_and_allocate(step)
        optimizer.zero_grad()
