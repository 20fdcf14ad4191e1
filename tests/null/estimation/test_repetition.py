"""A long generation is a few traced tokens repeated, if that is the same as tracing them all."""

import pytest

from brim.errors import UsageError
from brim.estimation import estimate
from brim.estimation.models import find_model
from brim.estimation.repetition import TRACED_TOKENS, stretched
from brim.estimation.steps import Job
from brim.estimation.workload import Workload


def whole_and_repeated(path, **settings):
    source, workload = find_model(path), Workload(task="generate", new_tokens=12, **settings)
    whole = estimate._traced(Job(source, workload), (8, 0))
    return whole, estimate.traced(Job(source, workload), (8, 0))


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_repeated_tokens_are_those_of_a_whole_trace(folder, name):
    whole, repeated = whole_and_repeated(folder(name), batch=2, seq=20)
    assert repeated.storages == whole.storages
    assert repeated.ops == whole.ops


def test_an_encoder_decoder_is_repeated_within_its_positions(folder):
    """The prompt stays as long as it is: what is checked further on is further on in the decoder."""
    path = folder("bart")
    whole, repeated = whole_and_repeated(path, seq=64)
    assert repeated.storages == whole.storages
    assert repeated.ops == whole.ops
    with pytest.raises(UsageError, match="decoder"):
        estimate.traced(Job(find_model(path), Workload(task="generate", seq=64, new_tokens=65)), (8, 0))


@pytest.mark.thorough
def test_what_does_not_repeat_is_traced(folder):
    """T5's bias is padded to 16 elements, so its size grows in jumps; a window fills up on the way."""
    for path in (folder("t5"), folder("llama", sliding_window=24, model_type="mistral",
                                      architectures=["MistralForCausalLM"])):  # fmt: skip
        whole, repeated = whole_and_repeated(path, seq=20)
        assert repeated.storages == whole.storages


def test_a_few_tokens_are_not_stretched(folder):
    workload = Workload(task="generate", seq=20, new_tokens=TRACED_TOKENS)
    few = estimate.traced(Job(find_model(folder("llama")), workload), (8, 0))
    assert stretched(few, TRACED_TOKENS) is None
    assert stretched(few, TRACED_TOKENS + 1) is not None
