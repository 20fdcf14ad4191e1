"""Ranks started by torchrun or by brim itself: how they meet, agree, fail together and never wait without end.

PyTorch's engine sends the tensors of a step. For everything else brim uses torchrun's key-value store: whether every
rank has done its part, how far each has got, and the error of a rank that failed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import enum
import importlib
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, NoReturn, TypeVar
from unittest import mock

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore
from torch.distributed import distributed_c10d
from torch.distributed.rendezvous import rendezvous

from brim import threads
from brim.errors import BrimError, TransferError, UsageError
from brim.processes import bound, on_loopback, python_command, temporary_folder

T = TypeVar("T")

STORE = "BRIM_RANKS_STORE"  # variable with the path of the file store of ranks that brim has started
_POLL_S = 0.5
_GRACE_S = 10.0  # for rank 0 to report the error of another rank
_FAILED, _REPORTED = "failed", "reported"
_OF_PLANS = ("torch.distributed.checkpoint.", "brim.run.checkpoint.")  # modules of plans and of a manifest's entries
_VALUES = {
    ("builtins", "set"), ("collections", "OrderedDict"), ("torch", "Size"), ("torch.serialization", "_get_layout"),
    ("traceback", "FrameSummary"), ("traceback", "StackSummary"),
}  # fmt: skip
_CHILD_POLL_S = 0.05
_ENDING_S = 15.0  # for the other ranks to end by themselves after a failure
_STOP_S = 5.0


class RankError(BrimError):
    """The error that ended the run on some rank; only rank 0 reports it."""

    def __init__(self, request: str, reason: str = "", todo: str = "", *, exit_code: int = 1) -> None:
        super().__init__(request, reason, todo)
        self.exit_code = exit_code


def started_as_rank() -> bool:
    """True if torchrun, or brim, has started this process as one of several."""
    meeting = STORE in os.environ or {"MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()
    return meeting and {"RANK", "WORLD_SIZE", "LOCAL_RANK"} <= os.environ.keys()


class Ranks:
    """The process group as seen by this process. ``restarts``: how often torchrun has restarted the ranks."""

    def __init__(self, store: Store, timeout_s: float) -> None:
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.local_rank = int(os.environ["LOCAL_RANK"])
        self.per_node = int(os.environ.get("LOCAL_WORLD_SIZE", self.world))
        self.restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
        self._store, self._timeout_s = store, timeout_s
        self._agreements = 0
        self._ending, self._telling = threading.Event(), threading.Lock()
        beside: Any = store  # cloned, as the first connection may be blocked in a wait
        self._watcher = threading.Thread(target=self._watch, args=(beside.clone(),), name="brim-ranks", daemon=True)

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def device(self) -> torch.device:
        if not torch.cuda.is_available():
            return torch.device("cpu")
        return torch.device("cuda", _device_number(self.local_rank, torch.cuda.device_count()))

    def agree(self, action: Callable[[], T], *, in_turn: bool = False) -> T:
        """Do ``action`` on every rank; if it fails on any, all raise that rank's error.

        ``in_turn``: a node's first rank does it before the others, which then find its results in the cache.
        """
        self._agreements += 1
        name = f"agreement-{self._agreements}"
        error: BaseException | None = None
        if in_turn and self.local_rank:
            self._wait([f"{name}-first-{self.rank // self.per_node}"])
        try:
            result = action()
        except BrimError as failure:
            error = failure
        except Exception as failure:  # a defect: its traceback on this rank, a sentence on the others
            error = failure
        if in_turn and not self.local_rank:
            self._store.set(f"{name}-first-{self.rank // self.per_node}", "")
        verdict = self._verdict(name, error)
        if error is not None and not isinstance(error, BrimError):
            raise error
        if verdict:
            raise _error_of(verdict)
        return result

    def of_first(self, action: Callable[[], Any]) -> Any:
        """Result of ``action`` on rank 0, sent as JSON to every rank; all raise its error."""
        name = f"result-{self._agreements}"
        self.agree(lambda: self._store.set(name, json.dumps(action())) if self.is_first else None)
        return json.loads(self._store.get(name))

    def gathered(self, number: int) -> list[int]:
        """Every rank's number, on all of them."""
        self._agreements += 1
        name = f"number-{self._agreements}"
        self._store.set(f"{name}-{self.rank}", str(number))
        keys = [f"{name}-{rank}" for rank in range(self.world)]
        self._wait(keys)
        return [int(self._store.get(key)) for key in keys]

    def _verdict(self, name: str, error: BaseException | None) -> str:
        """The error of the first rank that failed; empty if none did."""
        self._store.set(f"{name}-{self.rank}", "" if error is None else _text_of(error, self.rank))
        if self.is_first:
            keys = [f"{name}-{rank}" for rank in range(self.world)]
            self._wait(keys)
            texts = [self._store.get(key).decode() for key in keys]
            self._store.set(name, next((text for text in texts if text), ""))
        else:
            self._wait([name])
        return str(self._store.get(name).decode())

    def _wait(self, keys: list[str]) -> None:
        end = time.monotonic() + self._timeout_s
        while not self._store.check(keys):
            if time.monotonic() > end:
                missing = [key.rpartition("-")[2] for key in keys if not self._store.check([key])]
                raise TransferError(
                    f"Rank {self.rank} waited {self._timeout_s:g} s for other ranks.",
                    f"Nothing came from rank {', '.join(missing) or '0'}.",
                    "Look at that rank's log; a larger --timeout allows more time.",
                )
            time.sleep(0.02)

    def reach(self, step: int) -> None:
        """Publish the step that this rank has reached."""
        self._store.set(f"reached-{self.rank}", str(step))

    def stuck(self, error: Exception) -> RankError:
        """Describe an error of PyTorch's engine: which ranks did not answer."""
        reached = {rank: self._reached(rank) for rank in range(self.world)}
        most = max(reached.values())
        behind = [str(rank) for rank, step in reached.items() if step < most]
        where = f"Rank {', '.join(behind)} had not come to step {most}." if behind else f"All were in step {most}."
        reason = " ".join(str(error).split())
        return RankError(
            f"Rank {self.rank} cannot exchange tensors with other ranks.", f"It failed: {reason:.300}\n{where}",
            "The log of a rank that ended says why; a larger --timeout allows a slow one more time. "
            "--resume continues from the last checkpoint; torchrun --max-restarts does so by itself.",
        )  # fmt: skip

    def _reached(self, rank: int) -> int:
        key = f"reached-{rank}"
        with contextlib.suppress(RuntimeError):  # torchrun has ended, and its store with it
            return int(self._store.get(key)) if self._store.check([key]) else 0
        return 0

    def give_up(self, error: BaseException) -> NoReturn:
        """End this rank for ``error``; rank 0 reports it, even if it is waiting for this rank.

        The other ranks learn of it through the store and end too.
        """
        code = error.exit_code if isinstance(error, BrimError) else 1
        if self.is_first:
            self._tell(error, code)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # sent by torchrun once another rank has ended
        with contextlib.suppress(RuntimeError):  # torchrun has ended, and its store with it
            if not isinstance(error, RankError) or not self._store.check([_FAILED]):
                self._store.set(_FAILED, _text_of(error, self.rank))
            end = time.monotonic() + _GRACE_S
            while time.monotonic() < end and not self._store.check([_REPORTED]):
                time.sleep(_POLL_S / 5)
        self.leave(code)

    def _tell(self, error: BaseException, code: int) -> NoReturn:
        """Report the error on rank 0, once, in whichever thread learns of it first."""
        if not self._telling.acquire(blocking=False):
            threading.Event().wait()  # the other thread ends the process
        print(f"Error: {str(error) or type(error).__name__}", file=sys.stderr, flush=True)
        with contextlib.suppress(RuntimeError):  # torchrun may have ended, and its store with it
            self._store.set(_REPORTED, "")
        self.leave(code)

    def leave(self, code: int) -> NoReturn:
        """End this process at once: the group may be waiting for ranks that will never answer."""
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    def stop_watching(self) -> None:
        self._ending.set()
        self._watcher.join()

    def _watch(self, store: Store) -> None:
        """Poll for errors of other ranks: rank 0 may be inside a collective, which no exception interrupts."""
        while not self._ending.wait(_POLL_S):
            try:
                failed = store.get(_FAILED).decode() if store.check([_FAILED]) else ""
            except RuntimeError:  # torchrun has ended, and its store with it
                return
            if failed and not self._ending.is_set():
                error = _error_of(failed)
                if self.is_first:
                    self._tell(error, error.exit_code)
                self.leave(error.exit_code)


def _device_number(local_rank: int, count: int) -> int:
    """The GPU of a rank on its machine; if a scheduler shows each rank only its own, that GPU."""
    if count == 1:
        return 0
    if local_rank >= count:
        raise UsageError(
            f"Rank {local_rank} of this machine has no GPU of its own.",
            f"PyTorch sees {count} GPUs.",
            "Start as many processes per machine as it has GPUs.",
        )
    return local_rank


@contextmanager
def joined(timeout_s: float) -> Iterator[Ranks]:
    """Join torchrun's process group: NCCL with GPUs, else gloo.

    If all ranks are on this machine, they listen on the loopback interface only. Raises UsageError if torchrun has
    not started this process.
    """
    of_one_machine = os.environ.get("LOCAL_WORLD_SIZE", "") == os.environ.get("WORLD_SIZE")
    with on_loopback() if of_one_machine else contextlib.nullcontext(), _joined(timeout_s) as ranks, only_plans():
        yield ranks


@contextmanager
def _joined(timeout_s: float) -> Iterator[Ranks]:
    if not started_as_rank():
        raise UsageError(
            "Cannot split a model over ranks.", "This process is alone: torchrun did not start it.",
            "Run it as torchrun --nproc-per-node N --no-python brim ...",
        )  # fmt: skip
    hook = sys.excepthook
    timeout = datetime.timedelta(seconds=timeout_s)
    backend = "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(_device_number(int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()))
        backend = "nccl"
    store, rank, world = _meeting(timeout)
    turn = store.add(f"runs-{rank}", 1)  # a program may train several times, with other keys each time
    engine = PrefixStore(f"engine-{turn}", store)
    try:
        dist.init_process_group(backend, store=engine, rank=rank, world_size=world, timeout=timeout)
    except (dist.DistError, RuntimeError) as error:
        if rank:
            raise SystemExit(1) from error  # rank 0 reports it
        reason = " ".join(str(error).split())
        raise TransferError(
            f"{world} ranks did not connect within {timeout_s:g} s.",
            f"The rendezvous failed: {reason:.300}",
            "The log of a rank that ended says why; a larger --timeout allows more time.",
        ) from error
    sys.excepthook = hook  # PyTorch replaces it by one that only prefixes tracebacks with the rank
    ranks = Ranks(PrefixStore(f"brim-{turn}", store), timeout_s)
    threads.start(ranks._watcher)
    try:
        yield ranks
    finally:
        ranks.stop_watching()
        dist.destroy_process_group()


def _meeting(timeout: datetime.timedelta) -> tuple[Store, int, int]:
    """(store of all ranks, this rank, number of ranks)."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if STORE in os.environ:
        store = FileStore(os.environ[STORE], -1)  # removed by the process that started the ranks
        store.set_timeout(timeout)
        return store, rank, world
    if rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":  # then the store is this process's
        host = os.environ["MASTER_ADDR"]
        if host in ("localhost", "127.0.0.1"):
            return _loopback_store(int(os.environ["MASTER_PORT"])), rank, world
    store, rank, world = next(iter(rendezvous("env://", timeout=timeout)))
    return store, rank, world


@cache
def _loopback_store(port: int) -> Store:
    """A store that listens on the loopback interface; PyTorch's listens on all. It stays open for later trainings."""
    listener = socket.create_server(("127.0.0.1", port))
    return TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def _text_of(error: BaseException, rank: int) -> str:
    if isinstance(error, BrimError):
        parts = {"request": error.request, "reason": error.reason, "todo": error.todo, "exit_code": error.exit_code}
        return json.dumps(parts)
    reason = " ".join(str(error).split())
    return json.dumps({
        "request": f"Rank {rank} cannot do its part.", "reason": f"It fails: {type(error).__name__}: {reason:.500}",
        "todo": "", "exit_code": 1,
    })  # fmt: skip


def _error_of(text: str) -> RankError:
    parts: Mapping[str, str] = json.loads(text)
    return RankError(parts["request"], parts["reason"], parts["todo"], exit_code=int(parts["exit_code"]))


class Reader(pickle.Unpickler):
    """Reads plain values, plans and exceptions, and refuses everything else.

    ``torch.distributed`` pickles what collectives send, and neither gloo nor NCCL authenticates the sender. A
    distributed checkpoint sends plain values, plans of which rank writes which tensors, and the exceptions of ranks
    that failed.
    """

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _VALUES:
            return super().find_class(module, name)
        of_plans = module.startswith(_OF_PLANS)
        loaded = getattr(importlib.import_module(module) if of_plans else sys.modules.get(module), name, None)
        if isinstance(loaded, torch.dtype):
            return loaded
        if isinstance(loaded, type) and loaded.__module__ == module:  # no function, no imported name
            plain = dataclasses.is_dataclass(loaded) or issubclass(loaded, enum.Enum)
            if issubclass(loaded, BaseException) or (of_plans and plain):
                return loaded
        raise pickle.UnpicklingError(f"A rank has sent an object that is no plan and no value: {module}.{name}.")


@contextmanager
def only_plans() -> Iterator[None]:
    """Refuse other objects from other ranks while the context is open."""
    with mock.patch.object(distributed_c10d, "_unpickler", Reader):
        yield


def start(ranks: int, words: Sequence[str]) -> int:
    """Run ``brim WORDS`` on so many ranks; returns the exit code of the first that fails, 0 if none does.

    They meet in a file that only this user can read: nothing listens, and no other user can take part. No rank
    outlives this call. Raises TransferError if a rank was ended by a signal and no other rank has reported it.
    """
    with temporary_folder("brim-ranks-") as folder:
        shared = {
            **os.environ, STORE: str(folder / "store"), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks),
            "TORCHELASTIC_RUN_ID": "brim", "TORCHELASTIC_RESTART_COUNT": "0",
        }  # fmt: skip
        shared.setdefault("OMP_NUM_THREADS", str(max((os.cpu_count() or 1) // ranks, 1)))
        command = bound(python_command("-m", "brim", *words))
        children: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(ranks):
                own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": "0"}
                children.append(subprocess.Popen(command, env={**shared, **own}))
            return _ended(children)
        finally:
            _stop(children)


def _ended(children: Sequence[subprocess.Popen[bytes]]) -> int:
    """Wait until all have ended, or until a grace period after the first failure; returns the exit code."""
    failed_s: float | None = None
    while any(child.poll() is None for child in children):
        if failed_s is None and any(child.returncode for child in children):
            failed_s = time.monotonic()
        if failed_s is not None and time.monotonic() > failed_s + _ENDING_S:
            break
        time.sleep(_CHILD_POLL_S)
    failures = [child.returncode for child in children if child.returncode and child.returncode > 0]
    killed = [(rank, -child.returncode) for rank, child in enumerate(children) if (child.returncode or 0) < 0]
    if killed and (not failures or killed[0][0] == 0):  # else rank 0 has reported it
        rank, number = killed[0]
        raise TransferError(
            f"{len(children)} ranks were started.", f"Rank {rank} was ended by {signal.Signals(number).name}.",
            "If nobody sent that signal, the system's log tells whether memory ran out.",
        )  # fmt: skip
    return failures[0] if failures else 0


def _stop(children: Sequence[subprocess.Popen[bytes]]) -> None:
    for child in children:
        if child.poll() is None:
            child.terminate()
    for child in children:
        try:
            child.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
