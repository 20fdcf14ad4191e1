"""Reads what PyTorch's profiler wrote: where a device's time went, what was copied, and why nothing computed.

``torch.profiler.profile(...).export_chrome_trace`` and ``tensorboard_trace_handler`` write these files (Chrome trace
format, ``.json`` or ``.json.gz``). With ``profile_memory=True`` they also say what the allocators did.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from brim.core.json_stream import JsonStream
from brim.errors import FormatError
from brim.profiles.device import profile_of
from brim.profiles.events import ODD, Events
from brim.profiles.figures import Profile

_NAMES = "deviceProperties"
_KEYS = (b'"traceEvents"', b'"deviceProperties"', b'"displayTimeUnit"')  # of them one is near the beginning


def is_trace(data: bytes) -> bool:
    """Whether a file that begins with ``data`` (a few KiB of it) may be a profiler trace."""
    if data.startswith(b"\x1f\x8b"):
        return True
    begin = data.lstrip()[:1]
    if begin == b"[":
        return b'"ph"' in data
    return begin == b"{" and any(word in data for word in _KEYS)


def read(path: str | Path) -> Profile:
    """The profile in a file, read in one pass: memory goes with what ran on devices, not with the text.

    It is bounded by a few times the size of the text. A ``.gz`` file is much smaller than its text, so there is no
    such bound to the size of the file; one that grows to more than 200 times its size is refused.

    Raises FormatError if the file is missing, cut off or not a profiler trace.
    """
    asked = f"Cannot read {path} as a trace of PyTorch's profiler."
    stream = JsonStream(Path(path), asked)
    try:
        return _Reader(stream, str(path), asked).read()
    finally:
        stream.close()


class _Reader:
    def __init__(self, stream: JsonStream, source: str, asked: str) -> None:
        self.stream, self.source, self.asked = stream, source, asked
        self.events = Events()
        self.count = 0
        self.found = False

    def read(self) -> Profile:
        if self.stream.peek() == "[":  # the older form, events alone
            self.take_events()
        else:
            self.document()
        if self.stream.peek():
            raise self.stream.refuse("Something follows its end.")
        if not self.found:
            raise self.stream.refuse('It has no "traceEvents".')
        activity = self.events.activity
        if self.events.backwards:
            activity.facts["negative_durations"] = self.events.backwards
        return profile_of(activity, source=self.source, kind="pytorch", events=self.count, asked=self.asked)

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
                self.events.activity.device_names[item["id"]] = item["name"]

    def take_events(self) -> None:
        self.found = True
        add = self.events.add
        for event in self.stream.elements():
            try:
                add(event)
            except ODD as error:
                reason = f"Event {self.count} is not as PyTorch writes it: {type(error).__name__} {str(error)[:80]}."
                raise FormatError(self.asked, reason) from error
            self.count += 1
