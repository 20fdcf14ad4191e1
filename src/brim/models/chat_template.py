"""Render chat templates, which are programs that come with a model, in a separate process with limits.

jinja's sandbox limits the objects that a template may use, but not its time or memory: ``9 ** (9 ** 9)`` is one
instruction that cannot be interrupted. The process loads neither PyTorch nor this package; this file is its program.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from io import FileIO, RawIOBase
from pathlib import Path
from typing import IO, Any

_MOST_CPU_S = 4  # of a rendering: a conversation of 16 MiB takes a second
_MOST_WAIT_S = 120.0  # wall time, because other programs may use the CPUs
_MOST_BYTES, _MOST_BYTES_EACH = 256 << 20, 32  # of memory, and further bytes per byte of the template's input
_MOST_CHARACTERS, _MOST_CHARACTERS_EACH = 1 << 20, 8  # of text, likewise
_IDLE_S = 30.0  # after which the process, of 60 MiB, ends
_LENGTH_BYTES = 8  # the length before each message between the processes


class TemplateError(ValueError):
    """A chat template fails, or exceeds a limit."""


def apply_template(tokenizer: Any, messages: Sequence[Any], **options: Any) -> Any:
    """``tokenizer.apply_chat_template``, its template rendered within bounds of time, memory and text.

    Raises TemplateError if the template fails or exceeds a limit, and the errors of transformers before and after it.
    """
    from transformers import tokenization_utils_base

    names: Any = vars(tokenization_utils_base)
    render = names["render_jinja_template"]  # transformers takes no renderer as an argument
    if not isinstance(render, _Renderer):
        names["render_jinja_template"] = render = _Renderer(render)
    with render.bounded():
        return tokenizer.apply_chat_template(list(messages), **options)


class _Renderer:
    """Replace transformers' ``render_jinja_template`` within ``bounded``; other callers get the original."""

    def __init__(self, original: Callable[..., Any]) -> None:
        self._original = original
        self._here = threading.local()

    @contextlib.contextmanager
    def bounded(self) -> Iterator[None]:
        self._here.bounded = True
        try:
            yield
        finally:
            self._here.bounded = False

    def __call__(self, *args: Any, **arguments: Any) -> Any:
        if args or not getattr(self._here, "bounded", False):
            return self._original(*args, **arguments)
        given = json.dumps(arguments, default=str)
        bounds = {
            "cpu_s": _MOST_CPU_S,
            "bytes": _MOST_BYTES + _MOST_BYTES_EACH * len(given),
            "characters": _MOST_CHARACTERS + _MOST_CHARACTERS_EACH * len(given),
        }
        return _process.rendered(f"[{json.dumps(bounds)}, {given}]".encode())


class _Process:
    """The rendering process: started when needed, and again if it has ended or this process is a fork."""

    def __init__(self) -> None:
        self._child: subprocess.Popen[bytes] | None = None
        self._owner = 0
        self._lock = threading.Lock()

    def rendered(self, request: bytes) -> Any:
        with self._lock:
            for _ in range(2):  # it may have ended just now, after its idle time
                answer = self._response(request)
                if answer:
                    document = json.loads(answer)
                    if "error" in document:
                        raise TemplateError(document["error"])
                    return document["rendered"]
                code = self.end(at_once=False)
                if code == -signal.SIGXCPU:
                    raise TemplateError(f"it computes for more than {_MOST_CPU_S} s")
                if code:
                    break
        raise TemplateError(f"the process that renders it ended with code {code}")

    def _response(self, request: bytes) -> bytes:
        """The process's answer; empty if it ends without one."""
        try:
            child = self._begun()
            assert child.stdin is not None and child.stdout is not None
            _send(child.stdin, request)
            if not select.select([child.stdout], [], [], _MOST_WAIT_S)[0]:
                raise TemplateError(f"it is not rendered within {_MOST_WAIT_S:.0f} s")
            return _received(child.stdout)
        except BrokenPipeError:
            return b""
        except BaseException:
            self.end()  # a late answer must not be read as that of the next request
            raise

    def _begun(self) -> subprocess.Popen[bytes]:
        if self._owner != os.getpid():
            self.end()
        if self._child is None:
            command = [sys.executable, "-P", __file__]
            self._child = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                cwd=os.sep,  # this process's folder may be deleted
                start_new_session=True,  # Ctrl-C must not reach it
            )  # fmt: skip
            self._owner = os.getpid()
            assert self._child.stdin is not None
            _send(self._child.stdin, json.dumps([place for place in sys.path if place]).encode())
        return self._child

    def end(self, *, at_once: bool = True) -> int:
        """Wait for its end, and return its exit code."""
        child, self._child = self._child, None
        if child is None:
            return 0
        assert child.stdin is not None and child.stdout is not None
        if self._owner != os.getpid():  # only the original process may read, write and wait
            child.returncode = 0
            for pipe in (child.stdin, child.stdout):
                pipe.raw.close()  # type: ignore[attr-defined]  # without what is still in a buffer: it is the other's
            return 0
        if at_once:
            child.kill()
        with contextlib.suppress(BrokenPipeError):
            child.stdin.close()
        child.stdout.close()
        return child.wait()


_process = _Process()
atexit.register(_process.end)


def _send(pipe: IO[bytes], message: bytes) -> None:
    pipe.write(len(message).to_bytes(_LENGTH_BYTES, "little") + message)
    pipe.flush()


def _received(pipe: IO[bytes] | RawIOBase) -> bytes:
    """The next message; empty at the end, or if it is cut off."""
    message, length = bytearray(), _LENGTH_BYTES
    for _ in range(2):  # the length, then the text
        message = bytearray()
        while len(message) < length and (more := pipe.read(length - len(message))):
            message += more
        if len(message) < length:
            return b""
        length = int.from_bytes(message, "little")
    return bytes(message)


def _main() -> None:
    """Run the process: render requests until the input ends, or nothing comes for a while."""
    questions, answers = FileIO(0), sys.stdout.buffer  # unbuffered, for select
    sys.stdout = sys.stderr  # libraries may print
    sys.path[:] = json.loads(_received(questions))
    from transformers.utils.chat_template_utils import render_jinja_template

    while select.select([questions], [], [], _IDLE_S)[0] and (request := _received(questions)):
        bounds, arguments = json.loads(request)
        _limit(bounds)
        _send(answers, json.dumps(_answer(render_jinja_template, arguments, bounds)).encode())


def _limit(bounds: dict[str, int]) -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    used = resource.getrusage(resource.RUSAGE_SELF)
    cpu_s = int(used.ru_utime + used.ru_stime) + 1 + bounds["cpu_s"]
    limits = {resource.RLIMIT_CPU: cpu_s}
    if sys.platform == "linux":
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])  # proc_pid_statm(5)
        limits[resource.RLIMIT_AS] = pages * resource.getpagesize() + bounds["bytes"]
    for limit, most in limits.items():
        hard = resource.getrlimit(limit)[1]
        resource.setrlimit(limit, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def _answer(render: Callable[..., Any], arguments: dict[str, Any], bounds: dict[str, int]) -> dict[str, Any]:
    try:
        texts, spans = render(**arguments)
    except MemoryError:
        return {"error": f"it takes more than {bounds['bytes'] >> 20} MiB of memory"}
    except Exception as error:  # templates raise any exception
        return {"error": (" ".join(str(error).split()) or type(error).__name__)[:1000]}
    characters = sum(map(len, texts))
    if characters > bounds["characters"]:
        return {"error": f"it writes {characters:,} characters; at most {bounds['characters']:,} are taken"}
    return {"rendered": [texts, spans]}


if __name__ == "__main__":
    _main()
