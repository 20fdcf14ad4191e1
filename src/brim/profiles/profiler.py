"""A reader of the traces of PyTorch's profiler.

``torch.profiler.profile(...).export_chrome_trace`` and ``tensorboard_trace_handler`` write these files (Chrome trace
format, ``.json`` or ``.json.gz``). With ``profile_memory=True`` they also have allocations and frees.
Fields: kineto's ``libkineto/src/output_json.cpp`` and ``GenericTraceActivity``; ``[memory]`` events:
``torch/csrc/profiler/collection.cpp``. Kinds had other names before 2022 (``Kernel``, ``Memcpy``, ``Operator``).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from brim.core.json_stream import JsonStream
from brim.errors import FormatError
from brim.profiles.activity import D2D, D2H, H2D, H2H, MEMSET, P2P, UNKNOWN_COPY, Activity, call_kind, kernel_kind
from brim.profiles.figures import Profile, profile_of

Event = dict[str, Any]
ODD = (KeyError, TypeError, ValueError, OverflowError, AttributeError)

_DIRECTION = re.compile(r"\b([HDPMSA])(?:to|2)([HDPMSA])\b|(Host|Device)To(Host|Device)")
_HOST_LETTERS = "HMS"  # XPU writes M (memory) and S (shared) for the host's side
_LOADER = "enumerate(DataLoader)"
_STEP = "ProfilerStep#"
_NAMES = "deviceProperties"
_KEYS = (b'"traceEvents"', b'"deviceProperties"', b'"displayTimeUnit"')  # a document begins with one of them


def is_trace(data: bytes) -> bool:
    """Return whether a file whose first KiB are ``data`` may be a profiler trace."""
    if data.startswith(b"\x1f\x8b"):
        return True
    begin = data.lstrip()[:1]
    if begin == b"[":
        return b'"ph"' in data
    return begin == b"{" and any(word in data for word in _KEYS)


def read(path: str | Path) -> Profile:
    """Read a profile in one pass. Memory grows with the devices' activities, not with the text.

    It is bounded by a few times the size of the text. The text of a ``.gz`` file may have up to 200 times the file's
    size; a longer one is refused.

    Raises FormatError if the file is missing, cut off or not a profiler trace.
    """
    request = f"Cannot read {path} as a trace of PyTorch's profiler."
    stream = JsonStream(Path(path), request)
    try:
        return _Reader(stream, str(path), request).read()
    finally:
        stream.close()


class _Reader:
    """Puts a trace's events into columns. A handler raises one of ``ODD`` for an event that is not PyTorch's."""

    def __init__(self, stream: JsonStream, source: str, request: str) -> None:
        self.stream, self.source, self.request = stream, source, request
        self.event_count = 0
        self.has_events = False
        self.activity = Activity()
        self.number = self.activity.texts.number
        # The columns' own methods, for speed.
        self.device_columns = self.activity.device.appends
        self.call_columns = self.activity.call.appends
        self.operation_columns = self.activity.operations.appends
        self.zero_us: float | None = None  # the first time: seconds from it keep more digits than from 1970
        self.threads: dict[tuple[Any, Any], int] = {}
        self.kernel_kind, self.copy_kind, self.call_kind = cache(kernel_kind), cache(copy_kind), cache(call_kind)
        self.backwards = 0  # events that end before they begin, where clocks disagree
        self.handlers: dict[str | None, Callable[[Event], None]] = {}
        for kinds, handler in (
            (("kernel", "Kernel"), self.kernel),
            (("gpu_memcpy", "Memcpy"), self.copy),
            (("gpu_memset", "Memset"), self.memset),
            (("cuda_runtime", "cuda_driver", "Runtime", "xpu_runtime", "xpu_driver"), self.called),
            (("cpu_op", "Operator"), self.operation),
            (("user_annotation",), self.annotation),
            (("Trace",), self.window),
            ((None, "cpu_instant_event"), self.instant),
        ):
            self.handlers |= dict.fromkeys(kinds, handler)

    def read(self) -> Profile:
        if self.stream.peek() == "[":  # the older form, events alone
            self.take_events()
        else:
            self.document()
        if self.stream.peek():
            raise self.stream.refuse("There is more text after its end.")
        if not self.has_events:
            raise self.stream.refuse('It has no "traceEvents".')
        activity = self.activity
        if self.backwards:
            activity.facts["negative_durations"] = self.backwards
        return profile_of(activity, source=self.source, events=self.event_count, request=self.request)

    def document(self) -> None:
        stream = self.stream
        for key in stream.fields():
            if key == "traceEvents" and stream.peek() == "[":
                self.take_events()
            elif key == _NAMES:
                self.name_devices(stream.value())
            else:
                stream.skip()

    def name_devices(self, properties: Any) -> None:
        for item in properties if isinstance(properties, list) else []:
            if isinstance(item, dict) and isinstance(item.get("id"), int) and isinstance(item.get("name"), str):
                self.activity.device_names[item["id"]] = item["name"]

    def take_events(self) -> None:
        self.has_events = True
        add = self.add
        for event in self.stream.elements():
            try:
                add(event)
            except ODD as error:
                reason = (
                    f"Event {self.event_count} is not as PyTorch writes it: {type(error).__name__} {str(error)[:80]}."
                )
                raise FormatError(self.request, reason) from error
            self.event_count += 1

    def add(self, event: Event) -> None:
        handler = self.handlers.get(event.get("cat"))
        if handler is not None:
            handler(event)

    def span(self, event: Event) -> tuple[float, float]:
        """Return start and duration in seconds."""
        start_us, took_us = event["ts"], event.get("dur", 0)
        if type(start_us) is str or type(took_us) is str:
            start_us, took_us = float(start_us), float(took_us)
        if self.zero_us is None:
            self.zero_us = float(start_us)
        if took_us < 0:
            self.backwards += 1
            took_us = 0
        return (start_us - self.zero_us) * 1e-6, took_us * 1e-6

    def on_device(self, event: Event, kind: int) -> None:
        name = event["name"]
        args = event.get("args") or {}
        time, took, what, device, stream, key, size, text, unified = self.device_columns
        start, seconds = self.span(event)
        time(start)
        took(seconds)
        what(kind)
        device(args["device"] if "device" in args else int(event["pid"]))  # the process is the device then
        stream(args.get("stream", 0))
        key(args.get("correlation", -1))
        size(args.get("bytes", 0))
        text(self.number(name))
        unified("Managed" in name if kind >= MEMSET else 0)

    def kernel(self, event: Event) -> None:
        self.on_device(event, self.kernel_kind(event["name"]))

    def copy(self, event: Event) -> None:
        self.on_device(event, self.copy_kind(event["name"]))

    def memset(self, event: Event) -> None:
        self.on_device(event, MEMSET)

    def thread(self, event: Event) -> int:
        where = (event["pid"], event["tid"])
        number = self.threads.get(where)
        if number is None:  # a thread is 7 in one place and "7" in another
            number = self.threads.setdefault((where[0], str(where[1])), len(self.threads))
            self.threads[where] = number
        return number

    def called(self, event: Event) -> None:
        name = event["name"]
        args = event.get("args") or {}
        time, took, what, key, thread, text = self.call_columns
        start, seconds = self.span(event)
        time(start)
        took(seconds)
        what(self.call_kind(name))
        key(args.get("correlation", -1))
        thread(self.thread(event))
        text(self.number(name))

    def operation(self, event: Event) -> None:
        name = event["name"]
        if name.startswith((_LOADER, _STEP)):
            self.annotation(event)
        else:
            time, took, thread, text = self.operation_columns
            start, seconds = self.span(event)
            time(start)
            took(seconds)
            thread(self.thread(event))
            text(self.number(name))

    def annotation(self, event: Event) -> None:
        name = event["name"]
        if name.startswith(_LOADER):
            self.activity.loads.add(*self.span(event))
        elif name.startswith(_STEP):
            self.activity.steps.add(*self.span(event))

    def window(self, event: Event) -> None:
        """Note begin and length of the recording."""
        start, took = self.span(event)
        self.activity.facts |= {"recorded_begin_s": start, "recorded_s": took}

    def instant(self, event: Event) -> None:
        if event["name"] != "[memory]":
            return
        args = event["args"]
        time, _ = self.span(event)
        device = args["Device Id"] if args["Device Type"] != 0 else -1
        total, reserved = args.get("Total Allocated", -1), args.get("Total Reserved", -1)
        # Addresses have 64 bits there; 63 tell blocks apart.
        address = args["Addr"] & ((1 << 63) - 1) if "Addr" in args else -1
        self.activity.memory.add(time, device, args["Bytes"], address, total, reserved)


def copy_kind(name: str) -> int:
    """Return the kind of "Memcpy HtoD (Pageable -> Device)", "CopyHostToDevice" or "Memcpy M2D"."""
    match = _DIRECTION.search(name)
    if match is None:
        return UNKNOWN_COPY
    source, target = (match[1] or match[3])[0], (match[2] or match[4])[0]
    if source == target == "P":
        return P2P
    return {(True, False): H2D, (False, True): D2H, (True, True): H2H, (False, False): D2D}[
        source in _HOST_LETTERS, target in _HOST_LETTERS
    ]
