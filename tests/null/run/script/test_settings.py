"""Of several GPUs, the one that a program is to see."""

from __future__ import annotations

import pytest

from brim.errors import UsageError
from brim.run.script.settings import VISIBLE, Settings


@pytest.mark.parametrize(
    ("visible", "index", "shown"), [(None, 1, "1"), ("4,5, 6", 2, "6"), ("GPU-1f,GPU-2e", 0, "GPU-1f")]
)
def test_its_number_is_among_those_that_are_shown(visible: str | None, index: int, shown: str) -> None:
    environment = {} if visible is None else {VISIBLE: visible}
    Settings(device=f"cuda:{index}").show_alone(environment)
    assert environment == {VISIBLE: shown}


@pytest.mark.parametrize("visible", ["4", ""])
def test_one_that_is_hidden_is_refused(visible: str) -> None:
    with pytest.raises(UsageError, match=rf"cuda:1(.|\n)*{VISIBLE}={visible} does not list it"):
        Settings(device="cuda:1").show_alone({VISIBLE: visible})


@pytest.mark.parametrize("device", ["cuda:", "cuda:x", "cuda:-1", "cpu:1", "tpu"])
def test_what_is_no_device_is_refused(device: str) -> None:
    with pytest.raises(UsageError, match="device"):
        Settings(device=device)
