"""Further families of transformers and diffusers, small, to be run for real on a CPU and predicted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from support.cpu.zoo import Build, Step, hugging_face, image, stepper, text

_TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_WIDTH = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 1000, **_TOKENS}
_GROUPED = {**_WIDTH, "num_key_value_heads": 2, "intermediate_size": 128}
_BOTH = {
    "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "vocab_size": 1000, **_TOKENS,
}  # fmt: skip


def causal(family: str, **values: Any) -> Callable[[], nn.Module]:
    return hugging_face(f"{family}ForCausalLM", f"{family}Config", **values)


def masked(family: str, **values: Any) -> Callable[[], nn.Module]:
    return hugging_face(f"{family}ForMaskedLM", f"{family}Config", **{**_WIDTH, "intermediate_size": 128, **values})


def vision(family: str, **values: Any) -> Callable[[], nn.Module]:
    return hugging_face(f"{family}ForImageClassification", f"{family}Config", num_labels=10, **values)


DECODERS: dict[str, Callable[[], nn.Module]] = {
    "bloom": causal("Bloom", hidden_size=64, n_layer=2, n_head=4, vocab_size=1000),
    "cohere": causal("Cohere", **_GROUPED),
    "falcon": causal("Falcon", **_WIDTH, alibi=False),
    "gemma2": causal("Gemma2", **_GROUPED, head_dim=16, query_pre_attn_scalar=16),
    "gemma3": hugging_face("Gemma3ForCausalLM", "Gemma3TextConfig", **_GROUPED, head_dim=16,
                           query_pre_attn_scalar=16),
    "gpt-neox": causal("GPTNeoX", **_WIDTH, intermediate_size=128),
    "gpt-oss": causal("GptOss", **_GROUPED, head_dim=16, num_local_experts=4, num_experts_per_tok=2),
    "gptj": causal("GPTJ", n_embd=64, n_layer=2, n_head=4, vocab_size=1000, rotary_dim=16),
    "granite-moe": causal("GraniteMoe", **_GROUPED, num_local_experts=4, num_experts_per_tok=2),
    "jamba": causal("Jamba", **_GROUPED, num_experts=4, mamba_d_state=8, mamba_dt_rank=4, attn_layer_period=2,
                    attn_layer_offset=1, use_mamba_kernels=False),
    "lfm2": causal("Lfm2", **_GROUPED, layer_types=["conv", "full_attention"]),
    "mamba2": causal("Mamba2", hidden_size=64, num_hidden_layers=2, vocab_size=1000, state_size=16, num_heads=8,
                     head_dim=16, n_groups=1, expand=2, chunk_size=16),
    "mixtral": causal("Mixtral", **_GROUPED, num_local_experts=4, num_experts_per_tok=2),
    "mpt": causal("Mpt", d_model=64, n_heads=4, n_layers=2, vocab_size=1000),
    "olmo2": causal("Olmo2", **_GROUPED),
    "olmoe": causal("Olmoe", **_GROUPED, num_experts=8, num_experts_per_tok=2),
    "opt": causal("OPT", hidden_size=64, ffn_dim=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=1000,
                  word_embed_proj_dim=64, max_position_embeddings=128),
    "phi3": causal("Phi3", **_GROUPED),
    "stablelm": causal("StableLm", **_GROUPED),
    "starcoder2": causal("Starcoder2", **_GROUPED),
    "xlnet": hugging_face("XLNetLMHeadModel", "XLNetConfig", d_model=64, n_layer=2, n_head=4, d_inner=128,
                          vocab_size=1000),
}  # fmt: skip
ENCODERS: dict[str, Callable[[], nn.Module]] = {
    "albert": masked("Albert", embedding_size=32),
    "deberta": masked("DebertaV2", relative_attention=True, pos_att_type=["p2c", "c2p"]),
    "distilbert": hugging_face("DistilBertForMaskedLM", "DistilBertConfig", dim=64, n_layers=2, n_heads=4,
                               hidden_dim=128, vocab_size=1000),
    "electra": masked("Electra", embedding_size=32),
    "fnet": masked("FNet"),
    "modernbert": masked("ModernBert", local_attention=16),
    "roberta": masked("Roberta", max_position_embeddings=130),
}  # fmt: skip
BOTH: dict[str, Callable[[], nn.Module]] = {
    "bart": hugging_face("BartForConditionalGeneration", "BartConfig", **_BOTH, decoder_start_token_id=2,
                         max_position_embeddings=128),
    "marian": hugging_face("MarianMTModel", "MarianConfig", **_BOTH, decoder_start_token_id=2,
                           max_position_embeddings=128),
    "pegasus": hugging_face("PegasusForConditionalGeneration", "PegasusConfig", **_BOTH, decoder_start_token_id=0,
                            max_position_embeddings=128),
}  # fmt: skip
_STAGES = {"hidden_sizes": [16, 32, 64, 96], "depths": [1, 1, 1, 1]}
_VIT = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128,
        "image_size": 64, "patch_size": 8}  # fmt: skip
IMAGES: dict[str, Callable[[], nn.Module]] = {
    "beit": vision("Beit", **_VIT),
    "convnextv2": vision("ConvNextV2", **_STAGES, image_size=64),
    "deit": vision("DeiT", **_VIT),
    "dinov2": vision("Dinov2", hidden_size=64, num_hidden_layers=2, num_attention_heads=4, image_size=64,
                     patch_size=8),
    "efficientnet": vision("EfficientNet", image_size=64, width_coefficient=0.25, depth_coefficient=0.3,
                           hidden_dim=320),
    "mobilenet-v1": vision("MobileNetV1", image_size=64, depth_multiplier=0.25),
    "mobilenet-v2": vision("MobileNetV2", image_size=64, depth_multiplier=0.35),
    "mobilevit": vision("MobileViT", image_size=64, hidden_sizes=[32, 48, 64],
                        neck_hidden_sizes=[8, 16, 24, 32, 48, 64, 96], num_attention_heads=4),
    "poolformer": vision("PoolFormer", **_STAGES),
    "pvt": vision("Pvt", image_size=64, hidden_sizes=[16, 32, 64, 96], depths=[1, 1, 1, 1],
                  num_attention_heads=[1, 2, 4, 4]),
    "regnet": vision("RegNet", embedding_size=16, hidden_sizes=[16, 32, 64, 96], depths=[1, 1, 1, 1], groups_width=8),
    "segformer": vision("Segformer", hidden_sizes=[16, 32, 64, 96], depths=[1, 1, 1, 1],
                        num_attention_heads=[1, 2, 4, 4]),
    "swin": vision("Swin", image_size=64, patch_size=4, embed_dim=24, depths=[2, 2], num_heads=[2, 4], window_size=4),
    "swinv2": vision("Swinv2", image_size=64, patch_size=4, embed_dim=24, depths=[2, 2], num_heads=[2, 4],
                     window_size=4),
}  # fmt: skip


def pair(make: Callable[[], nn.Module], inputs: Callable[[], dict[str, Any]], *, infer: bool = False) -> Build:
    """A model whose outputs hold a loss, on inputs of its own kind."""

    def build() -> Step:
        model, given = make().train(), inputs()

        def loss() -> torch.Tensor:
            out = model(**given)
            value = getattr(out, "loss", None)
            return out[0].float().mean() if value is None else value

        return stepper(model, loss, "adamw", None, infer)

    return build


def _words(batch: int = 2, tokens: int = 32) -> torch.Tensor:
    return torch.randint(3, 1000, (batch, tokens))


def _clip_inputs() -> dict[str, Any]:
    return {"input_ids": _words(4, 16), "pixel_values": torch.randn(4, 3, 64, 64), "return_loss": True}


_TOWER = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
_clip = hugging_face(
    "CLIPModel", "CLIPConfig", projection_dim=32,
    text_config={**_TOWER, "vocab_size": 1000, "max_position_embeddings": 32, "eos_token_id": 2},
    vision_config={**_TOWER, "image_size": 64, "patch_size": 8},
)  # fmt: skip
_siglip = hugging_face(
    "SiglipModel", "SiglipConfig",
    text_config={**_TOWER, "vocab_size": 1000, "max_position_embeddings": 32},
    vision_config={**_TOWER, "image_size": 64, "patch_size": 8},
)  # fmt: skip
_speech = {**_TOWER, "conv_dim": [32] * 7, "vocab_size": 40, "num_conv_pos_embeddings": 16,
           "num_conv_pos_embedding_groups": 4, "mask_time_prob": 0.0, "layerdrop": 0.0}  # fmt: skip
_wav2vec2 = hugging_face("Wav2Vec2ForCTC", "Wav2Vec2Config", **_speech)
_hubert = hugging_face("HubertForCTC", "HubertConfig", **_speech)
_qwen2_vl = hugging_face(
    "Qwen2VLTextModel",
    "Qwen2VLTextConfig",
    **_GROUPED,
    rope_parameters={"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]},
)
_segmenter = hugging_face(
    "SegformerForSemanticSegmentation", "SegformerConfig", hidden_sizes=[16, 32, 64, 96], depths=[1, 1, 1, 1],
    num_attention_heads=[1, 2, 4, 4], decoder_hidden_size=64, num_labels=10,
)  # fmt: skip


def _sound() -> dict[str, Any]:
    return {"input_values": torch.randn(2, 8000), "labels": torch.ones(2, 8, dtype=torch.int64)}


def _detr() -> nn.Module:
    from transformers import DetrConfig, DetrForObjectDetection, ResNetConfig

    backbone = ResNetConfig(embedding_size=16, hidden_sizes=[16, 32, 64, 64], depths=[1, 1, 1, 1],
                            out_features=["stage4"])  # fmt: skip
    both = {name: value for name, value in _BOTH.items() if name not in ("vocab_size", *_TOKENS)}
    made: nn.Module = DetrForObjectDetection(
        DetrConfig(use_timm_backbone=False, backbone_config=backbone, backbone=None, num_queries=10, **both)
    )
    return made


def diffuser(kind: str, shapes: Callable[[], dict[str, Any]], infer: bool, **values: Any) -> Build:
    def build() -> Step:
        import diffusers

        model, given = getattr(diffusers, kind)(**values).train(), shapes()

        def loss() -> torch.Tensor:
            made: torch.Tensor = model(**given, return_dict=False)[0]
            return made.float().pow(2).mean()

        return stepper(model, loss, "adamw", None, infer)

    return build


def _latents(channels: int = 4, size: int = 16) -> torch.Tensor:
    return torch.randn(2, channels, size, size)


def _conditioned(infer: bool) -> Build:
    return diffuser(
        "UNet2DConditionModel",
        lambda: {"sample": _latents(), "timestep": torch.tensor([3, 7]),
                 "encoder_hidden_states": torch.randn(2, 8, 32)},
        infer, sample_size=16, block_out_channels=(32, 64), layers_per_block=1, cross_attention_dim=32,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        attention_head_dim=4,
    )  # fmt: skip


def _autoencoder(infer: bool) -> Build:
    return diffuser(
        "AutoencoderKL", lambda: {"sample": torch.randn(2, 3, 32, 32)}, infer, block_out_channels=(32, 64),
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2, norm_num_groups=8,
    )  # fmt: skip


def _transformer_2d(infer: bool) -> Build:
    return diffuser(
        "DiTTransformer2DModel",
        lambda: {"hidden_states": _latents(), "timestep": torch.tensor([3, 7]), "class_labels": torch.tensor([1, 2])},
        infer, num_attention_heads=4, attention_head_dim=16, in_channels=4, out_channels=4, num_layers=2,
        sample_size=16, norm_num_groups=4, dropout=0.1,
    )  # fmt: skip


Family = Callable[[], nn.Module]
Pairs = dict[str, tuple[Family, Callable[[], dict[str, Any]]]]

PAIRS: Pairs = {
    "clip": (_clip, _clip_inputs),
    "detr": (_detr, lambda: {"pixel_values": torch.randn(2, 3, 64, 64)}),
    "hubert": (_hubert, _sound),
    "qwen2-vl-text": (_qwen2_vl, lambda: {"input_ids": _words()}),
    "segformer-masks": (_segmenter, lambda: {"pixel_values": torch.randn(2, 3, 64, 64),
                                             "labels": torch.randint(0, 10, (2, 64, 64))}),
    "siglip": (_siglip, _clip_inputs),
    "wav2vec2": (_wav2vec2, _sound),
}  # fmt: skip


def configurations(
    decoders: dict[str, Family],
    encoders: dict[str, Family],
    images: dict[str, Family],
    pairs: Pairs,
    diffusers: dict[str, Callable[[bool], Build]],
) -> Iterator[tuple[str, Build]]:
    """A step of training and one of inference for every family, by name."""
    for name, make in decoders.items():
        yield name, text(make, 2, 32)
        yield f"{name}-inference", text(make, 2, 32, infer=True)
    for name, make in encoders.items():
        yield name, text(make, 2, 64)
        yield f"{name}-inference", text(make, 2, 64, infer=True)
    for name, make in images.items():
        yield name, image(make, (2, 3, 64, 64))
        yield f"{name}-inference", image(make, (2, 3, 64, 64), infer=True)
    for name, (make, inputs) in pairs.items():
        yield name, pair(make, inputs)
        yield f"{name}-inference", pair(make, inputs, infer=True)
    for name, made in diffusers.items():
        yield name, made(False)
        yield f"{name}-inference", made(True)


def _both() -> Iterator[tuple[str, Build]]:
    for name, make in BOTH.items():
        yield name, text(make, 2, 32)
        yield f"{name}-inference", pair(make, lambda: {"input_ids": _words(), "labels": _words()}, infer=True)


_DIFFUSERS = {"unet-conditioned": _conditioned, "vae": _autoencoder, "dit": _transformer_2d}
CONFIGURATIONS: dict[str, Build] = dict(_both()) | dict(configurations(DECODERS, ENCODERS, IMAGES, PAIRS, _DIFFUSERS))
