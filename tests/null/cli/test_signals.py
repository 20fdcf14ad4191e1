import gc
import signal
import sys
import time

import pytest

from brim.cli.signals import Terminated, signals_as_exceptions


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
