"""A hub on loopback: models by their files, with the errors that the real one answers with. It counts sent bytes."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from brim.estimation.hub import hub_model

_SIZES = {"F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1, "U8": 1, "I8": 1, "I32": 4, "U32": 4, "I64": 8, "F8_E8M0": 1}
Tensors = Mapping[str, tuple[str, tuple[int, ...]]]


def tensor_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    count = _SIZES[dtype]
    for size in shape:
        count *= size
    return count


def safetensors_head(tensors: Tensors) -> tuple[bytes, int]:
    """The first bytes of a file with ``tensors``, and the size of the file; its data is never written."""
    header, offset = {}, 0
    for name, (dtype, shape) in tensors.items():
        end = offset + tensor_bytes(dtype, shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text, 8 + len(text) + offset


@dataclass
class Hub:
    """``files``: repository -> path -> the first bytes, and the size. ``errors``: repository -> status and code."""

    files: dict[str, dict[str, tuple[bytes, int]]] = field(default_factory=dict)
    errors: dict[str, tuple[int, str]] = field(default_factory=dict)
    cut: set[str] = field(default_factory=set)  # repositories whose answers end early
    sent_bytes: int = 0
    requests: list[str] = field(default_factory=list)

    def add(self, repository: str, config: object, *shards: Tensors) -> None:
        files = self.files[repository] = {}
        text = config if isinstance(config, bytes) else json.dumps(config).encode()
        files["config.json"] = text, len(text)
        names = [f"model-{n:05}-of-{len(shards):05}.safetensors" for n in range(1, len(shards) + 1)]
        if len(shards) == 1:
            names = ["model.safetensors"]
        elif shards:
            places = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
            index = json.dumps({"metadata": {}, "weight_map": places}).encode()
            files["model.safetensors.index.json"] = index, len(index)
        for name, shard in zip(names, shards, strict=True):
            files[name] = safetensors_head(shard)

    def add_folder(self, repository: str, folder: Path) -> None:
        """Serve the files of ``folder``."""
        contents = {path.name: path.read_bytes() for path in folder.iterdir()}
        self.files[repository] = {name: (content, len(content)) for name, content in contents.items()}


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        path = self.path.split("?")[0].removeprefix("/")
        self.hub.requests.append(f"{self.command} {path}")
        found = re.fullmatch(r"([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        listed = re.fullmatch(r"api/models/([^/]+/[^/]+)(?:/(?:revision|tree)/([^/]+)/?)?", path)
        repository, revision, file = (
            found.groups() if found else (listed[1], listed[2] or "main", "") if listed else ("", "", "")
        )
        commit = hashlib.sha1(repository.encode()).hexdigest()
        if repository in self.hub.errors:
            status, code = self.hub.errors[repository]
            return self._refuse(status, code)
        files = self.hub.files.get(repository)
        if files is None:
            return self._refuse(401, "RepoNotFound")
        if revision not in ("main", commit):
            return self._refuse(404, "RevisionNotFound")
        if not file:
            tree = [{"type": "file", "path": f, "size": size, "oid": f} for f, (_, size) in files.items()]
            info = {"id": repository, "sha": commit, "siblings": [{"rfilename": f} for f in files]}
            return self._send_json(tree if "/tree/" in path else info)
        if file not in files:
            return self._refuse(404, "EntryNotFound")
        head, size = files[file]
        first, last = 0, size - 1
        if (wanted := self.headers.get("Range")) is not None:
            first, last = (int(n) for n in wanted.removeprefix("bytes=").split("-"))
            last = min(last, size - 1)
        content = head[first : last + 1] + bytes(max(0, last + 1 - max(first, len(head))) if body else 0)
        self.send_response(206 if wanted is not None else 200)
        self.send_header("X-Repo-Commit", commit)
        self.send_header("ETag", f'"{hashlib.sha1(head).hexdigest()}"')
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(last + 1 - first))
        self.end_headers()
        if body:
            if repository in self.hub.cut:
                content = content[: len(content) // 2]
                self.close_connection = True
            self.wfile.write(content)
            self.hub.sent_bytes += len(content)
        return None

    def _send_json(self, content: object) -> None:
        text = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def _refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", code)
        self.send_header("Content-Length", "0")
        self.end_headers()


@contextmanager
def serve(hub: Hub) -> Iterator[str]:
    """Serve ``hub`` and yield its address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture
def hub(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub that the client of this process asks, with a cache of its own."""
    from huggingface_hub import constants, hf_api

    served = Hub()
    hub_model.cache_clear()
    with serve(served) as address:
        monkeypatch.setattr(constants, "ENDPOINT", address)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        template = f"{address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(hf_api.api, "endpoint", address)
        yield served
    hub_model.cache_clear()
