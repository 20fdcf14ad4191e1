"""Which GPU a rank of torchrun has."""

from __future__ import annotations

import pytest

from brim.errors import UsageError
from brim.run.ranks.group import _device_number


@pytest.mark.parametrize(("local_rank", "visible", "number"), [(0, 1, 0), (3, 1, 0), (3, 8, 3)])
def test_a_rank_has_the_gpu_of_its_number_or_the_only_one_it_sees(local_rank: int, visible: int, number: int) -> None:
    assert _device_number(local_rank, visible) == number


def test_a_rank_without_a_gpu_is_told_so() -> None:
    with pytest.raises(UsageError, match="PyTorch sees 4 GPUs"):
        _device_number(4, 4)
