"""Run a script or a module as ``python`` does: as ``__main__`` of this process, with its own tracebacks.

Sources: CPython, Modules/main.c and Python/pythonrun.c (values of ``__main__``, ``sys.argv`` and ``sys.path``, and
the end of a process by an exception); coverage.py, which replaces ``__main__`` in the same way.
"""

from __future__ import annotations

import builtins
import importlib.machinery
import io
import os
import pkgutil
import runpy
import sys
import traceback
import types
from dataclasses import dataclass
from pathlib import Path

_OWN = str(Path(__file__).parents[2]) + os.sep


@dataclass(frozen=True, kw_only=True)
class Program:
    """A program: a file (or a folder or archive with a ``__main__.py``), or with ``is_module`` a dotted name.

    With ``safe_path`` it does not import from the folder of its file, or, as a module, from the current folder
    (``python -P``).
    """

    target: str
    arguments: tuple[str, ...] = ()
    is_module: bool = False
    safe_path: bool = bool(sys.flags.safe_path)


def execute(program: Program) -> None:
    """Run ``program`` as ``__main__``. Exceptions pass through; ``end_as_python`` ends the process."""
    main = types.ModuleType("__main__")
    vars(main).update(__builtins__=builtins, __annotations__={})
    sys.modules["__main__"] = main
    if program.is_module:
        sys.argv = ["-m", *program.arguments]
        _set_first_path(os.getcwd(), safe=program.safe_path)  # noqa: PTH109
        runpy._run_module_as_main(program.target)  # type: ignore[attr-defined]  # as `python -m` does
        return
    sys.argv = [program.target, *program.arguments]
    if pkgutil.get_importer(program.target) is not None:
        _set_first_path(os.path.abspath(program.target), safe=False)  # noqa: PTH100  # as Python, also with -P
        runpy._run_module_as_main("__main__", alter_argv=False)  # type: ignore[attr-defined]
        return
    _set_first_path(os.path.dirname(os.path.realpath(program.target)), safe=program.safe_path)  # noqa: PTH120
    _execute_file(main, program.target)


def _set_first_path(folder: str, *, safe: bool) -> None:
    """Replace the first path: the folder of Python's own script, unless Python was started with ``-P``."""
    if not sys.flags.safe_path:
        del sys.path[0]
    if not safe:
        sys.path.insert(0, folder)


def _execute_file(main: types.ModuleType, target: str) -> None:
    # As in Python since 3.9: absolute, and otherwise unchanged.
    path = target if os.path.isabs(target) else os.path.join(os.getcwd(), target)  # noqa: PTH109, PTH117, PTH118
    loader: importlib.machinery.SourceFileLoader | importlib.machinery.SourcelessFileLoader
    if path.endswith(".pyc"):
        loader = importlib.machinery.SourcelessFileLoader("__main__", path)
        code = loader.get_code("__main__")
        assert code is not None, "a file without source has code or raises"
    else:
        loader = importlib.machinery.SourceFileLoader("__main__", path)
        with io.open_code(path) as file:
            code = compile(file.read(), path, "exec", dont_inherit=True)
    vars(main).update(__file__=path, __cached__=None, __loader__=loader)
    exec(code, vars(main))


def end_as_python(error: BaseException) -> None:
    """Print ``error`` as ``python script.py`` would; the interpreter prints nothing more when it gets the error.

    The interpreter sets exit code 1, or dies by the signal for Ctrl-C, after threads and ``atexit``.
    """
    strip(error)
    try:
        sys.excepthook(type(error), error, error.__traceback__)
    except Exception as failed:
        failure: Exception | None = failed
    else:
        failure = None
    if failure is not None:
        sys.stderr.write("Error in sys.excepthook:\n")
        strip(failure)
        sys.__excepthook__(type(failure), failure, failure.__traceback__)
        sys.stderr.write("\nOriginal exception was:\n")
        sys.__excepthook__(type(error), error, error.__traceback__)
    sys.excepthook = lambda *_: None


def strip(error: BaseException) -> None:
    """Remove brim's frames from the tracebacks of ``error`` and its causes, except of errors that brim raised.

    An error raised in this file is the program's: its code does not compile.
    """
    queue: list[BaseException | None] = [error]
    seen: set[int] = set()
    while queue:
        current = queue.pop()
        if current is None or id(current) in seen:
            continue
        seen.add(id(current))
        queue += [current.__cause__, current.__context__]
        frames = [frame for frame, _ in traceback.walk_tb(current.__traceback__)]
        raised_here = frames and _is_own(frames[-1]) and frames[-1].f_code.co_filename != __file__
        if not raised_here or isinstance(current, KeyboardInterrupt):
            current.__traceback__ = _without_own(current.__traceback__)


def _is_own(frame: types.FrameType) -> bool:
    return frame.f_code.co_filename.startswith(_OWN)


def _without_own(trace: types.TracebackType | None) -> types.TracebackType | None:
    frames = []
    while trace is not None:
        if not _is_own(trace.tb_frame):
            frames.append(trace)
        trace = trace.tb_next
    stripped: types.TracebackType | None = None
    for entry in reversed(frames):
        stripped = types.TracebackType(stripped, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return stripped
