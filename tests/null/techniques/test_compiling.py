"""Compiled blocks in traces keep what ``torch.compile`` keeps, and need no memory within a kernel."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import brim
from brim.core import Category, Trace
from brim.errors import UnsupportedError
from brim.estimation.ranks.estimate import estimate_ranks
from brim.estimation.ranks.split import Split
from brim.predict.compiled.block import Layout
from brim.predict.compiled.kernels import Kernel, Program
from brim.predict.compiled.torch_compile import is_captured
from brim.techniques import compiling
from brim.techniques.checkpointing import technique as checkpointing
from support.compiled_model import Block, Model
from support.tiny_model import save_llama

_WIDTH, _TOKENS = 64, 32
_GENERATOR_BYTES = 5056  # the CPU's random state, which a compiled block keeps to compute attention again

pytestmark = pytest.mark.filterwarnings("ignore")


def block(choice: str = "none") -> Block:
    return Block(_WIDTH, choice)


def source() -> torch.Tensor:
    return torch.randn(2, _TOKENS, _WIDTH, requires_grad=True)


def traced(made_of: Callable[[], nn.Module] = block, choice: str = "none", *, compiled: bool = True) -> Trace:
    def build() -> Callable[[], None]:
        model = Model(made_of)
        checkpointing.apply(model, {f"layers.{index}": choice for index in range(2)})
        if compiled:
            compiling.apply(model)
        x = source()
        return lambda: model(x).sum().backward()

    return brim.trace(build, steps=1, target="cpu")


def kept_bytes(trace: Trace) -> int:
    return sum(storage.bytes for storage in trace.storages if storage.category is Category.ACTIVATION)


def really_kept_bytes(choice: str) -> int:
    """What autograd keeps of two blocks under torch.compile, with Inductor's decompositions and partitioner."""
    torch.compiler.reset()
    model, x = Model(lambda: block(choice)), source()
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), x)}
    for index, layer in enumerate(model.layers):
        model.layers[index] = torch.compile(layer, fullgraph=True, backend="aot_eager_decomp_partition")
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = model(x)
    out.sum().backward()
    return sum(kept.values())


@pytest.mark.thorough
@pytest.mark.parametrize("choice", checkpointing.CHOICES)
def test_a_compiled_block_keeps_what_torch_compile_keeps(choice):
    made = traced(choice=choice)
    beside = 2 * _GENERATOR_BYTES if choice == "full" else 0
    assert kept_bytes(made) == really_kept_bytes(choice) - beside
    assert made.not_modelled == ()


@pytest.mark.thorough
@pytest.mark.parametrize("choice", ["none", "selective"])
def test_it_keeps_less_than_the_same_block_as_it_is_written(choice):
    assert kept_bytes(traced(choice=choice)) < kept_bytes(traced(choice=choice, compiled=False))


def test_alternate_checkpointing_computes_the_second_the_fourth_and_the_sixth_product_again():
    rows = 2 * _TOKENS * torch.float32.itemsize
    given_up = rows * (_WIDTH + _WIDTH + 3 * _WIDTH)  # k, o and up
    selective, alternate = (
        kept_bytes(traced(choice=choice, compiled=False)) for choice in ("selective", "alternate")
    )
    assert selective - alternate == 2 * given_up


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Linear(_WIDTH, _WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.sin().cos().exp().tanh() * 2 + 1) * self.weight(x)


def test_what_lies_between_the_operations_of_one_kernel_is_in_no_memory():
    made, plain = traced(Chain), traced(Chain, compiled=False)
    size = 2 * _TOKENS * _WIDTH * 4

    def forward(trace: Trace) -> int:
        backward = next(op.at for op in trace.ops if op.phase == "backward")
        return sum(s.bytes >= size and 0 <= trace.step_starts[0] <= s.born < backward for s in trace.storages)

    assert forward(plain) > 2 * 7
    assert forward(made) <= 2 * 2 + 1  # of each block the product and what it gives; and the sum's gradient
    assert any(op.name.startswith("brim.fused") for op in made.ops)


def written_bytes(trace: Trace) -> list[int]:
    return [op.written_bytes for op in trace.ops if op.name.startswith("brim.fused")]


@pytest.mark.parametrize("choice", checkpointing.CHOICES)
def test_every_kernel_of_a_graph_is_in_the_trace_with_all_that_it_writes(choice, monkeypatch):
    wanted: list[int] = []
    plays = Program.play

    def play(program: Program, inputs: list[torch.Tensor]) -> list[torch.Tensor | None]:
        own = [kernel for kernel in program.kernels if kernel.call is None]
        wanted.extend(sum(node.meta["val"].nbytes for node in kernel.nodes) for kernel in own)
        in_place.extend(kernel for kernel in own if len(kernel.over) == len(kernel.nodes))
        return plays(program, inputs)

    in_place: list[Kernel] = []
    monkeypatch.setattr(Program, "play", play)
    made = traced(choice=choice)
    assert in_place
    assert written_bytes(made) == wanted


class AddsTo(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Linear(_WIDTH, _WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight(x) + x


def test_what_a_kernel_writes_over_is_read_once_and_written_once():
    made, size = traced(AddsTo), 2 * _TOKENS * _WIDTH * 4
    forward = [op for op in made.ops if op.name.startswith("brim.fused") and op.phase == "forward"]
    assert [(op.read_bytes, op.written_bytes) for op in forward] == [(2 * size, size)] * 2
    products = [op.at for op in made.ops if op.phase == "forward" and "mm" in op.name]
    held = [s for s in made.storages if s.bytes == size and products[0] <= s.born <= forward[-1].at]
    assert len(held) == len(products)  # the sum is where the product was


class Counting(nn.Module):
    """Writes to a buffer, which is no graph of tensors alone."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Linear(_WIDTH, _WIDTH)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.weight(x)


def test_a_block_that_is_no_one_graph_runs_as_it_is_written_and_the_trace_says_so():
    made, plain = traced(Counting), traced(Counting, compiled=False)
    assert [note for note in made.not_modelled if note.startswith("torch.compile: run as it is written: Counting")]
    assert made.storages == plain.storages


class Wrong(nn.Module):
    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.weight, self.error = nn.Linear(_WIDTH, _WIDTH), error

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if is_captured():
            raise self.error
        return self.weight(x)


@pytest.mark.parametrize("error", [ValueError("theirs"), AssertionError("theirs")])
def test_what_others_refuse_to_make_a_graph_of_runs_as_it_is_written(error):
    assert any("theirs" in note for note in traced(lambda: Wrong(error)).not_modelled)


def test_brims_own_errors_are_not_taken_for_the_modules(monkeypatch):
    with pytest.raises(UnsupportedError, match="brim's"):
        traced(lambda: Wrong(UnsupportedError("brim's")))

    bug: dict[str, Any] = {"__name__": "brim.predict.compiled.block"}
    exec("def empty(layout):\n    assert False, 'a bug'", bug)  # an assertion of the module that it says it is of
    monkeypatch.setattr(Layout, "empty", bug["empty"])
    with pytest.raises(AssertionError, match="a bug"):
        traced()


@pytest.mark.thorough
def test_blocks_that_are_checkpointed_in_another_way_are_another_graph():
    def kept(choices: dict[str, str]) -> int:
        def build() -> Callable[[], None]:
            model, x = Model(block), source()
            checkpointing.apply(model, choices)
            compiling.apply(model)
            return lambda: model(x).sum().backward()

        return kept_bytes(brim.trace(build, steps=1, target="cpu"))

    none, both = kept({}), kept({"layers.0": "full", "layers.1": "full"})
    one = [kept({f"layers.{index}": "full"}) for index in range(2)]
    assert both < one[0] < none
    assert both < one[1] < none


def test_without_gradients_it_runs_as_it_is_written():
    def build() -> Callable[[], torch.Tensor]:
        model = Model(block)
        compiling.apply(model)
        x = source()
        return torch.no_grad()(lambda: model(x))

    assert not any(op.name.startswith("brim.fused") for op in brim.trace(build, steps=1, target="cpu").ops)


def test_a_real_model_is_compiled_with_the_same_results():
    torch.compiler.reset()
    torch.manual_seed(0)
    model, x = Model(block), source()
    wanted = model(x)
    wanted.sum().backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    compiling.apply(model, backend="aot_eager")
    made = model(x)
    made.sum().backward()
    torch.testing.assert_close(made, wanted)
    torch.testing.assert_close([parameter.grad for parameter in model.parameters()], gradients)


# -- ranks -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("compiled"), layers=4, hidden=64, positions=256)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "settings",
    [{"zero": 3}, {"zero": 3, "tp": 2}, {"zero": 3, "tp": 2, "sequence_parallel": True}, {"zero": 1, "pp": 2},
     {"zero": 3, "cp": 2}],
)  # fmt: skip
def test_ranks_compile_however_a_model_is_split(llama, settings):
    split = Split(gpus=4, gpus_per_node=4, micro_batch=2, **settings)
    plain, made = (
        estimate_ranks(llama, split, seq=256, precision="bf16-mixed", compiled=compiled) for compiled in (False, True)
    )
    assert not [note for note in made.not_modelled if "torch.compile" in note]
    assert made.worst.peak_bytes.allocated < plain.worst.peak_bytes.allocated


def test_what_cannot_be_compiled_is_refused(llama):
    with pytest.raises(UnsupportedError, match="--ep"):
        estimate_ranks(llama, Split(gpus=2, gpus_per_node=2, ep=2), seq=64, compiled=True)


@pytest.mark.parametrize("asked", [{"compiled": True}, {"checkpointing": "alternate"}])
def test_megatron_is_asked_for_neither(llama, asked):
    with pytest.raises(UnsupportedError, match="Megatron-LM"):
        estimate_ranks(llama, Split(gpus=2, gpus_per_node=2), engine="megatron", precision="bf16", seq=64, **asked)
