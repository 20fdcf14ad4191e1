"""A program that ran out is rehearsed again with what would help, and only what fits is said to fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from brim.cli.trials import Trials, with_changes
from brim.rehearsal.rehearse import DevicePeak, Rehearsal, Request
from brim.report.phase import Advice
from brim.units import GIB

REQUEST = Request(target="train.py", arguments=("--batch", "8"), gpu="RTX 4090")
SETTING = Advice(text="With segments that grow it is served.", change="allocator:expandable_segments:True")
BATCH = Advice(text="Smaller.", change="half the batch")
CHECKPOINTING = Advice(text="Recompute.", change="checkpointing")
QUANTIZED = Advice(text="In 8 bits.", change="states in 8 bits")
ELSEWHERE = Advice(text="In RAM.")
USELESS = Advice(text="Emptying the cache.", helps=False)


def result(fits: bool | None, *changed: str) -> Rehearsal:
    ended = {True: "enough", False: "out of memory", None: "failed"}[fits]
    return Rehearsal(
        rank=None, ended=ended, message="", steps=2, grew_until=1, memory_bytes=8 * GIB, context_bytes=0,
        context_source="", seconds=1.0, host_peak_bytes=0, snapshot=None, changed=changed,
        devices=(DevicePeak(device=0, allocated_bytes=GIB, reserved_bytes=2 * GIB, process_bytes=3 * GIB),),
    )  # fmt: skip


class Device:
    """Rehearses by a table of what fits; remembers what it was asked."""

    def __init__(self, fitting: Sequence[Request], failing: Sequence[Request] = (), without_effect: bool = False):
        self.fitting, self.failing, self.without_effect = fitting, failing, without_effect
        self.asked: list[Request] = []

    def __call__(self, request: Request) -> list[Rehearsal]:
        self.asked.append(request)
        fits = None if request in self.failing else request in self.fitting
        return [result(fits, *(() if self.without_effect else request.changes))]


def revised(device: Device, *advice: Advice, most: int = 5) -> list[dict[str, Any]]:
    trials = Trials(REQUEST, device, most=most, report=lambda _: None)
    return trials.revised([asdict(one) for one in advice])


def test_what_fits_is_first_with_its_bytes_and_nothing_is_tried_after_it() -> None:
    smaller = with_changes(REQUEST, ["half the batch"])
    device = Device([smaller])
    found = revised(device, SETTING, BATCH, CHECKPOINTING, ELSEWHERE, USELESS)
    assert smaller.arguments == ("--batch", "4")
    assert [one["text"].partition(".")[0] for one in found] == [
        "Smaller", "Recompute", "In RAM", "With segments that grow it is served", "Emptying the cache"
    ]  # fmt: skip
    assert found[0]["text"] == "Smaller. With this it fits (rehearsed): 3 GiB taken by the process."
    assert found[0]["paste"] == "--batch 4"
    assert "is not enough (rehearsed): memory runs out in step 3" in found[3]["text"]
    assert [one.alloc_conf for one in device.asked] == ["expandable_segments:True", ""]
    assert found[1]["rehearsed"] is None and "fits" not in found[1]["text"]


def test_what_fails_for_another_reason_or_changes_nothing_is_said_neither_to_fit_nor_to_run_out() -> None:
    eight_bits = with_changes(REQUEST, [QUANTIZED.change])
    (found,) = revised(Device([], failing=[eight_bits]), QUANTIZED)
    assert found["rehearsed"] is None and found["text"] == QUANTIZED.text
    checkpointed = with_changes(REQUEST, [CHECKPOINTING.change])
    (found,) = revised(Device([checkpointed], without_effect=True), CHECKPOINTING)
    assert found["rehearsed"] is None and found["text"] == CHECKPOINTING.text


def test_where_nothing_suffices_alone_all_are_tried_together() -> None:
    both = with_changes(REQUEST, [BATCH.change, CHECKPOINTING.change])
    found = revised(Device([both]), BATCH, CHECKPOINTING, ELSEWHERE)
    assert found[0]["text"].startswith(
        "Do these together: half the batch, checkpointing. With this it fits (rehearsed)"
    )
    assert found[0]["rehearsed"]["fits"] and found[1]["text"] == ELSEWHERE.text
    assert not any(one["rehearsed"]["fits"] for one in found[2:])
    none = revised(Device([]), BATCH, CHECKPOINTING)
    (together,) = [one["text"] for one in none if one["text"].startswith("Do these together")]
    assert "It is not enough (rehearsed)" in together and "Alone" not in together


def test_no_more_are_tried_than_were_asked_for() -> None:
    device = Device([])
    assert all(one["rehearsed"] is None for one in revised(device, BATCH, CHECKPOINTING, most=0))
    assert not device.asked
