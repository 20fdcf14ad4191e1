"""``brim.fit`` of a diffusers pipeline: one plan for all of its models, and the same pictures."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.utils import convert_state_dict_to_diffusers
from peft import LoraConfig, get_peft_model_state_dict

import brim
from brim.errors import BudgetError, UnsupportedError, UsageError
from brim.planning.inference.pipelines import PipelineModels
from support.pipelines import autoencoder, small_pipeline, small_pipeline_with_hidden_states

STEPS = 3
CALL = {"prompt": "a", "num_inference_steps": STEPS, "output_type": "np"}
VRAM = "14MB"  # of 15 MB of weights and the activations


@pytest.fixture
def pipe(tmp_path: Path) -> Any:
    return small_pipeline(tmp_path)


def picture(pipe: Any) -> np.ndarray:
    image: np.ndarray = pipe(**CALL, generator=torch.Generator().manual_seed(1)).images
    return image


def test_pictures_are_the_same_within_the_budget_and_after_it(pipe: Any) -> None:
    expected = picture(pipe)
    handle = brim.fit(pipe, device="emulated", vram=VRAM, example=CALL)
    assert pipe.brim is handle
    for _ in range(2):
        assert np.array_equal(picture(pipe), expected)
    facts = handle.timeline().facts
    assert 0 < facts["held_bytes.vram"] < facts["promised_bytes.vram"] <= facts["budget_bytes.vram"]
    resident: Counter[str] = Counter()
    for decision in handle.plan.decisions:
        if decision.choice == "resident":
            resident[decision.block.partition(".")[0]] += decision.bytes
    assert resident["unet"] > 0.8 * resident.total()  # which is called in every step
    blocks = [d for d in handle.plan.decisions if d.choice == "resident" or not d.block.startswith("vae.encoder")]
    uncalled = [d.bytes for d in blocks if d.block.startswith("vae.encoder")]
    streamed = [d.bytes for d in blocks if d.choice != "resident"]
    assert max(uncalled, default=0) < min(streamed)  # only where no other block has room
    with pytest.raises(UsageError, match="fitted already"):
        brim.fit(pipe.unet, device="emulated")
    with pytest.raises(UsageError, match="fitted already"):
        brim.fit(pipe, device="emulated")
    with pytest.raises(UnsupportedError, match="Cannot move or cast"):
        pipe.to(torch.float16)
    handle.remove()
    assert np.array_equal(picture(pipe), expected)


def test_a_pipeline_that_was_never_called_gives_the_same_picture(tmp_path: Path) -> None:
    # transformers collects hidden states by hooks, which the first call registers
    fitted, other = (small_pipeline_with_hidden_states(tmp_path) for _ in range(2))
    brim.fit(fitted, device="emulated", vram="24MB", example=CALL)
    assert np.array_equal(picture(fitted), picture(other))


def test_adapters_are_loaded_switched_and_unloaded(pipe: Any, tmp_path: Path) -> None:
    plain = picture(pipe)
    pipe.unet.add_adapter(LoraConfig(r=4, init_lora_weights=False, target_modules=["to_q", "to_v"]), "x")
    layers = convert_state_dict_to_diffusers(get_peft_model_state_dict(pipe.unet, adapter_name="x"))
    pipe.save_lora_weights(tmp_path / "lora", unet_lora_layers=layers)
    pipe.unload_lora_weights()
    pipe.load_lora_weights(tmp_path / "lora", adapter_name="x")
    adapted = picture(pipe)
    pipe.unload_lora_weights()
    handle = brim.fit(pipe, device="emulated", vram=VRAM, example=CALL)
    pipe.load_lora_weights(tmp_path / "lora", adapter_name="x")
    assert np.array_equal(picture(pipe), adapted)
    pipe.disable_lora()
    assert np.array_equal(picture(pipe), plain)
    pipe.enable_lora()
    assert np.array_equal(picture(pipe), adapted)
    pipe.unload_lora_weights()
    assert np.array_equal(picture(pipe), plain)
    handle.remove()


def test_calls_are_recorded_without_values(pipe: Any) -> None:
    (_, *events), shares = PipelineModels(pipe).recorded(pipe, CALL)
    calls = [(event.model, event.method) for event in events if not isinstance(event, (int, tuple))]
    assert calls == [("text_encoder", "forward"), ("unet", "forward"), ("vae", "decode")]
    assert shares == {"text_encoder": 2 / STEPS, "unet": 1.0, "vae": 1 / STEPS}  # with a negative prompt
    assert "forward" not in vars(pipe.unet) and "decode" not in vars(pipe.vae)


def test_a_recorded_call_has_the_memory_of_the_pipelines_own_tensors(pipe: Any) -> None:
    models = PipelineModels(pipe)
    events, _ = models.recorded(pipe, CALL | {"output_type": "pt"})
    created = [event for event in events if isinstance(event, tuple)]
    latent_bytes = 2 * 4 * pipe.unet.config.sample_size**2 * 4  # with and without the prompt, in float32
    assert [size for _, size in created].count(latent_bytes) >= STEPS
    with torch.no_grad():
        left = models(*events)
    picture_bytes = 3 * (pipe.unet.config.sample_size * pipe.vae_scale_factor) ** 2 * 4
    assert picture_bytes in [tensor.untyped_storage().nbytes() for tensor in left]


def test_the_decoder_is_tiled_where_nothing_else_fits(pipe: Any) -> None:
    pipe.register_modules(vae=autoencoder(256))  # more activations than in the other models
    large = CALL | {"height": 128, "width": 128}
    with pytest.raises(BudgetError, match="Cannot run StableDiffusionPipeline") as refused:
        brim.fit(pipe, device="emulated", vram="1MB", example=large)
    assert not pipe.vae.use_tiling
    pipe.vae.tile_latent_min_size, pipe.vae.tile_sample_min_size = 32, 64
    smallest = refused.value.smallest_bytes["vram"]
    with pytest.warns(UserWarning, match="The decoder works in tiles"):
        handle = brim.fit(pipe, device="emulated", vram=smallest, example=large)
    assert pipe.vae.use_tiling and handle.plan.settings["tiled_models"] == 1
    handle.remove()
    assert not pipe.vae.use_tiling


def test_what_is_no_call_of_a_pipeline_is_refused(pipe: Any) -> None:
    with pytest.raises(UsageError, match="dictionary of the arguments"):
        brim.fit(pipe, device="cpu", example=(torch.zeros(1),))
    with pytest.raises(UsageError, match="for training"):
        brim.fit(pipe, torch.optim.SGD(pipe.unet.parameters()))
    with pytest.raises(UsageError, match="or a diffusers pipeline"):
        brim.fit(object())
