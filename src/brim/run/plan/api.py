"""``brim.plan``: how a model is to be trained or run in what a machine has."""

from __future__ import annotations

from pathlib import Path

from brim.run.model.training_model import Method
from brim.run.plan.request import Answer, Request
from brim.run.plan.search import plan as answer


def plan(
    model: str | Path, *, task: str = "generate",
    gpu: str | None = None, vram: str | int | None = None,
    ram: str | int | None = None, disk: str | int | None = None,
    batch: int = 1, seq: int = 1024, new_tokens: int = 128,
    precision: str | None = None, optimizer: str = "adamw", method: Method = "full",
    prefer: str = "speed", lossless: bool = False, top: int = 5,
    precisions: bool = False, router_statistics: str | None = None,
) -> Answer:  # fmt: skip
    """The fastest ways to do ``task`` ("generate" or "train") with ``model`` that fit, each one proved.

    ``model`` is a name of the catalog, a folder, a ``.gguf`` file, or for training ``file.py:build``, a function that
    returns a model and its inputs. The machine is this one, or that of ``gpu``, a name of the catalog, with ``ram``
    and ``disk``: amounts such as ``"8GiB"``. ``seq`` are tokens of a training sequence, or of the prompt before
    ``new_tokens``.

    ``precisions`` has the answer say what each kind of block takes in 8 bits and in 16. ``router_statistics`` ("auto"
    or a file) plans a mixture of experts by what its routers do in a short run.

    The answer's ``proposals`` are ranked; where nothing fits there are none, and ``nearest`` has the changes under
    which it would. Raises UsageError and ModelError for what was asked.
    """
    request = Request(
        model=model, task=task, gpu=gpu, vram=vram, ram=ram, disk=disk, batch=batch, seq=seq, new_tokens=new_tokens,
        precision=precision, optimizer=optimizer, method=method, prefer=prefer, lossless=lossless, top=top,
    )  # fmt: skip
    return answer(request, precisions=precisions, router_statistics=router_statistics)
