"""The split of a training job over GPUs: the mesh, its ranks' coordinates, and checks of a model's sizes.

Ranks are numbered as in Megatron-LM and torchtitan: neighbours share a tensor-parallel group, then come context, data
and pipeline parallelism, so that the groups that communicate most are within one node.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from brim.core.options import option
from brim.errors import UnsupportedError, UsageError

ENGINES = ("torch", "megatron")
_MOST_GPUS = 1 << 20
_POSITIVE = ("gpus", "gpus_per_node", "tp", "pp", "cp", "ep", "interleave", "micro_batch")


@dataclass(frozen=True, kw_only=True)
class Split:
    """A mesh of ``gpus`` = pp x dp x cp x tp ranks, and how a batch goes through it.

    ``zero``: states are split over dp x cp, as experts are by ``ep``. ``stage_layers``: interleaved stages in the
    model's order. ``dp`` and ``global_batch`` 0, and no ``stage_layers``: the default of their options.
    """

    gpus: int = option(help="Split the model over this number of GPUs, and predict the memory of every rank.")
    gpus_per_node: int = option(8, "GPUs of one machine. [default: 8]")
    tp: int = option(1, "Tensor parallelism: ranks that split every layer. [default: 1]")
    pp: int = option(1, "Pipeline stages. [default: 1]")
    dp: int = option(0, "Data parallelism. [default: the remaining factor of --gpus]")
    cp: int = option(1, "Context parallelism: ranks that split a sequence. [default: 1]")
    ep: int = option(1, "Ranks that split the experts of a layer. [default: 1]")
    zero: int = option(
        0,
        "ZeRO stage. Data-parallel ranks split 0 nothing, 1 optimizer states, 2 also gradients, 3 also "
        "weights. [default: 0]",
    )
    offload_shards: bool = option(False, "Keep the shards of --zero in RAM: weights, gradients, optimizer states.")
    sequence_parallel: bool = option(
        False, flags=("--sp",), help="Sequence parallelism between tensor-parallel products."
    )
    interleave: int = option(1, "Stages on each pipeline rank. [default: 1]")
    stage_layers: tuple[int, ...] = option(
        (),
        kind="layers",
        help="Layers of each pipeline stage, for example 9,9,8,6. [default: balanced by computation; with "
        "--engine megatron even]",
    )
    micro_batch: int = option(1, "Sequences of one micro-batch. [default: 1]")
    global_batch: int = option(
        0, "Sequences in a step, over all GPUs. [default: a micro-batch for each data-parallel rank and stage]"
    )

    def __post_init__(self) -> None:
        for name in _POSITIVE:
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= _MOST_GPUS:
                raise UsageError(
                    f"Cannot use {_flag(name)} {value}.", f"It must be a whole number, 1 to {_MOST_GPUS:,}."
                )
        if self.zero not in range(4):
            raise UsageError(f"Unknown --zero {self.zero}.", "The stages are 0, 1, 2 and 3.")
        if self.offload_shards:
            _check_offload(self)
        _check_mesh(self)
        object.__setattr__(self, "dp", self.gpus // (self.tp * self.pp * self.cp))
        _check_batch(self)
        if not self.global_batch:
            object.__setattr__(self, "global_batch", self.micro_batch * self.dp * self.pp)
        if self.sequence_parallel and self.tp == 1:
            raise UsageError(
                "--sp was given with --tp 1.",
                "Sequence parallelism splits over the tensor-parallel ranks.",
                "Give --tp, or leave it out.",
            )
        if self.interleave > 1:
            _check_interleave(self)
        if self.stage_layers:
            _check_stages(self)
        if (self.dp * self.cp) % self.ep:
            raise UsageError(
                f"--ep {self.ep} was given.",
                f"It does not divide the {self.dp * self.cp} ranks (dp x cp) over which experts are spread.",
                f"Nearest: --ep {nearest(self.ep, lambda n: (self.dp * self.cp) % n == 0)}.",
            )

    @property
    def micro_batches(self) -> int:
        """Micro-batches of each rank in one step."""
        return self.global_batch // (self.micro_batch * self.dp)

    @property
    def shards(self) -> int:
        """Ranks that hold the same weights, over which ZeRO splits: data and context parallelism."""
        return self.dp * self.cp

    def coordinates(self, rank: int) -> dict[str, int]:
        """A rank's coordinates: ``{"pp": ..., "dp": ..., "cp": ..., "tp": ...}``."""
        rest, tp = divmod(rank, self.tp)
        rest, cp = divmod(rest, self.cp)
        pp, dp = divmod(rest, self.dp)
        return {"pp": pp, "dp": dp, "cp": cp, "tp": tp}

    def rank(self, *, pp: int = 0, dp: int = 0, cp: int = 0, tp: int = 0) -> int:
        return ((pp * self.dp + dp) * self.cp + cp) * self.tp + tp

    def size(self, axis: str) -> int:
        """Ranks along ``tp``, ``cp``, ``dp``, ``pp``, ``ep`` or ``shard`` (dp x cp)."""
        return self.shards if axis == "shard" else int(getattr(self, axis))

    def per_node(self, axis: str) -> int:
        """Members of a group along ``axis`` in one node, at least 1."""
        stride = {"tp": 1, "cp": self.tp, "ep": self.tp, "shard": self.tp, "dp": self.tp * self.cp}
        step = stride.get(axis, self.tp * self.cp * self.dp)
        return max(min(self.size(axis), self.gpus_per_node // step), 1)

    def between(self, sequence: int) -> int:
        """Tokens of a sequence that a rank holds between its layers' products, and sends to the next stage."""
        return sequence // (self.cp * (self.tp if self.sequence_parallel else 1))

    def describe(self) -> str:
        """``512 GPUs: tp 8 x pp 16 x dp 4, ZeRO-1, 384 micro-batches of 1``."""
        parts = [f"{name} {self.size(name)}" for name in ("tp", "cp", "pp", "dp") if self.size(name) > 1]
        text = f"{self.gpus:,} GPU{'s' * (self.gpus > 1)}"
        text += f": {' x '.join(parts)}" if parts else ""
        text += f", experts over {self.ep}" if self.ep > 1 else ""
        text += f", ZeRO-{self.zero}" if self.zero else ""
        text += ", shards in RAM" if self.offload_shards else ""
        text += ", sequence parallel" if self.sequence_parallel else ""
        text += f", {self.interleave} chunks a rank" if self.interleave > 1 else ""
        text += f", {'-'.join(map(str, self.stage_layers))} layers" if self.stage_layers else ""
        return f"{text}, {self.micro_batches:,} micro-batch{'es' * (self.micro_batches > 1)} of {self.micro_batch}"


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of a model that must divide; ``name`` is the configuration's name of each."""

    layers: int
    heads: int
    kv_heads: int
    hidden: int
    ffn: int
    sequence: int
    experts: int = 0


def check_sizes(split: Split, sizes: Sizes, *, even_stages: bool = False) -> None:
    """Raise UsageError, naming the nearest size that works, where the model does not split that way.

    ``even_stages``: every pipeline rank must get equally many layers (Megatron-LM, and interleaving in general).
    """
    tensors = {"attention heads": sizes.heads, "key-value heads": sizes.kv_heads, "hidden size": sizes.hidden,
               "feed-forward size": sizes.ffn}  # fmt: skip
    for what, size in tensors.items():
        if size % split.tp:
            fits = nearest(split.tp, lambda n: all(each % n == 0 for each in tensors.values()))
            raise UsageError(
                f"--tp {split.tp} was given.", f"The model's {what} ({size:,}) cannot be split by it.",
                f"Nearest: --tp {fits}.",
            )  # fmt: skip
    chunks = split.pp * split.interleave
    if chunks > sizes.layers:
        what = f"{split.pp} pipeline stages" + (f" of {split.interleave} chunks" if split.interleave > 1 else "")
        raise UsageError(
            f"Cannot make {what}.", f"The model has {sizes.layers} layers, and a stage has at least one.",
            f"Nearest: --pp {nearest(sizes.layers // split.interleave or 1, lambda n: _divides(sizes.layers, n))}.",
        )  # fmt: skip
    if split.stage_layers and sum(split.stage_layers) != sizes.layers:
        raise UsageError(
            f"--stage-layers {','.join(map(str, split.stage_layers))} was given.",
            f"These are {sum(split.stage_layers)} layers, and the model has {sizes.layers}.",
        )
    if (even_stages or split.interleave > 1) and not split.stage_layers and sizes.layers % chunks:
        raise UsageError(
            f"Cannot make {chunks} even pipeline stages.", f"They do not divide the model's {sizes.layers} layers.",
            f"Nearest: --pp {nearest(split.pp, lambda n: _divides(sizes.layers, n * split.interleave))}, or give "
            "--stage-layers.",
        )  # fmt: skip
    _check_sequence(split, sizes.sequence)
    if split.ep > 1 and (not sizes.experts or sizes.experts % split.ep):
        reason = f"The model has {sizes.experts} experts." if sizes.experts else "The model has no experts."
        fits = nearest(split.ep, lambda n: bool(sizes.experts) and sizes.experts % n == 0) if sizes.experts else 1
        raise UsageError(f"--ep {split.ep} was given.", reason, f"Nearest: --ep {fits}.")


def experts_of(config: Any) -> int:
    """A layer's number of experts, by transformers' configuration; 0 without any."""
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    return int(next((count for name in names if (count := getattr(config, name, None))), 0))


def sizes_of(config: Any, sequence: int) -> Sizes:
    """The sizes that must divide, by transformers' configuration. Raises UnsupportedError without layers."""
    if any(not isinstance(getattr(config, name, None), int) for name in ("num_hidden_layers", "hidden_size")):
        raise UnsupportedError(
            f"Cannot split a model of {type(config).__name__} over several GPUs.",
            "It has no number of layers or hidden size: it is not a language model.",
        )
    heads = int(getattr(config, "num_attention_heads", 0) or 1)
    ffn = next((v for n in ("intermediate_size", "n_inner", "ffn_dim") if (v := getattr(config, n, None))), None)
    return Sizes(
        layers=int(config.num_hidden_layers), heads=heads,
        kv_heads=int(getattr(config, "num_key_value_heads", None) or heads), hidden=int(config.hidden_size),
        ffn=int(ffn or 4 * config.hidden_size), sequence=sequence, experts=experts_of(config),
    )  # fmt: skip


def check_experts(split: Split) -> None:
    """Raise UnsupportedError for experts over ranks over which PyTorch's engine cannot spread them."""
    if split.ep > 1 and (split.ep != split.shards or split.tp > 1):
        raise UnsupportedError(
            f"Cannot use --ep {split.ep} with {split.shards} data-parallel ranks and --tp {split.tp}.",
            "PyTorch's engine spreads experts over all data-parallel ranks, and does not split their tensors.",
            f"Use --ep {split.shards} --tp 1, or leave --ep out.",
        )


def check_context(split: Split) -> None:
    """Raise UnsupportedError for context parallelism with settings that PyTorch's engine cannot combine with it."""
    if split.cp > 1 and split.ep > 1:
        raise UnsupportedError(
            f"Cannot use --cp {split.cp} with --ep.",
            "PyTorch's engine combines --cp with tensors, pipelines, data parallelism and ZeRO only.",
            "Leave out --ep, or --cp.",
        )


def stage_layers(layers: int, stages: int) -> tuple[int, ...]:
    """Layers of each stage, as even as possible; the first and last stage have more beside, and get fewer."""
    low, more = divmod(layers, stages)
    order = sorted(range(stages), key=lambda stage: (stage in (0, stages - 1), stage))
    larger = set(order[:more])
    return tuple(low + (stage in larger) for stage in range(stages))


def nearest(wanted: int, works: Callable[[int], bool]) -> int:
    """The number from 1 on that works and is nearest to ``wanted``, the smaller of two; 1 if none works."""
    around = sorted(range(1, 2 * wanted + 1), key=lambda n: (abs(n - wanted), n))
    return next((n for n in around if works(n)), 1)


def _check_mesh(split: Split) -> None:
    each = split.tp * split.pp * split.cp
    parts = f"tp {split.tp} x pp {split.pp} x cp {split.cp}"
    if split.dp and each * split.dp != split.gpus:
        fits = f", or --dp {split.gpus // each}" if split.gpus % each == 0 else ""
        raise UsageError(
            f"Cannot make a mesh of {parts} x dp {split.dp} = {each * split.dp} ranks.",
            f"There are {split.gpus} GPUs.", f"Nearest: --gpus {each * split.dp}{fits}.",
        )  # fmt: skip
    if split.gpus % each:
        low = split.gpus // each * each
        counts = f"--gpus {low} or {low + each}" if low else f"--gpus {each}"
        raise UsageError(
            f"Cannot split {split.gpus} GPUs into {parts}.", f"{split.gpus} is not a multiple of {each}.",
            f"Nearest: {counts}{_smaller(split)}.",
        )  # fmt: skip
    if split.gpus > split.gpus_per_node and split.gpus % split.gpus_per_node:
        low = split.gpus // split.gpus_per_node * split.gpus_per_node
        raise UsageError(
            f"Cannot fill nodes of {split.gpus_per_node} with {split.gpus} GPUs.", "The last node would not be full.",
            f"Nearest: --gpus {low} or {low + split.gpus_per_node}.",
        )  # fmt: skip


def _smaller(split: Split) -> str:
    """A size of the mesh that makes it fit when changed alone."""
    for name in ("tp", "pp", "cp"):
        rest = split.tp * split.pp * split.cp // getattr(split, name)
        if split.gpus % rest == 0:
            fits = nearest(getattr(split, name), lambda n, rest=rest: split.gpus % (rest * n) == 0)  # type: ignore[misc]
            return f", or --{name} {fits}"
    return ""


def _check_batch(split: Split) -> None:
    each = split.micro_batch * split.dp
    if split.global_batch < 0 or split.global_batch % each:
        low = split.global_batch // each * each
        counts = f"{low} or {low + each}" if low > 0 else f"{each}"
        raise UsageError(
            f"--global-batch {split.global_batch} was given.",
            f"{split.dp} data-parallel ranks with micro-batches of {split.micro_batch} take multiples of {each}.",
            f"Nearest: --global-batch {counts}.",
        )


def _check_stages(split: Split) -> None:
    stage_layers = ",".join(map(str, split.stage_layers))
    many = split.pp * split.interleave
    if len(split.stage_layers) != many or min(split.stage_layers) < 1:
        counted = "--pp" if split.interleave == 1 else "--pp x --interleave"
        raise UsageError(
            f"Cannot use --stage-layers {stage_layers}.",
            f"It must be {many} numbers ({counted}), one for each stage, and each at least 1.",
        )


def _check_interleave(split: Split) -> None:
    if split.pp == 1:
        raise UsageError("--interleave was given with --pp 1.", "It splits pipeline stages.", "Give --pp.")
    if split.micro_batches % split.pp:
        unit = split.micro_batch * split.dp * split.pp
        low = split.global_batch // unit * unit
        counts = f"{low} or {low + unit}" if low else f"{unit}"
        raise UsageError(
            f"--interleave {split.interleave} was given with {split.micro_batches} micro-batches.",
            f"Interleaved stages take micro-batches in groups of {split.pp} (--pp).",
            f"Nearest: --global-batch {counts}.",
        )


def _check_offload(split: Split) -> None:
    if not split.zero:
        raise UsageError(
            "--offload-shards was given without --zero.", "Only shards of ZeRO can be kept in RAM.",
            "Add --zero 3, 2 or 1.",
        )  # fmt: skip
    if split.ep > 1:
        raise UnsupportedError(
            "--offload-shards was given with --ep.",
            "ZeRO does not split experts that are spread over ranks, so they stay on the GPU.",
            "Leave one of them out.",
        )


def _check_sequence(split: Split, sequence: int) -> None:
    unit = (2 * split.cp if split.cp > 1 else 1) * (split.tp if split.sequence_parallel else 1)
    if sequence % unit:
        low = sequence // unit * unit
        counts = f"{low} or {low + unit}" if low else f"{unit}"
        raise UsageError(
            f"Cannot split a sequence of {sequence:,} tokens.",
            f"Context and sequence parallelism take multiples of {unit}.", f"Nearest: --seq {counts}.",
        )  # fmt: skip


def _divides(size: int, n: int) -> bool:
    return n <= size and size % n == 0


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def in_flight(split: Split, stage: int) -> int:
    """Micro-batches, times model chunks, whose activations pipeline rank ``stage`` holds at most under 1F1B.

    Without interleaving ``p - stage``; with it Megatron-LM's warm-up (megatron/core/pipeline_parallel/schedules.py:
    ``(p - stage - 1) * 2 + (v - 1) * p``) and the one that follows it. Never more than there are.
    """
    most = split.micro_batches * split.interleave
    if split.pp == 1:
        return 1
    if split.interleave == 1:
        return min(split.pp - stage, most)
    return min((split.pp - stage - 1) * 2 + (split.interleave - 1) * split.pp + 1, most)
