"""transformers' Trainer."""

from __future__ import annotations

import tempfile

import torch
from _settings import LARGE, WORDS, language_loss, llama, moved, optimizer, settings
from transformers import Trainer, TrainingArguments

given = settings()
LENGTH = {"attention": 1024, "loss": 256, "evaluation": 128, "outputs": 128}.get(given.case, 128)
SHAPE = {
    "optimizer": LARGE,
    "states": LARGE,
    "loading": LARGE,
    "gradients": LARGE,
    "loss": WORDS,
    "evaluation": WORDS | {"vocab_size": 16000},
    "outputs": WORDS | {"vocab_size": 16000},
}.get(given.case, {})


class Tokens(torch.utils.data.Dataset):
    def __len__(self):
        return 96 if given.case in ("evaluation", "outputs") else 4096

    def __getitem__(self, at):
        tokens = torch.randint(0, 4000, (LENGTH,))
        return {"input_ids": tokens, "labels": tokens}


def loss_of(outputs, labels, num_items_in_batch=None):
    logits = outputs.logits[:, :-1].flatten(0, 1)
    return language_loss(logits, labels[:, 1:].flatten(), given)


model = moved(llama(given, **SHAPE), given)
kinds = {"optim": "adamw_torch_fused"} if given.case == "states" else {}
arguments = TrainingArguments(
    tempfile.mkdtemp(), max_steps=5, report_to="none", save_strategy="no", logging_strategy="no", disable_tqdm=True,
    per_device_train_batch_size=given.batch, per_device_eval_batch_size=given.batch,
    gradient_checkpointing="checkpointing" in given, gradient_checkpointing_kwargs={"use_reentrant": False},
    bf16="bfloat16 autocast" in given or given.case == "loss",
    eval_accumulation_steps=1 if "outputs to the CPU" in given else None, dataloader_pin_memory=False, **kinds,
)  # fmt: skip
if given.case == "gradients":
    updates = torch.optim.SGD(model.parameters(), lr=1e-4, foreach=False)
elif given.case == "states":
    updates = torch.optim.AdamW(model.parameters(), fused=True)
else:
    updates = optimizer(model.parameters(), given)
trainer = Trainer(
    model,
    arguments,
    train_dataset=Tokens(),
    eval_dataset=Tokens(),
    optimizers=(updates, torch.optim.lr_scheduler.ConstantLR(updates)),
    compute_loss_func=loss_of,
    compute_metrics=(lambda found: {"count": float(len(found.predictions))}) if given.case == "outputs" else None,
)
if given.case in ("evaluation", "outputs"):
    trainer.evaluate()
else:
    trainer.train()
