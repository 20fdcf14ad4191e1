"""Settings are checked before anything is built; a slip of the hand is told with what was meant."""

import pytest

from brim.errors import UnsupportedError, UsageError
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


@pytest.mark.parametrize("precision", ["fp8", "int8", "int4"])
@pytest.mark.parametrize("task", ["train", "generate"])
def test_weights_of_eight_or_four_bits_are_refused_not_guessed(task, precision):
    with pytest.raises(UnsupportedError, match=precision):
        Workload(task=task, precision=precision)


def test_what_is_left_open_is_filled_in():
    done = Workload(batch=2).resolved(seq=128, precision="bf16", new_tokens=None)
    assert done.describe() == "train, batch 2, 128 tokens, bf16, adamw, full"
    assert Workload(batch=2, seq=4).given == {"batch": 2, "seq": 4}
