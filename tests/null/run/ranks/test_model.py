"""What a model's layers rule out before a split training begins."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import Phi3Config, Phi3ForCausalLM

from brim.errors import UnsupportedError
from brim.estimation.ranks.split import Split
from brim.run.ranks.model import Recipe, check


def test_products_that_several_are_one_of_are_not_split_by_tensors():
    config = Phi3Config(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
        vocab_size=128, pad_token_id=0,
    )  # fmt: skip
    training_model = SimpleNamespace(module=Phi3ForCausalLM(config), opened=SimpleNamespace(quantization=""))

    def recipe(**sizes):
        split = Split(gpus=2, **sizes)
        return Recipe(folder=Path(), split=split, precision="fp32", optimizer="adamw", lr=1e-3, sequence=16)

    with pytest.raises(UnsupportedError, match=r"--tp 2 .* Phi3ForCausalLM.\n.*qkv_proj.*\n.*--zero or --pp"):
        check(training_model, recipe(tp=2))
    check(training_model, recipe(pp=2))
