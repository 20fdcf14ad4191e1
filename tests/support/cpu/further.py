"""Families of transformers and diffusers beyond those of ``cpu_families``: hybrids, state spaces, sparse attention,
segmentation, time series, sound and diffusion transformers. Small, to be run for real on a CPU and predicted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from support.cpu.families import Pairs, causal, configurations, diffuser, masked, vision
from support.cpu.zoo import Build, hugging_face

_TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_WIDTH = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 1000, **_TOKENS}
_GROUPED = {**_WIDTH, "num_key_value_heads": 2, "intermediate_size": 128}
_SCAN = {"mamba_n_heads": 8, "mamba_d_state": 16, "mamba_chunk_size": 16}
_TOWER = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}

DECODERS: dict[str, Callable[[], nn.Module]] = {
    "bamba": causal("Bamba", **_GROUPED, **_SCAN, mamba_d_head=16, attn_layer_indices=[1]),
    "cohere2": causal("Cohere2", **_GROUPED, sliding_window=16),
    "deepseek-v2": causal("DeepseekV2", **_WIDTH, num_key_value_heads=4, intermediate_size=128, kv_lora_rank=16,
                          q_lora_rank=24, n_routed_experts=4, n_shared_experts=1, qk_nope_head_dim=16,
                          qk_rope_head_dim=8, v_head_dim=16, num_experts_per_tok=2, moe_intermediate_size=32,
                          first_k_dense_replace=1),
    "falcon-h1": causal("FalconH1", **_GROUPED, **_SCAN, mamba_d_ssm=128),
    "falcon-mamba": causal("FalconMamba", hidden_size=64, num_hidden_layers=2, vocab_size=1000, state_size=8),
    "minimax": causal("MiniMax", **_GROUPED, head_dim=16, block_size=16, num_local_experts=4),
    "nemotron": causal("Nemotron", **_GROUPED, head_dim=16),
    "persimmon": causal("Persimmon", **_WIDTH, intermediate_size=128),
    "qwen3-next": causal("Qwen3Next", **_GROUPED, head_dim=16, linear_key_head_dim=16, linear_value_head_dim=16,
                         linear_num_key_heads=2, linear_num_value_heads=4, moe_intermediate_size=32,
                         shared_expert_intermediate_size=32, num_experts=4, num_experts_per_tok=2,
                         layer_types=["linear_attention", "full_attention"]),
    "recurrent-gemma": causal("RecurrentGemma", **{**_GROUPED, "num_hidden_layers": 3}, lru_width=64,
                              attention_window_size=16),
    "zamba2": causal("Zamba2", **{**_WIDTH, "num_hidden_layers": 3}, mamba_d_state=16, n_mamba_heads=8,
                     layers_block_type=["mamba", "hybrid", "mamba"], intermediate_size=128, adapter_rank=8,
                     chunk_size=16, use_mamba_kernels=False),
}  # fmt: skip
ENCODERS: dict[str, Callable[[], nn.Module]] = {
    "bigbird": masked("BigBird", block_size=4, num_random_blocks=1),
    "funnel": hugging_face("FunnelForMaskedLM", "FunnelConfig", block_sizes=[1, 1], d_model=64, n_head=4, d_head=16,
                           d_inner=128, vocab_size=1000, num_decoder_layers=1),
    "longformer": masked("Longformer", attention_window=16, max_position_embeddings=130),
    "nystromformer": masked("Nystromformer", num_landmarks=8, conv_kernel_size=9, max_position_embeddings=130),
    "perceiver": hugging_face("PerceiverForMaskedLM", "PerceiverConfig", num_latents=16, d_latents=64, d_model=48,
                              num_self_attends_per_block=2, num_self_attention_heads=4, num_cross_attention_heads=4,
                              vocab_size=1000, max_position_embeddings=64, qk_channels=32, v_channels=64),
    "reformer": hugging_face("ReformerForMaskedLM", "ReformerConfig", attn_layers=["local", "lsh"], hidden_size=64,
                             attention_head_size=16, num_attention_heads=4, axial_pos_shape=[8, 8], vocab_size=1000,
                             axial_pos_embds_dim=[16, 48], local_attn_chunk_length=16, lsh_attn_chunk_length=16,
                             num_buckets=4, feed_forward_size=128, hash_seed=0),
    "roformer": masked("RoFormer", embedding_size=32),
}  # fmt: skip
IMAGES: dict[str, Callable[[], nn.Module]] = {
    "bit": vision("Bit", embedding_size=32, hidden_sizes=[32, 64, 96, 128], depths=[1, 1, 1, 1], num_groups=8),
    "cvt": vision("Cvt", embed_dim=[16, 32, 64], num_heads=[1, 2, 4], depth=[1, 2, 3]),
    "hiera": vision("Hiera", embed_dim=24, image_size=[64, 64], depths=[1, 1, 1, 1]),
    "levit": vision("Levit", image_size=64, hidden_sizes=[32, 48, 64], num_attention_heads=[2, 3, 4],
                    depths=[1, 1, 1], key_dim=[8, 8, 8]),
}  # fmt: skip
_speech = {**_TOWER, "conv_dim": [32] * 7, "vocab_size": 40, "num_conv_pos_embeddings": 16,
           "num_conv_pos_embedding_groups": 4, "mask_time_prob": 0.0, "layerdrop": 0.0}  # fmt: skip
_SERIES = {"prediction_length": 8, "context_length": 16, "num_time_features": 1, "encoder_layerdrop": 0.0,
           "decoder_layerdrop": 0.0, "lags_sequence": [1, 2, 3, 4, 5, 6, 7]}  # fmt: skip


def _pixels(batch: int = 2) -> dict[str, Any]:
    return {"pixel_values": torch.randn(batch, 3, 64, 64)}


def _series(features: int = 1) -> dict[str, Any]:
    past, future = 16 + 7, 8
    return {
        "past_values": torch.rand(4, past), "past_time_features": torch.rand(4, past, features),
        "past_observed_mask": torch.ones(4, past), "future_values": torch.rand(4, future),
        "future_time_features": torch.rand(4, future, features),
    }  # fmt: skip


def _episode() -> dict[str, Any]:
    return {
        "states": torch.randn(4, 16, 17), "actions": torch.randn(4, 16, 4), "rewards": torch.randn(4, 16, 1),
        "returns_to_go": torch.randn(4, 16, 1), "timesteps": torch.arange(16).repeat(4, 1),
        "attention_mask": torch.ones(4, 16),
    }  # fmt: skip


_sam = hugging_face(
    "SamModel", "SamConfig",
    vision_config={"hidden_size": 64, "output_channels": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
                   "image_size": 64, "patch_size": 8, "window_size": 4, "global_attn_indexes": [1],
                   "num_pos_feats": 16},
    prompt_encoder_config={"hidden_size": 32, "image_size": 64, "patch_size": 8, "mask_input_channels": 4},
    mask_decoder_config={"hidden_size": 32, "mlp_dim": 64, "num_attention_heads": 4, "iou_head_hidden_dim": 32},
)  # fmt: skip
_blip = hugging_face(
    "BlipForConditionalGeneration", "BlipConfig", projection_dim=32, image_text_hidden_size=32,
    text_config={**_TOWER, "vocab_size": 1000, "encoder_hidden_size": 64, "max_position_embeddings": 32,
                 "bos_token_id": 1, "sep_token_id": 2},
    vision_config={**_TOWER, "image_size": 64, "patch_size": 8},
)  # fmt: skip


def _words(batch: int = 2, tokens: int = 32) -> torch.Tensor:
    return torch.randint(3, 1000, (batch, tokens))


PAIRS: Pairs = {
    "ast": (
        hugging_face("ASTForAudioClassification", "ASTConfig", **_TOWER, max_length=64, num_mel_bins=32,
                     patch_size=8, frequency_stride=8, time_stride=8, num_labels=10),
        lambda: {"input_values": torch.randn(2, 64, 32), "labels": torch.tensor([1, 2])},
    ),
    "autoformer": (
        hugging_face("AutoformerForPrediction", "AutoformerConfig", **_SERIES, label_length=4, moving_average=5),
        _series,
    ),
    "bark": (
        hugging_face("BarkSemanticModel", "BarkSemanticConfig", input_vocab_size=1000, output_vocab_size=1000,
                     num_layers=2, num_heads=4, hidden_size=64, block_size=64),
        lambda: {"input_ids": _words()},
    ),
    "blip": (_blip, lambda: {**_pixels(), "input_ids": _words(2, 16), "labels": _words(2, 16)}),
    "decision-transformer": (
        hugging_face("DecisionTransformerModel", "DecisionTransformerConfig", hidden_size=64, n_layer=2, n_head=4),
        _episode,
    ),
    "dpt": (
        hugging_face("DPTForDepthEstimation", "DPTConfig", **{**_TOWER, "num_hidden_layers": 4}, image_size=64,
                     patch_size=8, backbone_out_indices=[0, 1, 2, 3], neck_hidden_sizes=[16, 24, 32, 48],
                     fusion_hidden_size=16),
        _pixels,
    ),
    "informer": (hugging_face("InformerForPrediction", "InformerConfig", **_SERIES), _series),
    "musicgen": (
        hugging_face("MusicgenForCausalLM", "MusicgenDecoderConfig", vocab_size=1000, num_hidden_layers=2,
                     ffn_dim=128, num_attention_heads=4, hidden_size=64, num_codebooks=2, pad_token_id=1000,
                     max_position_embeddings=64),
        lambda: {"input_ids": _words(4, 32), "labels": torch.randint(3, 1000, (2, 32, 2))},
    ),
    "patchtst": (
        hugging_face("PatchTSTForPrediction", "PatchTSTConfig", num_input_channels=3, context_length=32,
                     patch_length=4, patch_stride=4, num_hidden_layers=2, d_model=32, ffn_dim=64,
                     prediction_length=8),
        lambda: {"past_values": torch.randn(4, 32, 3), "future_values": torch.randn(4, 8, 3)},
    ),
    "sam": (_sam, lambda: {**_pixels(), "input_points": torch.rand(2, 1, 2, 2) * 64}),
    "speecht5": (
        hugging_face("SpeechT5ForSpeechToText", "SpeechT5Config", hidden_size=64, encoder_layers=2, decoder_layers=2,
                     encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=128, decoder_ffn_dim=128,
                     encoder_layerdrop=0.0, decoder_layerdrop=0.0, conv_dim=[32] * 7, mask_time_prob=0.0,
                     num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=4),
        lambda: {"input_values": torch.randn(2, 8000), "labels": torch.randint(3, 80, (2, 12))},
    ),
    "time-series": (
        hugging_face("TimeSeriesTransformerForPrediction", "TimeSeriesTransformerConfig", **_SERIES), _series,
    ),
    "vit-mae": (
        hugging_face("ViTMAEForPreTraining", "ViTMAEConfig", **_TOWER, image_size=64, patch_size=8,
                     decoder_num_attention_heads=4, decoder_hidden_size=32, decoder_num_hidden_layers=2,
                     decoder_intermediate_size=64),
        _pixels,
    ),
    "wav2vec2-conformer": (
        hugging_face("Wav2Vec2ConformerForCTC", "Wav2Vec2ConformerConfig", **_speech),
        lambda: {"input_values": torch.randn(2, 8000), "labels": torch.ones(2, 8, dtype=torch.int64)},
    ),
}  # fmt: skip


def _sd3(infer: bool) -> Build:
    return diffuser(
        "SD3Transformer2DModel",
        lambda: {"hidden_states": torch.randn(2, 4, 16, 16), "encoder_hidden_states": torch.randn(2, 8, 48),
                 "pooled_projections": torch.randn(2, 24), "timestep": torch.tensor([3, 7])},
        infer, sample_size=16, in_channels=4, out_channels=4, num_layers=2, attention_head_dim=16,
        num_attention_heads=4, joint_attention_dim=48, caption_projection_dim=64, pooled_projection_dim=24,
        pos_embed_max_size=16, qk_norm="rms_norm",
    )  # fmt: skip


def _flux(infer: bool) -> Build:
    return diffuser(
        "FluxTransformer2DModel",
        lambda: {"hidden_states": torch.randn(2, 64, 16), "encoder_hidden_states": torch.randn(2, 8, 48),
                 "pooled_projections": torch.randn(2, 24), "timestep": torch.tensor([0.3, 0.7]),
                 "img_ids": torch.zeros(64, 3), "txt_ids": torch.zeros(8, 3)},
        infer, in_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=4,
        joint_attention_dim=48, pooled_projection_dim=24, axes_dims_rope=(4, 6, 6),
    )  # fmt: skip


def _vq(infer: bool) -> Build:
    return diffuser(
        "VQModel", lambda: {"sample": torch.randn(2, 3, 32, 32)}, infer, block_out_channels=(32, 64),
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2, norm_num_groups=8,
        num_vq_embeddings=64,
    )  # fmt: skip


def _unet_3d(infer: bool) -> Build:
    return diffuser(
        "UNet3DConditionModel",
        lambda: {"sample": torch.randn(1, 4, 4, 16, 16), "timestep": torch.tensor([3]),
                 "encoder_hidden_states": torch.randn(1, 8, 32)},
        infer, sample_size=16, block_out_channels=(32, 64), layers_per_block=1, cross_attention_dim=32,
        down_block_types=("CrossAttnDownBlock3D", "DownBlock3D"), up_block_types=("UpBlock3D", "CrossAttnUpBlock3D"),
        attention_head_dim=8, norm_num_groups=8,
    )  # fmt: skip


_DIFFUSERS = {"flux": _flux, "sd3": _sd3, "unet-3d": _unet_3d, "vq": _vq}
CONFIGURATIONS: dict[str, Build] = dict(configurations(DECODERS, ENCODERS, IMAGES, PAIRS, _DIFFUSERS))
