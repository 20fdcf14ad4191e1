"""Pipelines of diffusers with random weights: SDXL, FLUX.1-dev and Wan 2.1 1.3B, all or a share as wide.

Sizes are from the ``config.json`` files of stabilityai/stable-diffusion-xl-base-1.0, black-forest-labs/FLUX.1-dev and
Wan-AI/Wan2.1-T2V-1.3B-Diffusers on the Hugging Face hub. Tokenizers know three words.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    AutoencoderKLWan,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
    UniPCMultistepScheduler,
    WanPipeline,
    WanTransformer3DModel,
)
from transformers import (  # type: ignore[attr-defined]
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    T5Config,
    T5EncoderModel,
    T5TokenizerFast,
    UMT5Config,
    UMT5EncoderModel,
)

Call = dict[str, Any]


def _scheduler(kind: Any, **settings: Any) -> Any:
    with torch.device("cpu"):  # it computes with values, also for models on the meta device
        return kind(**settings)


def _clip_tokenizer() -> Any:
    with tempfile.TemporaryDirectory() as folder:
        vocabulary, merges = Path(folder, "vocab.json"), Path(folder, "merges.txt")
        vocabulary.write_text(json.dumps({"<|startoftext|>": 0, "<|endoftext|>": 1, "a</w>": 2}))
        merges.write_text("#version: 0.2\n")
        return CLIPTokenizer(str(vocabulary), str(merges), model_max_length=77)


def _t5_tokenizer() -> Any:
    return T5TokenizerFast(vocab=[("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁a", -1.0)], extra_ids=0)


def _clip(kind: Any, width: int, *, hidden: int, layers: int, heads: int, projection: int) -> Any:
    return kind(CLIPTextConfig(
        vocab_size=49408, hidden_size=hidden // width, intermediate_size=4 * hidden // width,
        num_hidden_layers=layers, num_attention_heads=heads // width, projection_dim=projection // width,
        bos_token_id=0, eos_token_id=1, pad_token_id=1, hidden_act="quick_gelu",
    ))  # fmt: skip


def _t5(kind: Any, config: Any, width: int, vocabulary: int) -> Any:
    return kind(config(
        vocab_size=vocabulary, d_model=4096 // width, d_ff=10240 // width, num_layers=24, num_heads=64 // width,
        d_kv=64, feed_forward_proj="gated-gelu",
    ))  # fmt: skip


def _decoder(width: int, **settings: Any) -> Any:
    return AutoencoderKL(
        block_out_channels=tuple(channels // width for channels in (128, 256, 512, 512)), layers_per_block=2,
        down_block_types=("DownEncoderBlock2D",) * 4, up_block_types=("UpDecoderBlock2D",) * 4,
        norm_num_groups=32 // width, sample_size=1024, **settings,
    )  # fmt: skip


def sdxl(width: int = 1) -> Any:
    """Stable Diffusion XL: two text encoders, a UNet, a decoder."""
    unet = UNet2DConditionModel(
        sample_size=128, block_out_channels=(320 // width, 640 // width, 1280 // width), layers_per_block=2,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"), norm_num_groups=32 // width,
        transformer_layers_per_block=(1, 2, 10), attention_head_dim=tuple(max(1, n // width) for n in (5, 10, 20)),
        cross_attention_dim=2048 // width, addition_embed_type="text_time", addition_time_embed_dim=256 // width,
        projection_class_embeddings_input_dim=2816 // width, use_linear_projection=True,
    )  # fmt: skip
    return StableDiffusionXLPipeline(
        vae=_decoder(width, latent_channels=4, scaling_factor=0.13025, force_upcast=False),
        text_encoder=_clip(CLIPTextModel, width, hidden=768, layers=12, heads=12, projection=768),
        text_encoder_2=_clip(CLIPTextModelWithProjection, width, hidden=1280, layers=32, heads=20, projection=1280),
        tokenizer=_clip_tokenizer(), tokenizer_2=_clip_tokenizer(), unet=unet, add_watermarker=False,
        scheduler=_scheduler(EulerDiscreteScheduler, beta_start=0.00085, beta_end=0.012,
                             beta_schedule="scaled_linear"),
    )  # fmt: skip


def flux(width: int = 1) -> Any:
    """FLUX.1-dev: two text encoders, a transformer with double and single blocks, a decoder."""
    transformer = FluxTransformer2DModel(
        in_channels=64, num_layers=19, num_single_layers=38, attention_head_dim=128, num_attention_heads=24 // width,
        joint_attention_dim=4096 // width, pooled_projection_dim=768 // width, guidance_embeds=True,
    )  # fmt: skip
    return FluxPipeline(
        vae=_decoder(width, latent_channels=16, scaling_factor=0.3611, shift_factor=0.1159,
                     use_quant_conv=False, use_post_quant_conv=False),
        text_encoder=_clip(CLIPTextModel, width, hidden=768, layers=12, heads=12, projection=768),
        text_encoder_2=_t5(T5EncoderModel, T5Config, width, 32128), transformer=transformer,
        tokenizer=_clip_tokenizer(), tokenizer_2=_t5_tokenizer(),
        scheduler=_scheduler(FlowMatchEulerDiscreteScheduler, shift=3.0),
    )  # fmt: skip


def wan(width: int = 1) -> Any:
    """Wan 2.1 text to video, 1.3B: one text encoder, a transformer, a decoder of videos."""
    transformer = WanTransformer3DModel(
        num_attention_heads=12 // width, attention_head_dim=128, ffn_dim=8960 // width, num_layers=30, freq_dim=256,
        text_dim=4096 // width, in_channels=16, out_channels=16,
    )  # fmt: skip
    return WanPipeline(
        vae=AutoencoderKLWan(base_dim=96 // width), transformer=transformer, tokenizer=_t5_tokenizer(),
        text_encoder=_t5(UMT5EncoderModel, UMT5Config, width, 256384 // width),
        scheduler=_scheduler(UniPCMultistepScheduler, prediction_type="flow_prediction", use_flow_sigmas=True,
                             flow_shift=3.0),
    )  # fmt: skip


PIPELINES: dict[str, Callable[[int], Any]] = {"sdxl": sdxl, "flux": flux, "wan": wan}
CALLS: dict[str, Call] = {
    "sdxl": {"prompt": "a", "height": 1024, "width": 1024},
    "flux": {"prompt": "a", "height": 1024, "width": 1024},
    "wan": {"prompt": "a", "height": 480, "width": 832, "num_frames": 81},
}
SMALL_CALLS: dict[str, Call] = {
    "sdxl": {"prompt": "a", "height": 128, "width": 128},
    "flux": {"prompt": "a", "height": 128, "width": 128, "max_sequence_length": 64},
    "wan": {"prompt": "a", "height": 64, "width": 64, "num_frames": 5, "max_sequence_length": 64},
}


def weights_bytes(pipe: Any) -> int:
    """Bytes of the parameters and buffers of all models of the pipeline."""
    parts = [part for part in pipe.components.values() if isinstance(part, torch.nn.Module)]
    return sum(tensor.nbytes for part in parts for tensor in (*part.parameters(), *part.buffers()))
