"""transformers' Trainer with a small GPT-2 on random tokens: the loop is the library's own."""

import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed
from transformers.trainer_callback import PrinterCallback
from transformers.utils import logging

logging.disable_progress_bar()
set_seed(12)
config = GPT2Config(vocab_size=512, n_positions=32, n_embd=160, n_layer=4, n_head=4, bos_token_id=0, eos_token_id=0)
model = GPT2LMHeadModel(config)
rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(0, 512, (16, 16))]
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        folder, per_device_train_batch_size=4, max_steps=4, logging_steps=1, save_strategy="no", report_to=[],
        disable_tqdm=True, use_cpu=not torch.cuda.is_available(), learning_rate=1e-3,
    )  # fmt: skip
    trainer = Trainer(model=model, args=arguments, train_dataset=rows)
    trainer.remove_callback(PrinterCallback)  # it prints how long things took
    trainer.train()
    for line in trainer.state.log_history:
        print({key: line[key] for key in ("loss", "grad_norm", "learning_rate") if key in line})
    print(trainer.evaluate(rows[:4])["eval_loss"])
