"""Models of images, speech and text together, from configuration classes of transformers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from support.ordinary import Step, program

_SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}


def _trained(model: nn.Module, lr: float = 5e-5, **inputs: Any) -> Step:
    model.cuda().train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)

    def step() -> None:
        moved = {name: value.cuda() if isinstance(value, torch.Tensor) else value for name, value in inputs.items()}
        loss = model(**moved).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def _ids(batch: int = 2, length: int = 24, words: int = 200) -> torch.Tensor:
    return torch.arange(batch * length).view(batch, length) % words + 10


@program(asks=True)
def llava_with_an_image_each() -> Step:
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    config = LlavaConfig(
        vision_config=CLIPVisionConfig(image_size=32, patch_size=8, **_SMALL),
        text_config=LlamaConfig(vocab_size=300, num_key_value_heads=2, **_SMALL),
        image_token_index=299, vision_feature_layer=-1,
    )  # fmt: skip
    ids = torch.cat((torch.full((2, 16), 299), _ids()), 1)
    mask = torch.ones_like(ids)
    mask[1, -5:] = 0
    labels = ids.masked_fill((ids == 299) | (mask == 0), -100)
    model = LlavaForConditionalGeneration(config)
    return _trained(model, input_ids=ids, attention_mask=mask, pixel_values=torch.randn(2, 3, 32, 32), labels=labels)


@program(asks=True)
def qwen2_vl_with_images_of_several_sizes() -> Step:
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    config = Qwen2VLConfig(
        vision_config={"depth": 2, "embed_dim": 64, "hidden_size": 64, "num_heads": 4, "mlp_ratio": 2,
                       "patch_size": 8},
        text_config={"vocab_size": 300, "num_key_value_heads": 2, **_SMALL,
                     "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}},
        image_token_id=297, video_token_id=298, vision_start_token_id=295, vision_end_token_id=296,
    )  # fmt: skip
    grids = torch.tensor([[1, 8, 8], [1, 4, 8]])
    rows = []
    for t, h, w in grids.tolist():
        count = t * h * w // 4
        rows.append(torch.cat((torch.tensor([295]), torch.full((count,), 297), torch.tensor([296]), _ids(1)[0])))
    ids = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=0)
    mask = nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    pixels = torch.randn(int(grids.prod(-1).sum()), 3 * 2 * 8 * 8)
    labels = ids.masked_fill((ids >= 295) | (mask == 0), -100)
    model = Qwen2VLForConditionalGeneration(config)
    return _trained(
        model, input_ids=ids, attention_mask=mask, pixel_values=pixels, image_grid_thw=grids, labels=labels,
        mm_token_type_ids=(ids == 297).int(),
    )  # fmt: skip


@program
def siglip_contrastive() -> Step:
    from transformers import SiglipConfig, SiglipModel

    model = SiglipModel(SiglipConfig(
        text_config={"vocab_size": 300, "max_position_embeddings": 24, **_SMALL},
        vision_config={"image_size": 32, "patch_size": 8, **_SMALL},
    ))  # fmt: skip
    return _trained(model, input_ids=_ids(), pixel_values=torch.randn(2, 3, 32, 32), return_loss=True)


@program
def blip_captions() -> Step:
    from transformers import BlipConfig, BlipForConditionalGeneration

    model = BlipForConditionalGeneration(BlipConfig(
        text_config={"vocab_size": 300, "bos_token_id": 1, "sep_token_id": 2, "pad_token_id": 0, "hidden_size": 64,
                     "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128,
                     "encoder_hidden_size": 64},
        vision_config={"image_size": 32, "patch_size": 8, **_SMALL},
    ))  # fmt: skip
    ids = _ids()
    return _trained(model, input_ids=ids, pixel_values=torch.randn(2, 3, 32, 32), labels=ids)


@program(asks=True)
def pali_gemma_answers() -> Step:
    from transformers import GemmaConfig, PaliGemmaConfig, PaliGemmaForConditionalGeneration, SiglipVisionConfig

    config = PaliGemmaConfig(
        vision_config=SiglipVisionConfig(image_size=32, patch_size=8, projection_dim=64, **_SMALL).to_dict(),
        text_config=GemmaConfig(vocab_size=300, num_key_value_heads=1, head_dim=16, **_SMALL).to_dict(),
        image_token_index=299, projection_dim=64, hidden_size=64,
    )  # fmt: skip
    ids = torch.cat((torch.full((2, 16), 299), _ids()), 1)
    kinds = torch.zeros_like(ids)
    kinds[:, 28:] = 1
    return _trained(
        PaliGemmaForConditionalGeneration(config), input_ids=ids, attention_mask=torch.ones_like(ids),
        token_type_ids=kinds, pixel_values=torch.randn(2, 3, 32, 32), labels=ids.masked_fill(kinds == 0, -100),
    )  # fmt: skip


@program
def segformer_segmentation() -> Step:
    from transformers import SegformerConfig, SegformerForSemanticSegmentation

    model = SegformerForSemanticSegmentation(SegformerConfig(
        hidden_sizes=[16, 32, 48, 64], depths=[1, 1, 1, 1], num_attention_heads=[1, 2, 3, 4], decoder_hidden_size=64,
        num_labels=5,
    ))  # fmt: skip
    labels = torch.arange(2 * 64 * 64).view(2, 64, 64) % 5
    labels[:, :4] = 255
    return _trained(model, pixel_values=torch.randn(2, 3, 64, 64), labels=labels)


@program(asks=True)
def masked_autoencoder_of_transformers() -> Step:
    from transformers import ViTMAEConfig, ViTMAEForPreTraining

    model = ViTMAEForPreTraining(ViTMAEConfig(
        image_size=32, patch_size=8, decoder_hidden_size=32, decoder_num_hidden_layers=1,
        decoder_num_attention_heads=4, decoder_intermediate_size=64, **_SMALL,
    ))  # fmt: skip
    return _trained(model, pixel_values=torch.randn(4, 3, 32, 32))


@program
def swin_classifier() -> Step:
    from transformers import SwinConfig, SwinForImageClassification

    model = SwinForImageClassification(SwinConfig(
        image_size=64, patch_size=4, embed_dim=24, depths=[2, 2], num_heads=[2, 4], window_size=4, num_labels=10,
    ))  # fmt: skip
    return _trained(model, pixel_values=torch.randn(4, 3, 64, 64), labels=torch.arange(4))


@program
def convnext_classifier() -> Step:
    from transformers import ConvNextConfig, ConvNextForImageClassification

    model = ConvNextForImageClassification(ConvNextConfig(
        hidden_sizes=[16, 32, 48, 64], depths=[1, 1, 2, 1], image_size=64, num_labels=10,
    ))  # fmt: skip
    return _trained(model, pixel_values=torch.randn(4, 3, 64, 64), labels=torch.arange(4))


@program(asks=True)
def hubert_ctc() -> Step:
    from transformers import HubertConfig, HubertForCTC

    model = HubertForCTC(HubertConfig(
        vocab_size=32, num_conv_pos_embeddings=16, conv_dim=(32,) * 7, mask_time_length=2, **_SMALL,
    ))  # fmt: skip
    mask = torch.ones(2, 8000, dtype=torch.long)
    mask[1, 6000:] = 0
    labels = torch.arange(20).view(2, 10) % 29 + 1
    labels[1, 7:] = -100
    return _trained(model, input_values=torch.randn(2, 8000), attention_mask=mask, labels=labels)


@program(asks=True)
def wav2vec2_pretraining() -> Step:
    from transformers import Wav2Vec2Config, Wav2Vec2ForPreTraining
    from transformers.models.wav2vec2.modeling_wav2vec2 import _compute_mask_indices, _sample_negative_indices

    config = Wav2Vec2Config(
        num_conv_pos_embeddings=16, conv_dim=(32,) * 7, codevector_dim=32, proj_codevector_dim=32,
        num_codevectors_per_group=16, num_negatives=10, mask_time_length=2, **_SMALL,
    )  # fmt: skip
    model = Wav2Vec2ForPreTraining(config)
    length = int(model._get_feat_extract_output_lengths(8000))
    mask = _compute_mask_indices((2, length), mask_prob=0.2, mask_length=2)
    negatives = _sample_negative_indices((2, length), 10, mask_time_indices=mask)
    return _trained(
        model, input_values=torch.randn(2, 8000), mask_time_indices=torch.tensor(mask, dtype=torch.long),
        sampled_negative_indices=torch.tensor(negatives, dtype=torch.long),
    )  # fmt: skip


@program
def audio_spectrogram_classifier() -> Step:
    from transformers import ASTConfig, ASTForAudioClassification

    model = ASTForAudioClassification(ASTConfig(num_labels=10, max_length=128, num_mel_bins=64, **_SMALL))
    return _trained(model, input_values=torch.randn(4, 128, 64), labels=torch.arange(4))


@program
def layout_of_documents() -> Step:
    from transformers import LayoutLMConfig, LayoutLMForTokenClassification

    model = LayoutLMForTokenClassification(LayoutLMConfig(vocab_size=300, num_labels=7, **_SMALL))
    boxes = torch.tensor([10, 20, 110, 40]).repeat(2, 24, 1)
    return _trained(model, input_ids=_ids(), bbox=boxes, labels=_ids() % 7)


@program
def vision_encoder_decoder_captions() -> Step:
    from transformers import GPT2Config, VisionEncoderDecoderConfig, VisionEncoderDecoderModel, ViTConfig

    decoder = GPT2Config(vocab_size=300, n_embd=64, n_layer=2, n_head=4, add_cross_attention=True, is_decoder=True)
    config = VisionEncoderDecoderConfig.from_encoder_decoder_configs(
        ViTConfig(image_size=32, patch_size=8, **_SMALL), decoder
    )
    config.decoder_start_token_id, config.pad_token_id = 1, 0
    model = VisionEncoderDecoderModel(config=config)
    labels = _ids()
    labels[1, -4:] = -100
    return _trained(model, pixel_values=torch.randn(2, 3, 32, 32), labels=labels)


@program
def time_series_of_patches() -> Step:
    from transformers import PatchTSTConfig, PatchTSTForPrediction

    model = PatchTSTForPrediction(PatchTSTConfig(
        num_input_channels=3, context_length=64, patch_length=8, stride=8, prediction_length=16, d_model=64,
        num_hidden_layers=2, num_attention_heads=4, ffn_dim=128,
    ))  # fmt: skip
    return _trained(model, past_values=torch.randn(4, 64, 3), future_values=torch.randn(4, 16, 3))


@program
def mamba_language_model() -> Step:
    from transformers import MambaConfig, MambaForCausalLM

    model = MambaForCausalLM(MambaConfig(vocab_size=300, hidden_size=64, state_size=8, num_hidden_layers=2))
    return _trained(model, input_ids=_ids(), labels=_ids())


@program(asks=True)
def deberta_classifier() -> Step:
    from transformers import DebertaV2Config, DebertaV2ForSequenceClassification

    model = DebertaV2ForSequenceClassification(DebertaV2Config(
        vocab_size=300, relative_attention=True, pos_att_type=["p2c", "c2p"], position_buckets=16, **_SMALL,
    ))  # fmt: skip
    mask = torch.ones(2, 24, dtype=torch.long)
    mask[1, 20:] = 0
    return _trained(model, input_ids=_ids(), attention_mask=mask, labels=torch.tensor([0, 1]))


@program
def gemma_with_sliding_windows() -> Step:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    model = Gemma2ForCausalLM(Gemma2Config(
        vocab_size=300, num_key_value_heads=2, head_dim=16, sliding_window=8, **_SMALL,
    ))  # fmt: skip
    return _trained(model.to(torch.bfloat16), input_ids=_ids(), labels=_ids())


@program(asks=True)
def qwen_of_experts() -> Step:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(
        vocab_size=300, num_key_value_heads=2, head_dim=16, num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=64, output_router_logits=True, **_SMALL,
    ))  # fmt: skip
    return _trained(model, input_ids=_ids(), labels=_ids())
