"""transformers' Trainer: a language model in bfloat16 with checkpointing and evaluation."""

import sys

from datasets import Dataset
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainingArguments,
)

tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(sys.argv[1]))
texts = Dataset.from_dict({"text": ["the cat sat on the mat and the dog ran to the house"] * 128})
tokens = texts.map(lambda one: tokenizer(one["text"]), remove_columns="text")
arguments = TrainingArguments(
    "out", per_device_train_batch_size=8, gradient_accumulation_steps=2, max_steps=6, bf16=True,
    gradient_checkpointing=True, eval_strategy="steps", eval_steps=3, report_to="none", logging_steps=1,
)  # fmt: skip
collate = DataCollatorForLanguageModeling(tokenizer, mlm=False)
trainer = Trainer(model, arguments, data_collator=collate, train_dataset=tokens, eval_dataset=tokens)
trainer.train()
print(trainer.evaluate())
