"""PyTorch's own engine, traced on one rank of a fake process group."""

import json
from itertools import accumulate

import pytest

from brim import catalog
from brim.core import Category, Phase
from brim.errors import UnsupportedError
from brim.estimation.models import find_model
from brim.estimation.ranks import torch_engine as ranks_torch
from brim.estimation.ranks.estimate import estimate_ranks
from brim.estimation.ranks.job import ParallelJob
from brim.estimation.ranks.split import Split
from brim.estimation.workload import Workload

CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 128, "intermediate_size": 256,
    "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 512,
    "tie_word_embeddings": False,
}  # fmt: skip
LAYER = 128 * 128 * 2 + 128 * 64 * 2 + 3 * 128 * 256 + 2 * 128
PARAMETERS = 2 * LAYER + 2 * 512 * 128 + 128


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def estimated(model, **settings):
    others = {name: settings.pop(name) for name in ("precision", "checkpointing", "gpu") if name in settings}
    return estimate_ranks(model, Split(**settings), engine="torch", seq=64, **others)


def facts_of(model, cp):
    """Of each stage of eight ranks: two share tensors, two are stages."""
    split = Split(gpus=4 * cp, tp=2, pp=2, cp=cp, sequence_parallel=True, micro_batch=4)
    workload = Workload(task="train", batch=4, seq=64, precision="fp32")
    job = ParallelJob(source=find_model(str(model)), workload=workload, split=split, sequence=64, capability=(9, 0))
    return ranks_torch.stages(job)[0]


def test_states_are_a_ranks_share(model):
    """A batch so large that the peak is in the second step, where the optimizer's state is there."""
    found = estimated(model, gpus=4, zero=3, precision="fp32", micro_batch=8).worst.breakdown
    assert found["optimizer_state"] == 2 * 4 * PARAMETERS // 4
    assert found["parameters"] == pytest.approx(4 * PARAMETERS // 4, rel=0.01)  # angles of rotation beside them


@pytest.mark.thorough
@pytest.mark.parametrize("zero", [1, 3])
def test_shards_in_ram_are_what_a_gpu_has_no_more(model, zero):
    split = {"gpus": 4, "zero": zero, "precision": "fp32", "micro_batch": 8, "gpu": "RTX 3090"}
    held, apart = estimated(model, **split), estimated(model, **split, offload_shards=True)
    of_gpu, in_ram = apart.worst.breakdown, apart.worst.ram
    share = 4 * PARAMETERS // 4
    assert of_gpu["optimizer_state"] == 0
    assert in_ram.allocated == 4 * share
    assert in_ram.breakdown["optimizer_state"] == 2 * share
    for locked in ("parameters", "gradients"):
        assert share <= in_ram.breakdown[locked] <= 2 * share
    assert apart.worst.peak_bytes.allocated < held.worst.peak_bytes.allocated - 3 * share
    assert apart.node_ram_bytes == 4 * in_ram.reserved
    assert held.worst.ram is None and held.node_ram_bytes == 0
    assert apart.step_s > held.step_s


@pytest.mark.thorough
def test_the_cpu_steps_and_the_last_micro_batch_takes_gradients_away(model):
    """AdamW goes through weight, gradient and moments of this rank's share, there and back. Under ZeRO-1 gradients
    leave the GPU once a step, under ZeRO-3 with every micro-batch, and a second one is added to the first."""

    def once_s(zero, many):
        split = {"gpus": 2, "zero": zero, "precision": "fp32", "global_batch": 2 * many, "gpu": "RTX 3090"}
        return estimated(model, **split, offload_shards=True).time.once_s

    stepped = 32 * PARAMETERS / 2 / (catalog.HOST_BYTES_PER_S / 2)
    assert once_s(3, 1) == pytest.approx(stepped, rel=0.01)
    assert once_s(3, 2) > 1.3 * stepped
    crossed = 2 * 4 * PARAMETERS / 2 / catalog.gpu("RTX 3090").pcie_bytes_per_s  # weights there, gradients back
    assert once_s(1, 2) > stepped + crossed


@pytest.mark.thorough
def test_memory_falls_from_stage_to_stage(model):
    peaks = [estimated(model, gpus=4, zero=zero, precision="fp32", global_batch=16).worst for zero in (0, 1, 3)]
    allocated = [rank.peak_bytes.allocated for rank in peaks]
    assert allocated == sorted(allocated, reverse=True)
    assert len(set(allocated)) == 3
    assert peaks[0].breakdown["optimizer_state"] == 2 * 4 * PARAMETERS  # every rank has all states


@pytest.mark.thorough
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_tensor_parallel_ranks_share_weights_and_activations(model, sequence_parallel):
    alone = estimated(model, gpus=1, precision="fp32", micro_batch=4).worst.breakdown
    shared = estimated(
        model, gpus=4, tp=4, sequence_parallel=sequence_parallel, precision="fp32", micro_batch=4
    ).worst.breakdown
    assert shared["optimizer_state"] == pytest.approx(alone["optimizer_state"] / 4, rel=0.02)
    assert shared["activations"] < (0.35 if sequence_parallel else 0.6) * alone["activations"]


@pytest.mark.thorough
def test_pipeline_stages_differ_and_the_worst_is_named(model):
    found = estimated(model, gpus=2, pp=2, precision="fp32", global_batch=8, gpu="A100 80GB")
    peaks = [rank.peak_bytes.allocated for rank in found.ranks]
    assert len(set(peaks)) > 1
    assert found.worst_rank == peaks.index(max(peaks))
    assert found.time.bubble_s > 0


@pytest.mark.thorough
def test_three_kinds_of_parallelism_at_once(model):
    found = estimated(model, gpus=8, tp=2, pp=2, zero=3, precision="bf16-mixed", global_batch=8, gpu="H100")
    assert len(found.ranks) == 8
    assert found.step_s > 0
    assert found.time.communication_s > 0


@pytest.mark.slow
def test_checkpointing_composes_with_sharding(model):
    plain, full = (
        estimated(model, gpus=2, zero=3, precision="fp32", micro_batch=8, checkpointing=kind).worst.breakdown
        for kind in ("none", "full")
    )
    assert full["activations"] < 0.7 * plain["activations"]


@pytest.mark.thorough
def test_interleaved_stages_keep_what_every_micro_batch_sent(model):
    """Also those that are not written out: on the first rank each takes the room for what it receives, and for what
    it has sent; its first chunk sends one way, its second both."""

    def peak(many):
        split = {"gpus": 2, "pp": 2, "interleave": 2, "global_batch": many}
        return estimated(model.parent / "deep", **split, precision="fp32").ranks[0].peak_bytes.allocated

    (model.parent / "deep").mkdir()
    (model.parent / "deep" / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": 4}))
    hidden = 64 * 128 * 4
    received = 3 * hidden  # room for what comes in, of both chunks
    assert peak(16) - peak(12) == peak(12) - peak(8) == 4 * (received + 3 * hidden)


EXPERTS = {
    "model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_local_experts": 4,
    "num_experts_per_tok": 2,
}  # fmt: skip


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mixtral")
    (folder / "config.json").write_text(json.dumps(CONFIG | EXPERTS))
    return folder


@pytest.mark.thorough
def test_ranks_share_a_layers_experts(mixture):
    """Weights, gradients and both moments of half of them go; the rest is on both ranks."""
    split = {"gpus": 2, "precision": "fp32", "gpu": "A100 80GB"}
    whole, shared = (estimated(mixture, **split, ep=ep) for ep in (1, 2))
    of_experts = 2 * 4 * 3 * 128 * 256 * 4
    for kind, times in (("parameters", 1), ("optimizer_state", 2)):
        gone = whole.worst.breakdown[kind] - shared.worst.breakdown[kind]
        assert gone == pytest.approx(times * of_experts // 2, rel=0.01)
    assert shared.time.communication_s > whole.time.communication_s


@pytest.mark.parametrize("settings", [{"gpus": 4, "ep": 2}, {"gpus": 4, "tp": 2, "ep": 2}])
def test_experts_go_over_all_data_parallel_ranks_of_whole_tensors(mixture, settings):
    with pytest.raises(UnsupportedError, match="or leave --ep out"):
        estimated(mixture, **settings)


@pytest.mark.thorough
def test_ranks_share_a_sequence(model):
    """Activations are a share, and attention's queries times all keys."""
    alone, shared = (estimated(model, gpus=4, zero=1, cp=cp, precision="fp32", micro_batch=4) for cp in (1, 4))
    assert shared.worst.breakdown["optimizer_state"] == alone.worst.breakdown["optimizer_state"]
    assert shared.worst.breakdown["activations"] < 0.5 * alone.worst.breakdown["activations"]
    assert shared.split.dp == 1


def most_kept_bytes(trace):
    """Of activations, at the moment when most of them are there: a rank's peak may be at another."""
    kept = [s for s in trace.storages if s.category is Category.ACTIVATION]
    changes = [(s.born, s.bytes) for s in kept] + [(s.died, -s.bytes) for s in kept if s.died is not None]
    return max(accumulate(bytes for _, bytes in sorted(changes)))


@pytest.mark.thorough
def test_sequences_are_shared_beside_tensors_and_pipelines(model):
    """Half of the tokens: half of what is kept for the backward pass, and of what a stage hands on."""
    one, other = (most_kept_bytes(facts_of(model, cp=cp)[0].trace) for cp in (1, 2))
    assert other == pytest.approx(one / 2, rel=0.1)
    handed = [[sent.bytes for sent in facts_of(model, cp=cp)[0].sent if sent.axis == "pp"] for cp in (1, 2)]
    assert handed[0] == [2 * size for size in handed[1]]


@pytest.mark.thorough
def test_what_is_sent_is_told_apart_by_its_axis(model):
    """Two ranks share tensors and two sequences, so that sizes do not tell which it was."""
    sent = facts_of(model, cp=2)[0].sent
    assert {one.axis for one in sent} == {"tp", "cp", "pp"}
    gathers = [one.bytes for one in sent if (one.axis, one.kind, one.phase) == ("cp", "all_gather", Phase.FORWARD)]
    assert len(gathers) == 2  # of a layer: both chunks
    assert sum(gathers) == 4 * 64 * 2 * 2 * 16 * 4  # rows, tokens, keys and values, half of the heads, their width
    assert {one.kind for one in sent if one.axis == "cp" and one.phase is Phase.BACKWARD} == {
        "all_gather", "reduce_scatter",
    }  # fmt: skip
    assert not [one for one in facts_of(model, cp=1)[0].sent if one.axis == "cp"]


def test_experts_over_ranks_go_with_whole_sequences(mixture):
    with pytest.raises(UnsupportedError, match="Leave out --ep, or --cp"):
        estimated(mixture, gpus=4, cp=2, ep=4)


@pytest.mark.parametrize("name", ["resnet50", "t5-small", "sd-unet"])
def test_models_that_have_no_one_list_of_layers_are_refused(name):
    with pytest.raises(UnsupportedError):
        estimate_ranks(name, Split(gpus=2, zero=3), engine="torch", seq=64)
