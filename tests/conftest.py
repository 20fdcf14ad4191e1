"""What all tests share: a cache folder of their own, and in it a machine that needs no measuring."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
from hypothesis import settings

from brim.core import Hardware, Link, Tier
from brim.core.hardware import DISK, RAM
from brim.measure import probe as probing
from support.garbage import collect_threads
from support.machine import cache, probed_home, share_conversions

__all__ = ["cache", "probed_home"]

# The same examples in every run: what fails before a change lands fails because of it. `make slow` tries new ones.
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

# No test asks the real hub, nor does a command that a test starts.
os.environ["HF_HUB_OFFLINE"] = "1"

# On a busy machine commands take longer, and a test says what is to be in a log.
os.environ.setdefault("BRIM_LOG_EVERY_S", "600")


# What a shell starts behind a script's back ignores Ctrl-C, and so would all that tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def known_machine() -> Hardware:
    """A small machine with round figures. Plans in tests do not depend on how fast the test machine is today."""
    return Hardware(
        name="a machine for tests",
        compute=RAM,
        tiers=(
            Tier(name=RAM, capacity_bytes=psutil.virtual_memory().total, bytes_per_s=10e9),
            Tier(name=DISK, capacity_bytes=1 << 40, bytes_per_s=1e9),
        ),
        links=(
            Link(source=DISK, target=RAM, bytes_per_s=1e9),
            Link(source=RAM, target=RAM, bytes_per_s=5e9),
        ),
        flops_per_s={"float32": 100e9, "bfloat16": 50e9},
        source="made up",
    )


@pytest.fixture(scope="module", autouse=True)
def only_what_comes_now_is_garbage() -> None:
    """Or each collection, of which brim asks for many, would look through the millions of objects of all imports.

    What is frozen is never freed: a model whose thread is in the middle of a job is waited for.
    """
    collect_threads()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny products take longer to be shared among threads than to be done, the more so beside other processes."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session", autouse=True)
def cache_home(tmp_path_factory: pytest.TempPathFactory, known_machine: Hardware, one_thread: None) -> Iterator[Path]:
    """The user's cache folder for the whole session, where a probe finds ``known_machine`` and measures nothing."""
    home = tmp_path_factory.mktemp("cache-home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(home))
        share_conversions(home, tmp_path_factory)
        facts = probing._fingerprint(None, home / "brim")
        probing._store(known_machine, probing._cache_file(facts))
        yield home
