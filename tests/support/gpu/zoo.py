"""Configurations to run for real on a GPU and to predict: models of random weights, no download.

A configuration is data (``Case``), so a record of a run can be predicted again from itself. ``build`` makes the step
for a device; the same function is measured and traced.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from brim.estimation.steps import training_step
from support.gpu import networks

Step = Callable[[], Any]

_TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_LLAMA = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 8, "num_attention_heads": 16,
          "num_key_value_heads": 4, "vocab_size": 32000, **_TOKENS}  # fmt: skip
_GPT2 = {"n_embd": 1024, "n_layer": 12, "n_head": 16, "vocab_size": 50257, "n_positions": 1024}
_QWEN3 = {**_LLAMA, "head_dim": 128, "vocab_size": 64000}
_GEMMA = {"hidden_size": 1536, "intermediate_size": 6144, "num_hidden_layers": 8, "num_attention_heads": 8,
          "num_key_value_heads": 4, "head_dim": 192, "vocab_size": 64000, **_TOKENS}  # fmt: skip
_MOE = {"hidden_size": 1024, "intermediate_size": 2816, "moe_intermediate_size": 512, "num_hidden_layers": 8,
        "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64, "num_experts": 16,
        "num_experts_per_tok": 4, "vocab_size": 32000, **_TOKENS}  # fmt: skip
_MIXTRAL = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 6, "num_attention_heads": 16,
            "num_key_value_heads": 4, "num_local_experts": 8, "num_experts_per_tok": 2, "vocab_size": 32000,
            **_TOKENS}  # fmt: skip
_BERT = {"hidden_size": 1024, "num_hidden_layers": 12, "num_attention_heads": 16, "intermediate_size": 4096,
         "vocab_size": 30522}  # fmt: skip
_T5 = {"d_model": 768, "d_kv": 64, "d_ff": 3072, "num_layers": 8, "num_heads": 12, "vocab_size": 32128,
       "decoder_start_token_id": 0, "pad_token_id": 0}  # fmt: skip
_VIT = {"hidden_size": 1024, "num_hidden_layers": 12, "num_attention_heads": 16, "intermediate_size": 4096,
        "image_size": 224, "patch_size": 16, "num_labels": 1000}  # fmt: skip
_RESNET = {"hidden_sizes": [256, 512, 1024, 2048], "depths": [3, 4, 6, 3], "num_labels": 1000, "embedding_size": 64}
_CONVNEXT = {"hidden_sizes": [128, 256, 512, 1024], "depths": [3, 3, 9, 3], "num_labels": 1000}
_MAMBA = {"hidden_size": 768, "num_hidden_layers": 4, "vocab_size": 32000, "state_size": 16}

# class, configuration class, its values, the values of a dry run beside them
_HUGGING_FACE: dict[str, tuple[str, str, Mapping[str, Any], Mapping[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", _LLAMA, {}),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", _GPT2, {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 500}),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", _QWEN3, {"head_dim": 16}),
    "gemma": ("GemmaForCausalLM", "GemmaConfig", _GEMMA, {"head_dim": 16}),
    "moe": ("Qwen3MoeForCausalLM", "Qwen3MoeConfig", _MOE,
            {"head_dim": 16, "moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", _MIXTRAL, {"num_local_experts": 4}),
    "bert": ("BertForMaskedLM", "BertConfig", _BERT, {}),
    "roberta": ("RobertaForSequenceClassification", "RobertaConfig", {**_BERT, "max_position_embeddings": 514}, {}),
    "t5": ("T5ForConditionalGeneration", "T5Config", _T5,
           {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4, "vocab_size": 500}),
    "vit": ("ViTForImageClassification", "ViTConfig", _VIT, {"image_size": 32, "patch_size": 8, "num_labels": 10}),
    "resnet": ("ResNetForImageClassification", "ResNetConfig", _RESNET,
               {"hidden_sizes": [16, 32, 64, 64], "depths": [1, 1, 1, 1], "embedding_size": 16, "num_labels": 10}),
    "convnext": ("ConvNextForImageClassification", "ConvNextConfig", _CONVNEXT,
                 {"hidden_sizes": [16, 32, 64, 64], "depths": [1, 1, 1, 1], "num_labels": 10}),
    "mamba": ("MambaForCausalLM", "MambaConfig", _MAMBA, {"hidden_size": 64, "num_hidden_layers": 2}),
}  # fmt: skip
# What makes any of the text models small.
_TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "vocab_size": 500}  # fmt: skip
_IMAGES = ("vit", "resnet", "convnext", *networks.IMAGES)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One configuration. ``size`` is tokens of a sequence or pixels of a side; ``steps`` are run before peaks are
    read."""

    name: str
    family: str
    model: str
    batch: int
    size: int
    precision: str = "fp32"  # fp32, bf16, amp-bf16, amp-fp16
    optimizer: str = "adamw"
    task: str = "train"  # train, infer, generate
    checkpointing: bool = False
    lora: bool = False
    attention: str = "sdpa"
    channels_last: bool = False
    new_tokens: int = 0
    steps: int = 3
    values: Mapping[str, Any] = field(default_factory=dict)

    def tiny(self) -> Case:
        """The same in a size that a CPU runs in a moment."""
        small = dict(_HUGGING_FACE[self.model][3]) if self.model in _HUGGING_FACE else {}
        if self.model in _HUGGING_FACE:
            known = _HUGGING_FACE[self.model][2]
            small = {key: value for key, value in _TINY.items() if key in known} | small
        size = 32 if self.model in _IMAGES or self.family == "diffusion" else 16
        return dataclasses.replace(self, batch=min(self.batch, 2), size=size, new_tokens=min(self.new_tokens, 4),
                                   values={**small, "tiny": True})  # fmt: skip

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> Case:
        """The case of a record. Fields that this version does not know are errors."""
        return cls(**document)


def build(case: Case, device: str, weights: nn.Module | None = None) -> Step:
    """The step of a case on a device; models, inputs and optimizer are made here.

    ``weights``: what ``initialized`` made for a case of the same ``weights_key``; it is copied.
    """
    with torch.device("cpu"):
        model = _model(case, initialized(case) if weights is None else copy.deepcopy(weights))
    model = model.to(device)
    if case.channels_last:
        model = model.to(memory_format=torch.channels_last)
    inputs = _inputs(case, model, device)
    if case.task == "train":
        return _training(case, model, inputs, device)
    model.eval()
    if case.task == "generate":
        return _generating(case, model, inputs)

    def infer() -> None:
        with torch.no_grad(), _autocast(case, device):
            model(**inputs)

    return infer


def weights_key(case: Case) -> tuple[Any, ...]:
    """Cases of equal keys begin with the same weights."""
    return case.model, case.attention, tuple(sorted(case.values.items()))


def initialized(case: Case) -> nn.Module:
    """The model in float32 on the CPU, before anything that only some cases do to it."""
    if case.model not in _HUGGING_FACE:
        return networks.make(case.model, tiny=bool(case.values.get("tiny")))
    import transformers

    model_class, config_class, values, _ = _HUGGING_FACE[case.model]
    settings = {**values, **{key: value for key, value in case.values.items() if key != "tiny"}}
    config = getattr(transformers, config_class)(**settings)
    if case.model not in ("resnet", "convnext", "mamba"):
        config._attn_implementation = case.attention
    made: nn.Module = getattr(transformers, model_class)(config)
    return made


def _model(case: Case, model: nn.Module) -> nn.Module:
    model = model.to(torch.bfloat16 if case.precision == "bf16" else torch.float32)
    if case.model not in _HUGGING_FACE:
        return model
    if case.lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(target_modules="all-linear", r=16))
    if case.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})  # type: ignore
        if case.lora:
            model.enable_input_require_grads()  # type: ignore[operator]
    return model


def _inputs(case: Case, model: nn.Module, device: str) -> dict[str, Any]:
    dtype = torch.bfloat16 if case.precision == "bf16" else torch.float32
    labels = case.task == "train"
    if case.family == "diffusion":
        return networks.diffusion_inputs(case.model, case.batch, case.size, dtype, device)
    if case.model in _IMAGES:
        pixels = torch.zeros(case.batch, 3, case.size, case.size, dtype=dtype, device=device)
        if case.channels_last:
            pixels = pixels.contiguous(memory_format=torch.channels_last)
        return {"pixel_values": pixels} | ({"labels": _ids(case.batch, device=device)} if labels else {})
    ids = _ids(case.batch, case.size, device=device)
    if not labels:
        return {"input_ids": ids} | ({"decoder_input_ids": ids[:, :8]} if case.model == "t5" else {})
    made = {"input_ids": ids, "labels": _ids(case.batch, device=device) if case.model == "roberta" else ids}
    return made | ({"use_cache": False} if case.family in ("decoder", "moe") else {})


def _ids(*shape: int, device: str) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.long, device=device)


def _training(case: Case, model: nn.Module, inputs: dict[str, Any], device: str) -> Step:
    model.train()
    optimizer = _optimizer(case, [p for p in model.parameters() if p.requires_grad])
    scaler = torch.amp.GradScaler(device) if case.precision == "amp-fp16" else None

    def forward() -> torch.Tensor:
        with _autocast(case, device):
            return _loss(model(**inputs), inputs)

    return training_step(forward, optimizer, scaler)


def _autocast(case: Case, device: str) -> Any:
    wanted = case.precision.startswith("amp")
    dtype = torch.float16 if case.precision == "amp-fp16" else torch.bfloat16
    return torch.autocast(torch.device(device).type, dtype, enabled=wanted)


def _loss(output: Any, inputs: dict[str, Any]) -> torch.Tensor:
    found: torch.Tensor | None = getattr(output, "loss", None)
    if found is not None:
        return found
    if "labels" in inputs:
        return F.cross_entropy(output.float(), inputs["labels"])
    return F.mse_loss(output.float(), inputs["sample"].float())


def _generating(case: Case, model: Any, inputs: dict[str, Any]) -> Step:
    from transformers import GenerationConfig

    model.generation_config = GenerationConfig(
        do_sample=False, max_new_tokens=case.new_tokens, min_new_tokens=case.new_tokens, pad_token_id=0,
        eos_token_id=None, decoder_start_token_id=0,
    )  # fmt: skip
    ids = inputs["input_ids"]
    mask = torch.ones_like(ids)

    def step() -> None:
        model.generate(input_ids=ids, attention_mask=mask)

    return step


def _optimizer(case: Case, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    name = case.optimizer
    if name == "adamw8bit":
        return _eight_bits(parameters)
    return {
        "adamw": lambda: torch.optim.AdamW(parameters),
        "adamw-fused": lambda: torch.optim.AdamW(parameters, fused=True),
        "adamw-loop": lambda: torch.optim.AdamW(parameters, foreach=False),
        "sgd": lambda: torch.optim.SGD(parameters, lr=0.01),
        "sgd-momentum": lambda: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
        "adafactor": lambda: torch.optim.Adafactor(parameters),
        "rmsprop": lambda: torch.optim.RMSprop(parameters),
        "adagrad": lambda: torch.optim.Adagrad(parameters),
    }[name]()


def has_eight_bits() -> bool:
    import importlib.util

    return importlib.util.find_spec("torchao") is not None


def _eight_bits(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """torchao's on a GPU; while tracing, and where it is not installed, brim's stand-in."""
    from torch._subclasses.fake_tensor import FakeTensor

    from brim.estimation.optimizers import AdamW8bit
    from brim.techniques import optimizers

    if isinstance(parameters[0], FakeTensor) or not parameters[0].is_cuda or not has_eight_bits():
        return AdamW8bit(parameters)
    return optimizers.make("adamw8bit", parameters)


def _case(name: str, family: str, model: str, batch: int, size: int, **settings: Any) -> Case:
    return Case(name=name, family=family, model=model, batch=batch, size=size, **settings)


def _cnn() -> list[Case]:
    return [
        _case("resnet-sgd-momentum", "cnn", "resnet", 64, 224, optimizer="sgd-momentum"),
        _case("resnet-amp-fp16", "cnn", "resnet", 64, 224, optimizer="sgd-momentum", precision="amp-fp16"),
        _case("resnet-amp-bf16-channels-last", "cnn", "resnet", 64, 224, optimizer="sgd-momentum",
              precision="amp-bf16", channels_last=True),
        _case("resnet-bf16", "cnn", "resnet", 64, 224, optimizer="sgd", precision="bf16"),
        _case("resnet-infer", "cnn", "resnet", 128, 224, task="infer"),
        _case("convnext-adamw", "cnn", "convnext", 32, 224),
        _case("convnext-amp-bf16", "cnn", "convnext", 32, 224, precision="amp-bf16"),
        _case("vgg-sgd", "cnn", "vgg", 32, 224, optimizer="sgd"),
        _case("vgg-rmsprop", "cnn", "vgg", 32, 224, optimizer="rmsprop"),
        _case("mobilenet-adagrad", "cnn", "mobilenet", 64, 224, optimizer="adagrad"),
        _case("mobilenet-amp-fp16", "cnn", "mobilenet", 64, 224, precision="amp-fp16"),
    ]  # fmt: skip


def _vit() -> list[Case]:
    return [
        _case("vit-adamw", "vit", "vit", 32, 224),
        _case("vit-amp-bf16", "vit", "vit", 32, 224, precision="amp-bf16"),
        _case("vit-amp-fp16-fused", "vit", "vit", 32, 224, precision="amp-fp16", optimizer="adamw-fused"),
        _case("vit-bf16", "vit", "vit", 64, 224, precision="bf16"),
        _case("vit-checkpointing", "vit", "vit", 64, 224, precision="bf16", checkpointing=True),
        _case("vit-infer", "vit", "vit", 64, 224, task="infer", precision="bf16"),
    ]  # fmt: skip


def _encoder() -> list[Case]:
    return [
        _case("bert-adamw", "encoder", "bert", 16, 512),
        _case("bert-amp-fp16", "encoder", "bert", 16, 512, precision="amp-fp16"),
        _case("bert-bf16-adafactor", "encoder", "bert", 16, 512, precision="bf16", optimizer="adafactor"),
        _case("bert-eager-attention", "encoder", "bert", 8, 512, precision="bf16", attention="eager"),
        _case("bert-checkpointing", "encoder", "bert", 32, 512, checkpointing=True),
        _case("bert-infer", "encoder", "bert", 32, 512, task="infer"),
        _case("roberta-amp-bf16", "encoder", "roberta", 16, 512, precision="amp-bf16"),
        _case("roberta-sgd", "encoder", "roberta", 16, 384, optimizer="sgd"),
        _case("t5-adafactor", "encoder", "t5", 8, 512, optimizer="adafactor"),
        _case("t5-bf16", "encoder", "t5", 16, 512, precision="bf16"),
        _case("t5-generate", "encoder", "t5", 4, 128, precision="bf16", task="generate", new_tokens=32, steps=2),
    ]  # fmt: skip


def _decoder() -> list[Case]:
    return [
        _case("llama-bf16", "decoder", "llama", 4, 2048, precision="bf16"),
        _case("llama-bf16-fused", "decoder", "llama", 4, 2048, precision="bf16", optimizer="adamw-fused"),
        _case("llama-bf16-loop", "decoder", "llama", 4, 2048, precision="bf16", optimizer="adamw-loop"),
        _case("llama-fp32", "decoder", "llama", 2, 1024),
        _case("llama-amp-bf16", "decoder", "llama", 2, 2048, precision="amp-bf16"),
        _case("llama-amp-fp16", "decoder", "llama", 2, 1024, precision="amp-fp16"),
        _case("llama-sgd", "decoder", "llama", 4, 2048, precision="bf16", optimizer="sgd"),
        _case("llama-sgd-momentum", "decoder", "llama", 4, 1536, precision="bf16", optimizer="sgd-momentum"),
        _case("llama-adafactor", "decoder", "llama", 4, 2048, precision="bf16", optimizer="adafactor"),
        _case("llama-adamw8bit", "decoder", "llama", 4, 2048, precision="bf16", optimizer="adamw8bit"),
        _case("llama-checkpointing", "decoder", "llama", 8, 2048, precision="bf16", checkpointing=True),
        _case("llama-checkpointing-amp", "decoder", "llama", 4, 2048, precision="amp-bf16", checkpointing=True),
        _case("llama-lora", "decoder", "llama", 4, 2048, precision="bf16", lora=True),
        _case("llama-lora-checkpointing", "decoder", "llama", 8, 2048, precision="bf16", lora=True,
              checkpointing=True),
        _case("llama-eager-attention", "decoder", "llama", 2, 1024, precision="bf16", attention="eager"),
        _case("llama-odd-length", "decoder", "llama", 3, 1337, precision="bf16"),
        _case("llama-infer", "decoder", "llama", 4, 4096, precision="bf16", task="infer"),
        _case("llama-generate", "decoder", "llama", 4, 512, precision="bf16", task="generate", new_tokens=32,
              steps=2),
        _case("llama-generate-fp32", "decoder", "llama", 1, 1024, task="generate", new_tokens=16, steps=2),
        _case("gpt2-adamw", "decoder", "gpt2", 8, 1024),
        _case("gpt2-amp-fp16", "decoder", "gpt2", 8, 1024, precision="amp-fp16"),
        _case("gpt2-bf16", "decoder", "gpt2", 16, 1024, precision="bf16"),
        _case("gpt2-generate", "decoder", "gpt2", 8, 256, precision="bf16", task="generate", new_tokens=32, steps=2),
        _case("qwen3-bf16", "decoder", "qwen3", 4, 2048, precision="bf16"),
        _case("qwen3-lora-amp", "decoder", "qwen3", 2, 2048, precision="amp-bf16", lora=True),
        _case("gemma-bf16", "decoder", "gemma", 4, 1024, precision="bf16"),
        _case("mamba-fp32", "decoder", "mamba", 2, 64, steps=2),
    ]  # fmt: skip


def _moe() -> list[Case]:
    return [
        _case("moe-bf16", "moe", "moe", 4, 1024, precision="bf16"),
        _case("moe-amp-bf16", "moe", "moe", 2, 1024, precision="amp-bf16"),
        _case("moe-checkpointing", "moe", "moe", 8, 1024, precision="bf16", checkpointing=True),
        _case("moe-infer", "moe", "moe", 8, 1024, precision="bf16", task="infer"),
        _case("mixtral-bf16", "moe", "mixtral", 4, 1024, precision="bf16"),
        _case("mixtral-sgd", "moe", "mixtral", 4, 1024, precision="bf16", optimizer="sgd"),
    ]  # fmt: skip


def _diffusion() -> list[Case]:
    return [
        _case("unet-adamw", "diffusion", "unet", 8, 64),
        _case("unet-amp-fp16", "diffusion", "unet", 16, 64, precision="amp-fp16"),
        _case("unet-bf16", "diffusion", "unet", 16, 64, precision="bf16"),
        _case("unet-infer", "diffusion", "unet", 16, 64, precision="bf16", task="infer"),
        _case("dit-adamw", "diffusion", "dit", 16, 32),
        _case("dit-bf16", "diffusion", "dit", 64, 32, precision="bf16"),
        _case("dit-amp-bf16-fused", "diffusion", "dit", 32, 32, precision="amp-bf16", optimizer="adamw-fused"),
    ]  # fmt: skip


_ALL = (*_cnn(), *_vit(), *_encoder(), *_decoder(), *_moe(), *_diffusion())
CASES: Mapping[str, Case] = {case.name: case for case in _ALL}
FAMILIES = tuple(dict.fromkeys(case.family for case in CASES.values()))
