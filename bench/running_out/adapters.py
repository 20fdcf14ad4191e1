"""PEFT: adapters in a frozen Llama, in a loop of one's own."""

from __future__ import annotations

import torch
from _settings import (
    LARGE,
    WORDS,
    autocast,
    kept,
    language_loss,
    llama,
    moved,
    optimizer,
    settings,
    without_gradients,
)
from peft import LoraConfig, get_peft_model

given = settings()
LENGTH = {"attention": 1024, "generation": 512}.get(given.case, 256)
SHAPE = {"loading": LARGE, "optimizer": LARGE, "loss": WORDS, "outputs": WORDS | {"vocab_size": 16000}}
RANKS = {"optimizer": 256}
model = llama(given, **SHAPE.get(given.case, {}))
model = get_peft_model(model, LoraConfig(r=RANKS.get(given.case, 8), target_modules="all-linear"))
model = moved(model, given)
if "checkpointing" in given:
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def batch():
    return torch.randint(0, 4000, (given.batch, LENGTH), device="cuda")


def train():
    updates = optimizer([one for one in model.parameters() if one.requires_grad], given)
    for _ in range(5):
        tokens = batch()
        with torch.autocast("cuda", torch.bfloat16) if given.case == "loss" else autocast(given):
            logits = model(input_ids=tokens).logits
        loss = language_loss(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), given)
        loss.backward()
        updates.step()
        updates.zero_grad()


def evaluate():
    model.eval()
    outputs = []
    with without_gradients(given):
        for _ in range(16 if given.case == "outputs" else 2):
            outputs.append(kept(model(input_ids=batch()).logits, given))
            if given.case != "outputs":
                outputs.clear()


if given.case == "evaluation":
    evaluate()
elif given.case == "outputs":
    with torch.no_grad():
        evaluate()
elif given.case == "generation":
    model.eval()
    model.generate(input_ids=batch(), max_new_tokens=4, do_sample=False)
else:
    train()
