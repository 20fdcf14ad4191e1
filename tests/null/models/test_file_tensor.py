"""Whatever is done to a tensor that is still in its file, its extents or values are those of the real operation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from brim.errors import TransferError, UnsupportedError
from brim.memory.checkpoint_files import read_checkpoint
from brim.memory.checkpoint_writing import write_safetensors
from brim.models.file_tensor import FileTensor

Operation = Callable[[list[torch.Tensor]], torch.Tensor]


def real_tensors() -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(4, 6, 8), torch.randn(4, 6, 8), torch.randn(4, 6, 8)]


@pytest.fixture
def lazy(tmp_path: Path) -> list[torch.Tensor]:
    content = {str(number): tensor for number, tensor in enumerate(real_tensors())}
    layout = [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in content.items()]
    write_safetensors(tmp_path / "model.safetensors", layout, content.items())
    return [FileTensor.open(source) for source in read_checkpoint(tmp_path).values()]


GATHERED: dict[str, Operation] = {
    "itself": lambda t: t[0],
    "all of it": lambda t: t[0][...],
    "stack": lambda t: torch.stack(t),
    "stack inside": lambda t: torch.stack(t, dim=1),
    "cat": lambda t: torch.cat(t),
    "cat inside": lambda t: torch.cat(t, dim=1),
    "cat last": lambda t: torch.cat(t, dim=-1),
    "experts": lambda t: torch.cat([torch.stack(t), torch.stack(t[::-1])], dim=1),
    "one": lambda t: t[1][2],
    "rows": lambda t: t[1][1:3],
    "columns": lambda t: t[1][:, 2:5],
    "column": lambda t: t[1][:, 3],
    "every other": lambda t: t[0][::2],
    "chunk": lambda t: torch.chunk(t[0], 2, dim=1)[1].contiguous(),
    "split": lambda t: torch.split(t[0], [1, 3])[1],
    "unbind": lambda t: torch.unbind(t[2], dim=1)[4],
    "reshape": lambda t: t[0].reshape(8, -1),
    "flatten a slice": lambda t: t[0][:, 1:].reshape(-1),
    "squeeze": lambda t: t[0][:1].squeeze(0),
    "clone": lambda t: t[0].clone(),
    "permuted heads": lambda t: t[0].view(4, 2, 3, 8).transpose(1, 2).reshape(4, 6, 8),
    "same dtype": lambda t: t[0].to(torch.float32),
}

COMPUTED: dict[str, Operation] = {
    "cast": lambda t: t[0].to(torch.float16),
    "sum": lambda t: t[0] + t[1],
    "transposed cast": lambda t: t[0].transpose(0, 2).half().contiguous(),
    "of a computed one": lambda t: torch.cat([t[0] * 2, t[1]])[3:5],
    "with a real one": lambda t: torch.cat([t[0], torch.ones(1, 6, 8)]),
    "mean": lambda t: t[0].mean(dim=1),
}


@pytest.mark.parametrize("name", GATHERED)
def test_a_gathering_is_a_list_of_extents(name: str, lazy: list[torch.Tensor]) -> None:
    found, expected = GATHERED[name](lazy), GATHERED[name](real_tensors())
    assert isinstance(found, FileTensor)
    assert found.extents is not None
    assert sum(extent.bytes for extent in found.extents) == expected.nbytes
    assert found.shape == expected.shape
    assert torch.equal(found.materialize(), expected)


@pytest.mark.parametrize("name", COMPUTED)
def test_anything_else_is_computed_when_it_is_read(name: str, lazy: list[torch.Tensor]) -> None:
    found, expected = COMPUTED[name](lazy), COMPUTED[name](real_tensors())
    assert isinstance(found, FileTensor)
    assert found.extents is None
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    assert torch.equal(found.materialize(), expected)
    assert found.materialize().is_contiguous()


def test_a_gathering_in_too_many_small_pieces_is_computed_instead(tmp_path: Path) -> None:
    content = torch.arange(64 * 64.0).reshape(64, 64)
    write_safetensors(tmp_path / "model.safetensors", [("x", torch.float32, (64, 64))], [("x", content)])
    (source,) = read_checkpoint(tmp_path).values()
    transposed = FileTensor.open(source).t()
    assert isinstance(transposed, FileTensor)
    assert transposed.extents is None
    assert torch.equal(transposed.materialize(), content.t())


def test_neighbours_in_the_file_become_one_extent(lazy: list[torch.Tensor]) -> None:
    together = torch.cat(lazy)
    assert isinstance(together, FileTensor)
    assert together.extents is not None
    assert len(together.extents) == 1


def test_equality_reads_the_files(lazy: list[torch.Tensor]) -> None:
    assert torch.equal(lazy[0], lazy[0].clone())
    assert torch.equal(lazy[0], torch.cat([lazy[0][:2], lazy[0][2:]]))
    assert not torch.equal(lazy[0], lazy[1])
    assert not torch.equal(lazy[0], lazy[0][:2])


def test_a_weight_is_not_changed_in_its_file(lazy: list[torch.Tensor]) -> None:
    with pytest.raises(UnsupportedError, match="still on disk"):
        lazy[0].zero_()
    with pytest.raises(UnsupportedError, match="still on disk"):
        lazy[0][1].normal_()


def test_a_file_that_became_shorter_is_one_clear_error(lazy: list[torch.Tensor]) -> None:
    last = lazy[-1]
    assert isinstance(last, FileTensor)
    assert last.extents is not None
    path = Path(last.extents[0].path)
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(TransferError, match="written to since its header was read"):
        last.materialize()
    path.unlink()
    with pytest.raises(TransferError, match="No such file"):
        last.materialize()
