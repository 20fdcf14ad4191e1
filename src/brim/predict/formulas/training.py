"""Parameters, states and FLOP of large training runs: ZeRO, Megatron-LM, GPT by its dimensions."""

from __future__ import annotations

from fractions import Fraction

from brim.errors import UsageError
from brim.predict.formulas.result import Result, at_least_one, result

_ZERO = "Rajbhandari et al., arXiv 1910.02054, Table 1"
_MEGATRON = "Narayanan et al., arXiv 2104.04473"


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


def megatron_states(parameters: int, *, data_parallel: int = 1, distributed_optimizer: bool = False) -> Result:
    """Bytes of Megatron-LM's states for the ``parameters`` that one GPU holds.

    18 B per parameter: 2 of bfloat16 weights, 4 of float32 gradients, 4 of float32 weights and 8 of moments. The
    distributed optimizer splits the last 12 over the data-parallel GPUs: ``6 + 12 / dp``
    (Megatron-LM ``docs/source/api-guide/dist_optimizer.md``).
    """
    at_least_one(parameters=parameters, data_parallel=data_parallel)
    source = "Megatron-LM, dist_optimizer"
    if not distributed_optimizer:
        return result(18 * parameters, "B", f"{parameters:,} x 18 B", source=source)
    each = 6 + Fraction(12, data_parallel)
    return result(parameters * each, "B", f"{parameters:,} x (6 + 12 / {data_parallel}) B", source=source)


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
