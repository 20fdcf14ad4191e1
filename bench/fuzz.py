"""Coverage-guided fuzzing of every reader of foreign files: atheris (libFuzzer) in the process, no file on a disk.

    pip install atheris
    python bench/fuzz.py gguf --inputs 1000000          # one reader; a line to measurements/fuzz.jsonl
    python bench/fuzz.py all --seconds 600              # each for ten minutes, one after the other
    python bench/fuzz.py --table                        # what was recorded

An input may be read or be refused by a BrimError. Anything else, more than a minute for one, or a process of more
than 2 GiB ends the campaign; the input is left beside as ``crash-...``. What libFuzzer finds to reach new code is
kept in --corpus, and begun with the next time.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import pickle
import re
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
    from brim.run.model.gguf_header import check_header

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
    at_once = snapshot._Reader.many

    def one_by_one(data: bytes) -> Any:
        snapshot._Reader.many = lambda self, table: None  # type: ignore[method-assign]
        try:
            return _parts(snapshot.parse(data))
        except snapshot.FormatError:
            return None
        finally:
            snapshot._Reader.many = at_once  # type: ignore[method-assign]

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
    from brim.run.plan import file as plan_file
    from brim.run.plan.request import Request

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

    entry = manifests.FileEntry(**{name: 4 if kind == "int" else {} for name, kind in _fields(manifests.FileEntry)})
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


def _fields(kind: Any) -> list[tuple[str, str]]:
    return [(name, str(field.type)) for name, field in kind.__dataclass_fields__.items()]


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
}


def _campaign(name: str, corpus: Path, inputs: int, seconds: float) -> None:
    """Never returns: libFuzzer ends the process."""
    import atheris

    with atheris.instrument_imports(include=["brim"]):
        from brim.errors import BrimError

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
    print("| reader | inputs | crashes | peak of the process |\n|---|---:|---:|---:|")
    total = 0
    for name in READERS:
        mine = [row for row in rows if row["reader"] == name]
        count = sum(row["inputs"] for row in mine)
        total += count
        peak = max((row["peak_rss_mib"] for row in mine), default=0)
        print(f"| {name} | {count:,} | {sum(row['crashes'] for row in mine)} | {peak} MiB |")
    print(f"| all | {total:,} | {sum(row['crashes'] for row in rows)} | |")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reader", nargs="?", choices=["all", *READERS])
    parser.add_argument("--inputs", type=int, default=0, help="how many; 0: as long as --seconds say")
    parser.add_argument("--seconds", type=float, default=0.0)
    parser.add_argument("--corpus", type=Path, help="where inputs that reach new code are kept")
    parser.add_argument("--table", action="store_true", help="print what was recorded")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.table:
        _table()
        return 0
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
