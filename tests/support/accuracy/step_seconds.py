"""Published seconds of timm's models, and a table of each model's operations to predict them from.

The steps are those of timm's own benchmark: float16 autocast, random weights, contiguous images; a training step
clears gradients, computes cross entropy and steps SGD with momentum, one parameter after the other as PyTorch 1.12
does; attention is a product, a softmax and a product there, and fused where PyTorch 2 inferred. A trace takes
seconds, so tables are kept in a folder if one is named.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
import sys
import types
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import torch

from brim.core import Op, Phase, Trace
from brim.predict.tracer import trace
from support.accuracy import ground_truth

_CLASSES = 1000
# Words before the name of the architecture: where its weights are from.
_PREFIXES = re.compile(r"^(tf|gluon|ssl|swsl|ig|legacy|tv|jx|ens|adv)_")


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A published row."""

    set: str
    gpu: str
    model: str
    batch: int
    size: int
    step_s: float

    @property
    def task(self) -> str:
        return self.set.partition(" ")[0]

    @property
    def family(self) -> str:
        """The architecture: the letters that its name begins with."""
        match = re.match("[a-z]+", _PREFIXES.sub("", self.model))
        return match[0] if match else self.model

    @property
    def is_held_out(self) -> bool:
        """A third of the families is not fitted to."""
        return is_held_out(self.family)


def is_held_out(family: str) -> bool:
    return int(hashlib.sha256(family.encode()).hexdigest(), 16) % 3 == 0


SETS = {
    "train RTX 3090": ("RTX 3090", "timm_train_amp_nchw_rtx3090_pt112.csv"),
    "infer RTX 4090": ("RTX 4090", "timm_infer_amp_nchw_rtx4090_pt240.csv"),
    "infer RTX 5090": ("RTX 5090", "timm_infer_amp_nchw_rtx5090_pt291.csv"),
}


def published(name: str, of_family: int) -> list[Measured]:
    """The rows of a set, at most so many of each family, spread by a hash of the name."""
    gpu, file = SETS[name]
    task = name.partition(" ")[0]
    families: dict[str, list[Measured]] = defaultdict(list)
    for row in ground_truth.rows(f"step_seconds/{file}"):
        measured = Measured(
            set=name, gpu=gpu, model=row["model"].partition(".")[0], batch=int(row[f"{task}_batch_size"]),
            size=int(row[f"{task}_img_size"]), step_s=float(row[f"{task}_step_time"]) / 1e3,
        )  # fmt: skip
        if measured.model not in {other.model for other in families[measured.family]}:
            families[measured.family].append(measured)
    return [row for rows in families.values() for row in sorted(rows, key=_spread)[:of_family]]


def _spread(row: Measured) -> str:
    return hashlib.sha256(row.model.encode()).hexdigest()


def traced(row: Measured, folder: Path | None = None) -> Trace:
    """The operations of a row's step, from the folder if they are there."""
    if folder is None:
        return _trace(row)
    return stored(folder / f"{row.task}-{row.model}-{row.batch}-{row.size}.json", lambda: _trace(row))


def stored(path: Path, make: Callable[[], Trace]) -> Trace:
    """The operations of a trace's last step, from the file if it is there."""
    if not path.exists():
        path.write_text(json.dumps(_packed(make())))
    return _unpacked(json.loads(path.read_text()))


def _trace(row: Measured) -> Trace:
    import_timm()
    capability = (8, 6) if row.task == "train" else (8, 9)
    return trace(lambda: _step(row), steps=1 + (row.task == "train"), capability=capability)


def _step(row: Measured) -> Callable[[], None]:
    timm = import_timm()
    timm.layers.set_fused_attn(row.task != "train")
    model = timm.create_model(row.model, **_size(timm, row)).cuda()
    images = torch.randn(row.batch, 3, row.size, row.size, device="cuda")

    def infer() -> None:
        with torch.no_grad(), torch.autocast("cuda", dtype=torch.float16):
            model(images)

    if row.task == "infer":
        model.eval()
        return infer
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9, nesterov=True, foreach=False)
    labels = torch.randint(0, _CLASSES, (row.batch,), device="cuda")

    def train() -> None:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            output = model(images)
            loss = torch.nn.functional.cross_entropy(output[0] if isinstance(output, tuple) else output, labels)
        loss.backward()
        optimizer.step()

    return train


def _size(timm: Any, row: Measured) -> dict[str, int]:
    settings = timm.get_pretrained_cfg(row.model)
    fixed = settings is not None and settings.fixed_input_size and settings.input_size[-1] != row.size
    return {"img_size": row.size} if fixed else {}


def has_timm() -> bool:
    return importlib.util.find_spec("timm") is not None


def import_timm() -> Any:
    """timm, without torchvision, which it needs for images alone and which needs a build of PyTorch of its own."""
    absent = None if importlib.util.find_spec("torchvision") else _Absent()
    if absent is not None and "timm" not in sys.modules:
        sys.meta_path.append(absent)  # type: ignore[arg-type]
    try:
        import timm
    finally:
        if absent in sys.meta_path:
            sys.meta_path.remove(absent)  # type: ignore[arg-type]
            for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
                del sys.modules[name]  # others ask whether it is there
    return timm


_MODES = ("BILINEAR", "BICUBIC", "LANCZOS", "HAMMING", "BOX", "NEAREST")


class _Absent:
    """Finds modules of torchvision whose every name is an empty class."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] == "torchvision" else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        module = types.ModuleType(spec.name)

        def member(name: str) -> type:
            if name.startswith("__"):
                raise AttributeError(name)
            return type(name, (), {mode: mode for mode in _MODES})

        module.__getattr__ = member  # type: ignore[method-assign]
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """Do nothing: there is nothing in it."""


# -- operations without names of modules and ticks ------------------------------------------------------------------

_FIELDS = ("name", "phase", "flops", "read_bytes", "written_bytes", "dtype", "kernel", "fill")


def _packed(made: Trace) -> dict[str, Any]:
    last = max(op.step for op in made.ops)
    keys: Counter[tuple[Any, ...]] = Counter()
    order = []
    for op in made.ops:
        if op.step == last and (op.flops or op.written_bytes):
            key = tuple(getattr(op, field) for field in _FIELDS)
            keys[key] += 1
            order.append(key)
    numbers = {key: number for number, key in enumerate(keys)}
    return {"kinds": list(keys), "order": [numbers[key] for key in order]}


def _unpacked(document: dict[str, Any]) -> Trace:
    kinds = [dict(zip(_FIELDS, kind, strict=True)) for kind in document["kinds"]]
    ops = [
        Op(module="", step=0, at=at, **kinds[kind] | {"phase": Phase(kinds[kind]["phase"])})
        for at, kind in enumerate(document["order"])
    ]
    return Trace(model="", target="cuda", ops=tuple(ops), storages=(), step_starts=(0,))
