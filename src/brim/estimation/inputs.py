"""Inputs of the right kind, shape and dtype for models of transformers or diffusers. Their values do not matter."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from brim.errors import UnsupportedError, UsageError
from brim.estimation.workload import Workload

DEFAULT_TOKENS = 4096
_TEXT_TOKENS = 77  # of CLIP's text encoder, whose output conditions diffusion models
_IMAGE_PIXELS = 224
# Sizes by the defaults of diffusers' pipelines: latents of 128 x 128, which models of tokens take 2 x 2 to a token.
_LATENT_SIDE, _IMAGE_TOKENS, _LONG_TEXT_TOKENS = 128, 64 * 64, 512
_PICTURE = "an image of 1024 x 1024 pixels, 4,096 tokens"
_VIDEO, _VIDEO_OF_48 = (21, 60, 104), (31, 44, 80)  # latents of Wan's videos: 81 frames, and 121 frames by Wan 2.2's
IMAGES = {  # where no setting says the size
    "FluxTransformer2DModel": _PICTURE,
    "QwenImageTransformer2DModel": _PICTURE,
    "WanTransformer3DModel": "a video of 81 frames of 832 x 480 pixels; of 121 of 1280 x 704 with 48 latent channels",
    "ZImageTransformer2DModel": _PICTURE,
}

_GUIDED = ("UNet2DConditionModel", "SD3Transformer2DModel")

Inputs = dict[str, Any]
_Zeros = Callable[..., torch.Tensor]


def default_tokens(model: nn.Module) -> int:
    """The default sequence length: 4,096, or the model's maximum if that is less."""
    config: Any = model.config
    if hasattr(getattr(config, "text_config", None), "to_dict"):  # a config object, not an unrelated dictionary
        config = config.text_config
    names = ("max_position_embeddings", "n_positions", "max_target_positions", "max_sequence_length", "seq_length")
    sizes = [getattr(config, name, None) for name in names]
    limits = [size for size in sizes if isinstance(size, int) and size > 0]
    return min([DEFAULT_TOKENS, *limits, *(limit for _, limit in position_tables(model))])


def forward_inputs(model: nn.Module, workload: Workload) -> Inputs:
    """Inputs of one forward pass of a transformers model, without labels."""
    kind, batch = getattr(model, "main_input_name", "input_ids"), workload.batch
    config: Any = model.config
    makers = {
        "input_ids": lambda: {"input_ids": token_ids(batch, workload.seq or 1)},
        "pixel_values": lambda: {"pixel_values": _image(getattr(config, "vision_config", config), batch)},
        "input_features": lambda: {
            "input_features": torch.zeros(batch, config.num_mel_bins, 2 * config.max_source_positions, device="cuda")
        },
        "input_values": lambda: {"input_values": torch.zeros(batch, workload.seq or 1, device="cuda")},
    }
    if type(model).forward is nn.Module.forward:
        raise UnsupportedError(
            f"Cannot make inputs for {type(model).__name__}.",
            "It has no forward pass of its own: its parts are called one by one.",
            "Estimate the part that you call, by a function that builds it: file.py:function.",
        )
    contrastive = "return_loss" in inspect.signature(model.forward).parameters
    known = kind in makers and (kind != "input_features" or hasattr(config, "num_mel_bins"))
    if not known or (is_multimodal(config) and not contrastive and not takes_text_alone(model)):
        what = f"{kind} beside others" if known else f"inputs named {kind}"
        raise UnsupportedError(
            f"Cannot make inputs for {type(model).__name__}.",
            f"It takes {what}, which brim estimate does not make.",
            "Write a function that builds the model and returns its step, and give it as file.py:function.",
        )
    inputs = makers[kind]()
    if contrastive:
        inputs = makers["input_ids"]() | makers["pixel_values"]()
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    return {name: t.to(dtype) if t.is_floating_point() else t for name, t in inputs.items()}


def training_inputs(model: nn.Module, workload: Workload) -> Inputs:
    """Forward inputs, and labels of the shape that the model's loss expects."""
    inputs, batch = forward_inputs(model, workload), workload.batch
    accepted = inspect.signature(model.forward).parameters
    config: Any = model.config
    if "return_loss" in accepted:
        inputs["return_loss"] = True
    elif "labels" in accepted:
        inputs["labels"] = _labels(model, workload)
    elif "start_positions" in accepted:
        inputs |= {"start_positions": token_ids(batch), "end_positions": token_ids(batch)}
    elif config.is_encoder_decoder and "decoder_input_ids" in accepted:
        inputs["decoder_input_ids"] = token_ids(batch, workload.seq or 1)
    if "use_cache" in accepted:
        inputs["use_cache"] = False
    return inputs


def takes_tokens(model: nn.Module, *, generates: bool) -> bool:
    """Return whether the model takes a sequence length, not counting generated tokens."""
    kind = getattr(model, "main_input_name", "")
    if "return_loss" in inspect.signature(model.forward).parameters:
        return True
    return kind in ("input_ids", "input_values") or (kind == "input_features" and not generates)


def takes_text_alone(model: nn.Module) -> bool:
    """Return whether a forward pass takes token ids only."""
    contrastive = "return_loss" in inspect.signature(model.forward).parameters
    return getattr(model, "main_input_name", "input_ids") == "input_ids" and not contrastive


def _labels(model: nn.Module, workload: Workload) -> torch.Tensor:
    config: Any = model.config
    batch, name = workload.batch, type(model).__name__
    if name.endswith(("SequenceClassification", "ImageClassification", "AudioClassification", "MultipleChoice")):
        return token_ids(batch) if config.num_labels > 1 else torch.zeros(batch, device="cuda")
    if getattr(model, "main_input_name", "") == "pixel_values":
        raise UnsupportedError(
            f"Cannot make labels for {name}.",
            "brim estimate makes labels of images for classification only.",
            "Write a function that builds the model and returns its step, and give it as file.py:function.",
        )
    return token_ids(batch, workload.seq or 1)


def diffusion_inputs(model: nn.Module, workload: Workload) -> Inputs:
    """Inputs of one denoising step of a diffusers UNet or transformer, or of one pass of an autoencoder."""
    config: Any = model.config
    batch, name = workload.batch, type(model).__name__
    dtype = next(model.parameters()).dtype
    if name in _TRANSFORMERS:
        return _TRANSFORMERS[name](config, workload, functools.partial(torch.zeros, dtype=dtype, device="cuda"))
    makes = name in ("UNet2DConditionModel", "UNet2DModel", "DiTTransformer2DModel") or name.startswith("Autoencoder")
    if not makes or getattr(config, "sample_size", None) is None:
        raise UnsupportedError(
            f"Cannot make inputs for {name}.",
            "brim estimate makes them for UNet2DConditionModel, UNet2DModel, DiTTransformer2DModel, "
            f"{', '.join(_TRANSFORMERS)} and autoencoders of images.",
            "Write a function that builds the model and returns its step, and give it as file.py:function.",
        )
    side = _side(config.sample_size)
    sample = torch.zeros(batch, config.in_channels, *side, dtype=dtype, device="cuda")
    if name.startswith("Autoencoder"):
        return {"sample": sample}
    steps = torch.zeros(batch, dtype=torch.long, device="cuda")
    if name == "UNet2DModel":
        return {"sample": sample, "timestep": steps}
    if name == "DiTTransformer2DModel":
        return {"hidden_states": sample, "timestep": steps, "class_labels": token_ids(batch)}
    width = config.cross_attention_dim
    if not isinstance(width, int):
        raise UnsupportedError(f"Cannot make inputs for {name}.", f"Its cross_attention_dim is {width}.")
    tokens = workload.seq or _TEXT_TOKENS
    text = torch.zeros(batch, tokens, width, dtype=dtype, device="cuda")
    inputs: Inputs = {"sample": sample, "timestep": steps, "encoder_hidden_states": text}
    if config.addition_embed_type == "text_time":  # SDXL: pooled text and six sizes
        pooled = config.projection_class_embeddings_input_dim - 6 * config.addition_time_embed_dim
        inputs["added_cond_kwargs"] = {
            "text_embeds": torch.zeros(batch, pooled, dtype=dtype, device="cuda"),
            "time_ids": torch.zeros(batch, 6, dtype=dtype, device="cuda"),
        }
    return inputs


def _flux_inputs(config: Any, workload: Workload, zeros: _Zeros) -> Inputs:
    batch, tokens = workload.batch, workload.seq or _LONG_TEXT_TOKENS
    inputs: Inputs = {
        "hidden_states": zeros(batch, _IMAGE_TOKENS, config.in_channels),
        "encoder_hidden_states": zeros(batch, tokens, config.joint_attention_dim),
        "pooled_projections": zeros(batch, config.pooled_projection_dim),
        "timestep": zeros(batch),
        "img_ids": zeros(_IMAGE_TOKENS, 3),
        "txt_ids": zeros(tokens, 3),
    }
    if config.guidance_embeds:
        inputs["guidance"] = torch.zeros(batch, device="cuda")
    return inputs


def _sd3_inputs(config: Any, workload: Workload, zeros: _Zeros) -> Inputs:
    """Text is CLIP's 77 tokens and T5's 256."""
    batch, tokens = workload.batch, workload.seq or 77 + 256
    return {
        "hidden_states": zeros(batch, config.in_channels, *_side(config.sample_size)),
        "encoder_hidden_states": zeros(batch, tokens, config.joint_attention_dim),
        "pooled_projections": zeros(batch, config.pooled_projection_dim),
        "timestep": zeros(batch),
    }


def _wan_inputs(config: Any, workload: Workload, zeros: _Zeros) -> Inputs:
    batch, video = workload.batch, _VIDEO_OF_48 if config.in_channels == 48 else _VIDEO
    inputs = {
        "hidden_states": zeros(batch, config.in_channels, *video),
        "timestep": token_ids(batch),
        "encoder_hidden_states": zeros(batch, workload.seq or _LONG_TEXT_TOKENS, config.text_dim),
    }
    if config.image_dim is not None:  # CLIP's tokens of the first frame
        inputs["encoder_hidden_states_image"] = zeros(batch, 257, config.image_dim)
    return inputs


def _qwen_image_inputs(config: Any, workload: Workload, zeros: _Zeros) -> Inputs:
    batch, tokens = workload.batch, workload.seq or _LONG_TEXT_TOKENS
    return {
        "hidden_states": zeros(batch, _IMAGE_TOKENS, config.in_channels),
        "encoder_hidden_states": zeros(batch, tokens, config.joint_attention_dim),
        "timestep": zeros(batch),
        "img_shapes": [[(1, _LATENT_SIDE // 2, _LATENT_SIDE // 2)]] * batch,
    }


def _z_image_inputs(config: Any, workload: Workload, zeros: _Zeros) -> Inputs:
    samples = range(workload.batch)
    return {
        "x": [zeros(config.in_channels, 1, _LATENT_SIDE, _LATENT_SIDE) for _ in samples],
        "t": zeros(workload.batch),
        "cap_feats": [zeros(workload.seq or _LONG_TEXT_TOKENS, config.cap_feat_dim) for _ in samples],
    }


_TRANSFORMERS: dict[str, Callable[[Any, Workload, _Zeros], Inputs]] = {
    "FluxTransformer2DModel": _flux_inputs,
    "SD3Transformer2DModel": _sd3_inputs,
    "WanTransformer3DModel": _wan_inputs,
    "QwenImageTransformer2DModel": _qwen_image_inputs,
    "ZImageTransformer2DModel": _z_image_inputs,
}


def denoises(model: nn.Module) -> bool:
    """Return whether ``diffusion_inputs`` makes inputs of a denoising step of the model."""
    name = type(model).__name__
    return name in _TRANSFORMERS or name in ("UNet2DConditionModel", "DiTTransformer2DModel")


def guided(model: nn.Module, workload: Workload) -> Workload:
    """Return the workload of a step with guidance, for which some pipelines take each sample twice at once."""
    samples = workload.batch * (2 if type(model).__name__ in _GUIDED else 1)
    return dataclasses.replace(workload, batch=samples)


def text_tokens(model: nn.Module, denoising: Sequence[Inputs]) -> int:
    """Return the tokens that a pipeline's text encoder gets: as many as the denoiser takes, or as it can."""
    tokens: list[int] = [
        inputs["encoder_hidden_states"].shape[1] for inputs in denoising if "encoder_hidden_states" in inputs
    ]
    return min([default_tokens(model), *tokens, *([] if tokens else [_LONG_TEXT_TOKENS])])


def latents(model: nn.Module, denoising: Inputs, batch: int) -> torch.Tensor:
    """Return what an autoencoder decodes after a denoising step."""
    config: Any = model.config
    sample = next(denoising[name] for name in ("sample", "hidden_states", "x") if name in denoising)
    is_video = any(isinstance(module, nn.Conv3d) for module in model.modules())
    has_places = isinstance(sample, torch.Tensor) and sample.dim() >= 4
    places: tuple[int, ...] = tuple(sample.shape[2:]) if has_places else (_LATENT_SIDE,) * 2
    if is_video and len(places) == 2:
        places = (1, *places)
    channels = getattr(config, "latent_channels", None) or config.z_dim
    return torch.zeros(batch, channels, *places, dtype=next(model.parameters()).dtype, device="cuda")


def position_tables(model: nn.Module) -> Iterator[tuple[str, int]]:
    """Yield learned tables of text positions by name, with the number of tokens in each."""
    for name, module in model.named_modules():
        leaf = name.rpartition(".")[2]
        if not isinstance(module, nn.Embedding) or "relative" in leaf or "vision" in name:
            continue
        if leaf == "wpe" or leaf in ("position_embeddings", "embed_positions", "position_embedding"):
            if model.main_input_name == "input_features" and name.endswith("encoder.embed_positions"):
                continue  # the audio's positions
            padding = 0 if module.padding_idx is None else module.padding_idx + 1
            yield name, module.num_embeddings - int(getattr(module, "offset", padding))


def check_positions(model: nn.Module, tokens: int, part: str = "") -> None:
    """Raise an error for more tokens than a learned table of positions has: fake tensors would not notice."""
    for name, limit in position_tables(model):
        if tokens > limit and part in name:
            raise UsageError(
                f"{type(model).__name__} cannot take {tokens:,} tokens.",
                f"Its position embedding {name} has {limit:,} positions.",
                "Ask for fewer tokens.",
            )


def token_ids(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.long, device="cuda")


def _image(config: Any, batch: int) -> torch.Tensor:
    side = _side(getattr(config, "image_size", None) or _IMAGE_PIXELS)
    return torch.zeros(batch, config.num_channels, *side, device="cuda")


def _side(size: Any) -> tuple[int, int]:
    if isinstance(size, int):
        return size, size
    height, width = size
    return int(height), int(width)


def is_multimodal(config: Any) -> bool:
    """Return whether a configuration has parts for images or sounds."""
    return any(getattr(config, name, None) is not None for name in ("vision_config", "audio_config"))
