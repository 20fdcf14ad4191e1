"""Small configurations of many families, to be run for real on a CPU and predicted."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

Step = Callable[[], Any]
Build = Callable[[], Step]

_OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adafactor": torch.optim.Adafactor,
    "adagrad": torch.optim.Adagrad,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "rmsprop": torch.optim.RMSprop,
    "sgd": partial(torch.optim.SGD, lr=0.1),
    "sgd-momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
}
_DECODER = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 1000}
_TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def hugging_face(model: str, config: str, **values: Any) -> Callable[[], nn.Module]:
    """A model class of transformers, made from its configuration class with these values."""

    def make() -> nn.Module:
        import transformers

        made: nn.Module = getattr(transformers, model)(getattr(transformers, config)(**values))
        return made

    return make


def stepper(
    model: nn.Module, loss: Callable[[], torch.Tensor], optimizer: str, amp: torch.dtype | None, infer: bool
) -> Step:
    if infer:
        model.eval()

        def infer_step() -> None:
            with torch.no_grad():
                loss()

        return infer_step
    state = _OPTIMIZERS[optimizer](model.parameters())

    def train_step() -> None:
        with torch.autocast("cpu", dtype=amp or torch.bfloat16, enabled=amp is not None):
            value = loss()
        value.backward()
        state.step()
        state.zero_grad()

    return train_step


def text(
    make: Callable[[], nn.Module],
    batch: int = 4,
    tokens: int = 64,
    *,
    optimizer: str = "adamw",
    amp: torch.dtype | None = None,
    dtype: torch.dtype | None = None,
    checkpointing: bool = False,
    infer: bool = False,
) -> Build:
    def build() -> Step:
        model = make().train()
        model = model if dtype is None else model.to(dtype)
        if checkpointing:
            model.gradient_checkpointing_enable()
        ids = torch.randint(3, 1000, (batch, tokens))
        labels = {} if infer else {"labels": ids}
        return stepper(model, lambda: model(input_ids=ids, **labels)[0], optimizer, amp, infer)

    return build


def image(
    make: Callable[[], nn.Module],
    shape: tuple[int, ...] = (4, 3, 64, 64),
    *,
    optimizer: str = "sgd-momentum",
    amp: torch.dtype | None = None,
    channels_last: bool = False,
    infer: bool = False,
) -> Build:
    def build() -> Step:
        model, source, classes = make().train(), torch.randn(shape), torch.randint(0, 10, (shape[0],))
        if channels_last:
            model, source = (
                model.to(memory_format=torch.channels_last),
                source.contiguous(memory_format=torch.channels_last),
            )

        def loss() -> torch.Tensor:
            out = model(source)
            logits = out if isinstance(out, torch.Tensor) else out.logits
            return logits.sum() if infer else F.cross_entropy(logits, classes)

        return stepper(model, loss, optimizer, amp, infer)

    return build


def speech() -> Step:
    shape = {f"{side}_{name}": value for side in ("encoder", "decoder")
             for name, value in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 192))}  # fmt: skip
    values = {"d_model": 96, "vocab_size": 1000, "max_source_positions": 100, "decoder_start_token_id": 1}
    model = hugging_face("WhisperForConditionalGeneration", "WhisperConfig", **values, **shape, **_TOKENS)().train()
    sound, words = torch.randn(2, 80, 200), torch.randint(3, 1000, (2, 32))
    return stepper(model, lambda: model(input_features=sound, labels=words).loss, "adamw", None, False)


def diffusion(infer: bool) -> Step:
    from diffusers import UNet2DModel

    down, up = ("DownBlock2D", "AttnDownBlock2D"), ("AttnUpBlock2D", "UpBlock2D")
    model = UNet2DModel(
        sample_size=32, layers_per_block=1, block_out_channels=(32, 64), down_block_types=down, up_block_types=up
    )
    source, times = torch.randn(2, 3, 32, 32), torch.tensor([3, 7])
    return stepper(model, lambda: F.mse_loss(model(source, times).sample, source), "adamw", None, infer)


_BF16 = torch.bfloat16
_llama = hugging_face("LlamaForCausalLM", "LlamaConfig", **_DECODER, intermediate_size=344, num_key_value_heads=2)
_gpt2 = hugging_face(
    "GPT2LMHeadModel", "GPT2Config", n_embd=128, n_layer=2, n_head=4, vocab_size=1000, n_positions=128
)
_qwen3_moe = hugging_face(
    "Qwen3MoeForCausalLM", "Qwen3MoeConfig", **_DECODER, intermediate_size=256, moe_intermediate_size=96,
    num_key_value_heads=2, head_dim=32, num_experts=8, num_experts_per_tok=2,
)  # fmt: skip
_deepseek = hugging_face(
    "DeepseekV3ForCausalLM", "DeepseekV3Config", **_DECODER, intermediate_size=256, moe_intermediate_size=64,
    num_key_value_heads=4, n_routed_experts=8, num_experts_per_tok=2, n_group=2, topk_group=1, kv_lora_rank=32,
    q_lora_rank=48, qk_rope_head_dim=16, v_head_dim=32, qk_nope_head_dim=32, first_k_dense_replace=1,
)  # fmt: skip
_bert = hugging_face("BertForMaskedLM", "BertConfig", **_DECODER, intermediate_size=512)
_t5 = hugging_face("T5ForConditionalGeneration", "T5Config", d_model=128, d_kv=32, d_ff=256, num_layers=2,
                   num_heads=4,                   vocab_size=1000, decoder_start_token_id=0)  # fmt: skip
_mamba = hugging_face(
    "MambaForCausalLM", "MambaConfig", hidden_size=64, num_hidden_layers=2, vocab_size=1000, state_size=8
)
_rwkv = hugging_face("RwkvForCausalLM", "RwkvConfig", hidden_size=64, num_hidden_layers=2, vocab_size=1000,
                     attention_hidden_size=64, context_length=64)  # fmt: skip
_vit = hugging_face("ViTForImageClassification", "ViTConfig", hidden_size=128, num_hidden_layers=2, num_labels=10,
                    num_attention_heads=4, intermediate_size=256, image_size=64, patch_size=8)  # fmt: skip
_stages = {"hidden_sizes": [32, 64, 96, 128], "depths": [1, 1, 2, 1], "num_labels": 10}
_convnext = hugging_face("ConvNextForImageClassification", "ConvNextConfig", **_stages, image_size=64)
_resnet = hugging_face("ResNetForImageClassification", "ResNetConfig", **_stages, embedding_size=32)

CONFIGURATIONS: dict[str, Build] = {
    "llama": text(_llama),
    "llama-sgd": text(_llama, optimizer="sgd"),
    "llama-checkpointing": text(_llama, batch=8, checkpointing=True),
    "llama-amp": text(_llama, amp=_BF16),
    "llama-bf16": text(_llama, dtype=_BF16),
    "llama-inference": text(_llama, infer=True),
    "gpt2": text(_gpt2, optimizer="adam"),
    "gpt2-adafactor": text(_gpt2, optimizer="adafactor"),
    "gpt2-inference": text(_gpt2, infer=True),
    "qwen3-moe": text(_qwen3_moe),
    "qwen3-moe-inference": text(_qwen3_moe, infer=True),
    "deepseek-mla": text(_deepseek, optimizer="adagrad"),
    "bert": text(_bert, optimizer="sgd-momentum"),
    "bert-amp": text(_bert, amp=_BF16),
    "t5": text(_t5, optimizer="adafactor"),
    "whisper": speech,
    "mamba": text(_mamba, tokens=16),
    "rwkv": text(_rwkv, batch=2, tokens=8),
    "vit": image(_vit),
    "vit-amp": image(_vit, amp=_BF16),
    "vit-inference": image(_vit, infer=True),
    "convnext": image(_convnext, optimizer="adamw"),
    "convnext-inference": image(_convnext, infer=True),
    "resnet": image(_resnet, optimizer="rmsprop"),
    "resnet-amp": image(_resnet, amp=_BF16),
    "resnet-channels-last": image(_resnet, channels_last=True),
    "resnet-inference": image(_resnet, infer=True),
    "unet": partial(diffusion, False),
    "unet-inference": partial(diffusion, True),
}
