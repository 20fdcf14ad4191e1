"""Activation bytes of a transformer trained in 16 bits: Korthikanti et al., arXiv 2205.05198, Table 2 and section 4.

One layer of a GPT with dropout masks of one byte keeps ``sbh (34 + 5 a s / h)`` bytes: 11 sbh in attention beside the
``5 a s^2 b`` of softmax, its dropout mask and its output, 19 sbh in the MLP and 4 sbh in the two layer norms.
"""

from __future__ import annotations

from fractions import Fraction

from brim.errors import UsageError
from brim.predict.formulas.result import Result, at_least_one, divides, result

_SOURCE = "Korthikanti et al., arXiv 2205.05198"
RECOMPUTE = ("none", "selective", "full")


def activations_per_layer(
    *,
    sequence: int,
    micro_batch: int,
    hidden: int,
    heads: int,
    tensor_parallel: int = 1,
    sequence_parallel: bool = False,
    recompute: str = "none",
    flash_attention: bool = False,
) -> Result:
    """Bytes that one layer keeps for backward on one GPU.

    ``recompute``: ``none``, ``selective`` (the attention core is computed again) or ``full`` (only the layer's input
    is kept). ``flash_attention`` never keeps the ``5 a s / h`` term.
    """
    at_least_one(sequence=sequence, micro_batch=micro_batch, hidden=hidden, heads=heads)
    divides("tensor_parallel", tensor_parallel, heads=heads, hidden=hidden)
    _check(recompute, tensor_parallel, sequence_parallel)
    sbh = f"{sequence:,} x {micro_batch} x {hidden:,}"
    size = Fraction(sequence * micro_batch * hidden)
    if recompute == "full":
        return result(2 * size, "B", f"2 x {sbh}", source=f"{_SOURCE}, Table 2", per="per layer")
    t = tensor_parallel
    core = Fraction(5 * heads * sequence, hidden * t)
    keeps_core = recompute == "none" and not flash_attention
    if sequence_parallel or t == 1:
        each, text = Fraction(34, t), "34" if t == 1 else f"34 / {t}"
    else:
        each, text = 10 + Fraction(24, t), f"10 + 24 / {t}"
    if keeps_core:
        text += f" + 5 x {heads} x {sequence:,} / " + (f"{hidden:,}" if t == 1 else f"({hidden:,} x {t})")
    total = size * (each + core * keeps_core)
    return result(total, "B", f"{sbh} x ({text})", source=f"{_SOURCE}, Table 2", per="per layer")


def activations_first_stage(
    layer: Result,
    *,
    layers: int,
    sequence: int,
    micro_batch: int,
    hidden: int,
    vocabulary: int,
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
    interleave: int = 1,
) -> Result:
    """Bytes of activations on the first pipeline stage, which holds the most; ``layer`` is one layer's.

    Under 1F1B it has ``layers / p`` layers of ``p`` micro-batches: as much as ``layers`` layers, times
    ``1 + (p - 1) / (p m)`` with ``m`` (``interleave``) model chunks per GPU; and ``sbhp / t`` for the embedding's
    dropout mask. Without a pipeline (p = 1) the last norm, the output layer and the float32 logits are here too:
    ``4 sbh / t (1 + v / h)``. Both extras assume sequence parallelism where t > 1, as in the paper.
    """
    p, t = pipeline_parallel, tensor_parallel
    at_least_one(layers=layers, vocabulary=vocabulary, pipeline_parallel=p, interleave=interleave)
    divides("pipeline_parallel x interleave", p * interleave, layers=layers)
    if interleave > 1 and p == 1:
        raise UsageError(
            f"interleave = {interleave} was given without a pipeline.", "It needs pipeline_parallel > 1."
        )
    size, sbh = Fraction(sequence * micro_batch * hidden, t), f"{sequence:,} x {micro_batch} x {hidden:,}"
    total, text = Fraction(layers * layer.value), f"{layers} layers x {layer.value:,} B"
    if interleave > 1:
        total *= 1 + Fraction(p - 1, p * interleave)
        text += f" x (1 + {p - 1} / ({p} x {interleave}))"
    total += size * p
    text += f" + {sbh} x {p} / {t}"
    if p == 1:
        total += 4 * size * (1 + Fraction(vocabulary, hidden))
        text += f" + 4 x {sbh} / {t} x (1 + {vocabulary:,} / {hidden:,})"
    return result(total, "B", text, source=f"{_SOURCE}, section 4.3")


def _check(recompute: str, tensor_parallel: int, sequence_parallel: bool) -> None:
    if recompute not in RECOMPUTE:
        raise UsageError(f"Unknown recompute {recompute!r}.", f"Known: {', '.join(RECOMPUTE)}.")
    if sequence_parallel and tensor_parallel == 1:
        raise UsageError(
            "sequence_parallel was given with tensor_parallel = 1.", "It splits over the tensor-parallel GPUs."
        )
