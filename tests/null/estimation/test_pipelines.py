"""A pipeline of diffusers is estimated as a whole: all its models on the GPU, each run once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from diffusers import AutoencoderKL, FluxTransformer2DModel, UNet2DConditionModel
from transformers import CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel

import brim
from brim.cli import main
from brim.errors import ModelError
from support.hub import Hub, hub

__all__ = ["hub"]
TEXT = CLIPTextConfig(
    vocab_size=1000, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2
)
LONG_TEXT = T5Config(vocab_size=1000, d_model=64, d_ff=128, num_layers=2, num_heads=2, d_kv=32)


def unet() -> UNet2DConditionModel:
    return UNet2DConditionModel(
        sample_size=32, block_out_channels=(32, 64), layers_per_block=1, cross_attention_dim=64, norm_num_groups=8,
        attention_head_dim=8, down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    )  # fmt: skip


def flux() -> FluxTransformer2DModel:
    return FluxTransformer2DModel(
        in_channels=64, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=64, pooled_projection_dim=64, axes_dims_rope=(4, 6, 6),
    )  # fmt: skip


def autoencoder(channels: int) -> AutoencoderKL:
    return AutoencoderKL(
        block_out_channels=(32,), down_block_types=("DownEncoderBlock2D",), up_block_types=("UpDecoderBlock2D",),
        latent_channels=channels, norm_num_groups=8, sample_size=32,
    )  # fmt: skip


def pipeline(folder: Path, kind: str, **models: Any) -> dict[str, Any]:
    """Write the configurations of a pipeline, as ``save_pretrained`` does; return them by file."""
    index: dict[str, Any] = {"_class_name": kind, "_diffusers_version": "0.35.0", "scheduler": ["diffusers", "Any"]}
    files: dict[str, Any] = {}
    for name, model in models.items():
        library = type(model).__module__.partition(".")[0]
        index[name] = [library, type(model).__name__]
        config = dict(model.config) | {"_class_name": type(model).__name__} if library == "diffusers" else None
        files[f"{name}/config.json"] = config or model.config.to_dict()
    files["model_index.json"] = index
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps(content))
    return files


def parameters_bytes(*models: Any) -> int:
    return sum(parameter.nbytes for model in models for parameter in model.parameters())


def estimated(model: str | Path) -> Any:
    return brim.estimate(model, "generate", gpu="RTX 4090")


def test_every_model_of_a_pipeline_is_counted(tmp_path: Path) -> None:
    models = {"text_encoder": CLIPTextModel(TEXT), "unet": unet(), "vae": autoencoder(4)}
    pipeline(tmp_path, "StableDiffusionPipeline", **models)
    result = estimated(tmp_path)
    assert result.workload.precision == "fp32"
    assert result.at_peak_bytes["parameters"] - parameters_bytes(*models.values()) in range(4096)  # its buffers
    alone = brim.estimate(tmp_path / "unet", "generate", gpu="RTX 4090")
    assert result.peak_bytes.allocated > alone.peak_bytes.allocated


def test_a_pipeline_of_tokens(tmp_path: Path) -> None:
    models = {
        "text_encoder": CLIPTextModel(TEXT), "text_encoder_2": T5EncoderModel(LONG_TEXT), "transformer": flux(),
        "vae": autoencoder(16),
    }  # fmt: skip
    pipeline(tmp_path, "FluxPipeline", **models)
    result = brim.estimate(tmp_path, "generate", precision="bf16", gpu="RTX 4090")
    half = parameters_bytes(*models.values()) // 2
    assert result.at_peak_bytes["parameters"] - half in range(8192)
    assert any("4,096 tokens" in note for note in result.notes)


def test_a_pipeline_of_the_hub_needs_its_configurations_only(hub: Hub, tmp_path: Path) -> None:
    models = {"text_encoder": CLIPTextModel(TEXT), "unet": unet(), "vae": autoencoder(4)}
    files = pipeline(tmp_path, "StableDiffusionPipeline", **models)
    contents = {name: json.dumps(content).encode() for name, content in files.items()}
    hub.files["org/pipe"] = {name: (content, len(content)) for name, content in contents.items()}
    assert estimated("org/pipe").peak_bytes == estimated(tmp_path).peak_bytes


def test_a_pipeline_names_models_of_its_own_folder_alone(tmp_path: Path) -> None:
    pipeline(tmp_path / "pipe", "StableDiffusionPipeline", unet=unet())
    pipeline(tmp_path, "StableDiffusionPipeline", vae=autoencoder(4))
    index = {"../vae": ["diffusers", "AutoencoderKL"], str(tmp_path / "vae"): ["diffusers", "AutoencoderKL"]}
    (tmp_path / "pipe" / "model_index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match="None of its models"):
        estimated(tmp_path / "pipe")


def test_a_damaged_index_of_the_hub_is_one_error(hub: Hub) -> None:
    hub.files["org/pipe"] = {"model_index.json": (b"[1, 2]", 6)}
    with pytest.raises(ModelError, match="not a pipeline's index"):
        estimated("org/pipe")


def test_a_pipeline_is_not_trained_as_a_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pipeline(tmp_path, "StableDiffusionPipeline", unet=unet(), vae=autoencoder(4))
    assert main(["estimate", str(tmp_path)]) == 2
    assert "one at a time" in capsys.readouterr().err
    (tmp_path / "model_index.json").write_text("{}")
    assert main(["estimate", str(tmp_path), "--task", "generate"]) == 2
    assert "None of its models" in capsys.readouterr().err
    (tmp_path / "model_index.json").write_text("[")
    assert main(["estimate", str(tmp_path), "--task", "generate"]) == 2
    assert "not a pipeline's index" in capsys.readouterr().err
