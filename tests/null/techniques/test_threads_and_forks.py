"""A streamed model in a program of several threads, and in processes that were forked."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import nn

import brim
from brim.errors import UnsupportedError
from support.streamed import FITS, X, load_streamed, make_net
from support.tiny_model import save_llama


@pytest.mark.parametrize("fit", FITS.values(), ids=FITS)
def test_calls_of_several_threads_take_turns(fit: Callable[[nn.Module], object]) -> None:
    inputs = [X + number for number in range(4)]
    net = make_net()
    with torch.no_grad():
        expected = [net(x) for x in inputs]
        handle = fit(net)

        def work(number: int) -> list[torch.Tensor]:
            with torch.no_grad():
                return [net(inputs[number]) for _ in range(5)]

        with ThreadPoolExecutor(4) as pool:
            outcomes = list(pool.map(work, range(4)))
    assert all(torch.equal(made, expected[n]) for n, outcome in enumerate(outcomes) for made in outcome)
    handle.remove()
    assert "_call_impl" not in vars(net)


def test_a_thread_that_failed_gives_its_turn_away() -> None:
    net = make_net()
    handle = FITS["cpu"](net)
    with torch.no_grad(), ThreadPoolExecutor(1) as pool:
        for _ in range(2):
            with pytest.raises(RuntimeError, match="shapes"):
                pool.submit(torch.no_grad()(net), torch.zeros(1, 3)).result(30)
        net(X)
        assert pool.submit(torch.no_grad()(net), X).result(30).shape == (3, 256)
    handle.remove()


@pytest.mark.thorough
def test_a_loaded_model_generates_in_several_threads(tmp_path: Path) -> None:
    module = load_streamed(save_llama(tmp_path))
    prompts = [torch.tensor([[number, number + 1, 5]]) for number in range(1, 4)]

    def generate(ids: torch.Tensor) -> list[int]:
        mask = torch.ones_like(ids)
        return module.generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=False)[0].tolist()  # type: ignore[operator]

    expected = [generate(ids) for ids in prompts]
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(generate, prompts)) == expected
    module.brim.remove()


def test_a_forked_process_is_refused_and_does_not_hang() -> None:
    net = make_net()
    handle = FITS["cpu"](net)
    with torch.no_grad():
        net(X)
        for use in (lambda: net(X), lambda: net[0](X), handle.remove):
            assert _outcome_in_a_fork(use) == 7, use
        assert _outcome_in_a_fork(net.state_dict) == 0  # which nothing moves for
        net(X)
    handle.remove()


def test_a_model_that_is_all_resident_can_be_called_in_a_fork() -> None:
    net = make_net()
    handle = brim.fit(net, ram="64MiB")
    assert _outcome_in_a_fork(lambda: torch.no_grad()(net)(X)) == 0
    handle.remove()


def _outcome_in_a_fork(use: Callable[[], object]) -> int:
    """7: refused with words; 0: done; -1: it hung."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking beside threads, which is what is tried
        pid = os.fork()
    if pid == 0:
        code = 9
        try:
            use()
            code = 0
        except UnsupportedError as error:
            code = 7 if "spawn" in str(error) else 8
        finally:
            os._exit(code)
    until_s = time.monotonic() + 20
    while time.monotonic() < until_s:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    return -1
