"""The command's process: standard streams in any state (closed, full, of a limited encoding), signals as exceptions.

A failed write to the standard output is an error, reported once. A failed write to the standard error is ignored:
there is nowhere to report it.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any

from brim import threads
from brim.printable import printable


class OutputError(Exception):
    """The standard output cannot be written."""


class _Output(io.FileIO):
    """The standard output; its failures are distinguished from those of other files, and reported once."""

    failed = False

    def write(self, data: Any) -> int:
        if self.failed:  # the buffer is written again as the process ends
            return memoryview(data).nbytes
        try:
            return super().write(data)
        except OSError as error:
            self.failed = True
            if isinstance(error, BrokenPipeError):
                raise
            raise OutputError(error.strerror) from error


class _Terminal(io.TextIOWrapper):
    """A terminal that gets text without control characters: names, messages and a model's words can hold any.

    rich writes colours and bars directly to the terminal (``rich_proxied_file``); ``Console`` checks its texts. A
    leading carriage return comes from a library's progress bar.
    """

    def write(self, text: str) -> int:
        start = text[:1] if text.startswith("\r") and self.fileno() == 2 else ""
        super().write(start + printable(text.removeprefix(start)))
        return len(text)

    @property
    def rich_proxied_file(self) -> _Unfiltered:
        return _Unfiltered(self)


class _Unfiltered:
    """The terminal as rich writes to it."""

    def __init__(self, terminal: _Terminal) -> None:
        self._terminal = terminal

    def write(self, text: str) -> int:
        return io.TextIOWrapper.write(self._terminal, text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._terminal, name)


class _Notes(io.FileIO):
    """The standard error: failed writes are dropped."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError:
            return memoryview(data).nbytes


@contextlib.contextmanager
def standard_streams() -> Iterator[None]:
    """While open, ``sys.stdout`` and ``sys.stderr`` accept any letter, written as ``\\xe9`` if their encoding lacks
    it.

    Raises OutputError, after reporting it, if the standard output could not be written.
    """
    _open_what_is_closed()
    before = sys.stdout, sys.stderr
    if not _is_file(sys.stdout, 1) or not _is_file(sys.stderr, 2):  # captured by a caller
        yield
        return
    replacements = [_replacement(stream, kind) for stream, kind in zip(before, (_Output, _Notes), strict=True)]
    sys.stdout, sys.stderr = replacements
    try:
        yield
        replacements[0].flush()
    except OutputError as error:
        replacements[1].write(f"Error: Cannot write the output: {error}.\n")
        raise
    finally:  # handlers of logs may keep the streams
        with contextlib.suppress(OutputError, OSError):
            replacements[0].flush()
        sys.stdout, sys.stderr = before


def _open_what_is_closed() -> None:
    """Open closed streams: the next file would get a closed stream's number, and libraries would write to it.

    As usual, a closed output is opened so that writing fails, and a closed input so that it is at its end.
    """
    for number, mode in ((0, os.O_RDONLY), (1, os.O_RDONLY), (2, os.O_WRONLY)):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, mode)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
    for number, name in ((1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w", encoding="utf-8", closefd=False))  # noqa: SIM115  # for good


def _is_file(stream: object, number: int) -> bool:
    try:
        return type(stream) is io.TextIOWrapper and stream.fileno() == number
    except (OSError, ValueError):
        return False


def _replacement(stream: Any, kind: type[io.FileIO]) -> io.TextIOWrapper:
    stream.flush()
    raw = kind(stream.fileno(), "w", closefd=False)
    buffered = stream.line_buffering or stream.isatty() or kind is _Notes
    wrapper = _Terminal if stream.isatty() else io.TextIOWrapper
    return wrapper(
        io.BufferedWriter(raw), encoding=stream.encoding, errors="backslashreplace", line_buffering=buffered
    )


_AGAIN_S = 0.01
_OPERATION_S = 3.0  # longer than any operation on fake tensors
_received: list[type[BaseException]] = []  # by the running command, since signals are exceptions
_CALLED_BY_CPP = frozenset({"__torch_dispatch__", "__torch_function__", "find_torch_dispatch_rule"})


class Terminated(BaseException):
    """The exception for SIGTERM, which by default ends a process at once and leaves its temporary files."""


@contextlib.contextmanager
def signals_as_exceptions() -> Iterator[None]:
    """SIGTERM raises ``Terminated``, as SIGINT raises KeyboardInterrupt. Only the main thread hears signals.

    Python drops an exception that is raised while a destructor or a callback of a weak reference runs: it goes to
    ``sys.unraisablehook`` and the program goes on. So a signal whose exception ends there is sent again.

    PyTorch calls Python code while it dispatches an operation to a mode (torch/_library/simple_registry.py, for one),
    partly where an exception comes to std::terminate. There the exception is raised once the operation is over.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    main = threading.get_ident()
    report = sys.unraisablehook
    raised: dict[signal.Signals, type[BaseException]] = {signal.SIGTERM: Terminated}
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        raised[signal.SIGINT] = KeyboardInterrupt

    awaited: list[FrameType] = []  # frames in which an exception is about to be raised
    _received.clear()

    def send_again(number: signal.Signals) -> None:
        # By another thread: sent from here, it would arrive before this function returns, and be dropped once more.
        again = threading.Timer(_AGAIN_S, _send, (number, main))
        again.daemon = True
        threads.start(again)

    def hear(number: int, frame: FrameType | None) -> None:
        error = raised[signal.Signals(number)]
        _received.append(error)
        caller = _asked_for_it(frame)
        if caller is None or awaited or sys.gettrace() is not None:  # a second one, or a debugger's
            _forget(awaited)
            raise error
        awaited.append(caller)
        _raise_in(awaited, error)
        watch = threading.Timer(_OPERATION_S, insist, (signal.Signals(number), caller))
        watch.daemon = True
        threads.start(watch)

    def insist(number: signal.Signals, caller: FrameType) -> None:
        if caller in awaited:
            _send(number, main)

    def hook(dropped: sys.UnraisableHookArgs) -> None:
        number = next((number for number, kind in raised.items() if dropped.exc_type is kind), None)
        if number is None:
            report(dropped)
        else:
            send_again(number)

    before = {number: signal.signal(number, hear) for number in raised}
    sys.unraisablehook = hook
    try:
        yield
    finally:
        _forget(awaited)
        sys.unraisablehook = report
        for number, handler in before.items():
            signal.signal(number, handler)


def last_signal() -> BaseException | None:
    """Return the exception of the last signal that the command has heard, even if C++ dropped it.

    PyTorch drops one that comes while it imports NumPy, which then cannot be imported again.
    """
    return _received[-1]() if _received else None


def _asked_for_it(frame: FrameType | None) -> FrameType | None:
    """The code that called the operation being dispatched to a mode; None where there is none."""
    torch: Any = sys.modules.get("torch")
    if not hasattr(torch, "_C"):
        return None
    is_dispatching = torch._C._len_torch_dispatch_stack() + torch._C._len_torch_function_stack() > 0
    asked, counted = None, _counting_wrapper()
    while frame is not None:
        if frame.f_code.co_name in _CALLED_BY_CPP or frame.f_code is counted:
            is_dispatching, asked = True, None  # modes are not in force within themselves
        elif asked is None and not _may_be_called_by_cpp(frame):
            asked = frame
        frame = frame.f_back
    return asked if is_dispatching else None


def _counting_wrapper() -> CodeType | None:
    """Return the code in which PyTorch wraps fake tensors' ``__torch_dispatch__``; its name is ``wrapper``."""
    fake_tensor = sys.modules.get("torch._subclasses.fake_tensor")
    mode = getattr(fake_tensor, "FakeTensorMode", None)
    return None if mode is None else mode.__torch_dispatch__.__code__


def _may_be_called_by_cpp(frame: FrameType) -> bool:
    module = str(frame.f_globals.get("__name__", ""))
    top = module.partition(".")[0]
    return top == "torch" or top in sys.stdlib_module_names or module.startswith("brim.predict")


def _raise_in(awaited: list[FrameType], error: type[BaseException]) -> None:
    """Raise ``error`` when the frame goes on, as a debugger would stop in it."""

    def trace(_: FrameType, event: str, __: Any) -> Any:
        if event == "exception":
            return trace
        _forget(awaited)
        raise error

    awaited[0].f_trace = trace
    sys.settrace(lambda *_: None)


def _forget(awaited: list[FrameType]) -> None:
    if awaited:
        awaited.pop().f_trace = None
        sys.settrace(None)


def _send(number: signal.Signals, thread: int) -> None:
    if hasattr(signal, "pthread_kill"):  # ends a wait that the thread may be in
        signal.pthread_kill(thread, number)
    else:
        signal.raise_signal(number)
