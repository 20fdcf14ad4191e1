"""brim.estimate on every kind of model and setting, and what it must add up to."""

import pytest

import brim
from brim.core import Category
from brim.errors import ModelError, UnsupportedError, UsageError
from brim.estimation.estimate import Study
from brim.estimation.models import find_model
from brim.estimation.simulation import phases, place_of, simulate
from brim.estimation.workload import Workload
from brim.predict.optimizer_states import OPTIMIZERS

CATEGORIES = {
    "parameters", "gradients", "optimizer_state", "activations", "temporary", "kv_cache", "inputs", "workspaces",
    "context",
}  # fmt: skip
KEYS = {
    "peak_bytes", "upper_bound_bytes", "at_peak_bytes", "per_module", "step_s", "flops", "not_modelled", "leak",
    "stored_bytes", "fits", "notes", "by", "precision", "precision_origin", "program", "brim_differs",
}  # fmt: skip


def adds_up(found):
    tensors = sum(size for name, size in found.at_peak_bytes.items() if name != "context")
    peak = found.peak_bytes
    return (
        tensors == sum(found.per_module.values())
        and tensors + found.rounding_bytes == peak.allocated <= peak.reserved < peak.process
        and peak.process + sum(margin.bytes for margin in found.margins) == found.upper_bound_bytes
    )


def test_the_document_has_these_keys_and_no_others(folder):
    found = brim.estimate(folder("llama"), batch=2, seq=32, gpu="RTX 4090")
    document = found.to_json()
    assert set(document) == KEYS
    assert set(document["at_peak_bytes"]) == CATEGORIES
    assert set(document["peak_bytes"]) == {"allocated", "reserved", "process"}
    assert document["fits"] is True
    assert document["step_s"] > 0
    assert document["flops"] > 0
    assert all(margin.why for margin in found.margins)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["gpt2", "bert", "t5", "vit", "resnet", "whisper", "moe", "unet"])
def test_every_kind_of_model_trains(folder, name):
    found = brim.estimate(folder(name), batch=2)
    assert adds_up(found)
    assert 0 < found.at_peak_bytes["optimizer_state"] <= 2 * found.at_peak_bytes["parameters"]


def test_text_is_generated_with_a_cache(folder):
    found = brim.estimate(folder("llama"), task="generate", seq=24, new_tokens=3)
    assert adds_up(found)
    assert found.at_peak_bytes["kv_cache"] > 0
    assert found.at_peak_bytes["gradients"] == found.at_peak_bytes["optimizer_state"] == 0


@pytest.mark.parametrize("name", ["t5", "whisper"])
def test_an_encoder_decoder_has_its_two_caches(folder, name):
    study = Study(find_model(folder(name)), Workload(task="generate", new_tokens=3), place_of(None), None, "")
    assert adds_up(study.estimate())
    caches = [storage for storage in study.trace.storages if storage.category is Category.KV_CACHE]
    assert any("encoder_attn" in s.module or "EncDecAttention" in s.module for s in caches)
    assert any("self_attn" in s.module or "SelfAttention" in s.module for s in caches)


@pytest.mark.parametrize("name", ["bert", "vit", "unet"])
def test_a_model_without_text_to_generate_does_one_forward_pass(folder, name):
    found = brim.estimate(folder(name), task="generate")
    assert adds_up(found)
    assert found.workload.new_tokens is None


@pytest.mark.thorough
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_steps(folder, optimizer):
    assert adds_up(brim.estimate(folder("llama"), seq=16, optimizer=optimizer))


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-mixed", "fp16-mixed"])
def test_weights_have_the_type_of_the_precision(folder, precision):
    found = brim.estimate(folder("gpt2"), seq=16, precision=precision)
    parameters = 500 * 64 + 128 * 64 + 2 * (12 * 64 * 64 + 13 * 64) + 2 * 64  # tied head; GPT-2's own formula
    assert found.at_peak_bytes["parameters"] == parameters * (2 if precision == "bf16" else 4)


def test_the_precision_is_the_configurations_where_none_is_given(folder):
    assert brim.estimate(folder("llama", torch_dtype="float16"), seq=16).workload.precision == "bf16"
    assert brim.estimate(folder("llama"), seq=16).workload.precision == "fp32"


@pytest.mark.thorough
def test_checkpointing_keeps_less_the_more_is_computed_again(folder):
    path = folder("llama", num_hidden_layers=4, vocab_size=50)
    peaks = [
        brim.estimate(path, batch=8, seq=256, precision="bf16", optimizer="sgd", checkpointing=way)
        for way in ("none", "selective", "full")
    ]
    allocated = [found.peak_bytes.allocated for found in peaks]
    assert allocated == sorted(allocated, reverse=True)
    assert len(set(allocated)) == 3
    assert peaks[0].flops < peaks[2].flops


@pytest.mark.thorough
def test_the_rank_and_the_targets_of_adapters_are_counted(folder):
    options = {"seq": 16, "method": "lora"}
    eight, sixteen = (brim.estimate(folder("llama"), lora_rank=rank, **options) for rank in (8, 16))
    default = brim.estimate(folder("llama"), **options)
    assert eight.at_peak_bytes == default.at_peak_bytes
    added = sixteen.at_peak_bytes["parameters"] - eight.at_peak_bytes["parameters"]
    full = brim.estimate(folder("llama"), seq=16).at_peak_bytes["parameters"]
    assert added == eight.at_peak_bytes["parameters"] - full
    wider = brim.estimate(folder("llama"), lora_targets=["all-linear"], **options)
    assert wider.at_peak_bytes["parameters"] > eight.at_peak_bytes["parameters"]
    one = brim.estimate(folder("llama"), lora_targets=["q_proj"], **options)
    assert full < one.at_peak_bytes["parameters"] < eight.at_peak_bytes["parameters"]
    assert "lora, rank 16" in sixteen.workload.describe() and "in q_proj" in one.workload.describe()


def test_adapters_that_cannot_be_are_refused(folder):
    with pytest.raises(UsageError, match="without method lora"):
        brim.estimate(folder("llama"), lora_rank=8)
    with pytest.raises(UsageError, match="lora_rank=0"):
        brim.estimate(folder("llama"), method="lora", lora_rank=0)
    with pytest.raises(UsageError, match="Name modules"):
        brim.estimate(folder("llama"), method="lora", lora_targets=[])
    with pytest.raises(UnsupportedError, match="PEFT refuses"):
        brim.estimate(folder("llama"), method="lora", lora_targets=["no_such"], seq=16)


def test_the_parts_of_a_step_begin_where_their_tensors_are_made(folder):
    study = Study(find_model(folder("llama")), Workload(seq=16), place_of("RTX 3060"), None, "")
    timeline = simulate(study.trace, study.place)
    found = phases(study.trace, timeline)
    assert [name for name, _ in found] == ["forward", "backward", "optimizer"] * 2
    begins = [event for _, event in found]
    assert begins == sorted(begins) and 0 < begins[0] < begins[-1] < len(timeline)
    states = [s.id for s in study.trace.storages if s.category is Category.OPTIMIZER_STATE]
    first = next(at for at, one in enumerate(timeline.column("storage")) if one in set(states))
    assert begins[2] <= first < begins[3]


def test_an_unknown_card_is_its_memory_alone(folder):
    found = brim.estimate(folder("llama"), seq=16, vram="12GiB")
    assert (found.fits, found.step_s, found.gpu) == (True, None, "a GPU of 12 GiB")
    assert "only the memory of this GPU is known" in " ".join(found.notes)
    assert brim.estimate(folder("llama"), seq=16, vram="401MiB").fits is False
    with pytest.raises(UsageError, match="total is unknown"):
        brim.estimate(folder("llama"), seq=16, vram="80%")
    named = brim.estimate(folder("llama"), seq=16, gpu="RTX 4090", vram="1.6%")
    assert named.fits is False and named.step_s is not None


def test_a_card_without_rates_has_no_seconds_and_says_what_is_not_simulated(folder):
    found = brim.estimate(folder("llama"), seq=16, gpu="Apple M3 Max 64GB")
    assert found.fits and found.step_s is None
    assert "are not simulated" in " ".join(found.notes)
    assert brim.estimate(folder("llama"), seq=16, gpu="Ascend 910B").step_s is None


def test_lora_has_gradients_and_state_for_adapters_only(folder):
    full, lora = (brim.estimate(folder("llama"), seq=16, method=method) for method in ("full", "lora"))
    adapters = 2 * 8 * ((64 + 64) + (64 + 32)) * 4  # two layers, rank 8, q_proj and v_proj, float32
    assert lora.at_peak_bytes["parameters"] == full.at_peak_bytes["parameters"] + adapters
    assert lora.at_peak_bytes["optimizer_state"] <= 2 * adapters < full.at_peak_bytes["optimizer_state"]


def test_what_does_not_fit_is_described_all_the_same(folder):
    found = brim.estimate(folder("llama", vocab_size=200_000), batch=64, seq=256, gpu="RTX 2070")
    assert found.fits is False
    assert "CUDA out of memory" in found.out_of_memory
    assert found.peak_bytes.process > 8 << 30
    assert adds_up(found)


def test_settings_that_mean_nothing_to_the_model_warn(folder):
    with pytest.warns(UserWarning, match="seq is ignored"):
        brim.estimate(folder("resnet"), seq=128)


@pytest.mark.parametrize(
    ("name", "settings", "error", "told"),
    [
        ("gpt2", {"seq": 129}, UsageError, "has 128 positions"),
        ("gpt2", {"seq": 120, "task": "generate", "new_tokens": 20}, UsageError, "140 tokens"),
        ("llama", {"num_attention_heads": 5}, ModelError, "Correct"),
        ("resnet", {"checkpointing": "full"}, UnsupportedError, "does not support"),
        ("unet", {"checkpointing": "selective"}, UnsupportedError, "full checkpointing"),
        ("llama", {"task": "generate", "precision": "bf16-mixed"}, UnsupportedError, "training only"),
    ],
)
def test_what_cannot_be_done_is_one_clear_error(folder, name, settings, error, told):
    changes = {key: settings.pop(key) for key in list(settings) if key == "num_attention_heads"}
    with pytest.raises(error, match=told):
        brim.estimate(folder(name, **changes), **settings)


def test_a_function_may_return_its_own_step_or_a_model_and_inputs(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "import torch\n"
        "def step():\n"
        "    model = torch.nn.Linear(256, 256).cuda()\n"
        "    optimizer = torch.optim.SGD(model.parameters())\n"
        "    def one():\n"
        "        model(torch.ones(4, 256, device='cuda')).sum().backward()\n"
        "        optimizer.step()\n"
        "        optimizer.zero_grad()\n"
        "    return one\n"
        "def pair():\n"
        "    return torch.nn.Linear(256, 256), torch.ones(4, 256)\n"
        "def number():\n"
        "    return 3\n"
        "def broken():\n"
        "    return torch.ones(3) @ torch.ones(4)\n"
    )
    own, pair = brim.estimate(f"{file}:step"), brim.estimate(f"{file}:pair", optimizer="adam")
    assert own.at_peak_bytes["parameters"] == pair.at_peak_bytes["parameters"] == (256 * 256 + 256) * 4
    assert pair.at_peak_bytes["optimizer_state"] == 2 * (256 * 256 + 256) * 4
    with pytest.raises(UsageError, match="returns a complete step"):
        brim.estimate(f"{file}:step", batch=8)
    with pytest.raises(UsageError, match="It returned int"):
        brim.estimate(f"{file}:number")
    with pytest.raises(ModelError, match="It fails"):
        brim.estimate(f"{file}:broken")
