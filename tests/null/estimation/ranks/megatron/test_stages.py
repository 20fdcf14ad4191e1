"""Megatron-LM's step, written down: against Korthikanti's closed forms, and rank by rank."""

import dataclasses

import pytest

from brim.core import Category
from brim.errors import UnsupportedError, UsageError
from brim.estimation.models import find_model
from brim.estimation.ranks.estimate import estimate_ranks
from brim.estimation.ranks.job import MegatronOptions
from brim.estimation.ranks.megatron.layer import Place
from brim.estimation.ranks.megatron.step import stage_trace
from brim.estimation.ranks.sizes import Shape, shape_of
from brim.estimation.ranks.split import Split
from brim.estimation.simulation import simulate
from brim.planning.meshes.search import megatron_state_bytes
from support.published_formulas import activations_per_layer

GPT = Shape(
    name="gpt", layers=8, hidden=6144, heads=64, kv_heads=64, head_dim=96, ffn=4 * 6144, vocabulary=51200,
    positions=2048, gated=False, layer_norm=True, bias=True, qkv_bias=True, tied=True, dropout=True,
)  # fmt: skip

SEQUENCE = 2048
LOGITS = SEQUENCE * 51200
DEFAULTS = MegatronOptions()
TE_LOSS = MegatronOptions(cross_entropy_loss_fusion=True, cross_entropy_fusion_impl="te")


def kept_by_one_layer(split, recompute="none", shape=GPT, options=DEFAULTS):
    """Bytes that grow by one with every layer, at the end of the forward pass."""
    sizes = []
    for layers in (2, 3):
        made = stage_trace(
            dataclasses.replace(shape, layers=layers),
            split,
            0,
            sequence=SEQUENCE,
            recompute=recompute,
            options=options,
        ).trace
        backward = min(op.at for op in made.ops if op.phase == "backward")
        sizes.append(sum(
            s.bytes for s in made.storages
            if s.category is Category.ACTIVATION and s.born < backward <= (s.died or backward)
        ))  # fmt: skip
    return sizes[1] - sizes[0]


def statistics_bytes(split):
    """What the paper leaves out as small: means and scales of two norms, and attention's sums of exponentials."""
    tokens = SEQUENCE * split.micro_batch
    return 2 * 8 * tokens // (split.tp if split.sequence_parallel else 1) + 4 * tokens * GPT.heads // split.tp


@pytest.mark.parametrize(
    ("tp", "sequence_parallel"), [(1, False), (8, False), (8, True)], ids=["one GPU", "TP", "TP + SP"]
)
def test_a_layer_keeps_what_korthikanti_counts(tp, sequence_parallel):
    split = Split(gpus=tp, tp=tp, sequence_parallel=sequence_parallel, micro_batch=4)
    form = activations_per_layer(
        sequence=SEQUENCE, micro_batch=4, hidden=GPT.hidden, heads=GPT.heads, tensor_parallel=tp,
        sequence_parallel=sequence_parallel, flash_attention=True,
    )  # fmt: skip
    assert kept_by_one_layer(split) == form.value + statistics_bytes(split)


def test_full_recomputation_keeps_a_layers_input():
    split = Split(gpus=1, micro_batch=4)
    assert kept_by_one_layer(split, "full") == 2 * SEQUENCE * 4 * GPT.hidden


def test_selective_recomputation_keeps_the_rest():
    split = Split(gpus=1)
    assert kept_by_one_layer(split) - kept_by_one_layer(split, "selective") == 4 * SEQUENCE * GPT.heads


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize(
    "split",
    [
        Split(gpus=1, global_batch=2),
        Split(gpus=8, tp=2, cp=2, pp=2, sequence_parallel=True, zero=1, global_batch=4),
        Split(gpus=8, pp=4, interleave=2, global_batch=16),
    ],
    ids=lambda split: split.describe(),
)
def test_everything_that_a_step_makes_is_let_go(split, recompute):
    for stage in range(split.pp):
        made = stage_trace(GPT, split, stage, sequence=SEQUENCE, recompute=recompute).trace
        left = [s for s in made.storages if s.died is None and s.born >= made.step_starts[0]]
        assert [s.module for s in left] in ([], [f"decoder.layers.{_first(split, stage)}.input_layernorm"])


def _first(split, stage):
    """The gradient that was sent last is that of the rank's first layer."""
    return stage * GPT.layers // (split.pp * split.interleave)


@pytest.mark.parametrize(("dp", "zero"), [(4, 0), (4, 1), (8, 1)])
def test_states_are_the_closed_form(dp, zero):
    made = stage_trace(GPT, Split(gpus=dp, zero=zero), 0, sequence=SEQUENCE, recompute="none")
    states = sum(s.bytes for s in made.trace.storages
                 if s.category in (Category.PARAMETER, Category.GRADIENT, Category.OPTIMIZER_STATE))  # fmt: skip
    assert states == pytest.approx(megatron_state_bytes(made.parameters, dp if zero else 1), abs=4)


def test_parameters_are_those_of_the_model():
    """A GPT by its dimensions (arXiv 2104.04473, equation 2), the last norm besides."""
    made = stage_trace(GPT, Split(gpus=1), 0, sequence=SEQUENCE, recompute="none")
    h, layers = GPT.hidden, GPT.layers
    assert made.parameters == 12 * layers * h * h + 13 * layers * h + (51200 + 2048) * h + 2 * h


def test_shapes_are_read_from_configurations():
    llama = shape_of(find_model("llama-3-70b"))
    assert (llama.layers, llama.heads, llama.kv_heads, llama.head_dim, llama.ffn) == (80, 64, 8, 128, 28672)
    assert llama.gated and not llama.layer_norm and not llama.bias and not llama.tied and not llama.positions
    gpt = shape_of(find_model("gpt3-175b"))
    assert (gpt.layers, gpt.hidden, gpt.ffn, gpt.positions) == (96, 12288, 49152, 2048)
    assert gpt.bias and gpt.layer_norm and gpt.tied and gpt.dropout and not gpt.gated
    with pytest.raises(UnsupportedError, match="mamba"):
        shape_of(find_model("mamba-130m"))


@pytest.mark.parametrize(
    ("name", "billions"), [("mixtral-8x7b", 46.7), ("deepseek-v3", 671.0), ("llama-3.1-405b", 405.9)]
)
def test_published_models_have_their_parameters(name, billions):
    """All experts of all ranks; the vocabulary is padded to a multiple of 128."""
    split = Split(gpus=8, ep=8 if name != "llama-3.1-405b" else 1)
    made = stage_trace(shape_of(find_model(name)), split, 0, sequence=128, recompute="full")
    assert (made.parameters + split.ep * made.expert_parameters) / 1e9 == pytest.approx(billions, rel=2e-3)


def test_experts_states_are_split_over_the_ranks_that_have_the_same():
    shape = shape_of(find_model("mixtral-8x7b"))
    split = Split(gpus=8, ep=4, zero=1)
    made = stage_trace(shape, split, 0, sequence=128, recompute="none")
    states = sum(s.bytes for s in made.trace.storages if s.category is Category.OPTIMIZER_STATE)
    assert states == pytest.approx(12 * (made.parameters / 8 + made.expert_parameters / 2), abs=32)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("name", ["mixtral-8x7b", "deepseek-v3"])
def test_everything_that_experts_and_latent_attention_make_is_let_go(name, recompute):
    shape = dataclasses.replace(shape_of(find_model(name)), layers=4)
    made = stage_trace(shape, Split(gpus=8, ep=8, zero=1), 0, sequence=128, recompute=recompute).trace
    assert not [s for s in made.storages if s.died is None and s.born >= made.step_starts[0]]


def test_each_expert_of_a_rank_is_a_product_and_its_router_has_gradients():
    """Up, gated, and down: forward one of each, backward two; the router's product and its two gradients."""
    shape = dataclasses.replace(shape_of(find_model("mixtral-8x7b")), layers=1)
    made = stage_trace(shape, Split(gpus=4, ep=4), 0, sequence=128, recompute="none").trace
    routers = [op for op in made.ops if op.module.endswith("mlp.router") and op.flops]
    experts = [op for op in made.ops if op.module.endswith("mlp.experts") and op.flops]
    assert len(routers) == 3 and {op.flops for op in routers} == {2 * 128 * shape.hidden * 8}
    assert len(experts) == 2 * (2 + 4)  # two of eight experts are on a rank
    assert {op.flops for op in experts} == {2 * 128 * shape.hidden * 14336, 2 * 128 * shape.hidden * 2 * 14336}


def test_an_unfused_loss_keeps_its_softmax_in_float32():
    traces = [traced(loss) for loss in (TE_LOSS, MegatronOptions())]
    kept = [max(s.bytes for s in trace.storages if s.category is Category.ACTIVATION) for trace in traces]
    assert kept == [2 * LOGITS, 4 * LOGITS]


def test_the_loss_is_unfused_by_default_and_the_native_one_takes_one_more_copy_of_the_logits():
    native = MegatronOptions(cross_entropy_loss_fusion=True)
    peaks = [simulate(traced(loss, micro_batch=16)).peak_bytes.allocated for loss in (TE_LOSS, None, native)]
    assert peaks[1] > peaks[0]
    assert peaks[2] - peaks[1] == pytest.approx(16 * 4 * LOGITS, rel=0.1)


def traced(options, micro_batch=1):
    chosen = {} if options is None else {"options": options}
    split = Split(gpus=1, micro_batch=micro_batch)
    return stage_trace(GPT, split, 0, sequence=SEQUENCE, recompute="full", **chosen).trace


def test_weight_gradients_are_tensors_of_their_own_where_their_accumulation_is_not_fused():
    fused, apart = (traced(MegatronOptions(gradient_accumulation_fusion=fusion)) for fusion in (True, False))
    dummies = sum(s.bytes for s in fused.storages if s.module == "dummy weight gradients")
    assert dummies == 2 * (12 * GPT.hidden**2 + 51200 * GPT.hidden)  # bfloat16
    assert not [s for s in apart.storages if s.module == "dummy weight gradients"]


def test_unfused_attention_keeps_what_korthikanti_counts():
    split = Split(gpus=1, micro_batch=4)
    unfused = kept_by_one_layer(split, options=MegatronOptions(attention_backend="unfused"))
    form = activations_per_layer(
        sequence=SEQUENCE, micro_batch=4, hidden=GPT.hidden, heads=GPT.heads, tensor_parallel=1,
        sequence_parallel=False, flash_attention=False,
    )  # fmt: skip
    assert unfused == form.value + 2 * 8 * SEQUENCE * 4  # means and scales of two norms


@pytest.mark.parametrize(
    ("capability", "micro_batch", "options", "copies"),
    [
        ((8, 0), 4, {}, True),
        ((8, 0), 1, {}, False),
        ((9, 0), 4, {}, False),
        ((9, 0), 4, {"attention_backend": "flash"}, True),
        ((10, 0), 4, {}, False),
        ((10, 0), 4, {"deterministic_mode": True}, True),
    ],
)
def test_flash_attention_keeps_its_output_in_two_layouts_of_several_sequences(
    capability, micro_batch, options, copies
):
    place = Place(
        shape=GPT, split=Split(gpus=1, micro_batch=micro_batch), sequence=SEQUENCE, recompute="none",
        options=MegatronOptions(**options), capability=capability,
    )  # fmt: skip
    assert place.copies_attention is copies


def test_the_loaders_mask_has_a_byte_for_each_pair_of_tokens():
    masks = [
        [s.bytes for s in traced(MegatronOptions(create_attention_mask_in_dataloader=creates)).storages
         if s.module == "attention mask"]
        for creates in (True, False)
    ]  # fmt: skip
    assert set(masks[0]) == {SEQUENCE * SEQUENCE}
    assert not masks[1]


def test_experts_are_split_by_tensor_parallel_ranks():
    mixtral = dataclasses.replace(shape_of(find_model("mixtral-8x7b")), layers=2)
    split = Split(gpus=8, tp=2, ep=4, sequence_parallel=True, global_batch=4)
    trace = stage_trace(mixtral, split, 0, sequence=SEQUENCE, recompute="none").trace
    assert not [s for s in trace.storages if s.died is None and s.born >= trace.step_starts[0]]
    parameters = [s.bytes for s in trace.storages if s.module == "experts parameters"]
    assert parameters == [2 * mixtral.layers * (8 // 4) * 3 * mixtral.hidden * 14336 // 2]
    with pytest.raises(UsageError, match=r"without --sp"):
        estimate_ranks("mixtral-8x7b", Split(gpus=8, tp=2, ep=4, global_batch=4), engine="megatron", gpu="H100")


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"attention_backend": "sdpa"}, "Unknown --attention-backend sdpa"),
        ({"cross_entropy_fusion_impl": "liger"}, "Unknown --cross-entropy-fusion-impl liger"),
        ({"transformer_impl": "torch"}, "Unknown --transformer-impl torch"),
        ({"cublas_workspace_config": "4096:8"}, "Cannot use --cublas-workspace-config 4096:8"),
        ({"cublas_workspace_config": ":4096"}, "Cannot use --cublas-workspace-config :4096"),
    ],
)
def test_values_that_the_engine_does_not_know_are_refused(options, error):
    with pytest.raises(UsageError, match=error):
        MegatronOptions(**options)


def test_a_configured_workspace_takes_the_place_of_cublass_own():
    storages = traced(MegatronOptions(cublas_workspace_config=":4096:2:16:8")).storages
    assert [s.bytes for s in storages if s.module == "PyTorch's cuBLAS"] == [(2 * 4096 + 8 * 16) * 1024] * 2


def test_a_small_model_is_as_slow_as_its_launches_and_says_so():
    small = estimate_ranks("gpt2", Split(gpus=1), engine="megatron", gpu="H100", seq=128)
    assert small.step_s > 12 * 3.6e-3
    assert any("bound by launches" in note for note in small.notes)
    large = estimate_ranks("llama-3-8b", Split(gpus=1), engine="megatron", gpu="H100", seq=4096)
    assert not any("bound by launches" in note for note in large.notes)


@pytest.fixture(scope="module")
def gpt3():
    split = Split(gpus=512, tp=8, pp=16, zero=1, sequence_parallel=True, global_batch=1536)
    return estimate_ranks("gpt3-175b", split, engine="megatron", gpu="H100", checkpointing="selective", seq=2048)


def test_every_rank_is_told_and_the_worst_is_on_the_first_stage(gpt3):
    document = gpt3.to_json()
    assert [rank["rank"] for rank in document["ranks"]] == list(range(512))
    assert {tuple(rank["coordinates"].items()) for rank in document["ranks"]} == {
        tuple(gpt3.split.coordinates(rank).items()) for rank in range(512)
    }
    worst = document["ranks"][document["worst_rank"]]
    assert worst["coordinates"]["pp"] == 0
    assert worst["peak_bytes"]["process"] == max(rank["peak_bytes"]["process"] for rank in document["ranks"])
    assert document["peak_bytes"] == worst["peak_bytes"]


def test_a_breakdown_sums_to_the_allocated_peak_and_what_lies_beside_it(gpt3):
    for rank in gpt3.ranks[:: 8 * 4]:
        beside = rank.breakdown["context"] + rank.breakdown["nccl"]
        assert sum(rank.breakdown.values()) == rank.peak_bytes.allocated + beside
        assert rank.peak_bytes.process == rank.peak_bytes.reserved + beside


def test_stages_hold_less_the_later_they_are_but_for_the_head(gpt3):
    peaks = [gpt3.ranks[gpt3.split.rank(pp=stage)].breakdown["activations"] for stage in range(15)]
    assert peaks == sorted(peaks, reverse=True)


def test_seconds_are_kernels_collectives_bubble_and_the_optimizer(gpt3):
    time = gpt3.time
    assert time.step_s == pytest.approx(time.compute_s + time.communication_s + time.bubble_s + time.once_s)
    whole = gpt3.flops / 512 / time.step_s
    assert 0.3e15 < whole < 0.6e15  # Megatron-LM's runs of this model on H100 reach 0.4 to 0.5 PFLOP/s


def test_a_longer_pipeline_has_more_bubble_and_interleaving_less():
    def bubble(**settings):
        split = Split(gpus=64, gpus_per_node=8, global_batch=64, **settings)
        return estimate_ranks("llama-3-8b", split, engine="megatron", gpu="H100", seq=1024).time.bubble_s

    assert bubble(pp=2) < bubble(pp=8)
    assert bubble(pp=8, interleave=4) < bubble(pp=8)


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"engine": "deepspeed"}, UsageError),
        ({"task": "generate"}, UnsupportedError),
        ({"precision": "fp32"}, UnsupportedError),
        ({"optimizer": "sgd"}, UnsupportedError),
        ({"zero": 3}, UnsupportedError),
    ],
)
def test_what_the_engine_does_not_do_is_refused(settings, error):
    settings = {"engine": "megatron"} | settings
    split = Split(gpus=8, zero=settings.pop("zero", 1))
    with pytest.raises(error):
        estimate_ranks("llama-3-8b", split, seq=512, **settings)
