"""What goes to RAM and back around a call: any containers, any strides, changes in place."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from collections import namedtuple
from typing import Any

import pytest
import torch

from brim.core import Timeline
from brim.errors import BudgetError
from brim.memory.tiers import Memory, emulated_memory
from brim.techniques.cpu_compute.technique import ActivationTransfer

Pair = namedtuple("Pair", "one two")


@dataclasses.dataclass(frozen=True)
class Held:
    name: str
    value: Any


def memory(ram_bytes: int = 1 << 20) -> Memory:
    return emulated_memory(Timeline("transfer", measured=True), vram_bytes=1 << 20, ram_bytes=ram_bytes)


def call(function: Any, *args: Any, **kwargs: Any) -> Any:
    made = memory()
    transfer = ActivationTransfer(made)
    result = transfer.call(function, "block, activations", args, kwargs)
    transfer.free()
    assert made.ram.held_bytes == 0
    made.close()
    return result


def test_nested_arguments_and_results_keep_their_form() -> None:
    x, y = torch.arange(6.0).view(2, 3), torch.tensor([True, False])
    seen: list[Any] = []

    def function(one: Any, *, two: Any) -> Any:
        seen.append((one, two))
        return {"pair": Pair(one[0] + 1, two["deep"][0]), "held": Held("n", two["deep"][1] * 2), "none": None, "n": 3}

    made = call(function, (x, 5), two={"deep": [y, x]})
    (inside, number), deep = seen[0][0], seen[0][1]["deep"]
    assert number == 5
    assert inside is deep[1] is not x  # the same tensor twice is the same tensor twice
    assert torch.equal(inside, x)
    assert torch.equal(made["pair"].one, x + 1)
    assert made["pair"].two is y  # what is only handed through is what it was
    assert made["held"].name == "n"
    assert torch.equal(made["held"].value, 2 * x)
    assert (made["none"], made["n"]) == (None, 3)


def test_what_went_there_is_not_kept_until_garbage_is_collected() -> None:
    """In a pass over many layers it would be the activations of all of them."""
    x = torch.ones(2, 3)
    gone = weakref.ref(x)
    gc.disable()
    try:
        made = call(lambda one, two: (one[0] + 1, two), [x, 5], {"deep": (x, [x])})
        del x
        assert gone() is made[1]["deep"][0]  # what comes back is what was given
        del made
        assert gone() is None
    finally:
        gc.enable()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(24.0).view(2, 3, 4).transpose(0, 2),
        torch.arange(24.0).view(4, 6)[::2, 1:4],
        torch.arange(3.0)[:, None].expand(3, 5),
        torch.tensor(3.0),
        torch.empty(0, 4),
        torch.arange(4, dtype=torch.int8),
        torch.arange(4.0).to(torch.bfloat16),
        torch.tensor([1 + 2j, 3j]).conj(),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    ],
    ids=["transposed", "cut out", "expanded", "scalar", "empty", "int8", "bfloat16", "conjugate", "channels last"],
)
def test_a_tensor_arrives_with_its_values_and_strides(tensor: torch.Tensor) -> None:
    seen: list[torch.Tensor] = []

    def function(x: torch.Tensor) -> torch.Tensor:
        seen.append(x)
        return x.clone()

    made = call(function, tensor)
    assert torch.equal(seen[0], tensor)
    assert (seen[0].shape, seen[0].stride(), seen[0].dtype) == (tensor.shape, tensor.stride(), tensor.dtype)
    assert seen[0].data_ptr() != tensor.data_ptr() or not tensor.numel()
    assert torch.equal(made, tensor)
    assert made.stride() == tensor.clone().stride()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=["no grad", "inference"])
def test_what_a_call_changes_in_place_is_changed(mode: Any) -> None:
    with mode():
        x, state, log = torch.zeros(3), {"seen": torch.ones(2)}, [torch.ones(1)]

        def function(x: torch.Tensor, state: Any, log: Any) -> torch.Tensor:
            x += 1
            state["new"] = x * 5
            log.append(state["seen"] * 2)
            return x

        before, kept = x, state["seen"]
        made = call(function, x, state, log)
        assert made is before
        assert x.tolist() == [1, 1, 1]
        assert list(state) == ["seen", "new"]
        assert state["seen"] is kept
        assert state["new"].tolist() == [5, 5, 5]
        assert [t.tolist() for t in log] == [[1], [2, 2]]


def test_what_a_call_keeps_is_not_the_next_calls() -> None:
    made, kept = memory(), []
    transfer = ActivationTransfer(made)
    transfer.make_room(4096)
    for value in (1.0, 2.0):
        transfer.call(kept.append, "block, activations", (torch.full((4,), value),), {})
    assert [t.tolist() for t in kept] == [[1] * 4, [2] * 4]
    transfer.free()
    made.close()


def test_an_object_that_is_no_container_stays_the_object() -> None:
    class Cache(dict[str, torch.Tensor]):
        """Known to nobody as a container."""

    cache = Cache(key=torch.ones(2))
    assert call(lambda c: c, cache) is cache


def test_the_buffer_grows_within_the_budget_only() -> None:
    made = memory(ram_bytes=3 * 4096)
    transfer = ActivationTransfer(made)
    transfer.make_room(4096)
    transfer.call(lambda x: x * 2, "block, activations", (torch.ones(2048),), {})  # 8 KiB
    assert made.ram.held_bytes == made.ram.peak_bytes == 2 * 4096
    with pytest.raises(BudgetError, match="transfer buffer"):
        transfer.call(lambda x: x * 2, "block, activations", (torch.ones(4096),), {})
    assert torch.equal(
        transfer.call(lambda x: x * 2, "block, activations", (torch.ones(8),), {}), torch.full((8,), 2.0)
    )
    transfer.free()
    made.close()
