"""Closed forms of papers that only documents and tests state: of GPTs, their pipelines and ZeRO."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from brim.errors import UsageError

_ACTIVATIONS = "Korthikanti et al., arXiv 2205.05198"
_ZERO = "Rajbhandari et al., arXiv 1910.02054, Table 1"
_MEGATRON = "Narayanan et al., arXiv 2104.04473"


@dataclass(frozen=True, kw_only=True)
class Result:
    """``value`` in ``unit`` (``B``, ``parameters``, ``FLOP``), and the sum as a person would write it.

    ``arithmetic`` reads ``2,048 x 1 x 12,288 x (34 / 8) = 106,954,752 B per layer``; ``source`` names the paper.
    """

    value: int
    unit: str
    arithmetic: str
    source: str


def result(value: Fraction | int, unit: str, sum_text: str, *, source: str, per: str = "") -> Result:
    """A Result whose arithmetic is ``sum_text = value unit per``; a fraction is rounded to the nearest whole."""
    whole = round(value)
    per = f" {per}" if per else ""
    return Result(value=whole, unit=unit, arithmetic=f"{sum_text} = {whole:,} {unit}{per}", source=source)


def at_least_one(**sizes: int) -> None:
    """Raises UsageError for a size below 1, by its name."""
    for name, value in sizes.items():
        if value < 1:
            raise UsageError(f"{name} = {value} was given.", "It must be at least 1.")


def divides(divisor_name: str, divisor: int, **sizes: int) -> None:
    """Raises UsageError where ``divisor`` does not divide one of the sizes."""
    for name, value in sizes.items():
        if value % divisor:
            raise UsageError(
                f"Cannot divide {name} = {value} by {divisor_name} = {divisor}.", "It does not divide evenly."
            )


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
    """Bytes that one layer of a transformer trained in 16 bits keeps for backward on one GPU.

    One layer of a GPT with dropout masks of one byte keeps ``sbh (34 + 5 a s / h)`` bytes (Table 2): 11 sbh in
    attention beside the ``5 a s^2 b`` of softmax, its dropout mask and its output, 19 sbh in the MLP and 4 sbh in the
    two layer norms.

    ``recompute``: ``none``, ``selective`` (the attention core is computed again) or ``full`` (only the layer's input
    is kept). ``flash_attention`` never keeps the ``5 a s / h`` term.
    """
    at_least_one(sequence=sequence, micro_batch=micro_batch, hidden=hidden, heads=heads)
    divides("tensor_parallel", tensor_parallel, heads=heads, hidden=hidden)
    if sequence_parallel and tensor_parallel == 1:
        raise UsageError(
            "sequence_parallel was given with tensor_parallel = 1.", "It splits over the tensor-parallel GPUs."
        )
    sbh = f"{sequence:,} x {micro_batch} x {hidden:,}"
    size = Fraction(sequence * micro_batch * hidden)
    if recompute == "full":
        return result(2 * size, "B", f"2 x {sbh}", source=f"{_ACTIVATIONS}, Table 2", per="per layer")
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
    return result(total, "B", f"{sbh} x ({text})", source=f"{_ACTIVATIONS}, Table 2", per="per layer")


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
    return result(total, "B", text, source=f"{_ACTIVATIONS}, section 4.3")


def zero_states(
    parameters: int,
    *,
    gpus: int = 1,
    stage: int = 0,
    parameter_bytes: int = 2,
    gradient_bytes: int = 2,
    optimizer_bytes: int = 12,
) -> Result:
    """Bytes of model states per GPU under data parallelism with ZeRO ``stage`` 0 to 3.

    Mixed-precision Adam by default: 2 B of weights, 2 B of gradients and K = 12 B of float32 weights and moments per
    parameter. Stage 1 splits the optimizer's, 2 the gradients' too, 3 the weights' too.
    """
    at_least_one(parameters=parameters, gpus=gpus)
    if stage not in range(4):
        raise UsageError(f"Unknown ZeRO stage {stage}.", "Known: 0, 1, 2 and 3.")
    parts = ((parameter_bytes, stage >= 3), (gradient_bytes, stage >= 2), (optimizer_bytes, stage >= 1))
    each = sum((Fraction(size, gpus if split else 1) for size, split in parts), Fraction(0))
    text = " + ".join(f"{size} / {gpus}" if split and gpus > 1 else f"{size}" for size, split in parts)
    return result(parameters * each, "B", f"{parameters:,} x ({text}) B", source=_ZERO, per="per GPU")


def gpt_parameters(*, layers: int, hidden: int, vocabulary: int, sequence: int) -> Result:
    """Parameters of a GPT: ``12 l h^2 (1 + 13 / (12 h) + (V + s) / (12 l h))``, biases and norms included.

    The norm after the last layer (2 h) is not in the published form.
    """
    at_least_one(layers=layers, hidden=hidden, vocabulary=vocabulary, sequence=sequence)
    count = 12 * layers * hidden**2 + 13 * layers * hidden + (vocabulary + sequence) * hidden
    text = f"12 x {layers} x {hidden:,}^2 + 13 x {layers} x {hidden:,} + ({vocabulary:,} + {sequence:,}) x {hidden:,}"
    return result(count, "parameters", text, source=f"{_MEGATRON}, equation 2")


def gpt_flops(
    *, layers: int, hidden: int, vocabulary: int, sequence: int, batch: int, recompute: bool = False
) -> Result:
    """FLOP of one training step of a GPT: ``72 B s l h^2 (1 + s / 6h + V / 12lh)``.

    With full ``recompute`` the layers' forward is computed twice: ``96 B s l h^2 (1 + s / 6h + V / 16lh)``.
    """
    at_least_one(layers=layers, hidden=hidden, vocabulary=vocabulary, sequence=sequence, batch=batch)
    factor, logits = (96, 16) if recompute else (72, 12)
    base = factor * batch * sequence * layers * hidden**2
    total = base * (1 + Fraction(sequence, 6 * hidden) + Fraction(vocabulary, logits * layers * hidden))
    text = f"{factor} x {batch} x {sequence:,} x {layers} x {hidden:,}^2 x (1 + {sequence:,} / (6 x {hidden:,})"
    text += f" + {vocabulary:,} / ({logits} x {layers} x {hidden:,}))"
    return result(total, "FLOP", text, source=f"{_MEGATRON}, equation 3")
