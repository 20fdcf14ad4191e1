"""Time a generation's passes block by block, by measurements on this machine or by a machine's rates."""

from __future__ import annotations

import hashlib
import inspect
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from brim.core import Hardware
from brim.core.hardware import RAM, VRAM
from brim.estimation import step_memory
from brim.estimation.step_memory import PROMPT, TOKEN, Inputs, PassWork
from brim.measure.probe import probe
from brim.measure.user_cache import fingerprint
from brim.planning.inference import memory
from brim.planning.inference.choosing import Cut, Need
from brim.planning.inference.memory import Sizes
from brim.planning.seconds.block_seconds import OUTSIDE, BlockSeconds
from brim.planning.seconds.measurement_cache import Remembered
from brim.planning.seconds.rated_seconds import rated_seconds, triggers
from brim.predict import dispatch, recorder
from brim.techniques.blocks import Partition
from brim.techniques.kv_offload import cache as kv_cache
from brim.version import __version__

# An unmeasured processor: 8 cores with two products of 8 floats per cycle at 3.5 GHz reach 0.9 Tflop/s, and large
# products about two thirds of that. Only prompts and batches depend on it.
_HOST_FLOPS_PER_S = 0.6e12
_METHOD = 2  # raised when the stored values or their format change
_WATCHING = (dispatch, kv_cache, memory, recorder, step_memory)  # the modules that an observed pass depends on
_HOP_S = 40e-6  # two synchronous copies of a token's activations, to the host and back
# What transformers' loop launches for a token beside the pass; where tokens are drawn, twice as much.
# tests/gpu/techniques/test_decoding_graphs.py counts them.
_LOOP_LAUNCHES = 30


@dataclass(frozen=True, kw_only=True)
class PassSeconds:
    """Seconds of blocks on ``hardware``, for every partition of ``module``.

    They are measured ones if ``hardware`` is this machine and these passes were measured; ``measures``: they are
    measured now if not, which takes seconds and the RAM of a few blocks. Else they follow from rates.
    ``host_compute``: the processor beside a GPU may compute blocks.
    """

    module: nn.Module
    hardware: Hardware
    measures: bool = False
    host_compute: bool = True

    @cached_property
    def host(self) -> Hardware | None:
        """The processor beside a GPU that may compute blocks, or None."""
        return processor_of(self.hardware) if self.host_compute and self.hardware.compute == VRAM else None

    @cached_property
    def is_here(self) -> bool:
        """True where ``hardware`` is this machine, so that blocks can be timed."""
        return is_this_machine(self.hardware)

    def paced(
        self,
        plain: Need,
        sizes: Sizes,
        cuts: Iterable[Cut],
        *,
        cache_bytes: int = 0,
        joined_bytes: int = 0,
        prompt: bool = False,
        graphs: bool = False,
    ) -> Need:
        """Add the seconds of a token's pass, or of the prompt's, to ``plain``.

        ``cuts`` are all cuts that need seconds. ``cache_bytes`` is the largest part of the KV cache that a block on
        the processor moves to RAM, ``joined_bytes`` the further RAM while a token is appended. ``graphs``: CUDA
        graphs generate the tokens.
        """
        seen = plain.observation
        assert seen is not None, "a pass was watched"
        first = prompt or TOKEN not in seen.passes  # the prompt's pass generates the first token
        tokens, work = sizes.batch * (sizes.chunk if first else 1), seen.passes[PROMPT if first else TOKEN]
        measured = (lambda partition: None) if first or graphs else self._measured(sizes, cuts)
        replays = graphs and not first
        hardware = replace(self.hardware, dispatch_s=0.0) if replays else self.hardware

        def seconds(partition: Partition) -> Mapping[str, BlockSeconds]:
            known = measured(partition)
            if known is not None:
                return known
            rated = dict(rated_seconds(self.module, partition, work, hardware, tokens=tokens))
            if replays:
                rated[OUTSIDE] = BlockSeconds(forward_s=rated[OUTSIDE].forward_s + self.loop_s(sizes))
            return rated

        paced = replace(plain, tokens=tokens, seconds=seconds)
        if self.host is None:
            return paced
        with_host = self._with_host(paced, work, self.host, cache_bytes)
        return replace(with_host, cpu_step_bytes=with_host.cpu_step_bytes + joined_bytes)

    def loop_s(self, sizes: Sizes) -> float:
        """Return the seconds of transformers' loop for a token: of a pass without graphs they are a small part."""
        return _LOOP_LAUNCHES * (2 if sizes.drawn else 1) * self.hardware.dispatch_s

    def _with_host(self, need: Need, work: PassWork, host: Hardware, cache_bytes: int) -> Need:
        def cpu_seconds(partition: Partition) -> Mapping[str, BlockSeconds]:
            made = rated_seconds(self.module, partition, work, host, tokens=need.tokens)
            return {name: replace(found, forward_s=found.forward_s + _HOP_S) for name, found in made.items()}

        assert need.observation is not None
        # Temporaries are as large as in the compute tier, and activations copied to the host at most as large. They
        # include a cache that counts as activations; ``cache_bytes`` is that of a planned one.
        step_bytes = 2 * need.observation.step_bytes
        return replace(need, cpu_seconds=cpu_seconds, cpu_bytes=cache_bytes, cpu_step_bytes=step_bytes)

    def _measured(
        self, sizes: Sizes, cuts: Iterable[Cut]
    ) -> Callable[[Partition], Mapping[str, BlockSeconds] | None]:
        """Return a function from a partition to a token pass's seconds: known for all ``cuts``, or None for each."""
        if not self.is_here:
            return lambda partition: None
        name = f"{sizes.batch} {sizes.prompt} {sizes.total}"

        def known(partition: Partition) -> Mapping[str, BlockSeconds] | None:
            names = [*(block.name for block in partition.blocks), OUTSIDE]
            numbers = self._memory.get(f"{name} {_digest(partition)}", count=len(names))
            if numbers is None:
                return None
            return {block: BlockSeconds(forward_s=number) for block, number in zip(names, numbers, strict=True)}

        if self.measures:
            partitions = {_digest(cut.partition): cut.partition for cut in cuts}
            if any(known(partition) is None for partition in partitions.values()):
                found = self._measure(sizes, [*partitions.values()])
                self._memory.keep(
                    {f"{name} {digest}": numbers for digest, numbers in zip(partitions, found, strict=True)}
                )
        # All cuts are stored together, so the first tells for all.
        return known if known(next(iter(cuts)).partition) is not None else lambda partition: None

    @cached_property
    def _memory(self) -> Remembered:
        facts = (_METHOD, self.hardware.name, torch.__version__, torch.get_num_threads(), fingerprint_of(self.module))
        return Remembered("pass-seconds", facts)

    def _measure(self, sizes: Sizes, partitions: Sequence[Partition]) -> list[list[float]]:
        """Measure the seconds of each partition's blocks, in order, and of the rest.

        A pass takes the same time however it is cut. Small parts run faster by themselves (their threads are awake,
        their code is in the cache), so their seconds are scaled to the sum of the coarsest partition's.
        """
        from brim.planning.seconds.block_calls import calls_of  # few generations measure
        from brim.planning.seconds.block_timing import block_seconds

        example = Inputs(batch=sizes.batch, prompt=sizes.prompt, total=sizes.total)
        paths = {trigger for partition in partitions for trigger in triggers(partition)}
        calls = calls_of(self.module, paths, example)
        found: list[list[float]] = []
        for partition in partitions:
            timed = block_seconds(self.module, partition, example, training=False, calls=calls)
            numbers = [timed[name].forward_s for name in [*(block.name for block in partition.blocks), OUTSIDE]]
            pace = sum(found[0]) / sum(numbers) if found and sum(numbers) else 1.0
            found.append([pace * number for number in numbers])
        return found


def fingerprint_of(module: nn.Module) -> str:
    """Return a hash of everything that the passes of ``module`` depend on."""
    config: Any = module.config
    kinds = {type(part) for part in module.modules()}
    sources = {inspect.getfile(watching) for watching in _WATCHING}
    sources |= {str(sys.modules[kind.__module__].__file__) for kind in kinds}
    tensors: Iterable[tuple[str, torch.Tensor]] = [*module.named_parameters(), *module.named_buffers()]
    return fingerprint(
        sorted(map(Path, sources)),
        (__version__, torch.__version__, transformers.__version__),
        json.dumps(config.to_dict(), sort_keys=True, default=str),
        [(name, getattr(config, name, None)) for name in ("_attn_implementation", "_experts_implementation")],
        [(name, type(part).__qualname__, part.training) for name, part in module.named_modules()],
        [(name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in tensors],
    )


def _digest(partition: Partition) -> str:
    facts = [(block.name, block.tensors, block.triggers) for block in partition.blocks]
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


def processor_of(hardware: Hardware) -> Hardware:
    """Return the processor beside the GPU of ``hardware`` as a machine of its own."""
    if hardware.compute == RAM:
        return hardware
    here = probe()
    if (here.name, here.compute) == (hardware.name, hardware.compute):
        return probe(device="cpu")
    tiers = tuple(tier for tier in hardware.tiers if tier.name != VRAM)
    links = tuple(link for link in hardware.links if VRAM not in (link.source, link.target))
    rates = {"float32": _HOST_FLOPS_PER_S, "bfloat16": _HOST_FLOPS_PER_S}
    return replace(hardware, compute=RAM, tiers=tiers, links=links, flops_per_s=rates, name=f"{hardware.name}'s host")


def is_this_machine(hardware: Hardware) -> bool:
    here = probe()
    return (here.name, here.compute) == (hardware.name, hardware.compute)
