"""The sum that is shown is the sum that was made: every arithmetic text is worked out again from its words."""

import re
from fractions import Fraction

import pytest

from support import published_formulas

GPT = {"sequence": 2048, "micro_batch": 4, "hidden": 6144, "heads": 64}


def first_stage(**split):
    layer = published_formulas.activations_per_layer(**GPT, tensor_parallel=8, sequence_parallel=True)
    sizes = {"layers": 48, "sequence": 2048, "micro_batch": 4, "hidden": 6144, "vocabulary": 51200}
    return published_formulas.activations_first_stage(layer, **sizes, tensor_parallel=8, **split)


RESULTS = [
    published_formulas.activations_per_layer(**GPT),
    published_formulas.activations_per_layer(**GPT, tensor_parallel=8),
    published_formulas.activations_per_layer(**GPT, tensor_parallel=8, sequence_parallel=True),
    published_formulas.activations_per_layer(**GPT, tensor_parallel=8, recompute="selective"),
    published_formulas.activations_per_layer(**GPT, recompute="selective"),
    published_formulas.activations_per_layer(**GPT, recompute="full"),
    first_stage(),
    first_stage(pipeline_parallel=8),
    first_stage(pipeline_parallel=8, interleave=3),
    published_formulas.zero_states(7_500_000_000, gpus=64, stage=2),
    published_formulas.gpt_parameters(layers=96, hidden=12288, vocabulary=51200, sequence=2048),
    published_formulas.gpt_flops(layers=96, hidden=12288, vocabulary=51200, sequence=2048, batch=3),
]


@pytest.mark.parametrize("found", RESULTS, ids=lambda found: found.arithmetic)
def test_the_arithmetic_gives_the_value(found):
    text, _, rest = found.arithmetic.partition(" = ")
    assert rest.startswith(f"{found.value:,} {found.unit}")
    text = re.sub(r"(?<=\d),(?=\d{3})", "", text).replace("^", "**")
    text = re.sub(r"\bx\b", "*", text)
    text = re.sub(r"[A-Za-z][A-Za-z-]*", "", text)  # units and nouns
    assert re.fullmatch(r"[\d\s.+*/()-]+", text), text
    exact = eval(
        re.sub(r"[\d.]+", r"Fraction('\g<0>')", text).replace("**Fraction('2')", "**2"), {"Fraction": Fraction}
    )
    assert round(exact) == found.value
