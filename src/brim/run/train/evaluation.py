"""The loss of data that is not trained on, in the course of a training and at its end."""

from __future__ import annotations

import math
from pathlib import Path

from brim.models.architecture import read_config
from brim.models.opening import read_tokenizer
from brim.planning.strategy.step import Fitted
from brim.run.data.dataset import IGNORED, Dataset, one_pass, open_data
from brim.run.train.request import Request


def open_evaluation(request: Request, folder: Path) -> Dataset | None:
    """The data to evaluate on, opened and checked as training data is; None where none was given."""
    if request.eval_data is None:
        return None
    config = read_config(folder, trust_remote_code=request.trust_remote_code)
    rows = getattr(config.get_text_config(), "vocab_size", None)
    return open_data(
        request.eval_data, read_tokenizer(folder, str(request.model)), request.seq, vocab_size=rows
    )  # fmt: skip


def evaluate(fitted: Fitted, data: Dataset, seq: int) -> float:
    """The mean loss over all of ``data``, every token with a label counted once.

    Micro-batches have the shape of the training's, and nothing is kept for a backward pass: at every moment there is
    less than in the forward pass of a step, so a plan's promise holds for it too.
    """
    total, counted = 0.0, 0
    for batch in one_pass(data, fitted.choice.micro_batch, pad_to=seq):
        tokens = int((batch["labels"][:, 1:] != IGNORED).sum())  # the model predicts each from those before it
        if tokens:
            total += float(fitted.evaluate(batch)) * tokens
            counted += tokens
    return total / counted if counted else math.nan
