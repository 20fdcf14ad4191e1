"""What is said of an out-of-memory error of a program comes from its traceback, too."""

from __future__ import annotations

import torch

from brim.run.script.retry import explanation

MESSAGE = (
    "CUDA out of memory. Tried to allocate 130.00 MiB. GPU 0 has a total capacity of 23.60 GiB of which "
    "87.19 MiB is free. "
    "Including non-PyTorch memory, this process has 23.40 GiB memory in use. Of the allocated memory 22.90 GiB is "
    "allocated by PyTorch, and 200.00 MiB is reserved by PyTorch but unallocated."
)


def raised(file: str, function: str) -> BaseException:
    """An error that a function of this name raises in a file of this name."""
    names = {"error": torch.OutOfMemoryError(MESSAGE)}
    exec(compile(f"def {function}():\n    raise error\n", file, "exec"), names)
    try:
        names[function]()
    except torch.OutOfMemoryError as error:
        return error
    raise AssertionError("it raises nothing")


def test_an_error_of_the_optimizers_step_is_told_what_helps_there():
    first = explanation(raised("/x/torch/optim/adamw.py", "_multi_tensor_adamw"))[2]
    assert "Use a fused optimizer" in first


def test_an_error_of_a_loss_is_told_what_helps_there():
    first = explanation(raised("/x/torch/nn/functional.py", "cross_entropy"))[2]
    assert "in chunks" in first
