"""What helps against running out of memory, the most promising first, and what does not help although many say so."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from brim.report.oom.cause import UNSET_BYTES, Cause, unallocated_bytes
from brim.units import MIB, format_bytes


@dataclass(frozen=True, kw_only=True)
class Advice:
    """One thing to do. ``paste`` is a command or setting to paste, if there is one; ``helps`` False: it does not."""

    text: str
    paste: str = ""
    helps: bool = True


EXPANDABLE = Advice(
    text="Let segments grow instead of being many: free pieces then join.",
    paste="export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
)
REPLAY = Advice(
    text="Record a snapshot and replay it: it shows whether another setting would have fitted.",
    paste="brim explain snapshot.pickle --what-if best",
)
SMALLER = Advice(text="Make the step smaller: batch size first (with gradient accumulation), then sequence length.")
RECOMPUTE = Advice(
    text="Recompute activations instead of keeping them.", paste="model.gradient_checkpointing_enable()"
)
PRECISION = Advice(text="Compute in bfloat16.", paste='torch.autocast("cuda", dtype=torch.bfloat16)')
FIT = Advice(text="Let brim place what does not fit in RAM or on disk.", paste="brim generate MODEL --vram 6GiB")
WHO = Advice(text="See who holds the device, and end or move them.", paste="nvidia-smi")

_BY_CAUSE: dict[Cause, tuple[Advice, ...]] = {
    Cause.EXHAUSTED: (SMALLER, RECOMPUTE, PRECISION, FIT),
    Cause.TOO_LARGE: (
        Advice(text="Look at the line that asks for it: a shape is usually wrong, or attention is not fused."),
        SMALLER,
        FIT,
    ),
    Cause.FRAGMENTATION: (EXPANDABLE, REPLAY, SMALLER),
    Cause.OTHER_PROCESS: (
        WHO,
        Advice(text="Use another device.", paste="export CUDA_VISIBLE_DEVICES=1"),
        SMALLER,
    ),
    Cause.MEMORY_FRACTION: (
        Advice(text="Raise or remove the limit.", paste="torch.cuda.set_per_process_memory_fraction(1.0)"),
        SMALLER,
    ),
    Cause.PRIVATE_POOLS: (
        Advice(
            text="Capture fewer CUDA graphs, or let them share one pool.", paste="torch.cuda.graph(g, pool=shared)"
        ),
        Advice(text="Without CUDA graphs:", paste='torch.compile(model, mode="default")'),
    ),
    Cause.ADDRESS_SPACE: (
        Advice(
            text="Reserve fewer addresses per expandable segment, or more if one request did not fit.",
            paste="export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True,expandable_segments_reserve:0.5",
        ),
        Advice(text="Use fewer CUDA streams: each has segments of its own."),
        Advice(text="Lift the limit of virtual memory.", paste="ulimit -v unlimited"),
    ),
    Cause.SPILL: (
        SMALLER,
        Advice(
            text='Forbid the fallback: NVIDIA control panel, "CUDA - Sysmem Fallback Policy": prefer no fallback.'
        ),
    ),
    Cause.MISLEADING_FREE: (
        WHO,
        Advice(text="On Windows and WSL, close what draws on the GPU and enlarge the page file."),
        SMALLER,
    ),
    Cause.HOST_MEMORY: (
        Advice(text="See what RAM is left, and whether the system killed a process.", paste="free -h; dmesg | tail"),
        Advice(text="Use fewer DataLoader workers.", paste="DataLoader(..., num_workers=2, persistent_workers=True)"),
        Advice(text="In a container, give shared memory.", paste="docker run --shm-size=16g ..."),
    ),
    Cause.ALLOCATOR: (Advice(text="Read what the MemPool's allocator logged before this."),),
}
# NVIDIA's driver does not heed the limit of locked memory (ulimit -l); WSL2's gives about half of the RAM it has.
_LOCKED = Advice(
    text="Free RAM: what is pinned cannot be swapped out. Under WSL2 give it more (memory= in .wslconfig).",
    paste="free -h",
)
_LESS_LAYERS = Advice(text="Put fewer layers on the GPU.", paste="llama-cli -ngl 20 ...")
_BY_FAMILY: dict[str, tuple[Advice, ...]] = {
    "llama.cpp": (
        _LESS_LAYERS,
        Advice(text="Shorten the context, or store its cache in 8 bits.", paste="-c 8192 -ctk q8_0 -ctv q8_0 -fa on"),
    ),
    "llama.cpp-pinned": (_LOCKED, Advice(text="Do without pinned memory.", paste="export GGML_CUDA_NO_PINNED=1")),
    "vllm": (
        Advice(text="Shorten the longest sequence.", paste="--max-model-len 8192"),
        Advice(
            text="Let it use more of the device, if nothing else runs there.", paste="--gpu-memory-utilization 0.95"
        ),
    ),
    "jax": (
        Advice(
            text="Do not take most of the device at the start.", paste="export XLA_PYTHON_CLIENT_PREALLOCATE=false"
        ),
    ),
    "jax-tpu": (
        SMALLER,
        Advice(text="Recompute in the backward pass.", paste="jax.checkpoint(f)"),
        Advice(text="Shard over more devices, or compute in bfloat16."),
    ),
    "sglang": (
        Advice(text="Give it more of the device.", paste="--mem-fraction-static 0.9"),
        Advice(text="Shorten the context.", paste="--context-length 8192"),
    ),
    "triton": (
        Advice(text="Make the tiles smaller, or use fewer stages.", paste="triton.Config({...}, num_stages=2)"),
        Advice(text="A smaller batch would not help: the need is per block.", helps=False),
    ),
    "tensorflow": (
        Advice(text="Take memory as it is needed.", paste="export TF_FORCE_GPU_ALLOW_GROWTH=true"),
        SMALLER,
    ),
    "torch-cublas": (
        Advice(
            text="Leave room for the library's workspace.", paste="torch.cuda.set_per_process_memory_fraction(0.9)"
        ),
        Advice(text="Or make the workspace small.", paste="export CUBLAS_WORKSPACE_CONFIG=:4096:2"),
        SMALLER,
    ),
    "torch-mps": (
        SMALLER,
        PRECISION,
        Advice(
            text="Lifting the limit lets macOS swap, and may make it fail:",
            paste="export PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0",
            helps=False,
        ),
    ),
}


# Families of PyTorch before 2.1, which has no expandable segments; the first two have no max_split_size either.
_BEFORE_SPLIT = ("torch-cuda-thc", "torch-cuda-cached")
_BEFORE_EXPANDABLE = (*_BEFORE_SPLIT, "torch-cuda-reserved", "torch-cuda-reserved-hint")
_VARIABLES = {
    "torch-hip": "PYTORCH_HIP_ALLOC_CONF",
    "torch-npu": "PYTORCH_NPU_ALLOC_CONF",
    "torch-xpu": "PYTORCH_ALLOC_CONF",
}


def advise(
    family: str, cause: Cause, numbers: Mapping[str, int], text: str, settings: str = ""
) -> tuple[Advice, ...]:
    """Advice for a message, ranked; what would not help comes last, with the reason.

    ``settings`` are the allocator settings that were in force, where the log shows them.
    """
    on = "expandable_segments is enabled" in text or "expandable_segments:true" in settings.lower()
    ranked = _BY_CAUSE[cause] if cause in (Cause.OTHER_PROCESS, Cause.MEMORY_FRACTION) and family != "vllm" else ()
    advices: list[Advice] = []
    for advice in ranked or _BY_FAMILY.get(family, ()) or _BY_CAUSE[cause]:
        advices += [advice] if advice is not EXPANDABLE else [] if on else _growing(family)
    return (*advices, *_no_help(cause, numbers, text, settings, expandable_on=on))


def _growing(family: str) -> list[Advice]:
    """The advice against fragmentation, as far as the version of PyTorch knows it."""
    if family in _BEFORE_SPLIT:
        return [Advice(text="Update PyTorch: from 2.1 on segments can grow (expandable_segments:True).")]
    if family in _BEFORE_EXPANDABLE:
        split = Advice(
            text="Keep large blocks whole (PyTorch 1.10 and later).",
            paste="export PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:128",
        )
        newer = "From PyTorch 2.1 on, let segments grow instead: free pieces then join."
        return [Advice(text=newer, paste=EXPANDABLE.paste), split]
    variable = _VARIABLES.get(family)
    return [replace(EXPANDABLE, paste=f"export {variable}=expandable_segments:True") if variable else EXPANDABLE]


def _no_help(
    cause: Cause, numbers: Mapping[str, int], text: str, settings: str, *, expandable_on: bool
) -> list[Advice]:
    """Popular settings that the message, or people, recommend and that would not help here."""
    said = f"{text} {settings}"
    sentences = []
    if expandable_on:
        sentences.append("expandable_segments:True is already on.")
        sentences.append("max_split_size_mb has no effect on expandable segments.")
    elif re.search(r"expandable_segments:True|max_split_size_mb", text) and cause is not Cause.FRAGMENTATION:
        free = format_bytes(unallocated_bytes(numbers))
        sentences.append(f"The message's hint would not help: only {free} are reserved but unallocated.")
    elif cause is Cause.FRAGMENTATION:
        sentences.append("max_split_size_mb has no effect beside expandable_segments:True: set one of the two.")
    if cause is Cause.EXHAUSTED and unallocated_bytes(numbers) < 64 * MIB and numbers:
        sentences.append("torch.cuda.empty_cache() would not help: PyTorch has emptied its cache before failing.")
    if cause is Cause.FRAGMENTATION:
        sentences.append(
            "torch.cuda.empty_cache() would not help: it gives back whole free segments only, and those are gone."
        )
    collects = "garbage_collection_threshold" in said or cause is Cause.FRAGMENTATION
    if collects and numbers.get("allowed", UNSET_BYTES) >= UNSET_BYTES:
        sentences.append("garbage_collection_threshold does nothing without a memory fraction below 1.")
    return [Advice(text=sentence, helps=False) for sentence in sentences]
