"""Coverage-guided fuzzing of every reader of foreign files: atheris (libFuzzer) in the process, no file on a disk.

    pip install atheris
    python bench/fuzz.py gguf --inputs 1000000          # one reader; a line to measurements/fuzz.jsonl
    python bench/fuzz.py all --seconds 600              # each for ten minutes, one after the other
    python bench/fuzz.py --growth                       # inputs of megabytes, and what twice as much takes
    python bench/fuzz.py --table                        # what was recorded

An input may be read or be refused by a BrimError. Anything else, more than a minute for one, or a process of more
than 2 GiB ends the campaign; the input is left beside as ``crash-...``. What libFuzzer finds to reach new code is
kept in --corpus, and begun with the next time.

Those inputs are small. ``--growth`` makes large ones, many of each kind of part that a file can have many of, and
twice as many: that may take three times the CPU time at most; time that grows with the square is four times as much.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import os
import pickle
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from brim.errors import BrimError  # noqa: E402

RESULTS = ROOT / "measurements" / "fuzz.jsonl"
_MOST_MIB, _ONE_INPUT_S = 2048, 60  # of the clock: others may use the machine
_MOST_INPUTS = 100_000  # of a process: atheris keeps what NumPy's comparisons give, some 12 KB for an input with rows
_LEAST_LENGTH_BYTES = 512  # of the longest input; a half more than the longest that it begins with


def _memory_folder() -> Path:
    shared = Path("/dev/shm")
    return Path(tempfile.mkdtemp(prefix="brim-fuzz-", dir=shared if shared.is_dir() else None))


Target = Callable[[bytes], object]


def _safetensors(folder: Path) -> tuple[Target, list[bytes]]:
    from brim.memory.checkpoint_files import read_safetensors_header

    path = folder / "model.safetensors"
    header = {"w": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}}
    seeds = []
    for entries in (header, header | {"__metadata__": {"format": "pt"}}, {}):
        text = json.dumps(entries).encode()
        seeds.append(struct.pack("<Q", len(text)) + text + bytes(16 * ("w" in entries)))

    def read(data: bytes) -> object:
        path.write_bytes(data)
        return read_safetensors_header(path)

    return read, seeds


def _header(folder: Path) -> tuple[Target, list[bytes]]:
    """The same, but all of the input is the header: its length is never wrong."""
    read, seeds = _safetensors(folder)
    return lambda data: read(struct.pack("<Q", len(data)) + data + bytes(16)), [seed[8:-16] for seed in seeds[:2]]


def _index(folder: Path) -> tuple[Target, list[bytes]]:
    from brim.memory.checkpoint_files import read_checkpoint

    one = json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    (folder / "a.safetensors").write_bytes(struct.pack("<Q", len(one)) + one + bytes(8))

    def read(data: bytes) -> object:
        (folder / "model.safetensors.index.json").write_bytes(data)
        return read_checkpoint(folder)

    return read, [json.dumps({"metadata": {}, "weight_map": {"w": "a.safetensors"}}).encode()]


def _gguf(folder: Path) -> tuple[Target, list[bytes]]:
    from brim.models.gguf import check_header

    path = folder / "model.gguf"

    def text(value: bytes) -> bytes:
        return struct.pack("<Q", len(value)) + value

    entries = text(b"general.architecture") + struct.pack("<I", 8) + text(b"llama")
    entries += text(b"tokens") + struct.pack("<IIQ", 9, 8, 2) + text(b"a") + text(b"b")
    entries += text(b"scores") + struct.pack("<IIQ", 9, 6, 2) + bytes(8)
    tensor = text(b"weight") + struct.pack("<IQQIQ", 2, 2, 2, 0, 0)
    seeds = [b"GGUF" + struct.pack(f"{order}IQQ", 3, 1, 3) + entries + tensor + bytes(32) for order in "<>"]

    def read(data: bytes) -> object:
        path.write_bytes(data)
        return check_header(path)

    return read, seeds


def _snapshot(folder: Path) -> tuple[Target, list[bytes]]:
    from brim.recordings.snapshot import parse

    frame = {"name": "f", "filename": "a.py", "line": 1}
    block = {"address": 512, "size": 512, "requested_size": 500, "state": "active_allocated", "frames": [frame]}
    segment = {
        "device": 0, "address": 512, "total_size": 2097152, "allocated_size": 512, "active_size": 512, "stream": 0,
        "requested_size": 500, "segment_type": "small", "segment_pool_id": (0, 0), "is_expandable": False,
        "blocks": [block, block | {"address": 1024, "size": 2096640, "state": "inactive", "frames": []}],
    }  # fmt: skip
    event = {"action": "alloc", "addr": 512, "size": 500, "stream": 0, "time_us": 1, "frames": [frame]}
    document: dict[str, Any] = {"segments": [segment], "device_traces": [[event]], "allocator_settings": {}}
    seeds = [pickle.dumps(part, protocol) for part in (document, document | {"segments": []}) for protocol in (2, 4)]
    return parse, seeds


def _snapshot_rows(folder: Path) -> tuple[Target, list[bytes]]:
    """Files of so many events that they are read many at a time: as they are read one by one."""
    from brim.recordings import plain_pickle, snapshot

    frames = [{"name": "f", "filename": f"{number}.py", "line": number} for number in range(3)]
    events = []
    for number in range(2 * plain_pickle.FEW_ROWS):
        row = {"action": "alloc" if number % 3 else "free_completed", "addr": 512 * number << number, "size": 500}
        row |= {"stream": 0, "time_us": number, "pool_id": (0, number % 2), "frames": frames[: number % 4]}
        events.append(row | ({"compile_context": "N/A"} if number % 5 else {}))
    plain = [{name: event[name] for name in ("action", "addr", "size")} for event in events]
    seeds = [pickle.dumps({"segments": [], "device_traces": [some]}, protocol=4) for some in (events, plain)]
    at_once = snapshot._Reader.replace_many

    def one_by_one(data: bytes) -> Any:
        snapshot._Reader.replace_many = lambda self, table: None  # type: ignore[method-assign]
        try:
            return _parts(snapshot.parse(data))
        except snapshot.FormatError:
            return None
        finally:
            snapshot._Reader.replace_many = at_once  # type: ignore[method-assign]

    def read(data: bytes) -> object:
        try:
            found = _parts(snapshot.parse(data))
        except snapshot.FormatError:
            found = None
        if found != one_by_one(data):
            raise AssertionError("read many at a time, its events are others than read one by one")
        return found

    return read, seeds


def _parts(found: Any) -> Any:
    """All that a snapshot holds, to be compared. Equal stacks may have been numbered in another order."""

    def parts(one: Any) -> list[Any]:
        columns = (one.actions, one.addresses, one.sizes, one.streams, one.times_us, one.pools)
        stacks = [found.stacks[number] if number >= 0 else None for number in one.stacks]
        return [one.device, one.segments, stacks, *map(list, columns)]

    return [parts(one) for one in found.devices]


def _recording(folder: Path) -> tuple[Target, list[bytes]]:
    """All of ``brim explain``: read, replayed, and under other settings what failed."""
    from brim.allocator.out_of_memory import OutOfMemory
    from brim.cli.explain.answers import of_snapshot
    from brim.cli.explain.source import SNAPSHOT, Source
    from support.simulated_recording import Recording

    path, seeds = folder / "run.pickle", []
    for settings in ("", "expandable_segments:True"):
        for capacity_bytes in (64 << 20, 8 << 20):
            run = Recording(settings, capacity_bytes, names_pools=not settings)
            with contextlib.suppress(OutOfMemory):
                blocks = [run.malloc(size << 18) for size in range(1, 8)]
                for block in blocks[::2]:
                    run.free(block)
                run.malloc(6 << 20)
            seeds += [run.dump(), run.dump(drop=5)]

    def read(data: bytes) -> object:
        path.write_bytes(data)
        answer = of_snapshot(Source(name="run.pickle", kind=SNAPSHOT, path=path), ())
        return json.dumps(answer.body, allow_nan=False), list(answer.lines)

    return read, seeds


def _log(folder: Path) -> tuple[Target, list[bytes]]:
    from brim.report.oom.reader import read_oom

    messages = sorted(
        {text for path in (ROOT / "tests" / "null" / "report").rglob("*.py") for text in _strings(path)}
    )
    return lambda data: read_oom(io.BytesIO(data)), [text.encode()[:1024] for text in messages]


def _strings(path: Path) -> list[str]:
    import ast

    found = (node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant))
    return [text for text in found if isinstance(text, str) and "memory" in text.lower()]


def _profile(folder: Path) -> tuple[Target, list[bytes]]:
    from brim.profiles.profiler import read as read_profile

    path = folder / "trace.json"
    kernel = {"ph": "X", "cat": "kernel", "name": "gemm", "ts": 5, "dur": 2, "pid": 0, "tid": 7}
    kernel["args"] = {"device": 0, "stream": 7, "correlation": 1}
    call = {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 1, "dur": 1, "pid": 1, "tid": 5}
    call["args"] = {"correlation": 1}
    memory = {"ph": "i", "cat": "cpu_instant_event", "name": "[memory]", "ts": 3, "pid": 1, "tid": 5}
    memory["args"] = {"Addr": 1, "Bytes": 512, "Device Type": 1, "Device Id": 0, "Total Allocated": 512}
    document = {"schemaVersion": 1, "traceEvents": [kernel, call, memory]}

    def read(data: bytes) -> object:
        path.write_bytes(data)
        return read_profile(path)

    return read, [json.dumps(document).encode(), json.dumps([kernel]).encode()]


def _timeline(folder: Path) -> tuple[Target, list[bytes]]:
    from brim.core import EventKind, Timeline

    path = folder / "timeline.json"
    made = Timeline("run", measured=True, facts={"budget_bytes.vram": 5.0})
    for number in range(3):
        made.add(EventKind.ALLOC, "vram", 512, storage=number, label="l", category="activation")

    def read(data: bytes) -> object:
        path.write_bytes(data)
        return Timeline.read(path)

    return read, [json.dumps(made.to_json()).encode()]


def _plan(folder: Path) -> tuple[Target, list[bytes]]:
    from brim.core import Decision, Hardware, Link, Plan, Promise, Tier
    from brim.planning import file as plan_file
    from brim.planning.request import Request

    path = folder / "plan.json"
    tiers = Tier(name="ram", capacity_bytes=8, bytes_per_s=1.0), Tier(name="disk", capacity_bytes=8, bytes_per_s=1.0)
    link = Link(source="disk", target="ram", bytes_per_s=1.0)
    hardware = Hardware(
        name="h", compute="ram", tiers=tiers, links=(link,), flops_per_s={"float32": 1.0}, source="s"
    )  # fmt: skip
    decision = Decision(technique="weight_streaming", block="model.layers.0", choice="resident", bytes=4)
    plan = Plan(
        model="m", hardware="h", task="generate", budget_bytes={"ram": 8}, decisions=(decision,),
        promise=Promise(peak_bytes={"ram": 8}), settings={"ring_slots": 2},
    )  # fmt: skip
    made = plan_file.PlanFile(
        brim="0", request=Request(model="m"), hardware=hardware, plan=plan, parameters={"w float32[2]": 1}
    )

    def read(data: bytes) -> object:
        path.write_bytes(data)
        return plan_file.read(path)

    return read, [json.dumps(made.to_json()).encode()]


def _checkpoint(folder: Path) -> tuple[Target, list[bytes]]:
    from brim.run.checkpoint import manifest as manifests

    tensor = manifests.TensorEntry(dtype="F32", shape=(1,), checksum="0" * 16)
    entry = manifests.FileEntry(bytes=4, checksum="0" * 16, tensors={"w": tensor})
    made = manifests.Manifest(brim="0", step=1, files={"model.safetensors": entry}, state={"seed": 1})
    path = folder / manifests.MANIFEST_NAME

    def read(data: bytes) -> object:
        """As written, and with the checksum that it should have: what is behind it is tried too."""
        path.write_bytes(data)
        try:
            return manifests.read_manifest(folder)
        except manifests.ModelError:
            try:
                document = json.loads(data)
                document.pop("checksum", None)
                right = json.dumps(document | {"checksum": manifests._digest(document)})
            except (ValueError, RecursionError, AttributeError, TypeError):
                raise manifests.ModelError("no manifest") from None
            path.write_text(right)
            return manifests.read_manifest(folder)

    return read, [manifests.to_text(made).encode()]


def _gguf_conversion(folder: Path) -> tuple[Target, list[bytes]]:
    """All of it but the weights' own bytes: config, module, tokenizer."""
    from brim.models.gguf import _convert, check_header

    path, into = folder / "model.gguf", folder / "converted"

    def read(data: bytes) -> object:
        path.write_bytes(data)
        check_header(path)
        into.mkdir(exist_ok=True)
        return _convert(path, into)

    return read, [_tiny_gguf(16)]


def _tiny_gguf(words: int) -> bytes:
    """A llama of one block with a vocabulary of that many."""
    import gguf
    import numpy as np

    path = _memory_folder() / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(32)
    writer.add_embedding_length(8)
    writer.add_block_count(1)
    writer.add_feed_forward_length(16)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(words)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["<s>", "</s>", "a", "b", "ab", *(f"w{number}" for number in range(words - 5))])
    writer.add_token_types([3, 3] + [1] * (words - 2))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    shapes = {"token_embd": (words, 8), "output_norm": (8,), "blk.0.attn_norm": (8,), "blk.0.ffn_norm": (8,)}
    shapes |= {f"blk.0.attn_{name}": (size, 8) for name, size in (("q", 8), ("k", 4), ("v", 4), ("output", 8))}
    shapes |= {"blk.0.ffn_gate": (16, 8), "blk.0.ffn_up": (16, 8), "blk.0.ffn_down": (8, 16)}
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", np.ones(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    made = path.read_bytes()
    shutil.rmtree(path.parent)
    return made


def _data(folder: Path) -> tuple[Target, list[bytes]]:
    """Training data: lines, the elements of a list, and text."""
    from brim.run.data.dataset import text_pieces
    from brim.run.data.lines import Lines

    lines, elements, text = folder / "data.jsonl", folder / "data.json", folder / "data.txt"

    def read(data: bytes) -> object:
        read_rows = 0
        for path in (lines, elements):
            path.write_bytes(data)
            with contextlib.suppress(BrimError):
                rows = Lines(path)
                read_rows += sum(bool(rows.row(index)) for index in range(len(rows)))
        text.write_bytes(data)
        return read_rows, sum(map(len, text_pieces(text)))

    chat = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    others = [
        {"text": "a b"},
        {"instruction": "a", "output": "b"},
        {"conversations": [{"from": "gpt", "value": "a"}]},
    ]
    return read, [json.dumps(row).encode() for row in (chat, [chat, chat], *others)]


def _conversation(folder: Path) -> tuple[Target, list[bytes]]:
    """A conversation as tokens, by a template that marks no answers."""
    from brim.run.data.chat import ChatEncoder
    from brim.run.data.lines import Lines

    encoder, path = ChatEncoder(_tokenizer(folder, CHATML)), folder / "data.jsonl"

    def read(data: bytes) -> object:
        path.write_bytes(data)
        return encoder.encode(Lines(path).row(0), "data.jsonl")

    return read, [_turns(2)]


def _template(folder: Path) -> tuple[Target, list[bytes]]:
    from brim.run.generate.inputs import encode

    tokenizer = _tokenizer(folder, None)

    def read(data: bytes) -> object:
        tokenizer.chat_template = data.decode("utf-8", "replace")
        return encode(tokenizer, "hello", True)

    return read, [
        CHATML.encode(),
        b"{{ messages[0].content | tojson * 3 }}",
        b"{% for n in range(9) %}{{ n ** 9 }}{% endfor %}",
    ]


CHATML = (
    "{% for m in messages %}{{ '<s>' + m.role + '\n' + m.content + '</s>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s>assistant\n' }}{% endif %}"
)


def _tokenizer(folder: Path, template: str | None) -> Any:
    from transformers import AutoTokenizer

    from support.tiny_model import save_tokenizer

    save_tokenizer(folder, chat_template=template)
    return AutoTokenizer.from_pretrained(folder)


def _turns(count: int) -> bytes:
    roles = ("user", "assistant")
    messages = [{"role": roles[n % 2], "content": f"turn {n} says {n * n}"} for n in range(2 * count)]
    return json.dumps({"messages": messages}).encode()


def _config(folder: Path) -> tuple[Target, list[bytes]]:
    from brim.estimation.models import find_model, transformers_config
    from brim.models.architecture import read_config

    def read(data: bytes) -> object:
        (folder / "config.json").write_bytes(data)
        with contextlib.suppress(BrimError):
            transformers_config(find_model(folder))
        return read_config(folder, trust_remote_code=False)

    llama = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "num_hidden_layers": 1}
    parts = {"model_type": "llava", "text_config": llama, "vision_config": {"model_type": "clip_vision_model"}}
    return read, [json.dumps(config).encode() for config in (llama, parts)]


def _prompts(folder: Path) -> tuple[Target, list[bytes]]:
    from brim.run.generate.inputs import read_prompts

    texts, lines = folder / "prompts.txt", folder / "prompts.jsonl"

    def read(data: bytes) -> None:
        for path in (texts, lines):
            path.write_bytes(data)
            with contextlib.suppress(BrimError):
                read_prompts(path)

    return read, [b"a\nb\n", b'{"prompt": "a"}\n{"prompt": "b"}\n']


def _cache(folder: Path) -> tuple[Target, list[bytes]]:
    """Our own cache: rates of this machine, and measured figures. Damage is a warning."""
    from brim.core import Hardware, Link, Tier
    from brim.measure.probe import _load
    from brim.planning.seconds.measurement_cache import Remembered

    path = folder / "hardware.json"
    figures = Remembered("fuzzed", ())
    figures._path = folder / "figures.json"
    tiers = Tier(name="ram", capacity_bytes=8, bytes_per_s=1.0), Tier(name="disk", capacity_bytes=8, bytes_per_s=1.0)
    link = Link(source="disk", target="ram", bytes_per_s=1.0)
    hardware = Hardware(name="h", compute="ram", tiers=tiers, links=(link,), flops_per_s={"float32": 1.0}, source="")

    def read(data: bytes) -> object:
        for file in (path, figures._path):
            file.write_bytes(data)
        return _load(path), figures._read()

    figures_text = json.dumps({"a": [[1.0, 0.5], 1.0]})
    return read, [json.dumps(hardware.to_json()).encode(), figures_text.encode()]


READERS: dict[str, Callable[[Path], tuple[Target, list[bytes]]]] = {
    "safetensors": _safetensors,
    "safetensors header": _header,
    "safetensors index": _index,
    "gguf": _gguf,
    "snapshot": _snapshot,
    "snapshot rows": _snapshot_rows,
    "recording": _recording,
    "log": _log,
    "profile": _profile,
    "timeline": _timeline,
    "plan": _plan,
    "checkpoint": _checkpoint,
    "config": _config,
    "gguf conversion": _gguf_conversion,
    "training data": _data,
    "conversation": _conversation,
    "template": _template,
    "prompts": _prompts,
    "cache": _cache,
}


def _header_of(entries: list[str]) -> bytes:
    text = f"{{{','.join(entries)}}}".encode()
    return struct.pack("<Q", len(text)) + text


def _tensors(count: int, last: int = -1) -> list[str]:
    names = [*range(count), *([last] if last >= 0 else [])]
    return [f'"{n}":{{"dtype":"U8","shape":[1],"data_offsets":[{n},{n + 1}]}}' for n in names]


def _gguf_with(entries: bytes, tensors: bytes, counts: tuple[int, int]) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, *counts) + entries + tensors + bytes(64)


def _gguf_text(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def _gguf_tensors(count: int) -> bytes:
    return _gguf_with(
        b"", b"".join(_gguf_text(f"w{n}") + struct.pack("<IQIQ", 1, 1, 0, 0) for n in range(count)), (count, 0)
    )


def _gguf_array(count: int) -> bytes:
    words = b"".join(_gguf_text(f"word {n}") for n in range(count))
    return _gguf_with(_gguf_text("tokens") + struct.pack("<IIQ", 9, 8, count) + words, b"", (0, 1))


def _gguf_keys(count: int) -> bytes:
    return _gguf_with(b"".join(_gguf_text(f"k{n}") + struct.pack("<II", 4, n) for n in range(count)), b"", (0, count))


def _events(count: int) -> bytes:
    memory = [
        {"ph": "i", "cat": "cpu_instant_event", "name": "[memory]", "ts": n, "pid": 1, "tid": 5,
         "args": {"Addr": n // 2, "Bytes": (1 - 2 * (n % 2)) * 512, "Device Type": 1, "Device Id": 0}}
        for n in range(count)
    ]  # fmt: skip
    kernels = [
        {"ph": "X", "cat": "kernel", "name": f"k{n}", "ts": n, "dur": 1, "pid": 0, "tid": 7,
         "args": {"device": 0, "stream": 7, "correlation": n}}
        for n in range(count)
    ]  # fmt: skip
    return json.dumps({"schemaVersion": 1, "traceEvents": memory + kernels}).encode()


def _snapshot_of(count: int) -> bytes:
    frames = [{"name": f"f{n}", "filename": "a.py", "line": n} for n in range(count // 4 + 1)]
    events = [
        {"action": "alloc" if n % 2 == 0 else "free_completed", "addr": 512 * (n // 2 + 1), "size": 512, "stream": 0,
         "time_us": n, "frames": [frames[n // 4]]}
        for n in range(count)
    ]  # fmt: skip
    return pickle.dumps({"segments": [], "device_traces": [events], "allocator_settings": {}}, protocol=4)


def _held_blocks(count: int) -> bytes:
    blocks = [
        {"address": 512 * n, "size": 512, "requested_size": 500, "state": "active_allocated", "frames": []}
        for n in range(1, count + 1)
    ]
    segment = {
        "device": 0, "address": 512, "total_size": 512 * count, "allocated_size": 512 * count, "stream": 0,
        "active_size": 512 * count, "requested_size": 500 * count, "segment_type": "large", "blocks": blocks,
        "segment_pool_id": (0, 0), "is_expandable": False,
    }  # fmt: skip
    return pickle.dumps({"segments": [segment], "device_traces": [[]], "allocator_settings": {}}, protocol=4)


def _timeline_of(count: int) -> bytes:
    from brim.core import EventKind, Timeline

    made = Timeline("run", measured=True)
    for number in range(count):
        made.add(EventKind.ALLOC, "vram", 512, storage=number, label=f"l{number}", category="activation")
    return json.dumps(made.to_json()).encode()


def _plan_of(count: int) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        document = json.loads(_plan(Path(folder))[1][0])
    one = document["plan"]["decisions"][0]
    document["plan"]["decisions"] = [one | {"block": str(n)} for n in [*range(count), count - 1]]
    document["parameters"] = {f"w{n} float32[2]": 1 for n in range(count)}
    return json.dumps(document).encode()


def _manifest_of(count: int) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        document = json.loads(_checkpoint(Path(folder))[1][0])
    [entry] = document["files"].values()
    document["files"] = {f"f{n}": entry for n in range(count)}
    return json.dumps(document).encode()


def _log_of(count: int) -> bytes:
    line = "step {}: loss 1.0, torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB\n"
    return "".join(line.format(n) for n in range(count)).encode()


def _json_of(count: int) -> bytes:
    return json.dumps({"model_type": "llama"} | {f"key_{n}": [n, {"depth": 1}] for n in range(count)}).encode()


def _shape_of(count: int) -> bytes:
    sizes = ",".join(["9" * 18] * count)
    return _header_of([f'"w":{{"dtype":"U8","shape":[{sizes}],"data_offsets":[0,1]}}'])


def _index_of(count: int, name: Callable[[int], str] = str, shard: Callable[[int], str] | None = None) -> bytes:
    shards = shard or (lambda number: "a.safetensors")
    entries = ",".join(f'"{name(number)}":"{shards(number)}"' for number in range(count))
    return f'{{"weight_map":{{{entries}}}}}'.encode()


def _aliases_of(count: int) -> bytes:
    return _index_of(count, shard=lambda number: "./" * (number % 50) + "a.safetensors")


def _layers_of(count: int) -> bytes:
    return json.dumps({"model_type": "llama", "layer_types": ["a"] * count}).encode()


def _figures_of(count: int) -> bytes:
    return json.dumps({str(number): [[1.0, 0.5], 1.0] for number in range(count)}).encode()


# Many of one part of a file: the reader, how many there are, and the file. Some hundred kilobytes to some megabytes.
GROWTHS: dict[str, tuple[str, int, Callable[[int], bytes]]] = {
    "tensors of safetensors": ("safetensors", 20_000, lambda n: _header_of(_tensors(n)) + bytes(n)),
    "a key that comes twice": ("safetensors", 40_000, lambda n: _header_of(_tensors(n, n - 1))),
    "sizes of a shape": ("safetensors", 200_000, _shape_of),
    "nested arrays": ("safetensors header", 400_000, lambda n: b'{"a":' + b"[" * n),
    "names of an index": ("safetensors index", 100_000, _index_of),
    "names of a shard": ("safetensors index", 2_000, _aliases_of),
    "a name that comes twice": ("safetensors index", 100_000, lambda n: _index_of(n, lambda k: str(k % (n - 1)))),
    "tensors of GGUF": ("gguf", 40_000, _gguf_tensors),
    "words of GGUF": ("gguf", 100_000, _gguf_array),
    "keys of GGUF": ("gguf", 60_000, _gguf_keys),
    "words converted": ("gguf conversion", 4_000, lambda n: _tiny_gguf(n)),
    "events of a snapshot": ("snapshot", 20_000, _snapshot_of),
    "blocks of a snapshot": ("snapshot", 20_000, _held_blocks),
    "events replayed": ("recording", 5_000, _snapshot_of),
    "blocks replayed": ("recording", 5_000, _held_blocks),
    "lines of a log": ("log", 3_000, _log_of),
    "one line of a log": ("log", 3_000, lambda n: _log_of(n).replace(b"\n", b" ")),
    "numbers in a line": ("log", 50_000, lambda n: b"CUDA out of memory. " + b"1 " * n),
    "events of a trace": ("profile", 5_000, _events),
    "events of a timeline": ("timeline", 10_000, _timeline_of),
    "decisions of a plan": ("plan", 10_000, _plan_of),
    "files of a checkpoint": ("checkpoint", 10_000, _manifest_of),
    "keys of a config": ("config", 2_000, _json_of),
    "layers in a config": ("config", 100_000, _layers_of),
    "lines of data": ("training data", 4_000, lambda n: b"\n".join([_turns(2)] * n)),
    "elements of data": ("training data", 4_000, lambda n: b"[" + b",".join([_turns(2)] * n) + b"]"),
    "messages of data": ("training data", 20_000, _turns),
    "blank lines of data": ("training data", 500_000, lambda n: b"\n" * n + b'{"text": "a"}'),
    "quotes in data": ("training data", 300_000, lambda n: b'["' + b'\\"' * n + b'"]'),
    "words without a line": ("training data", 1_000_000, lambda n: b"a b\n\n" * (n // 4)),
    "turns of a conversation": ("conversation", 500, _turns),
    "text of a template": ("template", 2_000, lambda n: b"{{ 1 }}a" * n),
    "prompts": ("prompts", 100_000, lambda n: b'{"prompt": "a"}\n' * n),
    "figures of the cache": ("cache", 20_000, _figures_of),
}
_LINEAR, _NOISE_S, _TRIES = 3.0, 0.1, 4  # of CPU time, for twice as much; the least of so many tries


def growth(name: str, share: float = 1.0) -> dict[str, Any]:
    """CPU seconds of reading one of ``GROWTHS``, and of twice as much. ``share``: of the number of parts."""
    reader, count, make = GROWTHS[name]
    folder = _memory_folder()
    try:
        target, _ = READERS[reader](folder)
        data, twice = (make(many * int(count * share)) for many in (1, 2))
        _cpu_s(target, data)  # which loads libraries too
        cpu_s, twice_cpu_s, linear = math.inf, math.inf, False
        for _ in range(_TRIES):
            cpu_s, twice_cpu_s = min(cpu_s, _cpu_s(target, data)), min(twice_cpu_s, _cpu_s(target, twice))
            linear = twice_cpu_s <= _LINEAR * cpu_s + _NOISE_S
            if linear:
                break
        return {
            "reader": reader, "growth": name, "bytes": len(data), "cpu_s": cpu_s, "twice_cpu_s": twice_cpu_s,
            "linear": linear,
        }  # fmt: skip
    finally:
        shutil.rmtree(folder)


def _cpu_s(target: Target, data: bytes) -> float:
    """Of this process and of those that it started."""
    import psutil

    def used_s() -> float:
        children = psutil.Process().children(recursive=True)
        own_and_ended = os.times()
        return sum(own_and_ended[:4]) + sum(sum(child.cpu_times()[:2]) for child in children)

    began_s = used_s()
    with contextlib.suppress(BrimError), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        target(data)
    return round(used_s() - began_s, 3)


def _campaign(name: str, corpus: Path, inputs: int, seconds: float) -> None:
    """Never returns: libFuzzer ends the process."""
    import atheris

    with atheris.instrument_imports(include=["brim"]):
        folder = _memory_folder()
        target, seeds = READERS[name](folder)
    warnings.simplefilter("ignore")
    corpus.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(seeds):
        (corpus / f"seed-{number}").write_bytes(seed)

    def one(data: bytes) -> None:
        with contextlib.suppress(BrimError):
            target(data)

    length = max(_LEAST_LENGTH_BYTES, 3 * max(map(len, seeds)) // 2)
    limits = [f"-max_len={length}", f"-rss_limit_mb={_MOST_MIB}", f"-timeout={_ONE_INPUT_S}", "-print_final_stats=1"]
    ends = [f"-runs={inputs}"] * bool(inputs) + [f"-max_total_time={int(seconds)}"] * bool(seconds)
    atheris.Setup([sys.argv[0], *limits, *ends, "-verbosity=1", str(corpus)], one)
    atheris.Fuzz()


def _run(name: str, corpus: Path, inputs: int, seconds: float) -> bool:
    """One campaign in processes of its own, one after the other, and its line among the results."""
    began_s = time.monotonic()
    row: dict[str, Any] = {"reader": name} | dict.fromkeys(
        ("inputs", "seconds", "peak_rss_mib", "coverage", "crashes"), 0
    )
    output = ""
    while not row["crashes"]:
        left = min(inputs - row["inputs"], _MOST_INPUTS) if inputs else _MOST_INPUTS
        left_s = seconds - (time.monotonic() - began_s) if seconds else 0.0
        if left < 1 or (seconds and left_s < 1):
            break
        output, code = _process(name, corpus, left, left_s)
        stats = dict(re.findall(r"stat::(\w+):\s+(\d+)", output))
        row["inputs"] += int(stats.get("number_of_executed_units", 0))
        row["peak_rss_mib"] = max(row["peak_rss_mib"], int(stats.get("peak_rss_mb", 0)))
        row["coverage"] = max(row["coverage"], *map(int, re.findall(r"cov: (\d+)", output)), 0)
        row["crashes"] = int(code != 0)
    row["seconds"] = round(time.monotonic() - began_s, 1)
    with RESULTS.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
    print(json.dumps(row), flush=True)
    if row["crashes"]:
        print(output[-4000:])
    return not row["crashes"]


def _process(name: str, corpus: Path, inputs: int, seconds: float) -> tuple[str, int]:
    command = [sys.executable, __file__, name, "--child", "--corpus", str(corpus)]
    done = subprocess.run(
        [*command, "--inputs", str(inputs), "--seconds", str(seconds)],
        capture_output=True,
        text=True,
        errors="replace",
    )
    return done.stdout + done.stderr, done.returncode


def _table() -> None:
    rows = [json.loads(line) for line in RESULTS.read_text(encoding="utf-8").splitlines()]
    rows, grown = [row for row in rows if "inputs" in row], [row for row in rows if "growth" in row]
    print("| reader | inputs | crashes | peak of the process |\n|---|---:|---:|---:|")
    total = 0
    for name in READERS:
        mine = [row for row in rows if row["reader"] == name]
        count = sum(row["inputs"] for row in mine)
        total += count
        peak = max((row["peak_rss_mib"] for row in mine), default=0)
        print(f"| {name} | {count:,} | {sum(row['crashes'] for row in mine)} | {peak} MiB |")
    print(f"| all | {total:,} | {sum(row['crashes'] for row in rows)} | |")
    print("\n| many | bytes | CPU | of twice as much |\n|---|---:|---:|---:|")
    for row in {row["growth"]: row for row in grown}.values():
        print(f"| {row['growth']} | {row['bytes']:,} | {row['cpu_s']:.2f} s | {row['twice_cpu_s']:.2f} s |")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reader", nargs="?", choices=["all", *READERS])
    parser.add_argument("--inputs", type=int, default=0, help="how many; 0: as long as --seconds say")
    parser.add_argument("--seconds", type=float, default=0.0)
    parser.add_argument("--corpus", type=Path, help="where inputs that reach new code are kept")
    parser.add_argument("--growth", action="store_true", help="read large inputs, and twice as large ones")
    parser.add_argument("--table", action="store_true", help="print what was recorded")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.table:
        _table()
        return 0
    if options.growth:
        rows = []
        for name, (reader, _, _) in GROWTHS.items():
            if options.reader in (None, "all", reader):
                rows.append(growth(name))
                print(json.dumps(rows[-1]), flush=True)
        with RESULTS.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
        return 0 if all(row["linear"] for row in rows) else 1
    if options.reader is None or not (options.inputs or options.seconds):
        parser.error("name a reader, and --inputs or --seconds")
    corpus = options.corpus or Path(tempfile.gettempdir()) / "brim-fuzz-corpus"
    if options.child:
        _campaign(options.reader, corpus, options.inputs, options.seconds)
    names = list(READERS) if options.reader == "all" else [options.reader]
    held = [_run(name, corpus / name.replace(" ", "-"), options.inputs, options.seconds) for name in names]
    return 0 if all(held) else 1


if __name__ == "__main__":
    sys.exit(main())
