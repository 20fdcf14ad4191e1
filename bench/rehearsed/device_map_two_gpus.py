"""accelerate: a model dispatched over two GPUs with less memory allowed than it takes on one."""

import sys

import torch
from accelerate import dispatch_model, infer_auto_device_map
from transformers import AutoConfig, AutoModelForCausalLM

model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(sys.argv[1])).eval()
size = sum(one.numel() * one.element_size() for one in model.parameters())
places = infer_auto_device_map(
    model, {0: int(size * 0.7), 1: int(size * 0.7), "cpu": size}, no_split_module_classes=model._no_split_modules
)
model = dispatch_model(model, places)
print(sorted(set(map(str, places.values()))))
with torch.no_grad():
    print(model(input_ids=torch.arange(64)[None].cuda()).logits.device)
