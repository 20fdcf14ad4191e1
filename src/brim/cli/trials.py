"""Rehearse a program that ran out of memory again, with changes that may help, until it fits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from brim.cli.explain.snapshot import ALLOCATOR
from brim.rehearsal.changes import changed_arguments
from brim.units import format_bytes

if TYPE_CHECKING:
    from brim.rehearsal.rehearse import Rehearsal, Request

MOST_TRIALS = 5
_Advice = dict[str, Any]
_TOGETHER = "Do these together: "


class Trials:
    """Rehearses a request again with changes, each once, until it fits or ``most`` were tried.

    ``rehearse`` returns a result for each rank; ``report`` gets a sentence on each trial.
    """

    def __init__(
        self,
        request: Request,
        rehearse: Callable[[Request], Sequence[Rehearsal]],
        *,
        most: int,
        report: Callable[[str], None],
    ) -> None:
        self._request, self._rehearse, self._left, self._report = request, rehearse, most, report
        self._results: dict[Request, Sequence[Rehearsal]] = {}

    def revised(self, advice: Sequence[_Advice]) -> list[_Advice]:
        """The advice with its rehearsals' results as ``rehearsed``, in order: fits, not tried, ran out again, does
        not help."""
        helpful = [item | {"rehearsed": None} for item in advice if item["helps"]]
        tried_settings = False
        for item in helpful:
            is_setting = item["change"].startswith(ALLOCATOR)
            if not item["change"] or item["change"] == ALLOCATOR or (is_setting and tried_settings):
                continue
            tried_settings |= is_setting
            self._try(item, (item["change"],))
            if _fits(item):
                break
        ran_out = [item for item in helpful if item["rehearsed"] and not _fits(item)]
        if len(ran_out) > 1 and not any(map(_fits, helpful)):
            helpful.append(self._together(ran_out))
        order = sorted(helpful, key=lambda item: 0 if _fits(item) else 2 if item["rehearsed"] else 1)
        return [_in_words(item) for item in order] + [item for item in advice if not item["helps"]]

    def _together(self, advice: Sequence[_Advice]) -> _Advice:
        changes = tuple(item["change"] for item in advice)
        text = f"{_TOGETHER}{', '.join(changes)}."
        paste = "; ".join(item["paste"] for item in advice if item["paste"])
        together = {"text": text, "paste": paste, "helps": True, "change": " + ".join(changes), "rehearsed": None}
        self._left = max(self._left, 1)
        self._try(together, changes)
        return together

    def _try(self, advice: _Advice, changes: Sequence[str]) -> None:
        """Rehearse with ``changes``; the result of a program that fails for another reason is dropped."""
        request = with_changes(self._request, changes)
        if request == self._request:
            return
        if request not in self._results:
            if self._left <= 0:
                return
            self._left -= 1
            self._report(f"Rehearsing it again with: {' + '.join(changes)}.")
            self._results[request] = self._rehearse(request)
        results = self._results[request]
        if any(result.fits is None or not set(request.changes) <= set(result.changed) for result in results):
            return  # it failed for another reason, or there was nothing to change
        devices = [device for result in results for device in result.devices]
        advice["rehearsed"] = {
            "fits": all(result.fits for result in results),
            "arguments": list(request.arguments),
            "steps": min(result.steps for result in results),
            **{
                name: max((getattr(device, name) for device in devices), default=0)
                for name in ("allocated_bytes", "reserved_bytes", "process_bytes")
            },
        }
        if request.arguments != self._request.arguments:
            advice["paste"] = " ".join(request.arguments)


def with_changes(request: Request, changes: Iterable[str]) -> Request:
    """Apply changes to the request: to its arguments where they name what is changed, else to its process."""
    for change in changes:
        arguments = changed_arguments(change, request.arguments)
        if change.startswith(ALLOCATOR):
            request = replace(request, alloc_conf=change.removeprefix(ALLOCATOR))
        elif arguments != request.arguments:
            request = replace(request, arguments=arguments)
        else:
            request = replace(request, changes=(*request.changes, change))
    return request


def _fits(advice: Mapping[str, Any]) -> bool:
    return bool(advice["rehearsed"] and advice["rehearsed"]["fits"])


def _in_words(advice: _Advice) -> _Advice:
    rehearsed = advice["rehearsed"]
    if not rehearsed:
        return advice
    if rehearsed["fits"]:
        told = f"With this it fits (rehearsed): {format_bytes(rehearsed['process_bytes'])} taken by the process."
    else:
        begin = "It" if advice["text"].startswith(_TOGETHER) else "Alone it"
        told = f"{begin} is not enough (rehearsed): memory runs out in step {rehearsed['steps'] + 1}."
    return advice | {"text": f"{advice['text']} {told}"}
