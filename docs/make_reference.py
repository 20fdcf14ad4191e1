"""docs/reference.md, made from the docstrings of the public functions and types: ``make reference`` writes it.

What a docstring leaves out (an argument, a field, a method) is an error here, and so is a warning of pdoc's.
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import pdoc.docstrings

FILE = Path(__file__).parent / "reference.md"

_HEAD = """# Reference

The Python interface. Made from the docstrings by `make reference`; do not edit it here.

* Amounts of memory are bytes, or texts: `"8GiB"`, `"512MB"`, `"90%"`.
* Names end in their unit: `_bytes`, `_s` (seconds), `_bytes_per_s`. A GiB is 2^30 bytes.
* Every error that brim raises on purpose is a [`BrimError`](#brimerror): what was asked, what was found, what to do.
* `Estimate`, `Answer`, `Trace`, `Timeline`, `Explained` and `Fitted` have `summary()`: the text that the command
  prints, which notebooks show.
* `to_json()` and `from_json()` of a type are each other's inverse; `read(path)` reads its file.
"""

_AS_JSON = ("to_json", "from_json", "read")  # said once, above

# What is public, in the order in which it is read. Of a class, the members that are for users (None: all).
_Members = tuple[str, ...] | None
_SECTIONS: dict[str, list[tuple[str, str, _Members]]] = {
    "Functions": [
        ("brim", name, None)
        for name in ("estimate", "plan", "load", "fit", "rehearse", "explain", "watch", "probe", "trace", "simulate")
    ],
    "What they take": [
        ("brim.estimation.step_memory", "Inputs", ()),
        ("brim.estimation.workload", "Workload", ()),
        ("brim.estimation.simulation", "Place", ()),
    ],
    "What they give": [
        ("brim.estimation.estimate", "Estimate", ("to_json",)),
        ("brim.estimation.estimate", "PeakBytes", ()),
        ("brim.estimation.bounds", "Margin", ()),
        ("brim.planning.request", "Answer", None),
        ("brim.planning.request", "Proposal", ()),
        ("brim.planning.request", "Effect", ()),
        ("brim.planning.request", "Nearest", ()),
        ("brim.planning.request", "Machine", ()),
        ("brim.techniques.streaming.weight_streaming", "WeightStreaming", ("misses", "timeline", "close", "remove")),
        ("brim.planning.strategy.step", "Fitted", ("summary", "clip_grad_norm_", "timeline", "close", "remove")),
        ("brim.rehearsal.rehearse", "Rehearsal", None),
        ("brim.rehearsal.rehearse", "DevicePeak", ()),
        ("brim.cli.explain.answers", "Explained", None),
    ],
    "brim.core: what is read and written": [
        ("brim.core", "Hardware", ("tier", "link")),
        ("brim.core", "Tier", ()),
        ("brim.core", "Link", None),
        ("brim.core", "Trace", ()),
        ("brim.core", "Op", ()),
        ("brim.core", "Storage", ()),
        ("brim.core.leak", "Leak", ("fills_memory",)),
        ("brim.core.leak", "LeakingLine", ()),
        ("brim.core", "Category", ()),
        ("brim.core", "Phase", ()),
        ("brim.core", "Plan", ("choices",)),
        ("brim.core", "Decision", ()),
        ("brim.core", "Promise", ()),
        ("brim.core", "Timeline", ("peak_bytes", "out_of_memory", "copied_bytes", "column", "texts", "add")),
        ("brim.core", "Event", ()),
        ("brim.core", "EventKind", ()),
        ("brim.core.timeline", "PeakBytes", None),
    ],
    "Rehearsals in processes of your own": [
        ("brim.device.environment", "find", None),
        ("brim.device.environment", "prepare", None),
        ("brim.device.environment", "Environment", None),
        ("brim.device.settings", "DeviceSettings", ("of",)),
    ],
    "Errors": [
        ("brim.errors", name, ())
        for name in (
            "BrimError", "UsageError", "ModelError", "BudgetError", "UnsupportedError", "OperationError",
            "TransferError", "FormatError",
        )
    ],
}  # fmt: skip


def text() -> str:
    """The whole page. Raises ValueError for what is public and not described."""
    made, missing = [_HEAD], list[str]()
    for section, entries in _SECTIONS.items():
        made.append(f"## {section}\n")
        for module, name, members in entries:
            thing = getattr(importlib.import_module(module), name)
            made += _class(thing, members, missing) if inspect.isclass(thing) else _function(thing, missing)
    if missing:
        raise ValueError("Docstrings leave out: " + ", ".join(missing))
    return "\n".join(made)


def _function(function: Callable[..., Any], missing: list[str]) -> Iterator[str]:
    public = "brim" if function.__name__ in _names("Functions") else function.__module__
    yield f"### {public}.{function.__name__}\n"
    yield _signature(f"{function.__name__}", function)
    yield _described(function, function.__name__, [*inspect.signature(function).parameters], {}, missing)


def _class(kind: type, members: _Members, missing: list[str]) -> Iterator[str]:
    if kind.__name__ in _names("Functions"):  # called as a function is
        yield f"### brim.{kind.__name__}\n"
        yield _signature(kind.__name__, kind)
        yield _described(kind, kind.__name__, [*inspect.signature(kind).parameters], {}, missing)
        return
    yield f"### {kind.__name__}\n"
    bases = [base.__name__ for base in kind.__bases__ if issubclass(kind, Exception)]
    derived = f", derived from {' and '.join(bases)}" if bases else ""
    yield f"`{kind.__module__}.{kind.__name__}`{derived}\n"
    types = {field.name: str(field.type) for field in fields(kind)} if is_dataclass(kind) else {}
    yield _described(kind, kind.__name__, [name for name in types if not name.startswith("_")], types, missing)
    if issubclass(kind, Enum):
        yield "Values: " + ", ".join(f"`{value.name}`" for value in kind) + "\n"
        return
    for name, member in vars(kind).items():
        is_method = inspect.isfunction(member) or isinstance(member, classmethod | staticmethod | property)
        public = is_method and not name.startswith("_") and name not in _AS_JSON
        if name in members if members is not None else public:
            yield from _member(kind, name, missing)


def _member(kind: type, name: str, missing: list[str]) -> Iterator[str]:
    raw = inspect.getattr_static(kind, name)
    if isinstance(raw, property):
        assert raw.fget is not None
        result = inspect.signature(raw.fget).return_annotation
        yield f"#### {kind.__name__}.{name}\n"
        yield f"`{result}`. {_described(raw.fget, f'{kind.__name__}.{name}', [], {}, missing)}"
        return
    function = getattr(kind, name)
    documented = "Args:" in (function.__doc__ or "")
    names = [one for one in inspect.signature(function).parameters if one != "self"] if documented else []
    yield f"#### {kind.__name__}.{name}()\n"
    yield _signature(name, function)
    yield _described(function, f"{kind.__name__}.{name}", names, {}, missing)


def _names(section: str) -> list[str]:
    return [name for _, name, _ in _SECTIONS[section]]


def _signature(name: str, function: Callable[..., Any]) -> str:
    """As the source has it, a line for each argument where it is long."""
    signature = inspect.signature(function)
    arguments, result, starred = [], signature.return_annotation, False
    for one in signature.parameters.values():
        if one.name == "self":
            continue
        if one.kind is one.KEYWORD_ONLY and not starred and not _is_variadic(signature):
            arguments.append("*")
        starred = starred or one.kind is one.KEYWORD_ONLY
        star = "*" if one.kind is one.VAR_POSITIONAL else ""
        default = "" if one.default is one.empty else f" = {_default(one.default)}"
        arguments.append(f"{star}{one.name}: {one.annotation}{default}")
    arrow = f" -> {result}" if result not in (signature.empty, "None") else ""
    line = f"{name}({', '.join(arguments)}){arrow}"
    if len(line) > 100:
        line = f"{name}(\n" + "".join(f"    {argument},\n" for argument in arguments) + f"){arrow}"
    return f"```python\n{line}\n```\n"


def _default(value: object) -> str:
    """As the source has it; what is made elsewhere (``os.environ``) differs from machine to machine."""
    if isinstance(value, str):
        return json.dumps(value)
    return repr(value) if value is None or isinstance(value, int | float | tuple) else "..."


def _is_variadic(signature: inspect.Signature) -> bool:
    return any(one.kind is one.VAR_POSITIONAL for one in signature.parameters.values())


def _described(thing: Any, name: str, needed: list[str], types: dict[str, str], missing: list[str]) -> str:
    """The docstring as Markdown, with ``types`` beside the entries of that name. Notes what it leaves out."""
    docstring = (
        inspect.cleandoc(vars(thing).get("__doc__") or "") if inspect.isclass(thing) else inspect.getdoc(thing)
    )
    if not docstring or docstring.startswith(f"{name}("):  # what dataclass writes where there is none
        missing.append(name)
        return ""
    page = pdoc.docstrings.convert(docstring, "google", None)
    page = re.sub(r"^###### (\w+):", r"*\1*", page, flags=re.MULTILINE)
    page = re.sub(r"^ ?- \*\*(\w+):\*\* +", lambda found: _entry(found[1], types), page, flags=re.MULTILINE)
    page = re.sub(r"^> ", "", page, flags=re.MULTILINE)
    described = set(re.findall(r"^- `(\w+)`", page, flags=re.MULTILINE))
    missing += [f"{name}({one})" for one in needed if one not in described]
    page = re.sub(r"``([^`]+)``", r"`\1`", page)
    return re.sub(r"\n{3,}", "\n\n", page).strip() + "\n"


def _entry(name: str, types: dict[str, str]) -> str:
    return f"- `{name}` (`{types[name]}`): " if name in types else f"- `{name}`: "


def main() -> None:
    warnings.simplefilter("error")
    FILE.write_text(text(), encoding="utf-8")
    print(f"wrote {FILE}", file=sys.stderr)


if __name__ == "__main__":
    main()
