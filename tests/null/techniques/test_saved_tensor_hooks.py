"""Saved-tensor hooks that several techniques, checkpointing and the user share."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from brim.techniques.saved_tensor_hooks import Saving, Unpack


class _Reference:
    def __init__(self, keeper: _ByStorage, tensor: torch.Tensor) -> None:
        self._keeper = keeper
        self._as = tensor.shape, tensor.stride(), tensor.storage_offset()

    def unpack(self) -> torch.Tensor:
        self._keeper.unpacked += 1
        return self._keeper.weight.as_strided(*self._as)


class _ByStorage:
    """Takes the views of one weight, as a technique that moves weights does."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight, self.unpacked = weight, 0

    def pack(self, tensor: torch.Tensor) -> Unpack | None:
        same = tensor.untyped_storage()._cdata == self.weight.untyped_storage()._cdata
        return _Reference(self, tensor).unpack if same else None


def _layers() -> tuple[nn.Linear, nn.Linear, torch.Tensor]:
    torch.manual_seed(0)
    return nn.Linear(8, 8), nn.Linear(8, 8), torch.randn(4, 8, requires_grad=True)


def _gradients(first: nn.Linear, second: nn.Linear, x: torch.Tensor, call) -> list[torch.Tensor]:
    call(x).pow(2).sum().backward()
    made = [x.grad, first.weight.grad, second.weight.grad]
    first.zero_grad(), second.zero_grad()
    x.grad = None
    return made


@pytest.mark.parametrize("checkpointed", [False, True])
def test_gradients_are_the_same_with_and_without_checkpointing_around(checkpointed: bool) -> None:
    first, second, x = _layers()
    keeper = _ByStorage(first.weight.data)

    def call(x: torch.Tensor) -> torch.Tensor:
        with Saving(keeper):
            y = first(x).relu()
        return second(y)

    plain = _gradients(first, second, x, lambda x: second(first(x).relu()))
    held = _gradients(
        first, second, x, lambda x: checkpoint(call, x, use_reentrant=False) if checkpointed else call(x)
    )
    assert keeper.unpacked > 0
    for one, other in zip(plain, held, strict=True):
        assert torch.equal(one, other)


def test_what_is_not_taken_goes_to_the_hooks_outside() -> None:
    first, second, x = _layers()
    keeper, seen = _ByStorage(first.weight.data), []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(tensor.shape)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        with Saving(keeper):
            y = first(x).relu()
        inside = len(seen)
        second(y)
    assert inside == 2  # the input of the first layer and the relu's output; not its weight
    assert len(seen) > inside  # and the hooks outside are the ones in force again


def test_end_without_begin_does_nothing_and_an_exception_restores_the_hooks() -> None:
    first, _, _ = _layers()
    Saving(_ByStorage(first.weight.data)).end()
    with pytest.raises(RuntimeError, match="broken"), Saving(_ByStorage(first.weight.data)):
        raise RuntimeError("broken")
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None


def test_a_graph_that_is_dropped_frees_what_it_kept() -> None:
    first, second, x = _layers()
    storages: list[weakref.ref] = []

    class Watching:
        def pack(self, tensor: torch.Tensor) -> Unpack | None:
            storages.append(weakref.ref(tensor.untyped_storage()))
            return None

    with Saving(Watching()):
        hidden = first(x).exp()  # exp keeps its own output
    y = second(hidden)
    del hidden
    gc.collect()
    assert any(storage() is not None for storage in storages)
    own = {t.untyped_storage()._cdata for t in (x, first.weight)}
    del y
    gc.collect()
    alive = [storage() for storage in storages]
    assert {storage._cdata for storage in alive if storage is not None} <= own


def test_what_was_modified_in_place_is_refused_as_by_plain_autograd() -> None:
    _, _, x = _layers()

    class Nothing:
        def pack(self, tensor: torch.Tensor) -> Unpack | None:
            return None

    with Saving(Nothing()):
        y = x.exp()
        z = (y * y).sum()
    y.add_(1)
    with pytest.raises(
        RuntimeError, match=r"modified by an inplace operation: \[torch.FloatTensor \[4, 8\]\] is at v"
    ):
        z.backward()
