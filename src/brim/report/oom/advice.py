"""Advice against running out of memory, the most promising first, and popular advice that does not help."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from brim.report.oom.cause import UNSET_BYTES, Cause, is_shared_memory, unallocated_bytes
from brim.report.oom.programs import IN_RAM, OF_FAMILY, program_advice, remedies, spelled
from brim.report.phase import BY_PHASE, GENERATE, PRECISION, RECOMPUTE, SMALLER, Advice, phase_of
from brim.units import MIB, format_bytes

EXPANDABLE = Advice(
    "Use expandable segments: free pieces then join into larger ones.",
    "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
)
REPLAY = Advice(
    "Record a snapshot and replay it: it shows with which settings the failed request succeeds.",
    "brim explain snapshot.pickle --what-if best",
)
FEWER_WORKERS = Advice(
    "Use fewer DataLoader workers: each may have its own copy of the data.",
    "DataLoader(..., num_workers=2, persistent_workers=True)",
)
SHARED_MEMORY = Advice("In a container, enlarge /dev/shm.", "docker run --shm-size=16g ...")
WHO = Advice("Find the processes that use the device, and end or move them.", "nvidia-smi")

_BY_CAUSE: dict[Cause, tuple[Advice, ...]] = {
    Cause.EXHAUSTED: (SMALLER, RECOMPUTE, PRECISION, GENERATE),
    Cause.TOO_LARGE: (
        Advice("Check the line that requests it: usually a shape is wrong, or attention is not fused."),
        SMALLER,
        GENERATE,
    ),
    Cause.FRAGMENTATION: (EXPANDABLE, REPLAY, SMALLER),
    Cause.OTHER_PROCESS: (WHO, Advice("Use another device.", "export CUDA_VISIBLE_DEVICES=1"), SMALLER),
    Cause.MEMORY_FRACTION: (
        Advice("Raise or remove the limit.", "torch.cuda.set_per_process_memory_fraction(1.0)"),
        SMALLER,
    ),
    Cause.PRIVATE_POOLS: (
        Advice("Capture fewer CUDA graphs, or let them share one pool.", "torch.cuda.graph(g, pool=shared)"),
        Advice("Without CUDA graphs:", 'torch.compile(model, mode="default")'),
    ),
    Cause.ADDRESS_SPACE: (
        Advice(
            "Reserve fewer addresses per expandable segment, or more if one request did not fit.",
            "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True,expandable_segments_reserve:0.5",
        ),
        Advice("Use fewer CUDA streams: each has its own segments."),
        Advice("Lift the limit of virtual memory.", "ulimit -v unlimited"),
    ),
    Cause.SPILL: (
        SMALLER,
        Advice('Forbid the fallback: NVIDIA control panel, "CUDA - Sysmem Fallback Policy": prefer no fallback.'),
    ),
    Cause.MISLEADING_FREE: (
        WHO,
        Advice("On Windows and WSL, close other programs that use the GPU, and enlarge the page file."),
        Advice(
            "Use expandable segments: they consist of small pages and need no large free piece of memory.",
            EXPANDABLE.paste,
        ),
        SMALLER,
    ),
    Cause.HOST_MEMORY: (
        Advice("Check how much RAM is free, and whether the system killed a process.", "free -h; dmesg | tail"),
        FEWER_WORKERS,
        SHARED_MEMORY,
    ),
    Cause.ALLOCATOR: (Advice("Read what the MemPool's allocator logged before this."),),
    Cause.UNKNOWN: (
        Advice("Watch which processes use RAM and the GPU during the run.", "free -h; nvidia-smi"),
        SMALLER,
    ),
}
# NVIDIA's driver does not heed the limit of locked memory (ulimit -l); WSL2's gives about half of the RAM it has.
_LOCKED = Advice("Free RAM: pinned memory cannot be swapped out. Under WSL2, raise memory= in .wslconfig.", "free -h")
_WHO_WAS_KILLED = Advice(
    "Check which process the kernel killed, and how much it used.", 'dmesg -T | grep -i -E "oom|killed"; free -h'
)
_LESS_RAM = Advice(
    "Load weights directly to the GPU, or map them from disk (safetensors): one copy, not one per process."
)
_BY_FAMILY: dict[str, tuple[Advice, ...]] = {
    "llama.cpp-pinned": (_LOCKED, Advice("Do without pinned memory.", "export GGML_CUDA_NO_PINNED=1")),
    "jax-tpu": (
        SMALLER,
        Advice("Recompute in the backward pass.", "jax.checkpoint(f)"),
        Advice("Shard over more devices, or compute in bfloat16."),
    ),
    "triton": (
        Advice("Make the tiles smaller, or use fewer stages.", "triton.Config({...}, num_stages=2)"),
        Advice("A smaller batch would not help: each block of the kernel needs this memory.", helps=False),
    ),
    "torch-cublas": (
        Advice("Leave room for the library's workspace.", "torch.cuda.set_per_process_memory_fraction(0.9)"),
        Advice("Or make the workspace small.", "export CUBLAS_WORKSPACE_CONFIG=:4096:2"),
        SMALLER,
    ),
    "torch-mps": (
        SMALLER,
        PRECISION,
        Advice(
            "Lifting the limit lets macOS swap, and may make it fail:",
            "export PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0",
            helps=False,
        ),
    ),
    "slurm": (
        Advice("Request more RAM for the job.", "#SBATCH --mem=64G   # or --mem-per-cpu, --mem=0 for the whole node"),
        Advice("Check how much the job used.", "sacct -j JOBID --format=JobID,State,ReqMem,MaxRSS"),
        FEWER_WORKERS,
        _LESS_RAM,
    ),
    "batch-scheduler": (Advice("Request more RAM from the scheduler."), FEWER_WORKERS, _LESS_RAM),
    "kubernetes": (
        Advice("Raise the container's limit.", "resources: {limits: {memory: 64Gi}}"),
        Advice("Check its state and its memory use.", "kubectl describe pod POD; kubectl top pod POD"),
        FEWER_WORKERS,
        _LESS_RAM,
    ),
    "linux-oom-killer": (
        _WHO_WAS_KILLED,
        FEWER_WORKERS,
        _LESS_RAM,
        Advice("In a container, raise its limit.", "docker run --memory=64g ..."),
    ),
    "oomd": (
        Advice("Check which process the daemon killed, and why.", "journalctl -u systemd-oomd -u earlyoom"),
        FEWER_WORKERS,
        _LESS_RAM,
    ),
    "cuda-runtime": (WHO, Advice("Work on less at a time (a smaller batch), or on another device.")),
    "hami": (
        Advice("Raise the container's share of the GPU.", "resources: {limits: {nvidia.com/gpumem: 20000}}"),
        Advice("Restart the container: ended processes may still be counted."),
        SMALLER,
    ),
    "killed": (_WHO_WAS_KILLED, FEWER_WORKERS, _LESS_RAM),
    "ray": (
        Advice("Run fewer tasks at once: request more CPUs or memory per task.", "@ray.remote(num_cpus=4)"),
        Advice("Check which workers use the RAM.", "ray memory; ps aux --sort=-rss | head"),
        Advice("Let Ray use more of the RAM before it ends a worker.", "RAY_memory_usage_threshold=0.98 ray start"),
    ),
    "ray-object-store": (
        Advice("Give the store more of the RAM.", "ray start --object-store-memory=16000000000"),
        Advice("Drop references to objects that are no longer needed (del ref), or put smaller ones."),
        SHARED_MEMORY,
    ),
    "windows-paging-file": (
        Advice("Make the page file larger: System, Advanced, Performance, Virtual memory."),
        Advice("Use fewer DataLoader workers: each loads all libraries of CUDA.", "DataLoader(..., num_workers=0)"),
        Advice("Close other programs that use RAM."),
    ),
    "shared-memory": (SHARED_MEMORY, FEWER_WORKERS),
    "transformers": (
        Advice("Use a smaller model, or free memory of the GPU.", "nvidia-smi"),
        Advice(
            "Or keep some of the weights in RAM, in 32 bits.",
            "BitsAndBytesConfig(..., llm_int8_enable_fp32_cpu_offload=True)",
        ),
        GENERATE,
    ),
}
_ON_TPU = {
    Cause.TOO_LARGE: (
        Advice("Make the kernel's blocks smaller (block_shape of a BlockSpec)."),
        Advice(
            "Or let kernels have more of the core's memory.",
            "export LIBTPU_INIT_ARGS=--xla_tpu_scoped_vmem_limit_kib=65536",
        ),
        Advice("A smaller batch would not help: each block of the kernel needs this memory.", helps=False),
    ),
    Cause.FRAGMENTATION: (
        Advice(
            "Compile and load programs before creating arrays, or restart the process: arrays are then side by side."
        ),
        Advice("Drop programs that are no longer needed.", "jax.clear_caches()"),
        SMALLER,
    ),
}
# Causes for which a smaller setting is not the first advice.
_NOT_BY_SIZE = (
    Cause.OTHER_PROCESS,
    Cause.MEMORY_FRACTION,
    Cause.MISLEADING_FREE,
    Cause.FRAGMENTATION,
    Cause.PRIVATE_POOLS,
    Cause.ADDRESS_SPACE,
    Cause.SPILL,
)


# Families of PyTorch before 2.1, which has no expandable segments; the first two have no max_split_size either.
_BEFORE_SPLIT = ("torch-cuda-thc", "torch-cuda-cached")
_BEFORE_EXPANDABLE = (*_BEFORE_SPLIT, "torch-cuda-reserved", "torch-cuda-reserved-hint")
_VARIABLES = {
    "torch-hip": "PYTORCH_HIP_ALLOC_CONF",
    "torch-npu": "PYTORCH_NPU_ALLOC_CONF",
    "torch-xpu": "PYTORCH_ALLOC_CONF",
}


def advise(
    family: str,
    cause: Cause,
    numbers: Mapping[str, int],
    text: str,
    settings: str = "",
    *,
    program: str = "",
    frames: Sequence[str] = (),
    device: str = "",
) -> tuple[Advice, ...]:
    """Return advice for a message, the most promising first; at the end advice that does not help, with the reason.

    ``settings`` are the allocator's settings and shares of the device in the log; ``program`` is the one that ran
    out, ``frames`` are lines of its traceback, the innermost first.
    """
    on = "expandable_segments is enabled" in text or "expandable_segments:true" in settings.lower()
    advices: list[Advice] = []
    for advice in _ranked(family, cause, numbers, f"{settings} {text}", program, frames, device):
        if advice.paste == EXPANDABLE.paste:
            advices += [] if on else _expandable_for(family) if advice is EXPANDABLE else [_named(family, advice)]
        else:
            advices.append(_on_device(advice, device))
    return (*advices, *_no_help(family, cause, numbers, text, settings, expandable_on=on))


# In place of NVIDIA's: the tool that lists a device's processes, and the variable that hides devices.
_TOOLS = {
    "hip": ("amd-smi process", "HIP_VISIBLE_DEVICES"),
    "xpu": ("xpu-smi ps", "ZE_AFFINITY_MASK"),
    "npu": ("npu-smi info", "ASCEND_RT_VISIBLE_DEVICES"),
}


def _on_device(advice: Advice, device: str) -> Advice:
    tool, variable = _TOOLS.get(device.partition(":")[0], ("nvidia-smi", "CUDA_VISIBLE_DEVICES"))
    paste = advice.paste.replace("nvidia-smi", tool).replace("CUDA_VISIBLE_DEVICES", variable)
    return replace(advice, paste=paste)


def _ranked(
    family: str, cause: Cause, numbers: Mapping[str, int], text: str, program: str, frames: Sequence[str], device: str
) -> list[Advice]:
    """Return helpful advice: the program's own remedies and settings, else by phase, else by cause."""
    by_cause = list(_BY_CAUSE[cause])
    if family == "jax-tpu" and cause in _ON_TPU:
        return list(_ON_TPU[cause])
    own = list(_BY_FAMILY.get(family, ()))
    if family == "dataloader":
        own = [SHARED_MEMORY, FEWER_WORKERS] if is_shared_memory(text) else [_WHO_WAS_KILLED, FEWER_WORKERS]
    on_host = cause is Cause.HOST_MEMORY
    of_program = program_advice(program, frames, text, numbers, on_host=on_host or device == "cpu")
    if of_program and not on_host:
        own = [advice for advice in own if not advice.helps]
        of_program += own
    elif own and (family == "hami" or cause not in (Cause.OTHER_PROCESS, Cause.MEMORY_FRACTION)):
        return [own[0], *of_program] if of_program and program in IN_RAM else spelled(program, own)
    if of_program:
        if cause not in _NOT_BY_SIZE or OF_FAMILY.get(family) == program:
            return of_program
        against = [advice for advice in by_cause if advice not in (SMALLER, RECOMPUTE, PRECISION, GENERATE)]
        first = of_program if cause is Cause.SPILL else remedies(program, text, numbers)
        return list(dict.fromkeys([*first, *against, *of_program]))
    if family.startswith("torch-") and cause is Cause.EXHAUSTED and numbers.get("allocated") == 0:
        return [WHO, *by_cause]
    phase = phase_of(frames) if cause in (Cause.EXHAUSTED, Cause.TOO_LARGE, Cause.FRAGMENTATION) else None
    if phase is not None and family.startswith("torch-"):
        by_phase = list(BY_PHASE[phase])
        if cause is Cause.FRAGMENTATION:
            by_phase = [EXPANDABLE, REPLAY, *by_phase]
        return spelled(program, by_phase)
    return spelled(program, by_cause)


def _expandable_for(family: str) -> list[Advice]:
    """Return the advice against fragmentation for the family's version of PyTorch."""
    if family in _BEFORE_SPLIT:
        return [Advice("Update PyTorch: from 2.1 on it has expandable segments (expandable_segments:True).")]
    if family in _BEFORE_EXPANDABLE:
        split = Advice(
            "Keep large blocks whole (PyTorch 1.10 and later).",
            "export PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:128",
        )
        newer = "From PyTorch 2.1 on, use expandable segments instead: free pieces then join."
        return [Advice(newer, EXPANDABLE.paste), split]
    return [_named(family, EXPANDABLE)]


def _named(family: str, advice: Advice) -> Advice:
    """Return the advice with the family's name of the variable."""
    variable = _VARIABLES.get(family)
    return replace(advice, paste=f"export {variable}=expandable_segments:True") if variable else advice


def _no_help(
    family: str, cause: Cause, numbers: Mapping[str, int], text: str, settings: str, *, expandable_on: bool
) -> list[Advice]:
    """Return popular settings that would not help here, with the reason."""
    said = f"{text} {settings}"
    of_torch = family.startswith("torch-") and family != "torch-mps" and numbers.get("allocated", 0) > 0
    sentences = []
    if expandable_on:
        sentences.append("expandable_segments:True is already on.")
        sentences.append("max_split_size_mb has no effect on expandable segments.")
    elif re.search(r"expandable_segments:True|max_split_size_mb", text) and cause is not Cause.FRAGMENTATION:
        free = format_bytes(unallocated_bytes(numbers))
        sentences.append(f"The message's hint would not help: only {free} are reserved but unallocated.")
    elif cause is Cause.FRAGMENTATION and of_torch:
        sentences.append("max_split_size_mb has no effect beside expandable_segments:True: set one of the two.")
    if cause is Cause.EXHAUSTED and of_torch and unallocated_bytes(numbers) < 64 * MIB:
        sentences.append("torch.cuda.empty_cache() would not help: PyTorch has emptied its cache before failing.")
    if cause is Cause.FRAGMENTATION and of_torch:
        sentences.append(
            "torch.cuda.empty_cache() would not help: it frees only unused segments, and PyTorch already did."
        )
    collects = "garbage_collection_threshold" in said or (cause is Cause.FRAGMENTATION and of_torch)
    if collects and numbers.get("allowed", UNSET_BYTES) >= UNSET_BYTES:
        sentences.append("garbage_collection_threshold has no effect without a memory fraction below 1.")
    return [Advice(sentence, helps=False) for sentence in sentences]
