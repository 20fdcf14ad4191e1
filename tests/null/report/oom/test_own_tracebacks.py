"""Tracebacks that PyTorch and transformers, as installed, print where an operation finds no memory."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM

from brim.report.oom.reader import OomMessage, read_oom
from brim.report.phase import Phase

MESSAGE = (
    "CUDA out of memory. Tried to allocate 130.00 MiB. GPU 0 has a total capacity of 23.60 GiB of which 87.19 MiB is "
    "free. Including non-PyTorch memory, this process has 23.40 GiB memory in use. Of the allocated memory "
    "22.90 GiB is "
    "allocated by PyTorch, and 200.00 MiB is reserved by PyTorch but unallocated."
)
IDS = torch.arange(16).reshape(2, 8)


class OutOfMemoryAt(TorchDispatchMode):
    """The ``count``-th operation of this name finds no memory."""

    def __init__(self, name: str, count: int) -> None:
        super().__init__()
        self.name, self.left = name, count

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.name in str(func):
            self.left -= 1
            if self.left == 0:
                raise torch.OutOfMemoryError(MESSAGE)
        return func(*args, **(kwargs or {}))


def explained(call: Callable[[], Any], operation: str, count: int = 1) -> OomMessage:
    with pytest.raises(torch.OutOfMemoryError) as caught, OutOfMemoryAt(operation, count):
        call()
    (message,) = read_oom("".join(traceback.format_exception(caught.value)))
    return message


def model(attention: str = "sdpa") -> LlamaForCausalLM:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, attn_implementation=attention, **sizes)).train()


def loss(of: LlamaForCausalLM) -> torch.Tensor:
    return of(input_ids=IDS, labels=IDS).loss


def optimizer(*, steps: int, foreach: bool) -> torch.optim.Optimizer:
    trained = model()
    adam = torch.optim.AdamW(trained.parameters(), foreach=foreach)
    for _ in range(steps):
        loss(trained).backward()
        adam.step()
    loss(trained).backward()
    return adam


def recomputed() -> torch.Tensor:
    layer = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.SiLU())
    return checkpoint(layer, torch.ones(2, 4, requires_grad=True), use_reentrant=False).sum()


CASES: dict[str, tuple[Callable[[], Callable[[], Any]], str, int, Phase]] = {
    "foreach": (lambda: optimizer(steps=1, foreach=True).step, "_foreach_sqrt", 1, Phase.OPTIMIZER),
    "one tensor": (lambda: optimizer(steps=1, foreach=False).step, "aten.sqrt", 1, Phase.OPTIMIZER),
    "states": (lambda: optimizer(steps=0, foreach=True).step, "zeros_like", 1, Phase.STATES),
    "cross entropy": (lambda: lambda: loss(model()), "_log_softmax", 1, Phase.LOSS),
    "the last layer": (lambda: lambda: loss(model()), "aten.mm", 2 * 7 + 1, Phase.LOSS),
    "a layer": (lambda: lambda: loss(model()), "aten.silu", 1, Phase.FORWARD),
    "scores": (lambda: lambda: loss(model("eager")), "_softmax", 1, Phase.ATTENTION),
    "backward": (lambda: loss(model()).backward, "aten.mm", 3, Phase.BACKWARD),
    "a layer again": (lambda: recomputed().backward, "aten.silu", 1, Phase.BACKWARD),
    "moved": (lambda: lambda: model().half(), "_to_copy", 1, Phase.LOADING),
    "a token": (
        lambda: (
            lambda: (
                model().eval().generate(IDS, attention_mask=torch.ones_like(IDS), max_new_tokens=2, pad_token_id=0)
            )
        ),
        "aten.silu",
        1,
        Phase.GENERATION,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_phase_is_read_from_a_real_traceback(name):
    prepared, operation, count, phase = CASES[name]
    message = explained(prepared(), operation, count)
    assert message.phase == phase
    assert message.program == ""


TRAINED = {
    "loss": ("train", "_log_softmax", Phase.LOSS, "use_liger_kernel"),
    "states": ("train", "zeros_like", Phase.STATES, "adamw_bnb_8bit"),
    "backward": ("train", "silu_backward", Phase.BACKWARD, "per_device_train_batch_size"),
    "predictions": ("evaluate", "aten.cat", Phase.EVALUATION, "per_device_eval_batch_size"),
    "evaluation": ("evaluate", "aten.silu", Phase.EVALUATION, "per_device_eval_batch_size"),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", TRAINED)
def test_a_traceback_of_transformers_trainer_gets_its_own_settings(name, tmp_path):
    from transformers import Trainer, TrainingArguments

    action, operation, phase, setting = TRAINED[name]
    rows = [{"input_ids": IDS[0], "labels": IDS[0]} for _ in range(4)]
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        save_strategy="no",
        dataloader_pin_memory=False,
    )
    trainer = Trainer(
        model=model(), args=arguments, train_dataset=rows, eval_dataset=rows, compute_metrics=lambda predictions: {}
    )
    message = explained(getattr(trainer, action), operation)
    assert (message.phase, message.program) == (phase, "hf-trainer")
    assert setting in message.advice[0].paste
