"""transformers' Trainer with a DeepSpeed configuration (ZeRO 2), on the ranks of a job."""

from datasets import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

settings = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "bf16": {"enabled": "auto"},
    "zero_optimization": {"stage": 2, "overlap_comm": True},
    "zero_allow_untested_optimizer": True,
}
rows = Dataset.from_dict({"input_ids": [list(range(128))] * 256, "labels": [list(range(128))] * 256})
arguments = TrainingArguments(
    "out", per_device_train_batch_size=4, max_steps=6, bf16=True, deepspeed=settings, report_to="none",
    save_strategy="no",
)  # fmt: skip
Trainer(GPT2LMHeadModel(GPT2Config(n_layer=6)), arguments, train_dataset=rows).train()
