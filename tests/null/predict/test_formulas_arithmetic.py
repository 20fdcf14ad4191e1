"""The sum that is shown is the sum that was made: every arithmetic text is worked out again from its words."""

import math
import re
from fractions import Fraction

import pytest

from brim import catalog
from brim.predict import formulas
from support import published_formulas

GPT = {"sequence": 2048, "micro_batch": 4, "hidden": 6144, "heads": 64}
LLAMA, GEMMA = catalog.model("llama-3-70b").config, catalog.model("gemma-2-9b").config


def first_stage(**split):
    layer = published_formulas.activations_per_layer(**GPT, tensor_parallel=8, sequence_parallel=True)
    sizes = {"layers": 48, "sequence": 2048, "micro_batch": 4, "hidden": 6144, "vocabulary": 51200}
    return published_formulas.activations_first_stage(layer, **sizes, tensor_parallel=8, **split)


RESULTS = [
    formulas.activations_per_layer(**GPT),
    published_formulas.activations_per_layer(**GPT, tensor_parallel=8),
    published_formulas.activations_per_layer(**GPT, tensor_parallel=8, sequence_parallel=True),
    published_formulas.activations_per_layer(**GPT, tensor_parallel=8, recompute="selective"),
    formulas.activations_per_layer(**GPT, recompute="selective"),
    formulas.activations_per_layer(**GPT, recompute="full"),
    first_stage(),
    first_stage(pipeline_parallel=8),
    first_stage(pipeline_parallel=8, interleave=3),
    published_formulas.zero_states(7_500_000_000, gpus=64, stage=2),
    formulas.megatron_states(10**9, data_parallel=7, distributed_optimizer=True),
    published_formulas.gpt_parameters(layers=96, hidden=12288, vocabulary=51200, sequence=2048),
    published_formulas.gpt_flops(layers=96, hidden=12288, vocabulary=51200, sequence=2048, batch=3),
    formulas.kv_cache_of_config(LLAMA),
    formulas.kv_cache_of_config(LLAMA, tokens=4096, batch=3, dtype="int4"),
    formulas.kv_cache_of_config(GEMMA, tokens=100_000, batch=2),
    formulas.latent_kv_cache(layers=61, kv_lora_rank=512, rope_head_dim=64, tokens=7, batch=2),
    formulas.weights(13_015_864_320),
    formulas.parameters_from_size(12346, "bf16"),
    formulas.optimizer_state("adamw", [(30, 40), (40,)]),
    formulas.optimizer_state("adamw8bit", [(512, 400), (40,)]),
    formulas.optimizer_state("adafactor", [(3, 30, 40), (40,)]),
    formulas.optimizer_state("sgd", [(30, 40)]),
]


@pytest.mark.parametrize("found", RESULTS, ids=lambda found: found.arithmetic)
def test_the_arithmetic_gives_the_value(found):
    text, _, rest = found.arithmetic.partition(" = ")
    assert rest.startswith(f"{found.value:,} {found.unit}")
    text = re.sub(r"(?<=\d),(?=\d{3})", "", text).replace("^", "**")
    text = re.sub(r"\bx\b", "*", text)
    text = re.sub(r"nothing per parameter", "0", text)
    text = re.sub(r"[A-Za-z][A-Za-z-]*", "", text)  # units and nouns
    assert re.fullmatch(r"[\d\s.+*/()-]+", text), text
    exact = eval(
        re.sub(r"[\d.]+", r"Fraction('\g<0>')", text).replace("**Fraction('2')", "**2"), {"Fraction": Fraction}
    )
    assert (math.floor(exact) if found.unit == "elements" else round(exact)) == found.value  # sizes round down
