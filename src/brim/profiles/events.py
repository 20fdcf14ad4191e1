"""The events of a PyTorch profiler trace, put into columns.

Fields: kineto's ``libkineto/src/output_json.cpp`` and ``GenericTraceActivity``; ``[memory]`` events:
``torch/csrc/profiler/collection.cpp``. Kinds had other names before 2022 (``Kernel``, ``Memcpy``, ``Operator``).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from brim.profiles.activity import (
    D2D,
    D2H,
    H2D,
    H2H,
    MEMSET,
    P2P,
    UNKNOWN_COPY,
    Activity,
    call_kind,
    kernel_kind,
)

Event = dict[str, Any]
ODD = (KeyError, TypeError, ValueError, OverflowError, AttributeError)

_WAY = re.compile(r"\b([HDPMSA])(?:to|2)([HDPMSA])\b|(Host|Device)To(Host|Device)")
_HOST_LETTERS = "HMS"  # XPU writes M (memory) and S (shared) for the host's side
_LOADER = "enumerate(DataLoader)"
_STEP = "ProfilerStep#"


class Events:
    """Takes events one at a time. ``ODD`` is what it raises for one that is not as PyTorch writes it."""

    def __init__(self) -> None:
        self.activity = Activity()
        self.number = self.activity.texts.number
        # The columns' own methods: this runs five million times.
        self.device_columns = self.activity.device.appends
        self.call_columns = self.activity.call.appends
        self.operation_columns = self.activity.operations.appends
        self.zero_us: float | None = None  # times in the file are so large that seconds from here keep more digits
        self.copy_kinds: dict[str, int] = {}
        self.threads: dict[tuple[Any, Any], int] = {}
        self.calls: dict[str, int] = {}
        self.kernels: dict[str, int] = {}
        self.backwards = 0  # events that end before they begin: clocks that disagree
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

    def add(self, event: Event) -> None:
        handler = self.handlers.get(event.get("cat"))
        if handler is not None:
            handler(event)

    def span(self, event: Event) -> tuple[float, float]:
        """Start and duration in seconds."""
        start_us, took_us = event["ts"], event.get("dur", 0)
        if type(start_us) is str or type(took_us) is str:
            start_us, took_us = float(start_us), float(took_us)
        if self.zero_us is None:
            self.zero_us = float(start_us)
        if took_us < 0:
            self.backwards += 1
            took_us = 0
        return (start_us - self.zero_us) * 1e-6, took_us * 1e-6

    def on_device(self, event: Event, kind: int, name: str) -> None:
        args = event.get("args") or {}
        time, took, what, device, stream, key, size, text, unified, cause = self.device_columns
        start, seconds = self.span(event)
        time(start)
        took(seconds)
        what(kind)
        device(args["device"] if "device" in args else int(event["pid"]))  # its process is the device there
        stream(args.get("stream", 0))
        key(args.get("correlation", -1))
        size(args.get("bytes", 0))
        text(self.number(name))
        unified("Managed" in name if kind >= MEMSET else 0)
        cause(0)

    def kernel(self, event: Event) -> None:
        name = event["name"]
        kind = self.kernels.get(name)
        if kind is None:
            kind = self.kernels[name] = kernel_kind(name)
        self.on_device(event, kind, name)

    def copy(self, event: Event) -> None:
        name = event["name"]
        kind = self.copy_kinds.get(name)
        if kind is None:
            kind = self.copy_kinds[name] = copy_kind(name)
        self.on_device(event, kind, name)

    def memset(self, event: Event) -> None:
        self.on_device(event, MEMSET, event["name"])

    def thread(self, event: Event) -> int:
        where = (event["pid"], event["tid"])
        number = self.threads.get(where)
        if number is None:  # a thread is 7 in one place and "7" in another
            number = self.threads.setdefault((where[0], str(where[1])), len(self.threads))
            self.threads[where] = number
        return number

    def called(self, event: Event) -> None:
        name = event["name"]
        kind = self.calls.get(name)
        if kind is None:
            kind = self.calls[name] = call_kind(name)
        args = event.get("args") or {}
        time, took, what, key, thread, text = self.call_columns
        start, seconds = self.span(event)
        time(start)
        took(seconds)
        what(kind)
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
        """The whole recording."""
        start, took = self.span(event)
        self.activity.facts |= {"recorded_begin_s": start, "recorded_s": took}

    def instant(self, event: Event) -> None:
        if event["name"] != "[memory]":
            return
        args = event["args"]
        time, _ = self.span(event)
        device = args["Device Id"] if args["Device Type"] != 0 else -1
        total, reserved = args.get("Total Allocated", -1), args.get("Total Reserved", -1)
        # An address is 64 bits without a sign there; here it only has to tell blocks apart.
        address = args["Addr"] & ((1 << 63) - 1) if "Addr" in args else -1
        self.activity.memory.add(time, device, args["Bytes"], address, total, reserved)


def copy_kind(name: str) -> int:
    """From "Memcpy HtoD (Pageable -> Device)", "CopyHostToDevice", "Memcpy M2D"."""
    match = _WAY.search(name)
    if match is None:
        return UNKNOWN_COPY
    source, target = (match[1] or match[3])[0], (match[2] or match[4])[0]
    if source == target == "P":
        return P2P
    return {(True, False): H2D, (False, True): D2H, (True, True): H2H, (False, False): D2D}[
        source in _HOST_LETTERS, target in _HOST_LETTERS
    ]
