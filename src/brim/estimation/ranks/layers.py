"""The layers of a traced stage of a model with several kinds of layers.

The first layers of a mixture of experts may be dense, and every sixth layer may have full attention. A stage then
gets its real layers, cut out of the whole model; for a shallower trace that is repeated, pairs of layers are left out
of a stretch in which each layer equals the one two layers before.
"""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from brim.errors import UsageError
from brim.estimation.extrapolation import on_meta, same_settings, settings_of
from brim.estimation.models import Source, transformers_config
from brim.estimation.ranks.job import ParallelJob
from brim.techniques.parallel import pipeline

# FSDP2 frees a layer's weights while the layer two positions later is gathered, so pairs of layers repeat:
# ``extend_depth`` needs copies that reach at most into the next copy.
UNIT = 2


@dataclass(frozen=True, kw_only=True)
class Layers:
    """A stage to trace: layers ``own`` of ``source``, of these ``kinds``."""

    source: Source
    own: tuple[int, ...]
    kinds: tuple[int, ...]
    embeds: bool
    has_head: bool
    of: int  # layers of the model
    alike: bool  # all of them

    @property
    def part(self) -> pipeline.Part:
        """The part of ``uncut`` that ``cut`` leaves."""
        if self.alike:  # a model with one layer before and one behind the stage, if the stage has neighbours there
            before, behind = (0 if self.embeds else 1), (0 if self.has_head else 1)
            return pipeline.Part(first=before, layers=len(self.own), of=before + len(self.own) + behind)
        first, end = (0 if self.embeds else self.own[0]), (self.of if self.has_head else self.own[-1] + 1)
        return pipeline.Part(first=first, layers=end - first, of=self.of)

    @property
    def uncut(self) -> Source:
        return _with_layers(self.source, self.part.of) if self.alike else self.source

    def cut(self, model: nn.Module) -> pipeline.Stage:
        """Cut the stage out of the model that was built from ``uncut``."""
        part = self.part
        return pipeline.cut(model, part, None if self.alike else [layer - part.first for layer in self.own])

    def shallower(self) -> tuple[list[Layers], int] | None:
        """Three stages, each two layers deeper than the last, and how many layers the first lacks; None where tracing
        all layers is no more work."""
        begin, end = _stretch(self.kinds)
        least = UNIT + (end - begin) % UNIT
        lengths = [least + more * UNIT for more in range(3)]
        few = [self._without(begin + length, end) for length in lengths]
        if lengths[-1] >= end - begin or sum(len(stage.own) for stage in few) >= len(self.own):
            return None
        return few, end - begin - least

    def _without(self, begin: int, end: int) -> Layers:
        own, kinds = self.own[:begin] + self.own[end:], self.kinds[:begin] + self.kinds[end:]
        return replace(self, own=own, kinds=kinds)


def layers_of(job: ParallelJob, part: pipeline.Part) -> Layers:
    """The stage with ``part`` of the job's layers. Raises UsageError for layers that its model lacks."""
    kinds = layer_kinds(job.source)
    there = tuple(range(len(kinds))) if job.layers is None else job.layers
    alike = len(set(kinds)) == 1
    if part.of != len(there) or (max(there) >= len(kinds) and not alike):
        raise UsageError(f"Cannot take {part.of} layers of {job.source.name}.", f"It has {len(kinds)}.")
    own = there[part.first : part.first + part.layers]
    return Layers(
        source=job.source, own=own, kinds=tuple(0 if alike else kinds[layer] for layer in own), embeds=part.embeds,
        has_head=part.has_head, of=len(kinds), alike=alike,
    )  # fmt: skip


def layer_kinds(source: Source) -> tuple[int, ...]:
    """The kind of each layer: 0 for the first and all like it, 1 for the next kind, ..."""
    as_file = json.dumps(source.config, sort_keys=True, default=lambda dtype: str(dtype).removeprefix("torch."))
    return _kinds_of(source.architecture, as_file)


def usual_layers(source: Source, count: int) -> tuple[int, ...]:
    """``count`` layers of the most frequent kind, or the last ones if too few; of one kind, any ``count``."""
    kinds = layer_kinds(source)
    if len(set(kinds)) == 1:
        return tuple(range(count))
    usual = Counter(kinds).most_common(1)[0][0]
    usual_indices = [layer for layer, kind in enumerate(kinds) if kind == usual]
    return tuple((usual_indices if len(usual_indices) >= count else range(len(kinds)))[-count:])


@functools.lru_cache(maxsize=16)
def _kinds_of(architecture: str, configuration: str) -> tuple[int, ...]:
    source = Source(
        name=architecture, library="transformers", architecture=architecture, config=json.loads(configuration)
    )
    config = transformers_config(source)
    model = on_meta(source, config)
    if model is None:  # the trace reports the error
        return (0,) * int(config.num_hidden_layers)
    layers, _ = pipeline.stack_of(model)
    lists = [value for _, value in pipeline.layer_settings(config, len(layers))]
    first: list[tuple[int, Any, dict[str, Any]]] = []  # of each kind
    kinds = []
    for number, layer in enumerate(layers):
        entries = [value[number] for value in lists]
        own = {name: value for name, value in settings_of(layer).items() if not isinstance(value, float)}
        alike = (
            entries == first_entries and same_settings(settings, own, n, number)
            for n, first_entries, settings in first
        )
        kind = next((kind for kind, same in enumerate(alike) if same), len(first))
        if kind == len(first):
            first.append((number, entries, own))
        kinds.append(kind)
    return tuple(kinds)


def _with_layers(source: Source, layers: int) -> Source:
    """The source with ``layers`` equal layers."""
    config = transformers_config(source)
    field = str(config.attribute_map.get("num_hidden_layers", "num_hidden_layers"))
    lists = dict(pipeline.layer_settings(config, int(config.num_hidden_layers)))
    entries = {name: [lists[name][0]] * layers for name in lists if name in source.config}
    return replace(source, config={**source.config, **entries, field: layers})


def _stretch(kinds: Sequence[int]) -> tuple[int, int]:
    """The longest stretch in which each layer equals the one two layers before."""
    longest, begin = (0, 0), 0
    for end in range(1, len(kinds) + 1):
        if end - begin > UNIT and kinds[end - 1] != kinds[end - 1 - UNIT]:
            begin = end - UNIT
        if end - begin > longest[1] - longest[0]:
            longest = begin, end
    return longest
