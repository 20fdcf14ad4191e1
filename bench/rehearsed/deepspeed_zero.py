"""DeepSpeed: an engine of the stage that is asked for, in bfloat16, on the ranks of a job."""

import sys

import deepspeed
import torch
from transformers import GPT2Config, GPT2LMHeadModel

stage = int(sys.argv[1])
settings = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": stage},
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
}
deepspeed.init_distributed()
with deepspeed.zero.Init(enabled=stage == 3, config_dict_or_path=settings):
    model = GPT2LMHeadModel(GPT2Config(n_layer=6))
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)
for _ in range(16):
    tokens = torch.randint(0, 50257, (4, 256), device=engine.device)
    engine.backward(engine(input_ids=tokens, labels=tokens).loss)
    engine.step()
