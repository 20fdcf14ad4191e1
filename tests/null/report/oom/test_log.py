"""Out-of-memory messages in logs: of several ranks, with prefixes, broken, in other encodings, of any size."""

from __future__ import annotations

import io
import re
import time
import tracemalloc
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from brim.errors import FormatError
from brim.report.oom.reader import Cause, read_oom
from brim.units import GIB, MIB, format_bytes

FULL = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 3 has a total capacity of 23.65 GiB "
    "of which 100.00 MiB is free. Including non-PyTorch memory, this process has 23.50 GiB memory in use. Of the "
    "allocated memory 15.00 GiB is allocated by PyTorch, and 8.00 GiB is reserved by PyTorch but unallocated."
)


def on_rank(rank: int) -> str:
    return FULL.replace("GPU 3", f"GPU {rank}")


def test_several_ranks_that_write_at_once_are_kept_apart():
    parts = [re.findall(r".{1,60}(?: |$)", on_rank(rank)) for rank in range(3)]
    lines = [f"[rank{rank}]: {line}" for row in zip(*parts, strict=True) for rank, line in enumerate(row)]
    messages = read_oom("\n".join(["step 1", *lines, "done"]))
    assert [(one.device, one.rank) for one in messages] == [(f"cuda:{rank}", f"rank{rank}") for rank in range(3)]
    assert len({tuple(one.numbers_bytes.items()) for one in messages}) == 1
    assert messages[0].numbers_bytes["unallocated"] == 8 * GIB


PREFIXES = {
    "timestamp": "2024-05-01 12:00:00,123 - ",
    "logger": "[2024-05-01 12:00:00,123] [ERROR] [trainer.py:387] ",
    "iso": "2024-05-01T12:00:00.123Z ",
    "vllm": "(EngineCore_0 pid=412) ERROR 06-02 05:17:18 [core.py:387] ",
    "compose": "vllm-1  | ERROR 06-02 05:17:18 [core.py:387] ",
    "mpirun": "[1,3]<stderr>: ",
    "srun": "12: ",
    "ray": "\x1b[36m(TaskRunner pid=3860829, ip=10.0.0.1)\x1b[0m ",
    "syslog": "Jun  2 05:17:18 node7 python[812]: ",
    "colour": "\x1b[1;31m",
    "box": "│ ",
}


@pytest.mark.parametrize("prefix", PREFIXES.values(), ids=PREFIXES)
@pytest.mark.parametrize("end", ["\n", "\r\n"], ids=["unix", "windows"])
def test_what_loggers_and_launchers_put_before_each_line_is_passed_over(prefix, end):
    lines = re.findall(r".{1,48}(?: |$)", on_rank(5))
    (message,) = read_oom(end.join(prefix + line.rstrip() for line in lines))
    assert (message.device, message.cause) == ("cuda:5", Cause.FRAGMENTATION)
    assert message.numbers_bytes == read_oom(on_rank(5))[0].numbers_bytes


@pytest.mark.parametrize("width", [20, 33, 47, 80, 100, 120])
def test_a_terminal_may_break_lines_inside_of_words_and_numbers(width):
    broken = "\n".join(FULL[at : at + width] for at in range(0, len(FULL), width))
    (message,) = read_oom(broken)
    assert message.numbers_bytes == read_oom(FULL)[0].numbers_bytes


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-le", "utf-16-be"])
def test_windows_writes_logs_in_other_encodings(encoding):
    (message,) = read_oom(io.BytesIO(f"step 1\r\n{FULL}\r\n".encode(encoding)))
    assert message.cause is Cause.FRAGMENTATION


class Repeated(io.RawIOBase):
    """A log of many equal blocks that was never in memory."""

    def __init__(self, block: bytes, times: int, end: bytes) -> None:
        self.block, self.left, self.end, self.rest = block, times, end, memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if not self.rest:
            self.rest = memoryview(self.block if self.left > 0 else self.end if self.left == 0 else b"")
            self.left -= 1
        count = min(len(buffer), len(self.rest))
        buffer[:count], self.rest = self.rest[:count], self.rest[count:]
        return count


@pytest.mark.parametrize("line", ["step 12 loss 0.25 lr 0.001", "loss 0.25 memory: 12 MB, max seq len 9"])
def test_a_large_log_is_streamed(line):
    block = (line + "\n").encode() * (64_000 // len(line))
    stream = io.BufferedReader(Repeated(block, 30 if len(line) < 30 else 5, FULL.encode()), buffer_size=1 << 17)
    tracemalloc.start()
    try:
        (message,) = read_oom(stream)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert message.cause is Cause.FRAGMENTATION
    assert peak_bytes < 12 * MIB


def test_a_log_of_messages_only_stays_within_bounds():
    text = "\n".join(FULL.replace("100.00 MiB", f"{number}.00 MiB") for number in range(1_500))
    assert len(read_oom(text)) == 1_000


@pytest.mark.parametrize(
    "before",
    ["İ" * 100, "İ" * 100 + "\n", "İ\n" * 100, "İ" * 50 + "\x00\x1b[7m"],
    ids=["one line", "two lines", "many lines", "control characters"],
)
def test_letters_that_are_longer_in_lower_case_move_nothing(before):
    (message,) = read_oom(f"{before}CUDA out of memory. Tried to allocate 2.00 GiB")
    assert message.numbers_bytes == {"tried": 2 * GIB}


def test_settings_that_the_log_shows_are_known():
    log = f"env PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True,garbage_collection_threshold:0.8\n{FULL}"
    (message,) = read_oom(log)
    useless = " ".join(advice.text for advice in message.advice if not advice.helps)
    for part in ("already on", "max_split_size_mb has no effect", "no effect without a memory fraction"):
        assert part in useless
    assert all("expandable_segments:True" not in advice.paste for advice in message.advice)


NUMBERED = {
    "plain": "Could not allocate tensor with {} bytes. There is not enough GPU video memory available!",
    "cpu": "DefaultCPUAllocator: can't allocate memory: you tried to allocate {} bytes.",
    "with a unit": "Out of memory: Killed process 12 (python) total-vm:{}kB, anon-rss:{}kB",
    "two units": "RESOURCE_EXHAUSTED: Failed to allocate request for 2.00GiB ({}B) on device ordinal 0",
    "with a point": "Free memory on device ({}/9.5 GiB) on startup is less than desired",
    "triton": "out of resource: shared memory, Required: {}, Hardware limit: 101376.",
    "llama": "ggml_backend_cuda_buffer_type_alloc_buffer: allocating 1.00 MiB on device 0: {}\n"
    "ggml_gallocr_reserve_n: failed to allocate CUDA0 buffer of size {}",
}


@pytest.mark.parametrize("text", NUMBERED.values(), ids=NUMBERED)
@pytest.mark.parametrize("number", ["9" * 22, "9" * 309, "9" * 2_000], ids=["22", "309", "2,000"])
def test_numbers_that_no_machine_has_are_passed_over(text, number):
    for message in read_oom(text.replace("{}", number)):
        assert all(0 <= count < 1 << 70 for count in message.numbers_bytes.values())
        assert all(format_bytes(count) for count in message.numbers_bytes.values())


def test_what_is_no_number_is_passed_over():
    (message,) = read_oom(NUMBERED["with a point"].replace("{}", "1.2.3"))
    assert message.numbers_bytes == {"total": 9.5 * GIB}


def test_a_tensor_that_no_machine_has_is_passed_over():
    shape = ",".join(["999999999999"] * 16)
    (message,) = read_oom(f"OOM when allocating tensor with shape[{shape}] and type float on GPU:0")
    assert message.numbers_bytes == {}


def test_old_versions_are_not_told_to_set_what_they_do_not_know():
    old = (
        "RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB (GPU 0; 23.65 GiB total capacity; 15.00 GiB "
        "already allocated; 100.00 MiB free; 23.00 GiB reserved in total by PyTorch)"
    )
    (message,) = read_oom(old)
    assert message.cause is Cause.FRAGMENTATION
    assert "PyTorch 2.1" in message.advice[0].text
    assert "max_split_size_mb" in message.advice[1].paste


OLD = (
    "RuntimeError: CUDA out of memory. Tried to allocate 130.00 MiB (GPU 1; 7.80 GiB total capacity; 5.91 GiB "
    "already allocated; 33.56 MiB free; 6.09 GiB reserved in total by PyTorch)"
)
JAX = "RESOURCE_EXHAUSTED: Failed to allocate request for 2.00GiB (2147483648B) on device ordinal 0"


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_cut_and_mixed_messages_give_a_result_or_one_kind_of_error(data):
    texts = [FULL, OLD, JAX, FULL.replace("\n", "\r\n"), "RuntimeError: CUDA error: out of memory"]
    parts = data.draw(st.lists(st.sampled_from(texts) | st.text(max_size=30), min_size=1, max_size=4))
    text = " ".join(part[: data.draw(st.integers(0, len(part)))] for part in parts)
    with suppress(FormatError):
        for message in read_oom(text):
            assert message.advice
            assert all(count >= 0 for count in message.numbers_bytes.values())


@pytest.mark.parametrize("count", [1, 2, 7, 40, 41, 3_000, 200_001])
def test_a_log_that_was_emptied_while_it_was_written_begins_with_zero_bytes(count):
    (message,) = read_oom(io.BytesIO(bytes(count) + FULL.encode()))
    assert message.numbers_bytes == read_oom(FULL)[0].numbers_bytes
    assert message.text == read_oom(FULL)[0].text


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be"])
def test_zero_bytes_before_text_of_two_bytes_a_character_change_nothing(encoding):
    (message,) = read_oom(io.BytesIO(bytes(40) + f"step 1\r\n{FULL}\r\n".encode(encoding)))
    assert message.cause is Cause.FRAGMENTATION


def test_zero_bytes_inside_of_a_message_are_no_text():
    (message,) = read_oom(io.BytesIO(FULL.replace(" ", "\0 ").encode()))
    assert message.text == read_oom(FULL)[0].text


LINES = {
    "telling, and no message": "INFO 06-02 05:17:18 [metrics.py:417] GPU KV cache usage: {:.1f}%, CPU KV cache usage",
    "who was killed": "worker {:.1f} was killed, gpu memory 3 GiB",
    "frames of a traceback": '  File "/x/vllm/worker.py", line {:.0f}, in load_model: out of memory',
    "the same message": FULL,
    "other messages": FULL.replace("2.00 GiB", "{:.2f} GiB"),
}


@pytest.mark.thorough
@pytest.mark.parametrize("kind", LINES)
def test_a_log_in_which_every_line_tells_something_is_read_in_a_time_that_grows_as_it_does(kind):
    """Four times the lines take less than eight times the time: a factor of two is left to the machine."""

    def took_s(count: int) -> float:
        data = "\n".join(LINES[kind].format(number / 7) for number in range(count)).encode()
        begin_s = time.process_time()
        with suppress(FormatError):
            read_oom(io.BytesIO(data))
        return time.process_time() - begin_s

    took_s(200)
    few, many = 3_000, 12_000
    assert min(took_s(many) for _ in range(2)) < 8 * min(took_s(few) for _ in range(3)) + 0.05
    assert min(took_s(few) for _ in range(3)) / few < 1e-3
