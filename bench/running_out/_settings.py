"""Options of these programs: which part of the run takes most (--case), and which advice is followed (--apply)."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import torch
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class Settings:
    case: str
    batch: int
    applied: frozenset[str]

    def __contains__(self, advice: str) -> bool:
        return advice in self.applied


def settings() -> Settings:
    parser = argparse.ArgumentParser()
    parser.add_argument("--case", required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--apply", default="", help='as in "checkpointing + half the batch"')
    given = parser.parse_args()
    return Settings(given.case, given.batch, frozenset(filter(None, given.apply.split(" + "))))


def optimizer(parameters, given: Settings):
    if "fused optimizer" in given:
        return torch.optim.AdamW(parameters, lr=1e-4, fused=True)
    if "foreach=False" in given:
        return torch.optim.AdamW(parameters, lr=1e-4, foreach=False)
    return torch.optim.AdamW(parameters, lr=1e-4, foreach=True)


def autocast(given: Settings):
    return torch.autocast("cuda", torch.bfloat16, enabled="bfloat16 autocast" in given)


def moved(model, given: Settings):
    """The model on the GPU."""
    return (model.bfloat16() if "weights in 16 bits" in given else model).cuda()


def without_gradients(given: Settings):
    return torch.inference_mode("no gradients in evaluation" in given)


def kept(output, given: Settings):
    """An output of an evaluation, as it is kept."""
    return output.cpu() if "outputs to the CPU" in given else output


def language_loss(logits, labels, given: Settings):
    """Cross entropy of (tokens, vocabulary) logits."""
    if "loss in chunks" in given:
        parts = zip(logits.split(256), labels.split(256), strict=True)
        losses = [checkpoint(_part, *part, use_reentrant=False) for part in parts]
        return torch.stack(losses).sum() / len(labels)
    return cross_entropy(logits if "logits in 16 bits" in given else logits.float(), labels)


def _part(logits, labels):
    return cross_entropy(logits.float(), labels, reduction="sum")


def llama(given: Settings, **changed):
    """A small Llama, in the attention that the case has."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {
        "hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 6, "num_attention_heads": 8,
        "num_key_value_heads": 8, "vocab_size": 4096, "max_position_embeddings": 8192,
    }  # fmt: skip
    attention = "eager" if given.case == "attention" and "fused attention" not in given else "sdpa"
    config = LlamaConfig(**shape | changed, attn_implementation=attention)
    config.use_cache = given.case == "generation"
    return LlamaForCausalLM(config)


LARGE = {"hidden_size": 1024, "intermediate_size": 4096}  # of cases in which weights take most
WORDS = {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 2, "vocab_size": 64000}  # ... or logits
