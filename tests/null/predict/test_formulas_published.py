"""Published tables, met to the rounding they are printed with."""

import pytest

from brim.errors import UsageError
from brim.planning.meshes.search import megatron_state_bytes
from brim.units import MIB
from support import published_formulas
from support.published_formulas import activations_per_layer

# Korthikanti et al., arXiv 2205.05198, Table 3
GPT_22B = {"hidden": 6144, "heads": 64, "micro_batch": 4}
GPT_175B = {"hidden": 12288, "heads": 96, "micro_batch": 1}
KINDS = [
    {},
    {"tensor_parallel": 8},
    {"tensor_parallel": 8, "sequence_parallel": True},
    {"tensor_parallel": 8, "sequence_parallel": True, "recompute": "selective"},
    {"recompute": "full"},
]


@pytest.mark.parametrize(
    ("model", "mib"),
    [(GPT_22B, [6752, 1264, 844, 204, 96]), (GPT_175B, [2736, 552, 342, 102, 48])],
    ids=["22B", "175B"],
)
def test_activations_per_layer_of_megatron_models(model, mib):
    found = [activations_per_layer(sequence=2048, **model, **kind).value for kind in KINDS]
    assert [value / MIB for value in found] == mib


@pytest.mark.parametrize(
    ("kind", "form"),
    [
        ({}, lambda s, b, h, a, t: s * b * h * (34 + 5 * a * s / h)),
        ({"tensor_parallel": 4}, lambda s, b, h, a, t: s * b * h * (10 + 24 / t + 5 * a * s / (h * t))),
        (
            {"tensor_parallel": 4, "sequence_parallel": True},
            lambda s, b, h, a, t: s * b * h / t * (34 + 5 * a * s / h),
        ),
        ({"tensor_parallel": 4, "recompute": "selective"}, lambda s, b, h, a, t: s * b * h * (10 + 24 / t)),
        (
            {"tensor_parallel": 4, "sequence_parallel": True, "recompute": "selective"},
            lambda s, b, h, a, t: 34 * s * b * h / t,
        ),
        ({"tensor_parallel": 4, "recompute": "full"}, lambda s, b, h, a, t: 2 * s * b * h),
    ],
)
@pytest.mark.parametrize(("s", "b", "h", "a"), [(2048, 1, 20480, 128), (2048, 3, 25600, 160), (512, 2, 1024, 16)])
def test_activations_per_layer_is_table_2(kind, form, s, b, h, a):
    found = activations_per_layer(sequence=s, micro_batch=b, hidden=h, heads=a, **kind)
    assert found.value == round(form(s, b, h, a, kind.get("tensor_parallel", 1)))
    assert f"= {found.value:,} B per layer" in found.arithmetic


def test_flash_attention_removes_the_softmax_term():
    plain, flash = (
        activations_per_layer(sequence=2048, **GPT_175B, flash_attention=flash) for flash in (False, True)
    )
    assert plain.value - flash.value == 5 * 96 * 2048 * 2048
    assert flash.value == 34 * 2048 * 12288


# layers, hidden, heads, pipeline, micro-batch, chunks: arXiv 2205.05198, Table 3 (interleaving from section 6)
@pytest.mark.parametrize(
    ("layers", "hidden", "heads", "p", "b", "m"),
    [(48, 6144, 64, 1, 4, 1), (96, 12288, 96, 8, 1, 3), (105, 20480, 128, 35, 1, 3), (128, 25600, 160, 64, 1, 1)],
    ids=["22B", "175B", "530B", "1T"],
)
def test_first_stage_of_megatron_models(layers, hidden, heads, p, b, m):
    s, t, v = 2048, 8, 51200
    layer = activations_per_layer(
        sequence=s,
        micro_batch=b,
        hidden=hidden,
        heads=heads,
        tensor_parallel=t,
        sequence_parallel=True,
        recompute="selective",
    )
    found = published_formulas.activations_first_stage(
        layer,
        layers=layers,
        sequence=s,
        micro_batch=b,
        hidden=hidden,
        vocabulary=v,
        tensor_parallel=t,
        pipeline_parallel=p,
        interleave=m,
    )
    factor = 1 + (p - 1) / (p * m) if m > 1 else 1
    expected = layers * factor * 34 * s * b * hidden / t + s * b * hidden * p / t
    if p == 1:
        expected += 4 * s * b * hidden / t * (1 + v / hidden)
    assert found.value == pytest.approx(expected, rel=1e-12)


# arXiv 1910.02054, Table 1, in GB: (billions of parameters, GPUs) -> stages 1, 2, 3
ZERO_TABLE_1 = {
    (7.5, 1): ("120", "120", "120"),
    (7.5, 4): ("52.5", "41.3", "30"),
    (7.5, 16): ("35.6", "21.6", "7.5"),
    (7.5, 64): ("31.4", "16.6", "1.88"),
    (7.5, 256): ("30.4", "15.4", "0.47"),
    (7.5, 1024): ("30.1", "15.1", "0.12"),
    (128, 4): ("896", "704", "512"),
    (128, 16): ("608", "368", "128"),
    (128, 64): ("536", "284", "32"),
    (128, 256): ("518", "263", "8"),
    (128, 1024): ("513", "257", "2"),
    (1000, 4): ("7000", "5500", "4000"),
    (1000, 16): ("4750", "2875", "1000"),
    (1000, 64): ("4187", "2218", "250"),
    (1000, 256): ("4046", "2054", "62.5"),
    (1000, 1024): ("4011", "2013", "15.6"),
}


@pytest.mark.parametrize(("billions", "gpus"), ZERO_TABLE_1)
def test_zero_table_1(billions, gpus):
    """The paper cuts some figures and rounds others: one unit of the last printed digit either way."""
    for stage, printed in enumerate(ZERO_TABLE_1[billions, gpus], start=1):
        unit = 10.0 ** -len(printed.partition(".")[2])
        found = published_formulas.zero_states(int(billions * 1e9), gpus=gpus, stage=stage).value / 1e9
        assert abs(found - float(printed)) < unit, (stage, found, printed)


def test_without_zero_every_gpu_holds_sixteen_bytes_a_parameter():
    assert published_formulas.zero_states(7_500_000_000, gpus=64).value == 120 * 10**9


def test_megatron_states():
    assert megatron_state_bytes(10**9) == 18 * 10**9
    assert megatron_state_bytes(10**9, shards=8) == 7.5 * 10**9


# Narayanan et al., arXiv 2104.04473, Table 1: layers, hidden, parameters in billions; V = 51,200, s = 2,048.
@pytest.mark.parametrize(
    ("layers", "hidden", "billions"),
    [
        (24, 2304, 1.7),
        (30, 3072, 3.6),
        (36, 4096, 7.5),
        (40, 6144, 18.4),
        (48, 8192, 39.1),
        (60, 10240, 76.1),
        (80, 12288, 145.6),
        (96, 16384, 310.1),
        (105, 20480, 529.6),
        (128, 25600, 1008.0),
    ],
)
def test_gpt_parameters(layers, hidden, billions):
    found = published_formulas.gpt_parameters(layers=layers, hidden=hidden, vocabulary=51200, sequence=2048)
    assert round(found.value / 1e9, 1) == billions


def test_gpt3_trains_in_34_days_as_published():
    """arXiv 2104.04473, section 5.1: 300 B tokens on 1,024 A100s at 140 teraFLOP/s. The paper takes 8 T P."""
    sizes = {"layers": 96, "hidden": 12288, "vocabulary": 51200, "sequence": 2048}
    step = published_formulas.gpt_flops(**sizes, batch=1536, recompute=True)
    days = step.value * 300e9 / (1536 * 2048) / (1024 * 140e12) / 86400
    assert days == pytest.approx(34, rel=0.03)


@pytest.mark.parametrize(
    "call",
    [
        lambda: published_formulas.zero_states(10, stage=4),
        lambda: published_formulas.zero_states(0),
        lambda: activations_per_layer(sequence=1, micro_batch=1, hidden=10, heads=3, tensor_parallel=2),
        lambda: activations_per_layer(sequence=1, micro_batch=1, hidden=8, heads=2, sequence_parallel=True),
    ],
)
def test_impossible_requests_are_usage_errors(call):
    with pytest.raises(UsageError):
        call()
