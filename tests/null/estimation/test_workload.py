"""Settings are checked before anything is built; a slip of the hand is told with what was meant."""

import pytest

from brim.errors import UsageError
from brim.estimation.workload import Workload


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"task": "trian"}, "Nearest: train"),
        ({"precision": "bf-16"}, "Nearest: bf16"),
        ({"optimizer": "adam-w"}, "adamw"),
        ({"method": "lorra"}, "Nearest: lora"),
        ({"checkpointing": "selectiv"}, "Nearest: selective"),
        ({"batch": 0}, "batch=0"),
        ({"batch": True}, "batch=True"),
        ({"seq": -4}, "seq=-4"),
        ({"task": "generate", "optimizer": "adamw"}, "optimizer was given for generating"),
        ({"task": "train", "new_tokens": 4}, "new_tokens was given for training"),
    ],
)
def test_what_cannot_be_meant_is_a_usage_error(settings, told):
    with pytest.raises(UsageError, match=told):
        Workload(**settings)


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_rounded_weights_train_no_further_than_by_adapters(precision):
    with pytest.raises(UsageError, match=precision):
        Workload(task="train", precision=precision)
    assert Workload(task="train", precision=precision, method="lora").precision == precision


def test_what_is_left_open_is_filled_in():
    done = Workload(batch=2).resolved(seq=128, precision="bf16", new_tokens=None)
    assert done.describe() == "train, batch 2, 128 tokens, bf16, adamw, full"
    assert Workload(batch=2, seq=4).given == {"batch": 2, "seq": 4}


def test_the_eight_bit_optimizer_is_said_to_be_torchaos():
    assert "adamw8bit (torchao)" in Workload(optimizer="adamw8bit").describe()
