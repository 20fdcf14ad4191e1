"""Extrapolate a deep model from a few layers, and a long generation from a few tokens.

Layers: ``find_depth`` compares the modules that a configuration makes: classes, settings and shapes of weights.
``extend_depth`` takes the traces of a model with d, d + 1 and d + 2 layers. The second is the first with events
inserted at some places: a layer's forward, its backward, its share of every list that the optimizer works on. The
third must be the first with the same events inserted twice; each further layer inserts them once more. Names, work
and the storage that an event frees follow one rule in all copies, or nothing is extrapolated.

Tokens: ``extend_tokens`` takes one trace. A period runs from one token's first operation to the next token's. If
three periods in a row have one structure and sizes that grow evenly, the tokens between are copies.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import nn

from brim.core import Op, Storage, Trace
from brim.core.hardware import filled
from brim.estimation.models import Source, class_of, transformers_config

_REGULAR = 2  # layers of the shallowest model that are like all later ones: a first and a last one
TRACED_TOKENS = 6  # the prompt, one token that still handles the prompt's tensors, three that are compared, the last
_FEWEST_LAYERS = 10  # with fewer, three traces of a few layers are as much work as one of all
_NUMBER = re.compile(r"(?:^|(?<=\.))\d+(?=\.|$)")
# Settings that make every n-th layer different.
_EVERY_NTH = re.compile(r"every|interval|freq|period|pattern|sparse_step")
_WORK = ("flops", "read_bytes", "written_bytes")
T = TypeVar("T", Op, Storage)
_SIMPLE = (bool, int, float, str, type(None), torch.dtype, tuple)


# -- layers that are alike -----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Stack:
    """The list of a model's layers; the first ``special`` are not like the others.

    ``field`` is the field of its configuration with their number, if that is known.
    """

    path: str
    layers: int
    special: int
    field: str = ""

    @property
    def fewest(self) -> int:
        """The number of layers of the shallowest model from which this one can be extrapolated."""
        return self.special + _REGULAR

    def place(self, name: str) -> int | None:
        """The number of the layer that ``name`` is in; None outside of them."""
        if not name.startswith(f"{self.path}."):
            return None
        return int(name[len(self.path) + 1 :].partition(".")[0])

    def renamed(self, name: str, places: Mapping[int, int]) -> str | None:
        """``name`` with its layer's number in ``places``; None if that layer is left out."""
        layer = self.place(name)
        if layer is None:
            return name
        if layer not in places:
            return None
        _, _, rest = name[len(self.path) + 1 :].partition(".")
        return f"{self.path}.{places[layer]}" + (f".{rest}" if rest else "")


def find_depth(source: Source, model: nn.Module | None = None) -> Stack | None:
    """The layers of a model, if they are alike; None if all of them have to be traced.

    ``model`` is the model of ``source``, if it is built already.
    """
    if source.library != "transformers":
        return None
    config = transformers_config(source)
    field = config.attribute_map.get("num_hidden_layers", "num_hidden_layers")
    layers = getattr(config, field, None)
    if not isinstance(layers, int) or layers < _FEWEST_LAYERS or config.is_encoder_decoder:
        return None
    if not _is_even(source.config, layers):
        return None
    model = on_meta(source, config) if model is None else model
    stack = None if model is None else find_stack(model)
    if stack is None or stack.layers != layers:
        return None
    # With more, a trace of all layers is no more work.
    return replace(stack, field=field) if 3 * (stack.fewest + 1) <= layers else None


def find_stack(model: nn.Module) -> Stack | None:
    """The only list of many equal layers; None if there is none, or several."""
    lists = [
        (path, layers)
        for path, layers in model.named_modules()
        if isinstance(layers, nn.ModuleList) and len(layers) >= _FEWEST_LAYERS
    ]
    outer = [(path, layers) for path, layers in lists if not any(path.startswith(f"{p}.") for p, _ in lists)]
    if len(outer) != 1:
        return None
    path, layers = outer[0]
    special = next((n for n in range(len(layers) - 1) if _are_alike(layers, n)), len(layers))
    if len(layers) - special < _FEWEST_LAYERS:
        return None
    return Stack(path=path, layers=len(layers), special=special)


def _is_even(config: Mapping[str, Any], layers: int) -> bool:
    """True if no setting is about single layers."""
    for name, value in config.items():
        parts = isinstance(value, dict) and name.endswith("_config")  # of several models in one
        if parts or (isinstance(value, list) and len(value) == layers):
            return False
        if _EVERY_NTH.search(name) and isinstance(value, int) and value > 1:
            return False
    return True


def on_meta(source: Source, config: Any) -> nn.Module | None:
    """The model on the meta device; None if its configuration is invalid."""
    from transformers.initialization import no_init_weights

    kind = class_of(config, [source.architecture], ("AutoModelForCausalLM", "AutoModel"))
    if kind is None:
        return None
    try:
        with no_init_weights(), torch.device("meta"):
            model: nn.Module = kind._from_config(config)
    except Exception:  # the trace reports what is wrong with the configuration
        return None
    return model


def _are_alike(layers: nn.ModuleList, first: int) -> bool:
    """True if all layers from ``first`` on have the same settings."""
    settings = settings_of(layers[first])
    return all(same_settings(settings, settings_of(layers[n]), first, n) for n in range(len(layers) - 1, first, -1))


def settings_of(layer: nn.Module) -> dict[str, Any]:
    """Return by path the classes of modules, shapes and dtypes of tensors, and plain attributes."""
    settings: dict[str, Any] = {}
    for path, module in layer.named_modules():
        settings[path] = type(module)
        settings |= {f"{path}.{name}": value for name, value in vars(module).items() if isinstance(value, _SIMPLE)}
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            settings[f"{path}.{name}"] = None if tensor is None else (tuple(tensor.shape), tensor.dtype)
    return settings


def same_settings(settings: Mapping[str, Any], others: Mapping[str, Any], first: int, second: int) -> bool:
    """True if the settings of layers ``first`` and ``second`` differ only in the layer's own number."""
    return settings.keys() == others.keys() and all(
        value == others[key] or (type(value) is int and (value, others[key]) == (first, second))
        for key, value in settings.items()
    )


# -- from three depths to any depth --------------------------------------------------------------------------------


# A storage's position in a shorter trace, those of two storages that are a token apart, and the tokens that are left
# out there: the difference of the two sizes is added for each of them.
Origin = tuple[int, int, int, int]


@dataclass(frozen=True, kw_only=True)
class Template:
    """The trace of a shallow model whose storages are copied for a deep one: ``storages`` are their origins in it.

    The shallow model is the deep one with ``layers`` in its configuration's ``field``.
    """

    field: str
    layers: int
    trace: Trace
    storages: tuple[Origin, ...]

    def longer(self, origins: Sequence[Origin]) -> Template:
        """Return the template of more tokens, whose storages have ``origins`` in the trace of this one."""
        own = [origin[0] for origin in self.storages]
        storages = tuple((own[at], own[first], own[then], tokens) for at, first, then, tokens in origins)
        return replace(self, storages=storages)

    def extended(self, storages: Sequence[Storage]) -> list[Storage]:
        """Return the deep model's storages at another size, from the shallow one's; their ticks mean nothing."""
        return [
            replace(storages[at], bytes=storages[at].bytes + tokens * (storages[then].bytes - storages[first].bytes))
            if tokens and storages[then].bytes != storages[first].bytes else storages[at]
            for at, first, then, tokens in self.storages
        ]  # fmt: skip


Place = tuple[int, int]  # (index of the event in the second trace, copy)


@dataclass(frozen=True, slots=True)
class _Event:
    """An operation, or a storage's birth or death (``birth``: the index of its birth).

    ``token`` is equal for events that differ in ``numbers`` only: the layer, and the work of an operation.
    """

    kind: str
    item: Op | Storage
    token: int
    numbers: tuple[int, ...]
    birth: int = -1


def extend_depth(traces: Sequence[Trace], layers: int, unit: int = 1) -> tuple[Trace, tuple[int, ...]] | None:
    """The trace with ``layers`` layers more than the first of three, each of which has ``unit`` more than the one
    before; and for each of its storages, the position in the second trace of the one that it is a copy of.

    None where the layers do not repeat. ``layers`` is a multiple of ``unit``.
    """
    numbering: dict[Any, int] = {}
    events = [_events(trace, unit, numbering) for trace in traces]
    first, second, third = ([event.token for event in own] for own in events)
    insertions = _insertions(first, second)
    if insertions is None:
        return None
    for turns in (1, 0):
        chunks = [_aligned(insertion, events[1], turns) for insertion in insertions]
        places = [list(_places(chunks, len(second), copies)) for copies in range(3)]
        if [second[index] for index, _ in places[2]] != third:
            return None
        with suppress(_NoRule):
            rules, copies = _Rules(traces, events, places, unit), layers // unit
            return rules.apply(_places(chunks, len(second), copies), copies)
    return None


def _events(trace: Trace, unit: int, numbering: dict[Any, int]) -> list[_Event]:
    births: dict[int, int] = {}
    events: list[_Event] = []
    for kind, item in _in_order(trace):
        path, layer = _split(item.module)
        if isinstance(item, Op):
            key: Any = (kind, item.name, item.phase, path, layer % unit, item.dtype, item.step)
            numbers, birth = (layer, *(getattr(item, name) for name in _WORK)), -1
        else:
            key = (kind, item.bytes, item.category, path, layer % unit, item.dtype)
            numbers, birth = (layer,), births.setdefault(item.id, len(events))
        events.append(_Event(kind, item, numbering.setdefault(key, len(numbering)), numbers, birth))
    return events


def _in_order(trace: Trace) -> Iterator[tuple[str, Op | Storage]]:
    """Operations, births and deaths. Deaths in a row are in the order of their births: storages that are freed at
    once have no order."""
    changes: list[tuple[int, str, Op | Storage]] = [(op.at, "op", op) for op in trace.ops]
    for storage in trace.storages:
        changes.append((storage.born, "born", storage))
        if storage.died is not None:
            changes.append((storage.died, "died", storage))
    changes.sort(key=lambda change: change[0])
    for kind, group in itertools.groupby(changes, key=lambda change: change[1]):
        items = [item for _, _, item in group]
        if kind == "died":
            items.sort(key=lambda item: item.born if isinstance(item, Storage) else 0)
        elif kind == "op":  # of consecutive operations of the build, only the last one allocates on the device
            items = [item for item in items if item is items[-1] or (isinstance(item, Op) and item.step >= 0)]
        for item in items:
            yield kind, item


@functools.lru_cache(maxsize=1 << 16)
def _split(path: str) -> tuple[str, int]:
    """``model.layers.3.mlp`` -> ``model.layers.*.mlp``, 3; -1 if no part is a number."""
    match = _NUMBER.search(path)
    if match is None:
        return path, -1
    return f"{path[: match.start()]}*{path[match.end() :]}", int(match[0])


def _insertions(first: Sequence[int], second: Sequence[int]) -> list[tuple[int, range]] | None:
    """Events of ``first`` before each insertion, and where it is in ``second``; None if more than that differs."""
    insertions: list[tuple[int, range]] = []
    here = there = 0
    left = len(second) - len(first)
    while True:
        same = _agreement(first, here, second, there)
        here, there = here + same, there + same
        if here == len(first):
            return [*insertions, (here, range(there, there + left))] if left else insertions
        lengths = [length for length in range(1, left + 1) if second[there + length] == first[here]]
        if not lengths:
            return None
        longest = max(lengths, key=lambda length: (_agreement(first, here, second, there + length), -length))
        insertions.append((here, range(there, there + longest)))
        there, left = there + longest, left - longest


def _agreement(first: Sequence[int], here: int, second: Sequence[int], there: int) -> int:
    """The number of equal tokens from two positions on."""
    count, most = 0, min(len(first) - here, len(second) - there)
    while count < most and first[here + count] == second[there + count]:
        count += 1
    return count


def _aligned(insertion: tuple[int, range], second: Sequence[_Event], turns: int) -> range:
    """The same insertion ``turns`` times its length earlier, and begun at an operation, where the same events precede
    it.

    Agreement is followed to its end, so copies lie behind all layers of the first trace. One turn on they lie between
    its first and its last one, in the forward pass as in the backward pass: copies of one layer have one number. And
    tokens of operations outside of modules are the same whatever they work on, so agreement went too far by one.
    """
    before, chunk = insertion
    length = len(chunk)

    def precedes(index: int) -> bool:
        return second[index].token == second[index + length].token

    back = turns * length
    if back <= before and all(map(precedes, range(chunk.start - back, chunk.start))):
        before, chunk = before - back, range(chunk.start - back, chunk.stop - back)
    for start in range(chunk.start, chunk.start - min(before, length), -1):
        if second[start].kind == "op":
            return range(start, start + length)
        if not precedes(start - 1):
            break
    return chunk


def _places(chunks: Sequence[range], length: int, copies: int) -> Iterator[Place]:
    """The origin of each event of a trace with ``copies`` copies of every chunk, in order."""
    end = 0
    for chunk in (*chunks, range(length, length)):
        yield from ((index, 0) for index in range(end, chunk.start))
        yield from ((index, copy) for copy in range(copies) for index in chunk)
        end = chunk.stop


class _NoRule(Exception):
    """The copies do not follow one rule."""


@dataclass(frozen=True, slots=True)
class _Rule:
    """An event of the second trace for any copy of any number of them.

    The numbers of ``event`` grow ``per_copy``, and ``per_total`` for each copy beyond ``total``. A death's birth is
    ``inside`` the copy that is ``shift`` from its own (counted from the last one if ``reverse``), or ``outside``.
    """

    event: _Event
    total: int
    per_copy: tuple[int, ...]
    per_total: tuple[int, ...]
    inside: int | None = None
    outside: int | None = None
    reverse: bool = False
    shift: int = 0

    def numbers(self, copy: int, copies: int) -> list[int]:
        rows = zip(self.event.numbers, self.per_copy, self.per_total, strict=True)
        return [number + copy * by_copy + (copies - self.total) * by_total for number, by_copy, by_total in rows]

    def birth(self, copy: int, copies: int) -> Place:
        other = _other_copy(copy, copies, self.reverse, self.shift)
        if self.inside is not None and other is not None:
            return self.inside, other
        if self.outside is None:
            raise _NoRule
        return self.outside, 0


class _Rules:
    """The rule of every event, from three traces: with no inserted copy, one copy and two copies."""

    def __init__(
        self,
        traces: Sequence[Trace],
        events: Sequence[Sequence[_Event]],
        places: Sequence[Sequence[Place]],
        unit: int,
    ) -> None:
        self._trace, self._events, self._places, self._unit = traces[0], events, places, unit
        self._positions = {storage.id: position for position, storage in enumerate(traces[1].storages)}
        self._at = [{place: index for index, place in enumerate(own)} for own in places]
        self._copied = {index for index, copy in places[2] if copy}
        self._rules = [self._rule(index) for index in range(len(events[1]))]

    def apply(self, places: Iterator[Place], copies: int) -> tuple[Trace, tuple[int, ...]]:
        """The trace with ``copies`` copies, whose events are at ``places``, and the template of each storage."""
        ops: list[Op] = []
        born: list[tuple[Storage, str, int]] = []
        templates: list[int] = []
        births: dict[Place, int] = {}
        deaths: dict[int, int] = {}
        starts: dict[int, int] = {}
        for tick, (index, copy) in enumerate(places):
            rule = self._rules[index]
            item, (layer, *amounts) = rule.event.item, rule.numbers(copy, copies)
            path, number = _split(item.module)
            module = path if number < 0 else path.replace("*", str(layer), 1)
            if isinstance(item, Op):
                starts.setdefault(item.step, tick)
                work: dict[str, Any] = dict(zip(_WORK, amounts, strict=True))
                ops.append(replace(item, module=module, at=tick, **work))
            elif rule.event.kind == "born":
                births[index, copy] = len(born)
                copied = self._events[1][index].item
                assert isinstance(copied, Storage)
                templates.append(self._positions[copied.id])
                born.append((item, module, tick))
            else:
                deaths[births[rule.birth(copy, copies)]] = tick
        trace = replace(
            self._trace,
            ops=tuple(ops),
            storages=tuple(
                item.moved(id=number, bytes=item.bytes, module=module, born=tick, died=deaths.get(number))
                for number, (item, module, tick) in enumerate(born)
            ),
            step_starts=tuple(starts[step] for step in range(len(self._trace.step_starts))),
        )
        return trace, tuple(templates)

    def _rule(self, index: int) -> _Rule:
        copied = index in self._copied
        instances = [(0, 1), (0, 2), (1, 2)] if copied else [(0, 0), (0, 1), (0, 2)]  # copy, of how many
        samples = {(copy, of): self._events[of][self._at[of][index, copy]] for copy, of in instances}
        base, more, most = (sample.numbers for sample in samples.values())
        per_total = tuple(b - a for a, b in zip(base, more, strict=True))
        per_copy = tuple(b - a for a, b in zip(more, most, strict=True))
        if any((*per_total[1:], *per_copy[1:])) if copied else per_total != per_copy:
            raise _NoRule
        if not copied:
            per_copy = (0,) * len(per_copy)
        unit = self._unit
        if (per_total[0], per_copy[0]) not in ((0, 0), (0, unit), (unit, 0), (unit, -unit)):
            raise _NoRule
        rule = _Rule(samples[instances[0]], instances[0][1], per_copy, per_total)
        if rule.event.kind != "died":
            return rule
        births = {key: self._places[key[1]][sample.birth] for key, sample in samples.items() if key[1]}
        inside = {birth for birth, _ in births.values() if birth in self._copied}
        outside = {birth for birth, _ in births.values()} - inside
        if len(inside) > 1 or len(outside) > 1:
            raise _NoRule
        rule = replace(rule, inside=next(iter(inside), None), outside=next(iter(outside), None))
        if not inside:
            return rule
        copies = [copy if birth in inside else None for birth, copy in births.values()]
        for reverse, shift in itertools.product((False, True), (0, -1, 1)):
            if copies == [_other_copy(copy, of, reverse, shift) for copy, of in births]:
                return replace(rule, reverse=reverse, shift=shift)
        raise _NoRule


def _other_copy(copy: int, copies: int, reverse: bool, shift: int) -> int | None:
    other = (copies - 1 - copy if reverse else copy) + shift
    return other if 0 <= other < copies else None


# -- from a few tokens to many -------------------------------------------------------------------------------------


def extend_tokens(trace: Trace, tokens: int, far: Trace | None = None) -> tuple[Trace, list[Origin]] | None:
    """The trace of ``TRACED_TOKENS`` tokens extended to ``tokens``, with the origins of its storages; None if its
    periods do not repeat.

    ``far`` is a trace of as many tokens after a prompt that is longer by the tokens that are left out: its last sizes
    must be those that are extrapolated here (a window of attention may have filled up in between).
    """
    starts, length = _periods(trace)
    copies = tokens - TRACED_TOKENS
    if not length or copies <= 0:
        return None
    before, storages, after = (_within(trace.storages, starts[index], length) for index in (2, 3, 4))
    if not before.keys() == storages.keys() == after.keys():
        return None
    growth = {tick: after[tick].bytes - storage.bytes for tick, storage in storages.items()}
    for tick, storage in storages.items():
        if storage.bytes - before[tick].bytes != growth[tick] or _life(before[tick]) != _life(storage):
            return None
    ops, next_ops = (_within(trace.ops, starts[index], length) for index in (3, 4))
    if [op.name for op in ops.values()] != [op.name for op in next_ops.values()]:
        return None
    if far is not None:
        far_starts, far_length = _periods(far)
        sizes = {tick: storage.bytes + copies * growth[tick] for tick, storage in storages.items()}
        far_storages = _within(far.storages, far_starts[3], far_length) if far_length else {}
        if {tick: storage.bytes for tick, storage in far_storages.items()} != sizes:
            return None
    work = {tick: (op, next_ops[tick]) for tick, op in ops.items() if tick in next_ops}
    seam, shift = starts[4], copies * length  # the copies are inserted after the fourth token

    at = {storage.id: position for position, storage in enumerate(trace.storages)}
    pairs = {tick: (at[storage.id], at[after[tick].id]) for tick, storage in storages.items()}

    def extended_storages() -> Iterator[tuple[int, int | None, Origin]]:
        """Yield the ticks and the origin of each storage."""
        for own, storage in enumerate(trace.storages):
            born, died = storage.born, storage.died
            if born >= seam:
                later = None if died is None else died + shift
                yield born + shift, later, (own, *pairs.get((born - seam) % length, (own, own)), copies)
            elif died is None or died < seam or (born >= starts[2] and died < seam + length):
                yield born, died, (own, own, own, 0)  # the last: freed by the next token, which is now a copy
            else:
                yield born, died + shift, (own, own, own, 0)
        for copy in range(1, copies + 1):
            for tick, storage in storages.items():
                died = storage.died
                if died is not None:  # or freed at the end of the step
                    died += copy * length if died < seam + length else shift
                own, then = pairs[tick]
                yield storage.born + copy * length, died, (own, own, then, copy)

    def extended_ops() -> Iterator[Op]:
        for op in trace.ops:
            pair = work.get((op.at - seam) % length, (op, op))
            yield op if op.at < seam else _grown(op, pair, copies, shift)
        for copy in range(1, copies + 1):
            yield from (_grown(pair[0], pair, copy, copy * length) for pair in work.values())

    ordered = sorted(extended_storages(), key=lambda entry: entry[0])
    bytes = [storage.bytes for storage in trace.storages]
    extended = replace(
        trace,
        storages=tuple(
            trace.storages[own].moved(
                id=index, bytes=bytes[own] + left_out * (bytes[then] - bytes[first]),
                module=trace.storages[own].module, born=born, died=died,
            )
            for index, (born, died, (own, first, then, left_out)) in enumerate(ordered)
        ),
        ops=tuple(sorted(extended_ops(), key=lambda op: op.at)),
    )  # fmt: skip
    return extended, [origin for *_, origin in ordered]


def _periods(trace: Trace) -> tuple[list[int], int]:
    """The tick at which each token begins (the embedding of its input), and the length of the steady ones.

    The length is 0 if they are not steady.
    """
    lookups = [op for op in trace.ops if op.name == "aten.embedding.default"]
    counts = Counter(op.module for op in lookups)
    table = next((module for module, count in counts.items() if count in (TRACED_TOKENS, TRACED_TOKENS + 1)), None)
    starts = [op.at for op in lookups if op.module == table][-TRACED_TOKENS:]  # one more: an encoder's own
    lengths = {after - before for before, after in itertools.pairwise(starts[2:])}
    return starts, lengths.pop() if len(lengths) == 1 else 0


def _within(entries: Iterable[T], begin: int, length: int) -> dict[int, T]:
    """Operations or storages that begin in a period, by their ticks in it."""
    ticks = ((entry.at if isinstance(entry, Op) else entry.born, entry) for entry in entries)
    return {tick - begin: entry for tick, entry in ticks if begin <= tick < begin + length}


def _life(storage: Storage) -> int | None:
    return None if storage.died is None else storage.died - storage.born


def _grown(op: Op, pair: tuple[Op, Op], tokens: int, shift: int) -> Op:
    """``op`` some tokens later, with the growth of its work from one of ``pair`` to the other for each."""
    first, second = pair
    work = {name: getattr(op, name) + tokens * (getattr(second, name) - getattr(first, name)) for name in _WORK}
    # A token lengthens a side of a product's matrices by one, so its flops over those of a token are that side.
    token_flops = second.flops - first.flops
    grows = token_flops and op.fill < 1
    now, later = (op.flops / token_flops, work["flops"] / token_flops) if grows else (1.0, 1.0)
    return Op(
        name=op.name, module=op.module, phase=op.phase, step=op.step, at=op.at + shift, **work, dtype=op.dtype,
        in_ram=op.in_ram, kernel=op.kernel, fill=op.fill * filled(later) / filled(now),
    )  # fmt: skip
