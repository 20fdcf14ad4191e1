"""What is no file is refused wherever a file is read: a pipe would be waited for without end."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from brim.cli.explain import source as explain_source
from brim.core import Hardware, Plan, Timeline
from brim.core.files import regular, special_file
from brim.errors import BrimError, ModelError
from brim.estimation.models import find_model
from brim.memory.checkpoint_files import read_checkpoint, read_safetensors_header
from brim.memory.checksums import read_manifest
from brim.models import gguf
from brim.models.architecture import read_config
from brim.models.location import local
from brim.recordings import snapshot
from brim.run.checkpoint import manifest as checkpoint_manifest
from brim.run.data import dataset as data_packed
from brim.run.data import lines as data_lines
from brim.run.generate.inputs import read_prompts

READERS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "plan": ("plan.json", Plan.read),
    "hardware": ("hardware.json", Hardware.read),
    "timeline": ("timeline.json", Timeline.read),
    "weights": ("model.safetensors", lambda path: read_checkpoint(path.parent)),
    "header": ("a.safetensors", read_safetensors_header),
    "index": ("model.safetensors.index.json", lambda path: read_checkpoint(path.parent)),
    "checksums": ("brim.checksums.json", lambda path: read_manifest(path.parent)),
    "config": ("config.json", lambda path: read_config(path.parent, trust_remote_code=False)),
    "described": ("config.json", lambda path: find_model(path.parent)),
    "tokenizer": ("tokenizer.json", lambda path: local(path.parent)),
    "manifest": (checkpoint_manifest.MANIFEST_NAME, lambda path: checkpoint_manifest.read_manifest(path.parent)),
    "snapshot": ("snapshot.pickle", snapshot.read),
    "lines": ("data.jsonl", data_lines.Lines),
    "text": ("data.txt", lambda path: list(data_packed.text_pieces(path))),
    "prompts": ("prompts.txt", read_prompts),
    "gguf": ("model.gguf", gguf.check_header),
}


@pytest.mark.parametrize(("name", "reader"), READERS.values(), ids=READERS)
def test_a_pipe_is_refused(tmp_path: Path, name: str, reader: Callable[[Path], Any]) -> None:
    path = tmp_path / name
    os.mkfifo(path)
    if reader is READERS["checksums"][1]:
        from brim.memory.checksums import MANIFEST_NAME

        path.rename(tmp_path / MANIFEST_NAME)
    with pytest.raises(BrimError, match="pipe"):
        reader(path)


def test_only_files_are_regular(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("text")
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "nowhere").symlink_to("missing")
    (tmp_path / "folder").mkdir()
    assert regular(tmp_path / "link").read_text() == "text"
    assert special_file(tmp_path) is None
    for path, words in ((tmp_path, "folder"), (Path("/dev/zero"), "device")):
        with pytest.raises(OSError, match=words):
            regular(path)
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(tmp_path / "socket"))
        assert special_file(tmp_path) == ("socket", "It is a socket, not a file")


def test_a_pipe_that_nobody_writes_to_is_not_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explain_source, "_FIRST_BYTES_WITHIN_S", 0.05)
    os.mkfifo(tmp_path / "log")
    with pytest.raises(BrimError, match="no data arrived"), explain_source.opened(tmp_path / "log"):
        pass


@pytest.mark.parametrize("model", ["~nobody-of-that-name/model", "/dev/null", "./missing", "a/b/c"])
def test_what_is_no_model_is_told_at_once(model: str) -> None:
    with pytest.raises(BrimError):
        local(model)


def test_what_may_be_on_the_hub_is_left_to_it() -> None:
    assert local("someone/model") is None
    with pytest.raises(ModelError):
        local("./someone/model")
