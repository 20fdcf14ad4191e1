import contextlib
import gc
import signal
import sys
import threading
import time

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from brim import cli as command_line
from brim.cli import process
from brim.cli.process import Terminated, signals_as_exceptions
from brim.errors import UnsupportedError


class Ended:
    """Something in whose destructor a signal arrives."""

    def __init__(self, number):
        self.number = number

    def __del__(self):
        signal.raise_signal(self.number)


@pytest.mark.parametrize(
    ("number", "raised"), [(signal.SIGTERM, Terminated), (signal.SIGINT, KeyboardInterrupt)], ids=["TERM", "INT"]
)
def test_a_signal_that_arrives_in_a_destructor_is_heard_after_it(number, raised):
    before = signal.getsignal(signal.SIGTERM), sys.unraisablehook
    with pytest.raises(raised), signals_as_exceptions():
        Ended(number)
        gc.collect()
        time.sleep(20)  # is ended by the signal
        pytest.fail("the signal was lost")
    assert (signal.getsignal(signal.SIGTERM), sys.unraisablehook) == before


def test_other_exceptions_of_destructors_are_reported_as_ever(monkeypatch):
    class Broken:
        def __del__(self):
            raise ValueError("broken")

    told = []
    monkeypatch.setattr(sys, "unraisablehook", lambda dropped: told.append(str(dropped.exc_value)))
    with signals_as_exceptions():
        Broken()
    assert told == ["broken"]


@pytest.mark.parametrize(("raised", "code"), [(KeyboardInterrupt, 130), (Terminated, 143)])
def test_a_signal_that_became_another_error_on_its_way_is_no_traceback(raised, code, monkeypatch, capsys):
    """A mode that is half entered when the signal comes raises an error of its own when it is left."""

    def interrupted(**_):
        try:
            raise raised
        finally:
            raise RuntimeError("there wasn't one\nactive")

    monkeypatch.setattr(command_line.brim, "main", interrupted)
    assert command_line.main([]) == code
    assert capsys.readouterr().err.endswith("ed. (RuntimeError: there wasn't one active)\n")


def test_a_signal_that_an_import_in_cpp_dropped_is_what_ended_the_command(monkeypatch, capsys):
    def imported(**_):
        with contextlib.suppress(Terminated):  # as C++ does, when it imports a library that it can do without
            signal.raise_signal(signal.SIGTERM)
        raise ImportError("cannot load module more than once per process")

    monkeypatch.setattr(command_line.brim, "main", imported)
    monkeypatch.setattr(command_line, "failed_import", lambda error: UnsupportedError("Cannot import numpy."))
    assert command_line.main([]) == 143
    assert capsys.readouterr().err.startswith("Terminated. (ImportError: cannot load module")


def test_an_error_without_a_signal_keeps_its_traceback(monkeypatch):
    def failed(**_):
        raise RuntimeError("a defect")

    monkeypatch.setattr(command_line.brim, "main", failed)
    with pytest.raises(RuntimeError, match="a defect"):
        command_line.main([])


def test_a_signal_within_a_trace_is_heard_where_no_code_of_pytorch_runs():
    """An exception in the midst of a dispatch may end the process: PyTorch's C++ lets none pass everywhere."""
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(8)])
    x = torch.zeros(4, 8)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model(x)  # what it imports
        for after_s in [0.001 * number for number in range(30)]:
            timer = threading.Timer(after_s, signal.pthread_kill, (threading.get_ident(), signal.SIGTERM))
            with pytest.raises(Terminated), signals_as_exceptions():
                timer.start()
                while True:
                    model(x)
            timer.join()
            assert torch._C._len_torch_dispatch_stack() == 1


class _Counter(dict):
    """Receives a signal while PyTorch counts a call of a fake tensor's mode, before that has begun."""

    def __contains__(self, name: object) -> bool:
        if not self:
            self["signal"] = 1
            signal.raise_signal(signal.SIGTERM)
        return super().__contains__(name)


def test_a_signal_before_a_fake_tensor_s_mode_is_heard_where_no_code_of_pytorch_runs(monkeypatch):
    """The mode is off already, and no frame has the name of its method yet."""
    x = torch.zeros(4, 8)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = nn.Linear(8, 8)
        model(x)
        monkeypatch.setattr(torch.utils._stats, "simple_call_counter", _Counter())
        with pytest.raises(Terminated) as raised, signals_as_exceptions():
            model(x)
            pytest.fail("the signal was lost")
    assert not [entry for entry in raised.traceback if "/torch/" in str(entry.path)]


def test_a_signal_within_a_trace_ends_what_waits_beneath_pytorch(monkeypatch):
    monkeypatch.setattr(process, "_OPERATION_S", 0.05)
    waits = Waits.apply
    timer = threading.Timer(0.05, signal.pthread_kill, (threading.get_ident(), signal.SIGINT))
    with FakeTensorMode(), pytest.raises(KeyboardInterrupt), signals_as_exceptions():
        timer.start()
        waits(torch.zeros(2))
        pytest.fail("the signal was lost")
    timer.join()
    assert sys.gettrace() is None


class Waits(torch.autograd.Function):
    @staticmethod
    def forward(_, x):
        while True:
            threading.Event().wait(20)
