"""Models, trainers and adapters of transformers and PEFT, as their documentation calls them."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from support.ordinary import Step, program

_SMALL = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 256}


def _trained(model: nn.Module, **inputs: Any) -> Step:
    model.cuda().train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-5)

    def step() -> None:
        loss = model(**{name: value.cuda() for name, value in inputs.items()}).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert loss.item() == loss.item()

    return step


def _padded(batch: int = 4, length: int = 32, words: int = 900) -> dict[str, torch.Tensor]:
    ids = torch.arange(batch * length).view(batch, length) % (words - 10) + 5
    mask = torch.ones_like(ids)
    for row in range(batch):
        mask[row, length - 5 * row :] = 0
    return {"input_ids": ids, "attention_mask": mask}


def _llama(**more: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(vocab_size=900, num_key_value_heads=2, **_SMALL, **more))


@program
def bert_classifier_with_padding() -> Step:
    from transformers import BertConfig, BertForSequenceClassification

    model = BertForSequenceClassification(BertConfig(vocab_size=900, **_SMALL))
    return _trained(model, **_padded(), labels=torch.tensor([0, 1, 0, 1]))


@program
def bert_masked_lm() -> Step:
    from transformers import BertConfig, BertForMaskedLM

    inputs = _padded()
    labels = inputs["input_ids"].clone()
    labels[torch.rand(labels.shape) > 0.15] = -100
    return _trained(BertForMaskedLM(BertConfig(vocab_size=900, **_SMALL)), **inputs, labels=labels)


@program
def token_tagger() -> Step:
    from transformers import RobertaConfig, RobertaForTokenClassification

    model = RobertaForTokenClassification(RobertaConfig(vocab_size=900, num_labels=9, **_SMALL))
    inputs = _padded()
    return _trained(model, **inputs, labels=inputs["input_ids"] % 9)


@program
def llama_with_padding() -> Step:
    inputs = _padded()
    return _trained(_llama(), **inputs, labels=inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100))


@program
def llama_resized_embeddings() -> Step:
    model = _llama()
    model.resize_token_embeddings(905)
    inputs = _padded()
    return _trained(model, **inputs, labels=inputs["input_ids"])


@program
def llama_with_gradient_checkpointing() -> Step:
    model = _llama()
    model.gradient_checkpointing_enable()
    inputs = _padded()
    return _trained(model, **inputs, labels=inputs["input_ids"])


@program
def t5_summaries() -> Step:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 128, "d_kv": 32, "d_ff": 256, "num_layers": 2, "num_heads": 4}
    config = T5Config(vocab_size=900, pad_token_id=0, **sizes)
    config.decoder_start_token_id = 0
    model = T5ForConditionalGeneration(config)
    inputs = _padded()
    return _trained(model, **inputs, labels=inputs["input_ids"][:, :12])


@program
def bart_summaries() -> Step:
    from transformers import BartConfig, BartForConditionalGeneration

    model = BartForConditionalGeneration(BartConfig(
        vocab_size=900, d_model=128, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=256, decoder_ffn_dim=256, max_position_embeddings=64,
    ))  # fmt: skip
    inputs = _padded()
    return _trained(model, **inputs, labels=inputs["input_ids"][:, :12])


@program
def clip_contrastive() -> Step:
    from transformers import CLIPConfig, CLIPModel

    config = CLIPConfig(
        text_config={"vocab_size": 900, "eos_token_id": 2, **_SMALL},
        vision_config={"image_size": 32, "patch_size": 8, **_SMALL}, projection_dim=64,
    )  # fmt: skip
    inputs = _padded()
    inputs["input_ids"][:, -6] = 2
    pixels = torch.randn(4, 3, 32, 32)
    return _trained(CLIPModel(config), **inputs, pixel_values=pixels, return_loss=torch.tensor(True))


@program
def vit_classifier() -> Step:
    from transformers import ViTConfig, ViTForImageClassification

    model = ViTForImageClassification(ViTConfig(image_size=32, patch_size=8, num_labels=10, **_SMALL))
    return _trained(model, pixel_values=torch.randn(8, 3, 32, 32), labels=torch.arange(8))


@program
def whisper_transcripts() -> Step:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    model = WhisperForConditionalGeneration(WhisperConfig(
        vocab_size=900, d_model=128, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=256, decoder_ffn_dim=256, max_source_positions=50,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, num_mel_bins=80,
    ))  # fmt: skip
    return _trained(model, input_features=torch.randn(2, 80, 100), labels=torch.arange(24).view(2, 12))


@program(asks=True)
def wav2vec2_ctc() -> Step:
    from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

    model = Wav2Vec2ForCTC(Wav2Vec2Config(vocab_size=32, num_conv_pos_embeddings=16, conv_dim=(64,) * 7, **_SMALL))
    return _trained(model, input_values=torch.randn(2, 8000), labels=torch.randint(1, 30, (2, 10)))


@program(asks=True)
def mixtral_routing() -> Step:
    from transformers import MixtralConfig, MixtralForCausalLM

    model = MixtralForCausalLM(MixtralConfig(vocab_size=900, num_key_value_heads=2, num_local_experts=4, **_SMALL))
    inputs = _padded()
    return _trained(model, **inputs, labels=inputs["input_ids"])


@program(asks=True)
def detr_detection() -> Step:
    from transformers import DetrConfig, DetrForObjectDetection, ResNetConfig

    model = DetrForObjectDetection(DetrConfig(
        use_timm_backbone=False, use_pretrained_backbone=False, backbone=None,
        backbone_config=ResNetConfig(embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1], layer_type="basic",
                                     out_features=["stage2"]),
        d_model=64, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=128, decoder_ffn_dim=128, num_queries=10,
    )).cuda()  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> None:
        out = model(pixel_values=torch.randn(2, 3, 64, 64).cuda())
        (out.logits.logsumexp(-1).mean() + out.pred_boxes.mean()).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@program(asks=True)
def generation_with_sampling() -> Step:
    model = _llama().cuda().eval()
    ids = _padded()["input_ids"].cuda()
    return lambda: model.generate(ids, max_new_tokens=8, do_sample=True, top_p=0.9, temperature=0.7, pad_token_id=0)


@program
def greedy_generation_with_left_padding() -> Step:
    model = _llama().cuda().eval()
    inputs = {name: value.flip(1).cuda() for name, value in _padded().items()}
    return lambda: model.generate(**inputs, max_new_tokens=8, do_sample=False, pad_token_id=0, eos_token_id=None)


@program
def hugging_face_trainer() -> Step:
    from transformers import Trainer, TrainingArguments

    rows = [{name: value[row] for name, value in _padded().items()} | {"labels": _padded()["input_ids"][row]}
            for row in range(4)]  # fmt: skip
    model = _llama()

    def step() -> None:
        with tempfile.TemporaryDirectory() as folder:
            arguments = TrainingArguments(
                folder, max_steps=2, per_device_train_batch_size=2, report_to=[], save_strategy="no",
                disable_tqdm=True, logging_steps=1,
            )  # fmt: skip
            Trainer(model, arguments, train_dataset=rows).train()

    return step


def _adapted(config: Any) -> Step:
    from peft import get_peft_model

    inputs = _padded()
    return _trained(get_peft_model(_llama(), config), **inputs, labels=inputs["input_ids"])


@program
def lora() -> Step:
    from peft import LoraConfig

    return _adapted(LoraConfig(task_type="CAUSAL_LM", r=8, lora_alpha=16, lora_dropout=0.05))


@program
def dora() -> Step:
    from peft import LoraConfig

    return _adapted(LoraConfig(task_type="CAUSAL_LM", r=8, use_dora=True, target_modules="all-linear"))


@program
def pissa() -> Step:
    from peft import LoraConfig

    return _adapted(LoraConfig(task_type="CAUSAL_LM", r=8, init_lora_weights="pissa_niter_4"))


@program
def ia3() -> Step:
    from peft import IA3Config

    return _adapted(IA3Config(task_type="CAUSAL_LM"))


@program
def prefix_tuning() -> Step:
    from peft import PrefixTuningConfig

    return _adapted(PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=8))


@program
def shira() -> Step:
    from peft import ShiraConfig

    return _adapted(ShiraConfig(task_type="CAUSAL_LM", r=8))


@program
def vera() -> Step:
    from peft import VeraConfig

    return _adapted(VeraConfig(task_type="CAUSAL_LM", r=16))


@program
def oft() -> Step:
    from peft import OFTConfig

    return _adapted(OFTConfig(task_type="CAUSAL_LM", oft_block_size=32, use_cayley_neumann=True))


@program
def direct_preference_optimization() -> Step:
    model, reference = _llama().cuda(), _llama().cuda().eval().requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    inputs = {name: value.cuda() for name, value in _padded().items()}
    labels = inputs["input_ids"].clone()
    labels[:, :8] = -100

    def chance(logits: torch.Tensor) -> torch.Tensor:
        wanted = labels[:, 1:].clone()
        mask = wanted != -100
        wanted[wanted == -100] = 0
        each = torch.gather(logits[:, :-1].log_softmax(-1), 2, wanted.unsqueeze(2)).squeeze(2)
        return (each * mask).sum(-1)

    def step() -> None:
        with torch.no_grad():
            before = chance(reference(**inputs).logits)
        now = chance(model(**inputs).logits)
        ratio = (now - before)[:2] - (now - before)[2:]
        (-F.logsigmoid(0.1 * ratio)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        (ratio > 0).float().mean().item()

    return step
