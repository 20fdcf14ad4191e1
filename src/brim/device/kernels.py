"""Allocations of kernels, which PyTorch's CUDA build on the device answers once for each call; answers are stored.

A call is an operator with its arguments; a tensor is described by shape, strides, offset, dtype and device. Its
script lists the kernel's allocations and frees, in order; ``kernel_worker``, which runs in a separate process,
defines the format. Answers are stored in the user's cache by PyTorch build, card and brim's sources,
one per line, so that commands that run at the same time can all add to them.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import json
import os
import select
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from brim.device import environment
from brim.device.environment import Environment
from brim.device.settings import DeviceSettings
from brim.errors import BrimError
from brim.measure.user_cache import cache_folder, fingerprint, load_text, own_folder
from brim.processes import bound, python_command

Script = tuple[tuple[str, int, int], ...]
Call = Mapping[str, Any]

# A common card of each compute capability: the sizes of launches and reductions depend on the card.
CARDS = {
    (7, 0): "Tesla V100-SXM2-32GB", (7, 5): "T4", (8, 0): "A100 80GB", (8, 6): "RTX 3090", (8, 9): "RTX 4090",
    (9, 0): "H100", (10, 0): "B200", (12, 0): "RTX 5090",
}  # fmt: skip
_MEMORY_BYTES = 1 << 45  # calls may have larger tensors than the card has memory
_LONGEST_WAIT_S = 60.0
_WORKER = Path(__file__).with_name("kernel_worker.py")
_AHEAD = """
import pathlib, sys
sys.path.insert(0, sys.argv[1])
from brim.device.kernels import answers_for
answers_for((int(sys.argv[3]), int(sys.argv[4])), pathlib.Path(sys.argv[2])).become_process()
"""


class KernelAnswers:
    """Scripts of the kernels of one card: stored ones, and a process with the CUDA build for the others."""

    def __init__(self, build: Environment, settings: DeviceSettings, path: Path) -> None:
        self._build, self._settings, self._path = build, settings, path
        self._process: subprocess.Popen[str] | None = None
        self._owner = 0
        self._known = _read(path)
        self.problem = ""  # the reason why the process did not start

    def script(self, call: Call) -> Script | None:
        """Return what the call allocates. None: PyTorch refuses the call, or the process does not start."""
        text = json.dumps(call, sort_keys=True)
        key = hashlib.sha256(text.encode()).hexdigest()
        if key not in self._known:
            said = self._ask(text)
            if said is None:
                return None  # another try may succeed
            self._known[key] = _script(said)
            self._append(json.dumps([key, said]))
        return self._known[key]

    def begin(self) -> None:
        """Begin the process ahead of the first call if there are no answers yet; it builds its device itself.

        If it fails, the first call begins another, and reports the reason if that fails too.
        """
        if not self._known and self._process is None:
            source, capability = Path(__file__).parents[2], self._settings.capability.split(".")
            with contextlib.suppress(OSError):
                self._start(python_command("-c", _AHEAD, source, self._build.folder, *capability))

    def become_process(self) -> None:
        """Build the device, then replace this process by the one that answers.

        Return if the device was built into a folder that ends with this process.
        """
        variables = self._build.variables(self._settings)
        if own_folder() is None:
            os.execve(self._build.python, self._worker(), variables)

    def close(self) -> None:
        """End the process. The next call begins another."""
        process, self._process = self._process, None
        if process is None or self._owner != os.getpid():
            return
        assert process.stdin is not None and process.stdout is not None
        process.kill()
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        process.stdout.close()
        process.wait()

    def _ask(self, text: str) -> Any:
        for _ in range(2):  # the process may have been killed; if it ends a second time, this call is the cause
            try:
                process = self._begun()
                assert process.stdin is not None and process.stdout is not None
                process.stdin.write(text + "\n")
                process.stdin.flush()
                if select.select([process.stdout], [], [], _LONGEST_WAIT_S)[0]:
                    return json.loads(process.stdout.readline())
            except BrimError as error:
                self.problem = error.reason
            except (OSError, ValueError):
                pass
            self.close()
        return None

    def _begun(self) -> subprocess.Popen[str]:
        if self._process is not None and self._owner == os.getpid():
            return self._process
        return self._start(self._worker(), self._build.variables(self._settings))

    def _worker(self) -> list[str]:
        return [str(self._build.python), "-P", str(_WORKER)]

    def _start(self, command: list[str], variables: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        self._process = subprocess.Popen(
            bound(command), env=variables, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        self._owner = os.getpid()
        return self._process

    def _append(self, line: str) -> None:
        """Append a line to the file in one piece; if that fails, only this process has the answer."""
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_NOFOLLOW", 0)
            file = os.open(self._path, flags, 0o600)
            try:
                os.write(file, f"\n{line}\n".encode())  # another process may have left an incomplete line
            finally:
                os.close(file)


@cache
def answers_for(capability: tuple[int, int], folder: Path | None = None) -> KernelAnswers | None:
    """The answers of a card of that compute capability; None without a CUDA build of PyTorch.

    Nothing is downloaded. ``folder``: the folder of builds, None: in the user's cache.
    """
    card = CARDS.get(capability)
    try:
        build = environment.find(folder=folder) if card is not None else None
        if build is None:
            return None
        settings = replace(DeviceSettings.of(card or ""), memory_bytes=_MEMORY_BYTES)
        torch_files = [build.site_packages / "torch" / name for name in ("version.py", "lib/libtorch_cpu.so")]
        key = fingerprint([*torch_files, _WORKER, Path(__file__)], settings)
    except (BrimError, OSError):
        return None
    answers = KernelAnswers(build, settings, cache_folder() / "kernels" / f"{key}.jsonl")
    atexit.register(answers.close)
    return answers


def begin(capability: tuple[int, int]) -> None:
    """Begin the process that answers for a card of that compute capability if none of its answers are stored."""
    answers = answers_for(capability)
    if answers is not None:
        answers.begin()


def _read(path: Path) -> dict[str, Script | None]:
    """Read the answers in a file, without incomplete lines of killed processes."""
    try:
        found = load_text(path)
    except UnicodeDecodeError:
        found = None
    known: dict[str, Script | None] = {}
    for line in (found or "").splitlines():
        with contextlib.suppress(ValueError, TypeError, KeyError):
            key, said = json.loads(line)
            known[str(key)] = _script(said)
    return known


def _script(said: Mapping[str, Any]) -> Script | None:
    if "script" not in said:
        return None
    entries = tuple((str(what), int(number), int(bytes)) for what, number, bytes in said["script"])
    if any(what not in ("alloc", "free", "out", "keep") or bytes < 0 for what, _, bytes in entries):
        raise ValueError("not a script")
    return entries
