"""What transformers refuses of a GGUF file is one error that names the file, whatever class it raises."""

from __future__ import annotations

from pathlib import Path

import pytest
from gguf import GGUFWriter

from brim.errors import UnsupportedError
from brim.models.gguf import _convert, _read_by_transformers


def written(path: Path, *, heads: int = 4) -> Path:
    writer = GGUFWriter(str(path), "llama")
    for count, add in (
        (64, writer.add_context_length), (32, writer.add_embedding_length), (1, writer.add_block_count),
        (64, writer.add_feed_forward_length), (heads, writer.add_head_count),
    ):  # fmt: skip
        add(count)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_sizes_that_do_not_divide_are_named(tmp_path: Path) -> None:
    path = written(tmp_path / "model.gguf", heads=5)
    (tmp_path / "converted").mkdir()
    with pytest.raises(UnsupportedError, match=r"model\.gguf(.|\n)+metadata"):
        _convert(path, tmp_path / "converted")


@pytest.mark.parametrize("error", [TypeError("x"), Exception("x"), OSError("not a valid JSON file")])
def test_any_exception_of_transformers_is_a_refusal(error: Exception, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="tokenizer"), _read_by_transformers(tmp_path, "tokenizer"):
        raise error


def test_a_disk_that_fails_is_told_as_it_is(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="full"), _read_by_transformers(tmp_path, "tokenizer"):
        raise OSError(28, "full")
