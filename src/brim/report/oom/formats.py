"""What out-of-memory messages look like: PyTorch 0.3 to 2.15 on every device, and the programs around it.

Sources: ``c10/cuda/CUDACachingAllocator.cpp``, ``c10/cuda/CUDAMallocAsyncAllocator.cpp``, ``c10/xpu``,
``aten/src/ATen/mps``, ``c10/core/impl/alloc_cpu.cpp`` of PyTorch; ``ggml-cuda.cu`` and ``ggml-alloc.c`` of llama.cpp;
XLA's and TensorFlow's BFC allocators; vLLM's workers; ``mm/oom_kill.c`` of Linux.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

# A size as printed. PyTorch's MB and GB are binary too; some locales write a decimal comma.
SIZE = r"([0-9]{1,20}(?:[.,][0-9]{1,9})?) ?(bytes|[KMGT]iB|[KMGT]B|[KMGT]|B)\b"
_UNITS = {"b": 0, "k": 1, "m": 2, "g": 3, "t": 4}


@dataclass(frozen=True, kw_only=True)
class Format:
    """One kind of message. ``start`` finds it, ``fields`` are searched for after it, each giving one number.

    One of ``words`` is in every text in which ``start`` finds something: most logs are passed over by that alone.

    A field's pattern holds the groups of ``SIZE``; ``plain`` ones a bare number of bytes. ``device`` is the kind of
    device; its number is looked for where ``_DEVICE`` says.
    """

    family: str
    start: re.Pattern[str]
    words: tuple[str, ...]
    device: str
    fields: tuple[tuple[str, re.Pattern[str]], ...] = ()
    plain: tuple[tuple[str, re.Pattern[str]], ...] = ()


def _format(
    family: str,
    start: str,
    words: tuple[str, ...],
    device: str,
    fields: dict[str, str] | None = None,
    plain: dict[str, str] | None = None,
) -> Format:
    return Format(
        family=family,
        start=re.compile(start),
        words=words,
        device=device,
        fields=tuple((name, re.compile(text.replace("{}", SIZE))) for name, text in (fields or {}).items()),
        plain=tuple((name, re.compile(text)) for name, text in (plain or {}).items()),
    )


# What XLA's buffer assignment has for the program (xla/service/buffer_assignment.cc, BufferAssignment::Stats).
_XLA_BUFFERS = {
    "parameters": r"\bparameter allocation: {}",
    "constants": r"\bconstant allocation: {}",
    "live_out": r"\bmaybe_live_out allocation: {}",
    "temporary": r"\bpreallocated temp allocation: {}",
    "temporary_fragmentation": r"\bpreallocated temp fragmentation: {}",
    "program": r"\btotal allocation: {}",
    "program_fragmentation": r"\btotal fragmentation: {}",
    "in_use_chunks": r"Sum Total of in-use chunks: {}",
}
# What the BFC allocator says of itself (xla/tsl/framework/allocator.cc, AllocatorStats::DebugString).
_BFC = {
    "limit": r"\b(?:Limit:|memory_limit_:) {1,40}([0-9]{1,20})\b",
    "allocated": r"\bInUse: {1,40}([0-9]{1,20})\b",
    "allocated_peak": r"\bMaxInUse: {1,40}([0-9]{1,20})\b",
    "largest": r"\bMaxAllocSize: {1,40}([0-9]{1,20})\b",
    "reserved": r"\bReserved: {1,40}([0-9]{1,20})\b",
    "reserved_peak": r"\bPeakReserved: {1,40}([0-9]{1,20})\b",
    "largest_free": r"\bLargestFreeBlock: {1,40}([0-9]{1,20})\b",
    "pool": r"\bTotal bytes in pool: {1,40}([0-9]{1,20})\b",
    "available": r"\bavailable bytes: {1,40}([0-9]{1,20})\b",
}
_OLD = {
    "tried": r"Tried to allocate {}",
    "total": r"{} total capacity",
    "allocated": r"{} already allocated",
    "free": r"{} free\b",
    "active": r"{} current active",
}
_RESERVED = {"reserved": r"{} reserved in total"}
_NEW = {
    "tried": r"Tried to allocate {}",
    "total": r"total capaci?ty of {}",
    "free": r"of which {} is free",
    "process": r"this process has {} memory in use",
    "allowed": r"{} allowed",
    "allocated": r"[Oo]f the allocated memory {} is allocated",
    "private_pools": r"with {} allocated in private pools",
    "unallocated": r"and {} is reserved by PyTorch but unallocated",
    "segment_reserve": r"expandable-segment reserve of {}",
}
_TRIED = r"out of memory\. ?Tried to allocate"
_ASKED = ("Tried to allocate",)
_REST = r"(?:(?!out of memory).){0,1500}?"  # of the same message

# The first that matches at a place wins, so the particular come before the general.
FORMATS = (
    _format(
        "torch-cuda-address-space",
        r"\[ExpandableSegmentVA\] Failed to reserve",
        ("ExpandableSegmentVA",),
        "cuda",
        {"tried": r"\({}\) of virtual address space"},
        {
            "tried_exact": r"Failed to reserve ([0-9]+) ",
            "reserved_addresses": r"reserving ([0-9]+) bytes",
        },
    ),
    _format(
        "torch-cuda-segment-reserve",
        r"This allocation exceeds the expandable-segment reserve of",
        ("expandable-segment reserve",),
        "cuda",
        {"segment_reserve": r"expandable-segment reserve of {}", "needed": r"so that a segment is at least {}"},
    ),
    _format(
        "torch-cuda-mempool",
        r"The custom allocator backing this MemPool returned nullptr",
        ("MemPool returned",),
        "cuda",
    ),
    _format(
        "torch-cuda-impossible",
        r"(?:CUDA|HIP) out of memory\. ?Tried to allocate more than 1EB",
        ("more than 1EB",),
        "cuda",
    ),
    _format(
        "torch-cuda-cached",
        rf"CUDA {_TRIED} [^(]{{1,30}}\(GPU [^)]{{0,200}} cached",
        _ASKED,
        "cuda",
        _OLD | {"cached": r"{} cached"},
    ),
    _format(
        "torch-cuda-reserved-hint",
        rf"CUDA {_TRIED} [^(]{{1,30}}\(GPU [^)]{{0,250}}\) If reserved memory",
        _ASKED,
        "cuda",
        _OLD | _RESERVED,
    ),
    _format(
        "torch-cuda-reserved",
        rf"CUDA {_TRIED} [^(]{{1,30}}\(GPU",
        _ASKED,
        "cuda",
        _OLD | _RESERVED,
    ),
    _format(
        "torch-npu",
        r"NPU out of memory\. ?NPUWorkspaceAllocator tried to allocate",
        ("NPUWorkspaceAllocator",),
        "npu",
        {"tried": r"tried to allocate {}", "total": r"{} total capacity", "free": r"{} free\b"},
    ),
    *(
        _format(f"torch-{kind}", rf"{kind.upper()} {_TRIED} [^(]{{1,30}}\([GNX]PU", _ASKED, kind, _OLD | _RESERVED)
        for kind in ("npu", "hip", "xpu")
    ),
    *(_format(f"torch-{kind}", rf"{kind.upper()} {_TRIED}", _ASKED, kind, _NEW) for kind in ("npu", "hip", "xpu")),
    _format("torch-cuda-2.1", rf"CUDA {_TRIED}(?={_REST}capacty)", _ASKED, "cuda", _NEW),
    _format("torch-cuda-2.15", rf"CUDA {_TRIED}(?={_REST}expandable_segments is enabled)", _ASKED, "cuda", _NEW),
    _format("torch-cuda-2.9", rf"CUDA {_TRIED}(?={_REST}PYTORCH_ALLOC_CONF)", _ASKED, "cuda", _NEW),
    _format("torch-cuda-2.2", rf"torch\.cuda\.OutOfMemoryError: CUDA {_TRIED}", _ASKED, "cuda", _NEW),
    _format("torch-cuda-2.5", rf"CUDA {_TRIED}", _ASKED, "cuda", _NEW),
    _format(
        "torch-cudaMallocAsync",
        r"Allocation on device [^.]{0,12}would exceed allowed memory",
        ("would exceed allowed memory",),
        "cuda",
        {
            "allocated": r"Currently allocated ?: {}",
            "tried": r"Requested ?: {}",
            "total": r"Device limit ?: {}",
            "free": r"Free \(according to CUDA\) ?: {}",
            "allowed": r"user-supplied memory fraction\) ?: {}",
        },
    ),
    _format(
        "torch-mps",
        r"MPS backend out of memory",
        ("MPS backend",),
        "mps",
        {
            "allocated": r"MPS allocated: {}",
            "other_allocations": r"other allocations: {}",
            "allowed": r"max allowed: {}",
            "tried": r"Tried to allocate {}",
        },
    ),
    _format(
        "torch-mps",
        r"Invalid buffer size: [0-9.]+ ?[KMGT]i?B",
        ("Invalid buffer size",),
        "mps",
        {"tried": r"Invalid buffer size: {}"},
    ),
    _format(
        "torch-directml",
        r"Could not allocate tensor with [0-9]+ bytes\. There is not enough GPU video memory",
        ("GPU video memory",),
        "gpu",
        plain={"tried": r"tensor with ([0-9]+) bytes"},
    ),
    _format(
        "torch-xpu-runtime",
        r"UR_RESULT_ERROR_OUT_OF_(?:DEVICE_MEMORY|HOST_MEMORY|RESOURCES)",
        ("UR_RESULT_ERROR_OUT_OF_",),
        "xpu",
    ),
    _format("torch-cublas", r"(?:HIPBLAS|ROCBLAS)_STATUS_ALLOC_FAILED", ("BLAS_STATUS_ALLOC_FAILED",), "hip"),
    _format(
        "torch-cublas",
        r"CUBLAS_STATUS_ALLOC_FAILED|CUBLAS_STATUS_NOT_INITIALIZED when calling .cublasCreate",
        ("CUBLAS_STATUS_",),
        "cuda",
    ),
    _format("torch-cudnn", r"CUDNN_STATUS_ALLOC_FAILED", ("CUDNN_STATUS_ALLOC_FAILED",), "cuda"),
    _format(
        "torch-cuda-library",
        r"CU(?:FFT|SOLVER_STATUS|SPARSE_STATUS)_ALLOC_FAILED|CUSPARSE_STATUS_INSUFFICIENT_RESOURCES",
        ("_ALLOC_FAILED", "_INSUFFICIENT_RESOURCES"),
        "cuda",
    ),
    _format(
        "torch-nccl",
        r"ncclUnhandledCudaError(?=.{0,600}out of memory)|NCCL WARN Cuda failure[^\n]{0,40}out of memory",
        ("ncclUnhandledCudaError", "NCCL WARN Cuda"),
        "cuda",
        plain={"tried": r"Failed to CUDA (?:c|host )?[Aa]lloc (?:async )?([0-9]+) bytes"},
    ),
    _format(
        "torch-cuda-thc",
        r"cuda runtime error \(2\) ?: out of memory|THCudaCheck FAIL [^\n]{0,200}error=2 ?: out of memory",
        ("cuda runtime error (2)", "THCudaCheck FAIL"),
        "cuda",
    ),
    _format(
        "torch-cpu",
        r"DefaultCPUAllocator: (?:not enough memory|can't allocate memory)|Torch: not enough memory: you tried",
        ("DefaultCPUAllocator", "Torch: not enough memory"),
        "cpu",
        {"tried_rounded": r"you tried to allocate (?![0-9]+ bytes){}"},
        {"tried": r"you tried to allocate ([0-9]+) bytes"},
    ),
    _format(
        "dataloader",
        r"DataLoader worker \(pid\(?s?\)? ?[0-9, ]+\) (?:is killed by signal|exited unexpectedly)"
        r"|unable to (?:mmap [0-9]+ bytes from file|open shared memory object|resize file) [^\n]{0,120}memory",
        ("DataLoader worker", "unable to "),
        "cpu",
        plain={"tried": r"unable to mmap ([0-9]+) bytes"},
    ),
    _format(
        "numpy",
        r"Unable to allocate [0-9.]+ [KMGT]?i?B(?:ytes)? for an array with shape",
        ("Unable to allocate",),
        "cpu",
        {"tried": r"Unable to allocate {}"},
    ),
    _format(
        "linux-oom-killer",
        r"Out of memory: Kill(?:ed)? process [0-9]+|Memory cgroup out of memory: Kill(?:ed)? process [0-9]+",
        ("ut of memory: Kill",),
        "cpu",
        {
            "virtual": r"total-vm:([0-9]+)(kB)",
            "resident": r"anon-rss:([0-9]+)(kB)",
            "resident_files": r"file-rss:([0-9]+)(kB)",
            "resident_shared": r"shmem-rss:([0-9]+)(kB)",
        },
    ),
    _format(
        "jax-tpu",
        r"(?:RESOURCE_EXHAUSTED: [^\n]{0,60}?)?Ran out of memory in memory space \w+",
        ("Ran out of memory in memory space",),
        "tpu",
        {"tried": r"Used {} of", "total": r"Used [0-9.]+[KMGT] of {}", "short": r"[Ee]xceeded \w+ capacity by {}"},
    ),
    _format(
        "jax",
        r"RESOURCE_EXHAUSTED: [^\n]{0,80}?(?:[Oo]ut of memory|allocat)",
        ("RESOURCE_EXHAUSTED",),
        "gpu",
        {
            "tried_rounded": r"(?:allocating|allocate(?: request for)?) {}",
            "tried": r"\(([0-9]+)(B)\) on device",
            **_XLA_BUFFERS,
        },
        {"tried": r"(?:allocate|allocating) ([0-9]+) bytes", **_BFC},
    ),
    _format(  # what jaxlib logs before it raises; TensorFlow's copy lies in external/local_xla
        "jax",
        r"external/xla/[\w/]{0,60}bfc_allocator\.cc:[0-9]+\] Allocator \(\w+\) ran out of memory",
        ("bfc_allocator.cc",),
        "gpu",
        {"tried_rounded": r"trying to allocate {}", "tried": r"\(([0-9]+)(B)\) on device", **_XLA_BUFFERS},
        {"tried": r"rounded to ([0-9]{1,20})\)", **_BFC},
    ),
    _format(
        "jax",
        r"Failed to allocate request for [0-9.]+ ?[KMGT]i?B",
        ("Failed to allocate request",),
        "gpu",
        {"tried_rounded": r"allocate request for {}", "tried": r"\(([0-9]+)(B)\) on device", **_XLA_BUFFERS},
        _BFC,
    ),
    _format(
        "tensorflow",
        r"OOM when allocating tensor with shape ?\[",
        ("OOM when allocating",),
        "gpu",
        plain=_BFC,
    ),
    _format(
        "tensorflow",
        r"failed to allocate [^:]{0,60} from device: CUDA_ERROR_OUT_OF_MEMORY",
        ("CUDA_ERROR_OUT_OF_MEMORY",),
        "gpu",
        {"tried_rounded": r"failed to allocate {}"},
        {"tried": r"\(([0-9]+) bytes\) from device"},
    ),
    _format(
        "llama.cpp-pinned",
        r"ggml_cuda_host_malloc: failed to allocate",
        ("ggml_cuda_host_malloc",),
        "cpu",
        {"tried": r"failed to allocate {}"},
    ),
    _format(
        "llama.cpp",
        r"ggml_backend_\w+_buffer_type_alloc_buffer: (?:allocating|failed to allocate)",
        ("buffer_type_alloc_buffer",),
        "cuda",
        {"tried_rounded": r"allocating {} on device"},
        {"tried": r"buffer of size ([0-9]+)"},
    ),
    _format(
        "llama.cpp",
        r"(?:alloc_tensor_range|ggml_gallocr_reserve_n\w*|ggml_metal\w*|ggml_vulkan|\w*kv_cache\w*|graph_reserve"
        r"|llama_\w+|ggml_backend_alloc\w+): .{0,40}?(?:failed to allocate|unable to allocate|allocation of size "
        r"[0-9]+ failed)|cudaMalloc failed: out of memory|ErrorOutOfDeviceMemory",
        (
            "failed to allocate",
            "unable to allocate",
            "allocation of size",
            "cudaMalloc failed",
            "ErrorOutOfDeviceMemory",
        ),
        "cuda",
        {"tried_rounded": r"size ?= ?{}"},
        {"tried": r"(?:buffer|allocation) of size ([0-9]+)"},
    ),
    _format("vllm", r"No available memory for the cache blocks", ("No available memory",), "cuda"),
    _format(
        "vllm",
        r"Free memory on device[^(]{0,12}\([0-9.]+/[0-9.]+ GiB\) on startup is less than",
        ("Free memory on device",),
        "cuda",
        {
            "free": r"Free memory on device[^(]{0,12}\(([0-9]+(?:\.[0-9]+)?)/[0-9.]+ ([KMGT]iB)\)",
            "total": r"Free memory on device[^(]{0,12}\([0-9.]+/{}\)",
            "wanted": r"utilization \([0-9.]+, {}\)",
        },
    ),
    _format(
        "vllm",
        r"larger than the maximum number of tokens that can be stored in KV cache"
        r"|[Tt]o serve at least one request with the model(?:'?s'?|s's) max seq len",
        ("stored in KV cache", "max seq len"),
        "cuda",
        {"needed": r"{} KV cache is needed", "available": r"available KV cache memory \({}\)"},
    ),
    _format(
        "sglang",
        r"Not enough memory\. ?Please try to increase --mem-fraction-static",
        ("--mem-fraction-static",),
        "cuda",
    ),
    _format(
        "triton",
        r"out of resource: shared memory, Required: [0-9]+",
        ("out of resource: shared memory",),
        "cuda",
        plain={"tried": r"Required: ([0-9]+)", "total": r"Hardware limit: ([0-9]+)"},
    ),
    _format(
        "torch-hip-runtime",
        r"HIP error: out of memory|hipErrorOutOfMemory|HIP out of memory",
        ("HIP error: out", "hipErrorOutOfMemory", "HIP out of memory"),
        "hip",
    ),
    _format(
        "torch-cuda-runtime",
        r"CUDA error: out of memory|cudaErrorMemoryAllocation|CUDA_ERROR_OUT_OF_MEMORY|CUDA out of memory",
        ("CUDA error: out", "cudaErrorMemoryAllocation", "CUDA_ERROR_OUT_OF_MEMORY", "CUDA out of memory"),
        "cuda",
    ),
    _format("torch-xpu-runtime", r"XPU out of memory", ("XPU out of memory",), "xpu"),
    _format("torch-npu", r"NPU out of memory", ("NPU out of memory",), "npu"),
    _format(
        "host",
        r"std::bad_alloc|\bMemoryError\b|DefaultCPUAllocator: not enough",
        ("std::bad_alloc", "MemoryError", "DefaultCPUAllocator"),
        "cpu",
    ),
)

_DEVICE = re.compile(
    r"\bGPU[ :]([0-9]+)|\b[NX]PU ([0-9]+)|\bon device:? ?(?:cuda:|ordinal )?([0-9]+)"
    r"|\b(?:CUDA|ROCm|Vulkan)([0-9]+) buffer"
)
_TENSOR = re.compile(r"tensor with shape ?\[([0-9]{1,12}(?:, ?[0-9]{1,12}){0,15})\] and type (\w+)")
_TYPE_BYTES = {"float": 4, "float32": 4, "int32": 4, "half": 2, "bfloat16": 2, "float16": 2, "double": 8, "int64": 8}
_TYPE_BYTES |= {"int8": 1, "uint8": 1, "bool": 1, "int16": 2, "complex64": 8}
PROCESS = re.compile(r"Process ([0-9]+) has " + SIZE + r" memory in use")


def tensor_bytes(text: str) -> int | None:
    """The bytes of the tensor whose shape and type a message of TensorFlow gives."""
    match = _TENSOR.search(text)
    if match is None or match[2] not in _TYPE_BYTES:
        return None
    return math.prod(int(part) for part in match[1].split(",")) * _TYPE_BYTES[match[2]]


def to_bytes(number: str, unit: str) -> int:
    """A printed size in bytes, rounded."""
    scale: int = 1024 ** _UNITS[unit[0].lower()]
    return round(float(number.replace(",", ".")) * scale)


def device_of(text: str, kind: str) -> str:
    """``cuda:0``; without a number where the message gives none."""
    match = None if kind in ("cpu", "mps") else _DEVICE.search(text)
    number = next((group for group in match.groups() if group is not None), None) if match else None
    return kind if number is None else f"{kind}:{number}"
