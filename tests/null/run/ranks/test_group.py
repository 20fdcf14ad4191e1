"""Which GPU a rank of torchrun has."""

from __future__ import annotations

import datetime
import socket

import psutil
import pytest

from brim.errors import UsageError
from brim.run.ranks.group import _device_number, _meeting


@pytest.mark.parametrize(("local_rank", "visible", "number"), [(0, 1, 0), (3, 1, 0), (3, 8, 3)])
def test_a_rank_has_the_gpu_of_its_number_or_the_only_one_it_sees(local_rank: int, visible: int, number: int) -> None:
    assert _device_number(local_rank, visible) == number


def test_a_rank_without_a_gpu_is_told_so() -> None:
    with pytest.raises(UsageError, match="PyTorch sees 4 GPUs"):
        _device_number(4, 4)


def test_a_store_that_a_rank_has_itself_listens_to_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a scheduler and not torchrun starts ranks; PyTorch's own store listens to all machines."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    for name, value in {"MASTER_ADDR": "localhost", "MASTER_PORT": port, "RANK": 0, "WORLD_SIZE": 1}.items():
        monkeypatch.setenv(name, str(value))
    store, rank, world = _meeting(datetime.timedelta(seconds=5))
    here = [c.laddr.ip for c in psutil.Process().net_connections("tcp") if c.laddr.port == port and not c.raddr]
    assert (rank, world, here) == (0, 1, ["127.0.0.1"])
    store.set("key", "value")
    again, _, _ = _meeting(datetime.timedelta(seconds=5))  # a program may train twice
    assert again.get("key") == b"value"
