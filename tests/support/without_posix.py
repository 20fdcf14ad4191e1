"""Runs in a process of its own: what Python lacks on Windows is taken away, then brim's commands are called.

Libraries are imported before, as they have other code for Windows.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import signal
import sys
from pathlib import Path
from typing import Any

import highspy
import numpy
import psutil
import safetensors.torch
import torch
import torch._dynamo
import torch.distributed
import transformers.modeling_utils
from transformers import AutoConfig, LlamaForCausalLM

LIBRARIES = (highspy, numpy, psutil, safetensors.torch, torch._dynamo, torch.distributed, transformers.modeling_utils,
             AutoConfig, LlamaForCausalLM)  # fmt: skip
MODULES = ("fcntl", "resource", "pwd", "grp", "termios", "tty", "pty", "posix_ipc", "syslog")
OF_OS = (
    "preadv", "pwritev", "pread", "pwrite", "posix_fadvise", "posix_fallocate", "sysconf", "sysconf_names", "fork",
    "register_at_fork", "sched_getaffinity", "sched_setaffinity", "getuid", "geteuid", "mkfifo",
    "O_DIRECT", "O_DSYNC", "O_SYNC", "O_CLOEXEC", "O_NONBLOCK", "O_NOFOLLOW", "O_DIRECTORY", "O_TMPFILE", "sendfile",
    "memfd_create", "copy_file_range", "uname", "getpgid", "killpg", "setsid", "fchmod", "fchown", "chown", "nice",
    "wait4", "waitid", "WNOHANG", "SCHED_OTHER", "SCHED_IDLE", "setpriority", "getloadavg", "eventfd",
)  # fmt: skip
OF_SIGNAL = ("SIGKILL", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGQUIT", "SIGCHLD", "SIGALRM", "SIGBUS", "SIGPIPE",
             "SIGCONT", "SIGSTOP", "SIGTSTP", "pthread_kill", "pthread_sigmask", "alarm", "setitimer", "siginterrupt",
             "sigwait")  # fmt: skip


def hide() -> None:
    for module, names in ((os, OF_OS), (signal, OF_SIGNAL)):
        for name in names:
            if hasattr(module, name):
                delattr(module, name)
    for name in [name for name in dir(mmap) if name.startswith(("MAP_", "MADV_", "PROT_"))]:
        delattr(mmap, name)
    for name in MODULES:
        sys.modules[name] = None  # type: ignore[assignment]  # an import of it fails
    load = ctypes.CDLL.__init__

    def loading(self: Any, name: str | None, *args: Any, **kwargs: Any) -> None:
        if name is None:
            raise TypeError("Windows has no name for the program itself")
        if str(name).startswith("libc."):
            raise FileNotFoundError(name)  # as Windows does for a library that is not there
        load(self, name, *args, **kwargs)

    ctypes.CDLL.__init__ = loading  # type: ignore[method-assign]


def commands(folder: Path) -> list[list[str]]:
    """Of each command that has to work, with what it reads made in ``folder``."""
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 160,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 500,
        "max_position_embeddings": 512,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "log.txt").write_text(
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of"
        " 23.65 GiB of which 1.10 GiB is free. Including non-PyTorch memory, this process has 22.53 GiB memory in"
        " use. Of the allocated memory 20.00 GiB is allocated by PyTorch, and 2.00 GiB is reserved by PyTorch but"
        " unallocated.\n"
    )
    (folder / "train.py").write_text(
        "import torch\ndef build():\n    return torch.nn.Linear(8, 8), torch.ones(2, 8)\n"
    )
    sizes = ["--batch", "1", "--seq", "32"]
    return [
        ["--help"],
        ["estimate", str(folder / "config.json"), *sizes, "--gpu", "RTX 4090", "--json"],
        ["estimate", f"{folder / 'train.py'}:build", "--json"],
        ["plan", str(folder / "config.json"), "--task", "train", *sizes, "--gpu", "RTX 4090", "--json"],
        ["plan", str(folder / "config.json"), "--task", "generate", "--seq", "32", "--gpu", "RTX 4090", "--json"],
        ["explain", str(folder / "log.txt")],
    ]


if __name__ == "__main__":
    hide()
    import brim
    from brim.cli import COMMANDS, main
    from brim.errors import BrimError

    for verb in brim.__all__:
        getattr(brim, verb)
    words = commands(Path(sys.argv[1]))
    words += [[name, "--help"] for name in COMMANDS]
    if len(sys.argv) > 2:
        words = [sys.argv[2:]]
    for one in words:
        code = main(one)
        assert code == 0, f"brim {' '.join(one)} ended with {code}"
    try:
        brim.fit(torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(8))), ram="1MiB")
    except BrimError as error:
        print(f"brim.fit: {error}")
