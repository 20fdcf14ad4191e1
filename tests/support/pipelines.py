"""Pipelines of diffusers with 15 and 2 MB of random weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    DDIMScheduler,
    StableDiffusionPipeline,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
)
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer


def autoencoder(channels: int) -> AutoencoderKL:
    return AutoencoderKL(
        block_out_channels=(channels, 64), down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2, latent_channels=4, sample_size=64,
    )  # fmt: skip


def tokenizer(folder: Path) -> CLIPTokenizer:
    (folder / "vocab.json").write_text(json.dumps({"<|startoftext|>": 0, "<|endoftext|>": 1, "a</w>": 2}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    return CLIPTokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"), model_max_length=77)


def small_pipeline(folder: Path) -> Any:
    torch.manual_seed(0)
    text = CLIPTextConfig(
        vocab_size=1000, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
        bos_token_id=0, eos_token_id=1, pad_token_id=1,
    )  # fmt: skip
    unet = UNet2DConditionModel(
        sample_size=32, block_out_channels=(64, 128), layers_per_block=1, cross_attention_dim=64,
        attention_head_dim=8, down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip
    vae = autoencoder(32)
    pipe = StableDiffusionPipeline(
        vae=vae, text_encoder=CLIPTextModel(text), unet=unet,
        scheduler=DDIMScheduler(steps_offset=1, clip_sample=False),
        tokenizer=tokenizer(folder),
        safety_checker=None, feature_extractor=None, requires_safety_checker=False,
    )  # fmt: skip
    pipe.set_progress_bar_config(disable=True)
    return pipe


def small_pipeline_with_hidden_states(folder: Path) -> Any:
    """Return a pipeline that conditions on hidden states of its text encoders."""
    torch.manual_seed(0)
    text = CLIPTextConfig(
        vocab_size=1000, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
        projection_dim=32, bos_token_id=0, eos_token_id=1, pad_token_id=1,
    )  # fmt: skip
    unet = UNet2DConditionModel(
        sample_size=32, block_out_channels=(32, 64), layers_per_block=1, cross_attention_dim=64, norm_num_groups=8,
        attention_head_dim=8, down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"), addition_embed_type="text_time",
        addition_time_embed_dim=8, projection_class_embeddings_input_dim=80,
    )  # fmt: skip
    pipe = StableDiffusionXLPipeline(
        vae=autoencoder(32), text_encoder=CLIPTextModel(text), text_encoder_2=CLIPTextModelWithProjection(text),
        tokenizer=tokenizer(folder), tokenizer_2=tokenizer(folder), unet=unet, add_watermarker=False,
        scheduler=DDIMScheduler(steps_offset=1, clip_sample=False),
    )  # fmt: skip
    pipe.set_progress_bar_config(disable=True)
    return pipe
