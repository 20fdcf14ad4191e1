"""What a division says of a training before anything is searched."""

import json
from pathlib import Path

import pytest

from brim.errors import BudgetError
from brim.planning.request import Request, machine_of
from brim.planning.training import plan_training, states_of


def test_states_that_all_tiers_together_cannot_hold_are_refused_by_a_division() -> None:
    request = Request(model="llama-3-70b", task="train", gpu="RTX 3060", ram="64GiB", disk="100GiB", seq=1024)
    with pytest.raises(BudgetError, match=r"weights and optimizer states alone take 78\d GiB") as refused:
        plan_training(request, machine_of(request))
    assert refused.value.smallest_bytes["ram"] > 600 << 30


@pytest.mark.parametrize(("precision", "bytes_each"), [(None, 12), ("bf16", 6), ("bf16-stochastic", 6), ("fp32", 12)])
def test_states_are_counted_as_they_are_held(precision: str | None, bytes_each: int) -> None:
    request = Request(model="llama-3-8b", task="train", gpu="RTX 3060", precision=precision)
    assert states_of(request) == pytest.approx(bytes_each * 8_030_261_248, rel=1e-6)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_adapters_over_weights_of_another_type_are_planned_in_the_precision(precision: str, tmp_path: Path) -> None:
    promises = []
    for stored in ("float16", "float32", "bfloat16"):
        config = {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
            "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 1000, "dtype": stored,
        }  # fmt: skip
        (tmp_path / "config.json").write_text(json.dumps(config))
        request = Request(
            model=tmp_path, task="train", gpu="RTX 3060", method="lora", seq=64, precision=precision, top=1
        )
        promises.append(plan_training(request, machine_of(request))[0].plan.promise)
    assert promises[0] == promises[1] == promises[2]
