"""Published tables, met to the rounding they are printed with."""

import pytest

from brim.errors import UsageError
from brim.predict import formulas
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


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_activations_per_layer_of_one_gpu_are_those_of_the_paper(recompute):
    sizes = {"sequence": 2048, **GPT_22B, "recompute": recompute}
    found = formulas.activations_per_layer(**sizes)
    assert found.value == activations_per_layer(**sizes).value
    assert f"= {found.value:,} B per layer" in found.arithmetic


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
    assert formulas.megatron_states(10**9).value == 18 * 10**9
    found = formulas.megatron_states(10**9, data_parallel=8, distributed_optimizer=True)
    assert found.value == 7.5 * 10**9
    assert found.arithmetic == "1,000,000,000 x (6 + 12 / 8) B = 7,500,000,000 B"


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


def test_weights_of_llama_13b_and_of_a_billion():
    llama = formulas.weights(13_015_864_320, "float32")
    assert llama.arithmetic.endswith("52.06 GB = 48.49 GiB")
    assert formulas.weights(10**9, "fp32").value / 2**30 == pytest.approx(3.725, abs=5e-4)


def test_kv_cache_of_llama_3_70b_is_320_kib_a_token():
    found = formulas.kv_cache(layers=80, kv_heads=8, head_dim=128)
    assert found.value == 327_680
    assert found.arithmetic == "2 x 80 layers x 8 heads x 128 x 2 B = 327,680 B per token"


def test_latent_cache_of_deepseek_v3():
    """arXiv 2412.19437, section 2.1.1: d_c = 512 and d_h^R = 64 over 61 layers are cached: 70,272 B a token."""
    assert formulas.latent_kv_cache(layers=61, kv_lora_rank=512, rope_head_dim=64).value == 70_272


@pytest.mark.parametrize(
    "call",
    [
        lambda: published_formulas.zero_states(10, stage=4),
        lambda: published_formulas.zero_states(0),
        lambda: activations_per_layer(sequence=1, micro_batch=1, hidden=10, heads=3, tensor_parallel=2),
        lambda: formulas.activations_per_layer(sequence=1, micro_batch=1, hidden=8, heads=2, recompute="some"),
        lambda: activations_per_layer(sequence=1, micro_batch=1, hidden=8, heads=2, sequence_parallel=True),
        lambda: formulas.weights(10, "float33"),
        lambda: formulas.optimizer_state("adamm", [(2, 2)]),
        lambda: formulas.kv_cache(layers=2, kv_heads=2, head_dim=2, windowed_layers=3, window=4),
    ],
)
def test_impossible_requests_are_usage_errors(call):
    with pytest.raises(UsageError):
        call()
