"""Headers, shards, the writer and the checksums, as someone who holds only a folder of files sees them."""

from __future__ import annotations

import hashlib
import json
import time
from pathlib import Path

import pytest
import safetensors.torch
import torch

from brim.errors import ModelError
from brim.memory import checkpoint_files
from brim.memory.checkpoint_files import (
    DTYPES,
    Extent,
    TensorSource,
    merge_extents,
    read_checkpoint,
    read_safetensors_header,
)
from brim.memory.checkpoint_writing import write_safetensors
from brim.memory.checksums import checksum, read_manifest, verify_hub_blob, write_manifest


def read(source: TensorSource) -> torch.Tensor:
    data = b""
    for extent in source.extents:
        with open(extent.path, "rb") as file:
            file.seek(extent.offset)
            data += file.read(extent.bytes)
    return (
        torch.frombuffer(bytearray(data), dtype=source.dtype).reshape(source.shape)
        if data
        else torch.empty(source.shape, dtype=source.dtype)
    )


def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "odd": torch.randn(3, 5),
        "half": torch.randn(64, 64).bfloat16(),
        "scalar": torch.tensor(3),
        "empty": torch.zeros(0, 4),
        "square": torch.randn(16, 16),
        "flag": torch.tensor([True]),
        "eight": torch.randn(7).to(torch.float8_e4m3fn),
    }


def write(path: Path, content: dict[str, torch.Tensor]) -> dict[str, int]:
    layout = [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in content.items()]
    return write_safetensors(path, layout, content.items(), {"format": "pt"})


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def test_every_tensor_of_a_file_written_by_safetensors_is_where_its_extent_says(tmp_path: Path) -> None:
    safetensors.torch.save_file(tensors(), tmp_path / "model.safetensors")
    found = read_checkpoint(tmp_path)
    assert found.keys() == tensors().keys()
    for name, tensor in tensors().items():
        assert read(found[name]).shape == tensor.shape
        assert same(read(found[name]).reshape(-1), tensor.reshape(-1)), name
        assert found[name].bytes == tensor.nbytes


def test_safetensors_reads_what_we_write_and_the_data_is_aligned(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    write(path, tensors())
    loaded = safetensors.torch.load_file(path)
    assert all(same(loaded[name].reshape(-1), tensor.reshape(-1)) for name, tensor in tensors().items())
    found = read_safetensors_header(path)
    first = next(iter(found.values()))
    assert first.extents[0].offset % 4096 == 0
    for source in found.values():
        if source.bytes % 64 == 0:
            assert all(extent.offset % 64 == 0 for extent in source.extents)
    with safetensors.safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_tensors_may_come_in_any_order_and_are_taken_one_at_a_time(tmp_path: Path) -> None:
    content = tensors()
    layout = [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in content.items()]
    path = tmp_path / "model.safetensors"
    write_safetensors(path, layout, ((name, content[name]) for name in reversed(content)))
    loaded = safetensors.torch.load_file(path)
    assert all(same(loaded[name].reshape(-1), tensor.reshape(-1)) for name, tensor in content.items())


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_nothing_is_left_when_writing_is_interrupted(tmp_path: Path, error: type[BaseException]) -> None:
    content = tensors()

    def interrupted():
        yield "odd", content["odd"]
        raise error

    layout = [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in content.items()]
    with pytest.raises(error):
        write_safetensors(tmp_path / "model.safetensors", layout, interrupted())
    assert list(tmp_path.iterdir()) == []


def test_shards_are_read_through_their_index(tmp_path: Path) -> None:
    content = tensors()
    names = list(content)
    for shard, part in (("a.safetensors", names[:3]), ("b.safetensors", names[3:])):
        safetensors.torch.save_file({name: content[name] for name in part}, tmp_path / shard)
    weight_map = {name: "a.safetensors" if name in names[:3] else "b.safetensors" for name in names}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    found = read_checkpoint(tmp_path)
    assert {name: Path(source.extents[0].path).name for name, source in found.items() if source.bytes} == {
        name: shard for name, shard in weight_map.items() if content[name].nbytes
    }


def test_a_diffusers_folder_is_read(tmp_path: Path) -> None:
    safetensors.torch.save_file(tensors(), tmp_path / "diffusion_pytorch_model.safetensors")
    assert read_checkpoint(tmp_path).keys() == tensors().keys()


def test_a_hub_cache_whose_files_are_links_into_its_blobs_is_read_and_verified(tmp_path: Path) -> None:
    repo = tmp_path / "models--some--model"
    snapshot, blobs = repo / "snapshots" / "abc", repo / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    safetensors.torch.save_file(tensors(), tmp_path / "shard")
    blob = blobs / hashlib.sha256((tmp_path / "shard").read_bytes()).hexdigest()
    (tmp_path / "shard").rename(blob)
    link = snapshot / "model-00001-of-00001.safetensors"
    link.symlink_to(Path("../../blobs") / blob.name)
    index = {"weight_map": dict.fromkeys(tensors(), link.name)}
    (snapshot / "model.safetensors.index.json").write_text(json.dumps(index))
    assert read_checkpoint(snapshot).keys() == tensors().keys()
    assert verify_hub_blob(link)
    damaged = bytearray(blob.read_bytes())
    damaged[-1] ^= 1
    blob.write_bytes(damaged)
    with pytest.raises(ModelError, match="damaged"):
        verify_hub_blob(link)


def test_a_file_outside_a_hub_cache_has_no_hash_to_verify(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert not verify_hub_blob(tmp_path / "model.safetensors")


def test_every_dtype_that_safetensors_and_torch_share_is_known(tmp_path: Path) -> None:
    for number, dtype in enumerate(DTYPES.values()):
        path = tmp_path / f"{number}.safetensors"
        write(path, {"x": torch.zeros(4, dtype=dtype)})
        assert safetensors.torch.load_file(path)["x"].dtype == dtype


def test_neighbouring_extents_are_joined() -> None:
    pieces = [("a", 0, 4), ("a", 4, 4), ("a", 12, 4), ("a", 0, 0), ("b", 16, 4)]
    merged = merge_extents(Extent(path=path, offset=offset, bytes=count) for path, offset, count in pieces)
    assert [(extent.path, extent.offset, extent.bytes) for extent in merged] == [
        ("a", 0, 8),
        ("a", 12, 4),
        ("b", 16, 4),
    ]


def header_of(path: Path, text: str) -> None:
    path.write_bytes(len(text).to_bytes(8, "little") + text.encode())


def test_more_tensors_than_any_model_has_are_refused_before_they_are_parsed(tmp_path: Path) -> None:
    entry = '{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
    path = tmp_path / "model.safetensors"
    header_of(path, "{" + ",".join(f'"{number}":{entry}' for number in range(1_000_000)) + "}")
    began_s = time.process_time()
    with pytest.raises(ModelError, match="lists 1,000,000 tensors; at most 262,144"):
        read_checkpoint(tmp_path)
    assert time.process_time() - began_s < 1
    header_of(path, "{" + ",".join(f'"{number}":{entry}' for number in range(2_000)) + "}")
    with pytest.raises(ModelError, match="2,000 of its tensors hold no bytes"):
        read_checkpoint(tmp_path)


def test_a_shape_of_a_million_sizes_is_refused_before_they_are_multiplied(tmp_path: Path) -> None:
    sizes = ",".join(["9000000000000000000"] * 1_000_000)
    header_of(tmp_path / "model.safetensors", f'{{"w":{{"dtype":"F32","shape":[{sizes}],"data_offsets":[0,0]}}}}')
    began_s = time.process_time()
    with pytest.raises(ModelError, match=r"shape .* of .w. is wrong"):
        read_checkpoint(tmp_path)
    assert time.process_time() - began_s < 5


def test_a_key_that_comes_twice_among_many_is_found_at_once(tmp_path: Path) -> None:
    keys = ",".join(f'"{number}":"a.safetensors"' for number in [*range(200_000), 199_999])
    header_of(tmp_path / "model.safetensors", f"{{{keys}}}")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "model.safetensors.index.json").write_text(f'{{"weight_map":{{{keys}}}}}')
    began_s = time.process_time()
    for folder in (tmp_path, tmp_path / "b"):
        with pytest.raises(ModelError, match="the key '199999' appears twice"):
            read_checkpoint(folder)
    assert time.process_time() - began_s < 5


def test_a_shard_that_is_listed_by_many_names_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "a.safetensors", tensors())
    names = {f"{name}": "./" * number + "a.safetensors" for number, name in enumerate(tensors())}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    headers = []
    monkeypatch.setattr(
        checkpoint_files,
        "read_safetensors_header",
        lambda path: headers.append(path) or read_safetensors_header(path),
    )
    assert read_checkpoint(tmp_path).keys() == tensors().keys()
    assert len(headers) == 1


class TestChecksum:
    @pytest.mark.parametrize("size", [1, 7, 8, 9, 64, 4096 + 5, (1 << 18) + 3])
    def test_any_single_flipped_bit_shows(self, size: int) -> None:
        torch.manual_seed(size)
        data = torch.randint(0, 256, (size,), dtype=torch.uint8)
        known = checksum(data)
        assert checksum(data.clone()) == known
        for position in {0, size // 2, size - 1, *range(0, size, max(1, size // 50))}:
            for bit in range(8):
                flipped = data.clone()
                flipped[position] ^= 1 << bit
                assert checksum(flipped) != known, (position, bit)

    def test_swapped_words_and_swapped_chunks_show(self) -> None:
        torch.manual_seed(0)
        data = torch.randn(1 << 17).view(torch.uint8)
        known, words = checksum(data), data.view(torch.int64)
        for one, other in ((0, 1), (5, 900), (3, (1 << 15) + 3)):
            swapped = words.clone()
            swapped[[one, other]] = swapped[[other, one]]
            assert checksum(swapped.view(torch.uint8)) != known
        assert checksum(words.roll(1 << 15).view(torch.uint8)) != known

    def test_zeros_of_different_lengths_differ(self) -> None:
        assert len({checksum(torch.zeros(size, dtype=torch.uint8)) for size in range(40)}) == 40

    def test_it_does_not_depend_on_where_the_bytes_lie(self) -> None:
        data = torch.arange(1000).to(torch.uint8)
        assert checksum(torch.cat([data[:3], data])[3:]) == checksum(data)

    def test_the_writer_returns_what_the_manifest_keeps(self, tmp_path: Path) -> None:
        content = tensors()
        write_manifest(tmp_path, write(tmp_path / "model.safetensors", content))
        found = read_manifest(tmp_path)
        assert found is not None
        assert found == {name: checksum(t.reshape(-1).view(torch.uint8)) for name, t in content.items()}

    def test_a_folder_without_a_manifest_has_none(self, tmp_path: Path) -> None:
        assert read_manifest(tmp_path) is None
