"""Out-of-memory messages: every kind is known, every number is read, the cause and what helps are told."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from brim.errors import FormatError
from brim.report.oom.cause import UNSET_BYTES
from brim.report.oom.formats import SIZE, to_bytes
from brim.report.oom.reader import Cause, primary, read_oom

ROOT = Path(__file__).parents[4]
MESSAGES = Path(os.environ.get("BRIM_GROUND_TRUTH", ROOT.parent / "shared" / "ground_truth")) / "oom_messages.txt"


def collected() -> dict[str, str]:
    """Messages that people posted, by their number; none where the file is not at hand."""
    if not MESSAGES.exists():
        return {}
    found = {}
    for part in MESSAGES.read_text(encoding="utf-8").split("\n---\n"):
        lines = [line for line in part.strip().splitlines() if not line.startswith(("#", "family:", "source:"))]
        head = next((line for line in lines if line.startswith("id:")), None)
        if head is not None:
            found[head.split()[1]] = "\n".join(line for line in lines if line is not head).strip()
    return found


POSTED = collected()
EXPECTED = {
    "01": ("torch-cuda-thc", "cuda", Cause.EXHAUSTED),
    "03": ("torch-cuda-thc", "cuda", Cause.EXHAUSTED),
    "05": ("torch-cuda-cached", "cuda:0", Cause.TOO_LARGE),
    "07": ("torch-cuda-cached", "cuda:0", Cause.EXHAUSTED),
    "09": ("torch-cuda-reserved", "cuda:1", Cause.EXHAUSTED),
    "11": ("torch-cuda-reserved", "cuda:0", Cause.EXHAUSTED),
    "13": ("torch-cuda-reserved-hint", "cuda:0", Cause.EXHAUSTED),
    "15": ("torch-cuda-2.1", "cuda:0", Cause.EXHAUSTED),
    "17": ("torch-cuda-2.1", "cuda:0", Cause.MISLEADING_FREE),
    "19": ("torch-cuda-2.2", "cuda:0", Cause.EXHAUSTED),
    "21": ("torch-cuda-2.5", "cuda:0", Cause.FRAGMENTATION),
    "23": ("torch-cuda-2.9", "cuda:0", Cause.OTHER_PROCESS),
    "25": ("torch-cuda-2.5", "cuda:0", Cause.EXHAUSTED),
    "27": ("torch-hip", "hip:0", Cause.MEMORY_FRACTION),
    "29": ("torch-cudaMallocAsync", "cuda:0", Cause.OTHER_PROCESS),
    "31": ("torch-mps", "mps", Cause.EXHAUSTED),
    "33": ("torch-xpu", "xpu:0", Cause.MISLEADING_FREE),
    "35": ("torch-cublas", "cuda", Cause.EXHAUSTED),
    "37": ("torch-cpu", "cpu", Cause.HOST_MEMORY),
    "39": ("dataloader", "cpu", Cause.HOST_MEMORY),
    "41": ("tensorflow", "gpu:0", Cause.EXHAUSTED),
    "43": ("llama.cpp", "cuda:0", Cause.EXHAUSTED),
    "45": ("llama.cpp-pinned", "cpu", Cause.HOST_MEMORY),
    "T1": ("torch-cuda-2.15", "cuda", Cause.EXHAUSTED),
    "T3": ("torch-cuda-mempool", "cuda", Cause.ALLOCATOR),
    "T5": ("torch-cuda-segment-reserve", "cuda", Cause.ADDRESS_SPACE),
    "T7": ("torch-cuda-address-space", "cuda", Cause.ADDRESS_SPACE),
}


@pytest.mark.skipif(not POSTED, reason=f"{MESSAGES} is not at hand")
@pytest.mark.parametrize("number", EXPECTED)
def test_a_posted_message_is_understood(number):
    messages = read_oom(POSTED[number])
    assert len(messages) == 1
    (message,) = messages
    assert (message.family, message.device, message.cause) == EXPECTED[number]
    assert message.why
    assert message.advice
    sizes = {to_bytes(*match.groups()) for match in re.finditer(SIZE, POSTED[number])}
    plain = {int(text) for text in re.findall(r"\b([0-9]{9,})\b(?! ?[KMGT]i?B|\.[0-9]|/|_)", POSTED[number])}
    sizes |= {count for count in plain if "pytorch_" + str(count) not in POSTED[number]}
    not_known = {count for count in sizes if count >= UNSET_BYTES}
    assert sizes - not_known <= set(message.numbers_bytes.values())
    assert len(message.unknown) >= len(not_known)


@pytest.mark.skipif(not POSTED, reason=f"{MESSAGES} is not at hand")
def test_every_posted_message_has_an_expectation():
    assert set(POSTED) == set(EXPECTED)


CUBLAS = "RuntimeError: CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"


def cuda(tried: str, free: str, middle: str = "", total: str = "23.65 GiB", end: str = "") -> str:
    return (
        f"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {tried}. GPU 3 has a total capacity of "
        f"{total} of which {free} is free. {middle}{end}"
    )


def held(allocated: str, unallocated: str, private: str = "") -> str:
    return (
        f"Of the allocated memory {allocated} is allocated by PyTorch, {private}and {unallocated} is reserved by "
        "PyTorch but unallocated."
    )


OWN = "Including non-PyTorch memory, this process has {} memory in use. "


def test_chained_exceptions_are_all_read_and_the_fullest_is_explained():
    first = cuda("2.00 GiB", "100.00 MiB", OWN.format("23.50 GiB") + held("15.00 GiB", "8.00 GiB"))
    log = f"{CUBLAS}\nDuring handling of the above exception:\n{first}\n{first}\n"
    messages = read_oom(log)
    assert [message.family for message in messages] == ["torch-cublas", "torch-cuda-2.5"]
    assert primary(messages).cause is Cause.FRAGMENTATION


HINT = " If reserved but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"


def test_the_hint_is_contradicted_where_it_would_not_help():
    full = cuda("22.00 MiB", "11.06 MiB", OWN.format("23.60 GiB") + held("22.90 GiB", "10.00 MiB"), end=HINT)
    told = [advice.text for advice in read_oom(full)[0].advice if not advice.helps]
    assert any("hint would not help" in text for text in told)
    fragmented = cuda("2.00 GiB", "0 bytes", OWN.format("23.50 GiB") + held("15.00 GiB", "8.00 GiB"), end=HINT)
    first = read_oom(fragmented)[0].advice[0]
    assert "expandable_segments:True" in first.paste
    assert first.helps


def test_nothing_is_advised_that_is_already_on():
    text = cuda(
        "2.00 GiB", "0 bytes", held("15.00 GiB", "8.00 GiB"), end=" expandable_segments is enabled. If instead"
    )
    (message,) = read_oom(text)
    assert message.family == "torch-cuda-2.15"
    assert all("expandable_segments:True" not in advice.paste for advice in message.advice)
    assert any("already on" in advice.text and not advice.helps for advice in message.advice)


@pytest.mark.parametrize("text", ["", "all is well", "loss 0.5 memory 3 GiB"])
def test_a_text_without_a_message_is_refused(text):
    with pytest.raises(FormatError, match="known forms"):
        read_oom(text)
