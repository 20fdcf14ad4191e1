"""Fake results that are remembered are those that PyTorch's fake kernels give, each with a storage of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from brim.predict.autograd import written
from brim.predict.shapes import result_of

aten = torch.ops.aten


class Remembering(TorchDispatchMode):
    """Answers as a trace of ``mode`` does."""

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()
        self.mode = mode

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return result_of(func, args, kwargs or {}, self.mode)[0]


@pytest.fixture
def fake() -> Iterator[FakeTensorMode]:
    with FakeTensorMode() as mode:
        yield mode


def facts(value: Any, home: int) -> Any:
    if not isinstance(value, torch.Tensor):
        return [facts(one, home) for one in value] if isinstance(value, (tuple, list)) else value
    storage = value.untyped_storage()
    where = value.storage_offset(), storage.nbytes(), storage._cdata == home
    return tuple(value.shape), value.stride(), value.dtype, value.device, where, value.is_inference()


CALLS: dict[str, Callable[[torch.Tensor], Any]] = {
    "sum of two": lambda x: x + x,
    "product with an integer": lambda x: x * 2,
    "product with a float": lambda x: x * 2.0,
    "product with a truth": lambda x: x * True,
    "matrix product": lambda x: x @ x.t(),
    "comparison": lambda x: x > 0,
    "transposed": lambda x: x.t(),
    "sliced": lambda x: x[1:, ::2],
    "a row": lambda x: x[2],
    "reshaped": lambda x: x.reshape(2, -1),
    "viewed as other numbers": lambda x: x.view(torch.int32),
    "unfolded": lambda x: x.unfold(0, 2, 1),
    "split": lambda x: x.split(2),
    "chunked": lambda x: x.chunk(2, dim=1),
    "joined": lambda x: torch.cat([x, x]),
    "stacked": lambda x: torch.stack([x, x]),
    "sorted": lambda x: x.sort(),
    "largest": lambda x: x.max(dim=1),
    "normalised": lambda x: torch.nn.functional.layer_norm(x, (x.shape[-1],)),
    "dropped": lambda x: torch.native_dropout(x, 0.5, True),
    "in half": lambda x: x.to(torch.bfloat16),
    "as it is": lambda x: x.to(torch.float32),
    "cloned": lambda x: x.clone(),
    "zeros": lambda x: torch.zeros_like(x, dtype=torch.float64),
    "expanded": lambda x: x[:1].expand(5, -1),
    "expanded and added": lambda x: x[:1].expand(5, -1) + 1,
    "strided": lambda x: torch.as_strided(x, (2, 2), (1, 1)),
    "strided from elsewhere": lambda x: torch.as_strided(x, (2, 2), (2, 1), 3),
    "made": lambda x: torch.empty(3, x.shape[0], dtype=torch.bfloat16),
    "made for bytes": lambda x: torch.empty((x.numel(),), dtype=torch.uint8, device="cpu"),
    "made as strides say": lambda x: torch.empty_strided((2, 3), (1, 2)),
    "picked": lambda x: x.gather(1, torch.zeros(x.shape, dtype=torch.long)),
}


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_remembered_result_is_the_one_of_the_fake_kernel(
    call: Callable[[torch.Tensor], Any], inference: bool, fake: FakeTensorMode
) -> None:
    with torch.inference_mode(inference):
        for given in (torch.empty(4, 6), torch.empty(6, 4).t(), torch.empty(5, 6)[1:], torch.empty(4, 12)[:, ::2]):
            wanted = facts(call(given), given.untyped_storage()._cdata)
            with Remembering(fake):
                for _ in range(3):
                    assert facts(call(given), given.untyped_storage()._cdata) == wanted


def test_results_are_never_the_same_storage_twice(fake: FakeTensorMode) -> None:
    given = torch.empty(4, 6)
    with Remembering(fake):
        made = [given * 2 for _ in range(4)]
    assert len({one.untyped_storage()._cdata for one in made}) == 4


def test_what_is_refused_is_refused_again(fake: FakeTensorMode) -> None:
    with Remembering(fake):
        for _ in range(2):
            with pytest.raises(RuntimeError, match="reduction dim"):
                torch.empty(4, 6) @ torch.empty(5, 6)


def test_a_view_beyond_its_storage_does_to_that_what_the_fake_kernel_does(fake: FakeTensorMode) -> None:
    one, other = torch.empty(4, 6), torch.empty(4, 6)
    torch.as_strided(one, (7, 6), (6, 1))
    with Remembering(fake):
        for given in (torch.empty(4, 6), torch.empty(4, 6), other):
            torch.as_strided(given, (7, 6), (6, 1))
    assert other.untyped_storage().nbytes() == one.untyped_storage().nbytes()


def test_a_remembered_tensor_is_all_that_the_constructor_makes_of_one(fake: FakeTensorMode) -> None:
    with Remembering(fake):
        _, _, made = (torch.empty(4, 6).t() for _ in range(3))
    wanted = torch.empty(4, 6).t()
    assert isinstance(made, FakeTensor)
    assert vars(made) == vars(wanted)
    assert (made.requires_grad, made.is_leaf) == (wanted.requires_grad, wanted.is_leaf)
    assert str(torch._C._dispatch_keys(made)) == str(torch._C._dispatch_keys(wanted))


def test_who_asks_the_same_hears_of_the_same_work(fake: FakeTensorMode) -> None:
    _, first = result_of(aten.mul.Tensor, (torch.empty(4, 9), 2.0), {}, fake)
    _, second = result_of(aten.mul.Tensor, (torch.empty(4, 9), 2.0), {}, fake)
    _, larger = result_of(aten.mul.Tensor, (torch.empty(5, 9), 2.0), {}, fake)
    assert first is second is not None
    assert larger is not first


def test_writing_where_a_tensor_lies_gives_that_tensor(fake: FakeTensorMode) -> None:
    one, other = torch.empty(4, 6), torch.empty(4, 6)
    assert written(aten.add_.Tensor, (one, other), {"alpha": 2}) is one
    assert written(aten.lerp_.Scalar, (one, other, 0.1), {}) is one


@pytest.mark.parametrize(
    "other",
    [
        lambda: torch.empty(5, 6),
        lambda: torch.empty(4, 6, dtype=torch.float64),
        lambda: torch.empty(4, 6, dtype=torch.long),
        lambda: torch.empty(()),
        lambda: 1j,
    ],
)
def test_anything_less_plain_is_left_to_the_fake_kernel(other: Callable[[], Any], fake: FakeTensorMode) -> None:
    assert written(aten.add_.Tensor, (torch.empty(4, 6), other()), {}) is None


def test_only_dense_floats_are_plain(fake: FakeTensorMode) -> None:
    whole = torch.empty(4, 6, dtype=torch.long)
    assert written(aten.add_.Tensor, (whole, whole), {}) is None
    expanded = torch.empty(1, 6).expand(4, 6)
    assert written(aten.mul_.Tensor, (expanded, 2.0), {}) is None
    literal = torch.tensor(1.0)
    assert isinstance(literal, FakeTensor)
    assert literal.constant is not None
    assert written(aten.add_.Tensor, (literal, 1.0), {}) is None
