"""A program that ran out of memory, rehearsed again with what would help, until it fits."""

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

    ``rehearse`` gives a result for each rank; ``told`` is given a sentence on each trial.
    """

    def __init__(
        self,
        request: Request,
        rehearse: Callable[[Request], Sequence[Rehearsal]],
        *,
        most: int,
        told: Callable[[str], None],
    ) -> None:
        self._request, self._rehearse, self._left, self._told = request, rehearse, most, told
        self._results: dict[Request, Sequence[Rehearsal]] = {}

    def revised(self, advice: Sequence[_Advice]) -> list[_Advice]:
        """The advice with what its rehearsals gave as ``rehearsed``: what fits, what was not tried, what ran out
        again, what does not help."""
        helpful = [one | {"rehearsed": None} for one in advice if one["helps"]]
        tried_settings = False
        for one in helpful:
            is_setting = one["change"].startswith(ALLOCATOR)
            if not one["change"] or one["change"] == ALLOCATOR or (is_setting and tried_settings):
                continue
            tried_settings |= is_setting
            self._try(one, (one["change"],))
            if _fits(one):
                break
        ran_out = [one for one in helpful if one["rehearsed"] and not _fits(one)]
        if len(ran_out) > 1 and not any(map(_fits, helpful)):
            helpful.append(self._together(ran_out))
        order = sorted(helpful, key=lambda one: 0 if _fits(one) else 2 if one["rehearsed"] else 1)
        return [_in_words(one) for one in order] + [one for one in advice if not one["helps"]]

    def _together(self, advice: Sequence[_Advice]) -> _Advice:
        changes = tuple(one["change"] for one in advice)
        text = f"{_TOGETHER}{', '.join(changes)}."
        paste = "; ".join(one["paste"] for one in advice if one["paste"])
        together = {"text": text, "paste": paste, "helps": True, "change": " + ".join(changes), "rehearsed": None}
        self._left = max(self._left, 1)
        self._try(together, changes)
        return together

    def _try(self, advice: _Advice, changes: Sequence[str]) -> None:
        """Rehearse with ``changes``; a program that fails for another reason then tells nothing."""
        request = with_changes(self._request, changes)
        if request == self._request:
            return
        if request not in self._results:
            if self._left <= 0:
                return
            self._left -= 1
            self._told(f"Rehearsing it again with: {' + '.join(changes)}.")
            self._results[request] = self._rehearse(request)
        results = self._results[request]
        if any(result.fits is None or not set(request.changes) <= set(result.changed) for result in results):
            return  # it failed for another reason, or there was nothing to change
        devices = [device for result in results for device in result.devices]
        advice["rehearsed"] = {
            "fits": all(result.fits for result in results),
            "arguments": list(request.arguments),
            "steps": min(result.steps for result in results),
            "allocated_bytes": max((device.allocated_bytes for device in devices), default=0),
            "reserved_bytes": max((device.reserved_bytes for device in devices), default=0),
            "process_bytes": max((device.process_bytes for device in devices), default=0),
        }
        if request.arguments != self._request.arguments:
            advice["paste"] = " ".join(request.arguments)


def with_changes(request: Request, changes: Iterable[str]) -> Request:
    """The request with changes made: in its arguments where they name what is changed, in its process otherwise."""
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
        told = f"It fits so (rehearsed): {format_bytes(rehearsed['process_bytes'])} taken by the process."
    else:
        told = f"Alone it does not suffice (rehearsed): memory runs out in step {rehearsed['steps'] + 1}."
    if advice["text"].startswith(_TOGETHER):
        told = told.replace("Alone it does", "It does")
    return advice | {"text": f"{advice['text']} {told}"}
