"""The formats of out-of-memory messages: PyTorch 0.3 to 2.15 on every device, and the programs around it.

Sources: ``c10/cuda/CUDACachingAllocator.cpp``, ``c10/cuda/CUDAMallocAsyncAllocator.cpp``, ``c10/xpu``,
``aten/src/ATen/mps``, ``c10/core/impl/alloc_cpu.cpp`` of PyTorch; ``ggml-cuda.cu`` and ``ggml-alloc.c`` of llama.cpp;
XLA's and TensorFlow's BFC allocators; vLLM's workers; SGLang's scheduler; ``mm/oom_kill.c`` of Linux; Slurm's
``slurmstepd``; Ray's memory monitor.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from functools import cache

# A size as printed. PyTorch's MB and GB are binary too; some locales write a decimal comma; Kubernetes writes Gi.
SIZE = r"([0-9]{1,20}(?:[.,][0-9]{1,9})?) ?(bytes|[KMGT]iB|[KMGTk][Bb]|[KMGT]i?|B)\b"
# Printed in place of a size that the program does not know.
UNKNOWN = (
    r"(?:N/A|n/a|\[?Not Supported\]?|[Uu]nknown|(?:[Nn]a[Nn]|inf)(?: undefined| [KMGT]i?B)?"
    r"|-1(?:\.0+)? ?(?:[KMGT]i?B?|bytes|B)?)"
)
SIZE_PATTERN = re.compile(rf"(?<![\w.,]){SIZE}")
_UNITS = {"b": 0, "k": 1, "m": 2, "g": 3, "t": 4}


class Format:
    """A kind of message. ``start`` matches its beginning, ``fields`` its numbers.

    Every text that ``start`` matches has one of ``words``, which rules out most logs quickly.

    A field's pattern has the groups of ``SIZE``, written ``{}``; that of a ``plain`` one a number of bytes, or of KiB
    if its name ends so. ``device`` is the kind of device; ``_DEVICE`` matches its number. A ``general`` message says
    only that memory ran out, and counts only without a better one nearby. ``own_line``: it is a full line of the log.
    """

    def __init__(
        self,
        family: str,
        start: str,
        words: str | tuple[str, ...],
        device: str,
        fields: Mapping[str, str] = {},
        plain: Mapping[str, str] = {},
        *,
        general: bool = False,
        own_line: bool = False,
    ) -> None:
        self.family, self.start, self.device = family, re.compile(start), device
        self.words = (words,) if isinstance(words, str) else words
        self.fields = tuple((name, re.compile(text.replace("{}", SIZE))) for name, text in fields.items())
        self.plain = tuple((name, re.compile(text)) for name, text in plain.items())
        self.general, self.own_line = general, own_line


# XLA's buffer assignment for the program (xla/service/buffer_assignment.cc, BufferAssignment::Stats).
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
# The BFC allocator's own figures (xla/tsl/framework/allocator.cc, AllocatorStats::DebugString).
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
_ASKED = "Tried to allocate"
_REST = r"(?:(?!out of memory).){0,1500}?"  # of the same message

# The first match wins, so special formats precede general ones.
FORMATS = (
    Format(
        "torch-cuda-address-space",
        r"\[ExpandableSegmentVA\] Failed to reserve",
        "ExpandableSegmentVA",
        "cuda",
        {"tried": r"\({}\) of virtual address space"},
        {"tried_exact": r"Failed to reserve ([0-9]+) ", "reserved_addresses": r"reserving ([0-9]+) bytes"},
    ),
    Format(
        "torch-cuda-segment-reserve",
        r"This allocation exceeds the expandable-segment reserve of",
        "expandable-segment reserve",
        "cuda",
        {"segment_reserve": r"expandable-segment reserve of {}", "needed": r"so that a segment is at least {}"},
    ),
    Format(
        "torch-cuda-mempool",
        r"The custom allocator backing this MemPool returned nullptr",
        "MemPool returned",
        "cuda",
    ),
    Format(
        "torch-cuda-impossible",
        r"(?:CUDA|HIP) out of memory\. ?Tried to allocate more than 1EB",
        "more than 1EB",
        "cuda",
    ),
    Format(
        "torch-cuda-cached",
        rf"CUDA {_TRIED} [^(]{{1,30}}\(GPU [^)]{{0,200}} cached",
        _ASKED,
        "cuda",
        _OLD | {"cached": r"{} cached"},
    ),
    Format(
        "torch-cuda-reserved-hint",
        rf"CUDA {_TRIED} [^(]{{1,30}}\(GPU [^)]{{0,250}}\) If reserved memory",
        _ASKED,
        "cuda",
        _OLD | _RESERVED,
    ),
    Format("torch-cuda-reserved", rf"CUDA {_TRIED} [^(]{{1,30}}\(GPU", _ASKED, "cuda", _OLD | _RESERVED),
    Format(
        "torch-npu",
        r"NPU out of memory\. ?NPUWorkspaceAllocator tried to allocate",
        "NPUWorkspaceAllocator",
        "npu",
        {"tried": r"tried to allocate {}", "total": r"{} total capacity", "free": r"{} free\b"},
    ),
    *(
        Format(f"torch-{kind}", rf"{kind.upper()} {_TRIED} [^(]{{1,30}}\([GNX]PU", _ASKED, kind, _OLD | _RESERVED)
        for kind in ("npu", "hip", "xpu")
    ),
    *(Format(f"torch-{kind}", rf"{kind.upper()} {_TRIED}", _ASKED, kind, _NEW) for kind in ("npu", "hip", "xpu")),
    Format("torch-cuda-2.1", rf"CUDA {_TRIED}(?={_REST}capacty)", _ASKED, "cuda", _NEW),
    Format("torch-cuda-2.15", rf"CUDA {_TRIED}(?={_REST}expandable_segments is enabled)", _ASKED, "cuda", _NEW),
    Format("torch-cuda-2.9", rf"CUDA {_TRIED}(?={_REST}PYTORCH_ALLOC_CONF)", _ASKED, "cuda", _NEW),
    Format("torch-cuda-2.2", rf"torch\.cuda\.OutOfMemoryError: CUDA {_TRIED}", _ASKED, "cuda", _NEW),
    Format("torch-cuda-2.5", rf"CUDA {_TRIED}", _ASKED, "cuda", _NEW),
    Format(
        "torch-cudaMallocAsync",
        r"Allocation on device [^.]{0,12}would exceed allowed memory",
        "would exceed allowed memory",
        "cuda",
        {
            "allocated": r"Currently allocated ?: {}",
            "tried": r"Requested ?: {}",
            "total": r"Device limit ?: {}",
            "free": r"Free \(according to CUDA\) ?: {}",
            "allowed": r"user-supplied memory fraction\) ?: {}",
        },
    ),
    Format(  # some of PyTorch's allocators, and what ComfyUI keeps of the message
        "torch-cudaMallocAsync", r"Allocation on device\b", "Allocation on device", "cuda"
    ),
    Format(
        "torch-mps",
        r"MPS backend out of memory",
        "MPS backend",
        "mps",
        {
            "allocated": r"MPS allocated: {}",
            "other_allocations": r"other allocations: {}",
            "allowed": r"max allowed: {}",
            "tried": r"Tried to allocate {}",
        },
    ),
    Format(
        "torch-mps",
        r"Invalid buffer size: [0-9.]+ ?[KMGT]i?B",
        "Invalid buffer size",
        "mps",
        {"tried": r"Invalid buffer size: {}"},
    ),
    Format(
        "torch-directml",
        r"Could not allocate tensor with [0-9]+ bytes\. There is not enough GPU video memory",
        "GPU video memory",
        "gpu",
        plain={"tried": r"tensor with ([0-9]+) bytes"},
    ),
    Format(
        "torch-xpu-runtime",
        r"UR_RESULT_ERROR_OUT_OF_(?:DEVICE_MEMORY|HOST_MEMORY|RESOURCES)"
        r"|PI_ERROR_(?:OUT_OF_RESOURCES|OUT_OF_HOST_MEMORY|MEM_OBJECT_ALLOCATION_FAILURE)",
        ("UR_RESULT_ERROR_OUT_OF_", "PI_ERROR_"),
        "xpu",
    ),
    Format("torch-cublas", r"(?:HIPBLAS|ROCBLAS)_STATUS_ALLOC_FAILED", "BLAS_STATUS_ALLOC_FAILED", "hip"),
    Format(
        "torch-cublas",
        r"CUBLAS_STATUS_ALLOC_FAILED|CUBLAS_STATUS_NOT_INITIALIZED when calling .cublasCreate",
        "CUBLAS_STATUS_",
        "cuda",
    ),
    Format("torch-cudnn", r"CUDNN_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED", "cuda"),
    Format(
        "torch-cuda-library",
        r"CU(?:FFT|SOLVER_STATUS|SPARSE_STATUS)_ALLOC_FAILED|CUSPARSE_STATUS_INSUFFICIENT_RESOURCES",
        ("_ALLOC_FAILED", "_INSUFFICIENT_RESOURCES"),
        "cuda",
    ),
    Format(
        "torch-nccl",
        r"ncclUnhandledCudaError(?=.{0,600}out of memory)|NCCL WARN Cuda failure[^\n]{0,40}out of memory",
        ("ncclUnhandledCudaError", "NCCL WARN Cuda"),
        "cuda",
        plain={"tried": r"Failed to CUDA (?:c|host )?[Aa]lloc (?:async )?([0-9]+) bytes"},
    ),
    Format(
        "torch-cuda-thc",
        r"cuda runtime error \(2\) ?: out of memory|THCudaCheck FAIL [^\n]{0,200}error=2 ?: out of memory",
        ("cuda runtime error (2)", "THCudaCheck FAIL"),
        "cuda",
    ),
    Format(
        "torch-cpu",
        r"DefaultCPUAllocator: (?:not enough memory|can't allocate memory)|Torch: not enough memory: you tried",
        ("DefaultCPUAllocator", "Torch: not enough memory"),
        "cpu",
        {"tried_rounded": r"you tried to allocate (?![0-9]+ bytes){}"},
        {"tried": r"you tried to allocate ([0-9]+) bytes"},
    ),
    Format(
        "dataloader",
        r"DataLoader worker \(pid\(?s?\)? ?[0-9, ]+\) (?:is killed by signal|exited unexpectedly)"
        r"|unable to (?:mmap [0-9]+ bytes from file|open shared memory object|resize file"
        r"|write to file) [^\n]{0,120}?"
        r"(?:memory|No space left)",
        ("DataLoader worker", "unable to "),
        "cpu",
        plain={"tried": r"unable to mmap ([0-9]+) bytes"},
    ),
    Format(
        "numpy",
        r"Unable to allocate [0-9.]+ [KMGT]?i?B(?:ytes)? for an array with shape",
        "Unable to allocate",
        "cpu",
        {"tried": r"Unable to allocate {}"},
    ),
    Format(
        "linux-oom-killer",
        r"(?:\b\w[\w.:-]{0,40} invoked oom-killer|oom-kill:constraint=|(?:Memory cgroup o"
        r"|O)ut of memory: Kill(?:ed)? process [0-9]+"
        r"|oom_reaper: reaped process|\bKilled process [0-9]+)",
        ("oom-kill", "ut of memory: Kill", "oom_reaper", "Killed process"),
        "cpu",
        {
            "virtual": r"total-vm:([0-9]+)(kB)",
            "resident": r"anon-rss:([0-9]+)(kB)",
            "resident_files": r"file-rss:([0-9]+)(kB)",
            "resident_shared": r"shmem-rss:([0-9]+)(kB)",
            "page_tables": r"pgtables:([0-9]+)(kB)",
            "used": r"memory: usage ([0-9]+)(kB)",
            "limit": r"memory: usage [0-9]+kB, limit ([0-9]+)(kB)",
        },
    ),
    Format(
        "oomd",
        r"Killed \S{1,200} due to memory (?:pressure|used)|killed by the OOM killer|Failed with result 'oom-kill'"
        r"|sending SIG(?:TERM|KILL) (?:to|when not enough) .{0,100}?(?:badness|memory)",
        ("due to memory", "sending SIG", "OOM killer", "oom-kill"),
        "cpu",
        {"resident": r"VmRSS:? {}", "used": r"due to memory used \({}\)", "total": r"total \({}\)"},
    ),
    Format(
        "slurm",
        r"[Dd]etected [0-9]+ oom[-_]kill event|\boom-kill event\(s\) in|[Ee]xceeded (?:job|step) memory limit"
        r"|exceeded memory limit \(|task [0-9,\[\]-]+: Out [Oo]f [Mm]emory|\bState: OUT_OF_MEMORY"
        r"|being killed.{0,20}exceeded.{0,20}memory|\bOUT_OF_ME(?:MORY|\+)(?= )",
        ("oom", "memory limit", "Out Of Memory", "Out of memory", "Out of Memory", "OUT_OF_ME", "being killed"),
        "cpu",
        {
            "used": r"Memory Utilized: {}",
            "limit": r"Memory Efficiency: [0-9.]+% of {}",
            "resident": r"\bMaxRSS=([0-9.]+)([KMGT])",
        },
        {
            "used_kib": r"exceeded memory limit \(([0-9]+) > [0-9]+\)",
            "limit_kib": r"exceeded memory limit \([0-9]+ > ([0-9]+)\)",
        },
    ),
    Format(
        "batch-scheduler",
        r"PBS: job killed: \w+ [0-9]+kb exceeded limit [0-9]+kb|TERM_MEMLIMIT|over memory limit of [0-9]+ megabytes",
        ("PBS: job killed", "TERM_MEMLIMIT", "over memory limit"),
        "cpu",
        {
            "used": r"job killed: \w+ ([0-9]+)(kb)",
            "limit": r"exceeded limit ([0-9]+)(kb)",
            "allowed_memory": r"memory limit of ([0-9]+) (m)egabytes",
            "used_peak": r"(?:Peak usage|Max Memory ?): ?([0-9.]+) ([KMGTkmgt])",
        },
    ),
    Format(
        "kubernetes",
        r"\bOOMKill(?:ed|ing)\b(?!['\"]?: ?false)|low on resource: memory",
        ("OOMKill", "low on resource: memory"),
        "cpu",
        {
            "threshold": r"Threshold quantity: {}",
            "available": r"\bavailable: {}",
            "used": r"was using {}",
            "requested": r"request is {}",
            "limit": r"Limits: (?:cpu: \S+ )?memory: {}",
        },
    ),
    Format(
        "ray",
        r"Task was killed due to the node running low on memory|Memory on the node \(IP"
        r"|\b[0-9]{1,9} Workers? \(tasks / actors\) killed due to memory pressure",
        ("running low on memory", "Memory on the node", "killed due to memory pressure"),
        "cpu",
        {
            "worker": r"memory used={}",
            "used": r"\) was running was {} / ",
            "total": r"\) was running was [0-9.]+ ?\w+ / {}",
        },
    ),
    Format(
        "ray-object-store",
        r"ObjectStoreFullError|in object store because it is full",
        ("ObjectStoreFullError", "object store because"),
        "cpu",
        plain={"tried": r"[Oo]bject size is ([0-9]+) bytes"},
    ),
    Format(
        "ollama",
        r"model requires more (?:system |gpu )?memory \([^)]{1,40}\) than is available"
        r"|model request too large for system",
        ("model requires more", "model request too large"),
        "cpu",
        {
            "needed": r"(?:more (?:system |gpu )?memory \(|\brequested=\"?){}",
            "available": r"(?:is available \(|\bavailable=\"?){}",
            "total": r"\btotal=\"?{}",
            "free": r"\bfree=\"?{}",
        },
    ),
    Format(
        "lm-studio",
        r"insufficient system resources",
        "insufficient system resources",
        "cpu",
        {"needed": r"requires approximately {}"},
    ),
    Format(
        "windows-paging-file",
        r"[Pp]aging file is too small|WinError 1455|os error 1455|DefaultCPUAllocator: .{0,20}paging file",
        ("aging file", "1455"),
        "cpu",
    ),
    Format(
        "jax-tpu",
        r"(?:RESOURCE_EXHAUSTED: [^\n]{0,60}?)?Ran out of memory in memory space \w+",
        "Ran out of memory in memory space",
        "tpu",
        {
            "tried": r"(?:Used|Scoped allocation with size) {} (?:of|and)",
            "total": r"(?:Used [0-9.]+[KMGT] of|and limit) {}",
            "short": r"[Ee]xceeded (?:scoped )?\w+ (?:capacity|limit) by {}",
        },
    ),
    Format(  # tpu_driver: the program is loaded at the bottom of memory, its arrays lie at the top
        "jax-tpu",
        r"(?:RESOURCE_EXHAUSTED: [^\n]{0,80}?)?Attempting to (?:reserve|allocate) [0-9.]+[KMGT]?B?\b.{0,60}?"
        r"That was not possible",
        "That was not possible",
        "tpu",
        {
            "tried": r"Attempting to (?:reserve|allocate) {}",
            "free": r"There are {} free",
            "reserved": r"free, {} reserved",
            "reservable": r"and {} reservable",
        },
    ),
    Format(
        "jax",
        r"RESOURCE_EXHAUSTED: (?!OOM when)[^\n]{0,80}?(?:[Oo]ut of memory|allocat)",
        "RESOURCE_EXHAUSTED",
        "gpu",
        {
            "tried_rounded": r"(?:allocating|allocate(?: request for)?) {}",
            "tried": r"\(([0-9]+)(B)\) on device",
            **_XLA_BUFFERS,
        },
        {"tried": r"(?:allocate|allocating) ([0-9]+) bytes", **_BFC},
    ),
    Format(  # what jaxlib logs before it raises; TensorFlow's copy lies in external/local_xla
        "jax",
        r"external/xla/[\w/]{0,60}bfc_allocator\.cc:[0-9]+\] Allocator \(\w+\) ran out of memory"
        r"(?!.{0,80}The caller indicates)",
        "bfc_allocator.cc",
        "gpu",
        {"tried_rounded": r"trying to allocate {}", "tried": r"\(([0-9]+)(B)\) on device", **_XLA_BUFFERS},
        {"tried": r"rounded to ([0-9]{1,20})\)", **_BFC},
    ),
    Format(  # the share that is taken at the start is more than is free
        "jax",
        r"(?:external/xla/[\w/]{0,80}|\bcuda_executor)\.cc:[0-9]+\] failed to allocate [^:]{0,60} from device: ",
        ("external/xla/", "cuda_executor.cc"),
        "gpu",
        {"tried_rounded": r"failed to allocate {}"},
        {"tried": r"\(([0-9]+) bytes\) from device"},
    ),
    Format(
        "jax",
        r"Failed to allocate request for [0-9.]+ ?[KMGT]i?B",
        "Failed to allocate request",
        "gpu",
        {"tried_rounded": r"allocate request for {}", "tried": r"\(([0-9]+)(B)\) on device", **_XLA_BUFFERS},
        _BFC,
    ),
    Format("tensorflow", r"OOM when allocating tensor with shape ?\[", "OOM when allocating", "gpu", plain=_BFC),
    Format(
        "tensorflow",
        r"bfc_allocator\.cc:[0-9]+\] Allocator \(\w+\) ran out of memory trying to allocate"
        r"(?!.{0,60}The caller indicates)|failed to allocate memory \[Op:"
        r"|(?:Failed copying .{0,120})?Dst tensor is not initialized",
        ("bfc_allocator.cc", "failed to allocate memory [Op", "Dst tensor is not"),
        "gpu",
        {"tried_rounded": r"trying to allocate {}"},
        {"tried": r"rounded to ([0-9]{1,20})\)", **_BFC},
    ),
    Format(
        "tensorflow",
        r"failed to allocate [^:]{0,60} from device: (?:RESOURCE_EXHAUSTED: )?:? ?CUDA_ERROR_OUT_OF_MEMORY",
        "CUDA_ERROR_OUT_OF_MEMORY",
        "gpu",
        {"tried_rounded": r"failed to allocate {}"},
        {"tried": r"\(([0-9]+) bytes\) from device"},
    ),
    Format(
        "mlx",
        r"\[(?:metal::)?malloc(?:_or_wait)?\] (?:Attempting|Unable) to allocate [0-9]+ bytes"
        r"|Command buffer execution failed: Insufficient Memory(?: \(\w{1,20}:\w{1,80}\))?",
        ("to allocate", "Insufficient Memory"),
        "mps",
        plain={"tried": r"to allocate ([0-9]+) bytes", "largest_buffer": r"buffer size of ([0-9]+) bytes"},
    ),
    Format(
        "llama.cpp-pinned",
        r"ggml_cuda_host_malloc: failed to allocate",
        "ggml_cuda_host_malloc",
        "cpu",
        {"tried": r"failed to allocate {}"},
    ),
    Format(
        "llama.cpp",
        r"ggml_backend_\w+_buffer_type_alloc_buffer: (?:allocating|failed to allocate)",
        "buffer_type_alloc_buffer",
        "cuda",
        {"tried_rounded": r"allocating {} on device"},
        {"tried": r"buffer of size ([0-9]+)"},
    ),
    Format(
        "llama.cpp",
        r"(?:alloc_tensor_range|ggml_gallocr_reserve_n\w*|ggml_metal\w*|ggml_vulkan|\b\w{0,40}kv_cache\w*|graph_reserve"
        r"|llama_\w+|ggml_backend_alloc\w+): .{0,40}?(?:failed to allocate|unable to allocate|allocation of size "
        r"[0-9]+ failed)|cudaMalloc failed: out of memory|ErrorOutOf(?:Device|Host)Memory"
        r"|failed to fit params to free device memory(?!: \w+ is not implemented)|cannot fulfill margin of"
        r"|kIOGPUCommandBufferCallbackErrorOutOfMemory"
        r"|ggml_aligned_malloc: insufficient memory",
        (
            "failed to allocate",
            "unable to allocate",
            "allocation of size",
            "cudaMalloc failed",
            "ErrorOutOf",
            "failed to fit params",
            "cannot fulfill margin",
            "ErrorOutOfMemory",
            "ggml_aligned_malloc",
        ),
        "gpu",
        {
            "tried_rounded": r"(?:size ?= ?|attempted to allocate +){}",
            "margin": r"cannot fulfill margin of {}",
            "short": r"need to use {} less",
        },
        {"tried": r"(?:buffer|allocation) of size ([0-9]+)"},
    ),
    Format(
        "vllm",
        r"No available memory for the cache blocks",
        "No available memory",
        "cuda",
        {"short": r"Available KV cache memory: -{}"},
    ),
    Format(
        "vllm",
        r"Free memory on device[^(]{0,12}\([0-9.]+/[0-9.]+ GiB\) on startup is less than",
        "Free memory on device",
        "cuda",
        {
            "free": r"Free memory on device[^(]{0,12}\(([0-9]+(?:\.[0-9]+)?)/[0-9.]+ ([KMGT]iB)\)",
            "total": r"Free memory on device[^(]{0,12}\([0-9.]+/{}\)",
            "wanted": r"utilization \([0-9.]+, {}\)",
        },
    ),
    Format(
        "vllm",
        r"larger than the maximum number of tokens that can be stored in KV cache"
        r"|[Tt]o serve at least one request with the model(?:'?s'?|s's) max seq len",
        ("stored in KV cache", "max seq len"),
        "cuda",
        {"needed": r"{} KV cache is needed", "available": r"available KV cache memory \({}\)"},
    ),
    Format(
        "sglang",
        r"Not enough memory\. ?Please try to increase --mem-fraction-static"
        r"|(?:Prefill|Decode) out of memory\. ?Try to lower your batch size",
        ("--mem-fraction-static", "ut of memory. Try to lower your batch size"),
        "cuda",
    ),
    Format("sglang-unbalanced", r"memory capacity is unbalanced", "capacity is unbalanced", "cuda"),
    Format(
        "tgi",
        r"Not enough memory to handle [0-9]+ (?:total|prefill) tokens",
        "Not enough memory to handle",
        "cuda",
    ),
    Format(
        "tensorrt",
        r"CUDA runtime error in .{0,200}?: out of memory|Requested amount of GPU memory \([0-9]+ bytes\) could not be"
        r"|Cuda Runtime \(out of memory\)|OutOfMemory \(.{0,20}no implementation",
        ("CUDA runtime error in", "Requested amount of GPU memory", "Cuda Runtime (out of memory)", "OutOfMemory ("),
        "cuda",
        plain={"tried": r"GPU memory \(([0-9]+) bytes\)", "tried_exact": r"\brequested size of ([0-9]+)"},
    ),
    Format(
        "onnxruntime",
        r"Failed to allocate memory for requested buffer of size [0-9]+|Available memory of [0-9]+ is smaller than"
        r"|CUDA failure 2: out of memory",
        ("Failed to allocate memory for requested", "Available memory of", "CUDA failure 2"),
        "gpu",
        plain={
            "tried": r"(?:requested buffer of size|requested bytes of) ([0-9]+)",
            "free": r"Available memory of ([0-9]+)",
        },
    ),
    Format(
        "cupy",
        r"[Oo]ut of memory (?:allocating [0-9,]+|to allocate [0-9]+) bytes",
        ("ut of memory allocating", "ut of memory to allocate"),
        "cuda",
        plain={
            "tried": r"(?:allocating|to allocate) ([0-9,]+) bytes",
            "allocated": r"(?:allocated so far:|\(total) ([0-9,]+) bytes",
            "limit": r"limit set to:? ([0-9,]+) bytes",
        },
    ),
    Format(
        "rmm",
        r"(?:(?:std::)?bad_alloc|out_of_memory)\W.{0,30}?"
        r"(?:RMM failure at|CUDA error(?: \(failed to allocate [^)]*\))? at)"
        r"|(?:\[Upstream [0-9]+B\]\[FAILURE )?[Mm]aximum pool size exceeded",
        ("RMM failure", "bad_alloc", "out_of_memory", "aximum pool size"),
        "cuda",
        {"tried": r"[Ff]ailed to allocate {}"},
        {"tried": r"[Ff]ailed to allocate ([0-9]+) bytes", "upstream": r"\[Upstream ([0-9]+)B\]"},
    ),
    Format(
        "xgboost",
        r"Memory allocation error on worker [0-9]+",
        "Memory allocation error on worker",
        "cuda",
        {"free": r"Free memory: {}", "tried": r"Requested memory: {}"},
        {
            "free": r"Free memory: ([0-9]+)(?![0-9.]| ?[KMGT])",
            "tried": r"Requested memory: ([0-9]+)(?![0-9.]| ?[KMGT])",
        },
    ),
    Format(
        "habana",
        r"Allocation failed for size ?::? ?[0-9]+",
        "Allocation failed for size",
        "hpu",
        plain={"tried": r"Allocation failed for size ?::? ?([0-9]+)"},
    ),
    Format(
        "torch-npu",
        r"\bEL0004\b|ACL_ERROR_RT_MEMORY_ALLOCATION|error code is 207001",
        ("EL0004", "ACL_ERROR_RT_MEMORY", "207001"),
        "npu",
    ),
    Format(  # a share of a GPU that a container was given
        "hami",
        r"HAMI-core ERROR [^\]]{0,80}\]: Device [0-9]+ OOM [0-9]+ / [0-9]+",
        "HAMI-core ERROR",
        "cuda",
        plain={"needed": r"OOM ([0-9]+) /", "limit": r"OOM [0-9]+ / ([0-9]+)"},
    ),
    Format(
        "exllama",
        r"Insufficient VRAM (?:in split )?for model and cache|Insufficient space on devices? for model and cache",
        "for model and cache",
        "cuda",
    ),
    Format("transformers", r"enough GPU RAM to fit the", "enough GPU RAM", "gpu"),
    Format(
        "torch-directml",
        r"Not enough memory resources are available to complete this operation|E_OUTOFMEMORY",
        ("Not enough memory resources", "E_OUTOFMEMORY"),
        "gpu",
    ),
    Format(
        "shared-memory",
        r"Error while creating shared memory segment \S+|/dev/shm.{0,80}No space left on device",
        ("shared memory segment", "/dev/shm"),
        "cpu",
        plain={"tried": r"\(size ([0-9]+)\)"},
    ),
    Format(
        "triton",
        r"out of resource: shared memory, Required: [0-9]+",
        "out of resource: shared memory",
        "cuda",
        plain={"tried": r"Required: ([0-9]+)", "total": r"Hardware limit: ([0-9]+)"},
    ),
    Format(
        "torch-hip-runtime",
        r"HIP error: out of memory|hipErrorOutOfMemory|HIP out of memory|HSA_STATUS_ERROR_OUT_OF_RESOURCES",
        ("HIP error: out", "hipErrorOutOfMemory", "HIP out of memory", "HSA_STATUS_ERROR_OUT"),
        "hip",
        general=True,
    ),
    Format(
        "torch-cuda-runtime",
        r"CUDA (?:driver )?[Ee]rror: out of memory|NVML_SUCCESS == r INTERNAL ASSERT FAILED"
        r"|CUDA out of memory|NvMapMemAllocInternalTagged: \d+ error 12",
        ("rror: out of memory", "NVML_SUCCESS == r", "CUDA out of memory", "NvMapMemAllocInternalTagged"),
        "cuda",
        general=True,
    ),
    Format(
        "cuda-runtime",
        r"cudaErrorMemoryAllocation|CUDA_ERROR_OUT_OF_MEMORY|CUDA failed with error out of memory"
        r"|CUDA error at .{0,200}?out of memory|\(-217:Gpu API call\) out of memory",
        ("cudaErrorMemoryAllocation", "CUDA_ERROR_OUT_OF_MEMORY", "CUDA failed with error", "out of memory"),
        "cuda",
        general=True,
    ),
    Format("torch-xpu-runtime", r"XPU out of memory", "XPU out of memory", "xpu", general=True),
    Format("torch-npu", r"NPU out of memory", "NPU out of memory", "npu", general=True),
    Format(
        "host",
        r"std::bad_alloc|\bMemoryError\b|DefaultCPUAllocator: not enough|\bCannot allocate memory"
        r"|memory allocation of [0-9]+ bytes failed|Insufficient memory\)? \(?Failed to allocate [0-9]+ bytes"
        r"|java\.lang\.OutOfMemoryError|JavaScript heap out of memory|crashed after using all available RAM",
        (
            "std::bad_alloc",
            "MemoryError",
            "DefaultCPUAllocator",
            "Cannot allocate memory",
            "memory allocation of",
            "Insufficient memory",
            "OutOfMemoryError",
            "heap out of memory",
            "all available RAM",
        ),
        "cpu",
        plain={"tried": r"(?:memory allocation of|Failed to allocate) ([0-9]+) bytes"},
        general=True,
    ),
    Format(  # a process that the system ends says nothing itself: its shell, launcher or container does
        "killed",
        r"line [0-9]+: +[0-9]+ Killed\b|\[[0-9]+\] ?[+-]? +(?:[0-9]+ )?[Kk]illed\b|zsh: killed\b"
        r"|(?:[Ee]xit(?:ed)?(?: with)?(?: exit)?[ _]?(?:[Cc]ode|[Ss]tatus)?|return code"
        r"|exitcode)\s?[:=]? ?(?:137|-9)\b"
        r"|<?Signals\.SIGKILL: 9|(?<!via )\bSIGKILL\(-9\)|[Ss]ignal:? 9 ?\(SIGKILL\)|signal:? killed\b"
        r"|(?:[Tt]erminated|[Kk]illed|KILLED) (?:[Bb]y|BY|with) (?:signal|SIGNAL):? (?:9|SIGKILL)"
        r"|due to signal 9\b|exited on signal 9\b",
        ("illed", "137", "-9", "SIGKILL", "ignal 9", "ignal: 9", "signal"),
        "cpu",
        general=True,
    ),
    Format("killed", r"Killed(?:: 9)?", "Killed", "cpu", general=True, own_line=True),
    Format(
        "other",
        r"(?i:\b(?:(?<!run )(?<!running )(?<!avoid )(?<!prevent )out of (?:\w+ )?memory|(?:insufficient"
        r"|not enough) (?:\w+ ){0,2}(?:memory|vram|ram)"
        r"|ran out of \w* ?(?:memory|vram|ram)|memory (?:was )?exhausted|failed to allocate|unable to allocate"
        r"|exceeds? .{0,40}?(?:memory|vram)))",
        ("emory", "EMORY", "llocate", "VRAM", "vram", " RAM"),
        "unknown",
        general=True,
    ),
)

# The device of a buffer of llama.cpp, by the allocating function or the buffer's name.
_LLAMA_DEVICES = tuple(
    (re.compile(text), kind)
    for text, kind in (
        (r"_host_buffer_type_alloc|\b\w+_Host buffer|ErrorOutOfHostMemory", "cpu"),
        (r"ggml_backend_cpu_\w*buffer_type_alloc|\bCPU\w* buffer|ggml_aligned_malloc", "cpu"),
        (r"\bROCm[0-9]* buffer|\bROCm[0-9]+\b", "hip"),
        (r"ggml_backend_(?:vk|vulkan)_|\bVulkan[0-9]* buffer|ggml_vulkan|ErrorOutOfDeviceMemory", "vulkan"),
        (r"ggml_backend_sycl_|\bSYCL[0-9]* buffer", "xpu"),
        (r"ggml_backend_metal_|\b(?:Metal|MTL[0-9]*)\w* buffer|ggml_metal|kIOGPUCommand", "mps"),
        (r"ggml_backend_cann_|\bCANN[0-9]* buffer", "npu"),
        (r"ggml_backend_opencl_|\bOpenCL\w* buffer", "opencl"),
        (r"ggml_backend_rpc_|\bRPC\S* buffer", "rpc"),
        (r"cuda|CUDA", "cuda"),
    )
)
_KINDS_IN_WORDS = tuple(
    (re.compile(text, re.IGNORECASE), kind)
    for text, kind in (
        (r"\b(?:gpu|cuda|vram|video memory|device memory|hbm|shared memory)\b", "gpu"),
        (r"\b(?:system memory|host|ram|cpu|swap)\b", "cpu"),
    )
)
_DEVICE = re.compile(
    r"\b(?:GPU[ :]|Device )([0-9]+)|\b[NX]PU ([0-9]+)|\bon device:? ?(?:cuda:|ordinal )?([0-9]+)"
    r"|\b(?:CUDA|ROCm|Vulkan|SYCL|CANN)([0-9]+) buffer"
)
_TENSOR = re.compile(r"tensor with shape ?\[([0-9]{1,12}(?:, ?[0-9]{1,12}){0,15})\] and type (\w+)")
_TYPE_BYTES = {"float": 4, "float32": 4, "int32": 4, "half": 2, "bfloat16": 2, "float16": 2, "double": 8, "int64": 8}
_TYPE_BYTES |= {"int8": 1, "uint8": 1, "bool": 1, "int16": 2, "complex64": 8}
PROCESS = re.compile(r"Process ([0-9]+) has " + SIZE + r" memory in use")


def tensor_bytes(text: str) -> int | None:
    """Return the bytes of the tensor in a message of TensorFlow."""
    match = _TENSOR.search(text)
    if match is None or match[2] not in _TYPE_BYTES:
        return None
    return math.prod(int(part) for part in match[1].split(",")) * _TYPE_BYTES[match[2]]


def to_bytes(number: str, unit: str) -> int:
    """Return a printed size in bytes, rounded."""
    scale: int = 1024 ** _UNITS[unit[0].lower()]
    return round(float(number.replace(",", ".")) * scale)


def device_of(text: str, form: Format) -> str:
    """Return the device, such as ``cuda:0``; without a number if the message has none."""
    kind = form.device
    if form.family == "llama.cpp":
        kind = next((name for pattern, name in _LLAMA_DEVICES if pattern.search(text)), kind)
    if form.family == "other":
        kind = next((name for pattern, name in _KINDS_IN_WORDS if pattern.search(text)), kind)
    match = None if kind in ("cpu", "mps", "unknown") else _DEVICE.search(text)
    number = next((group for group in match.groups() if group is not None), None) if match else None
    return kind if number is None else f"{kind}:{number}"


@cache
def unknown_of(pattern: re.Pattern[str]) -> re.Pattern[str]:
    """Return the pattern of a field for unknown numbers."""
    return re.compile(pattern.pattern.replace(SIZE, UNKNOWN))


_NAMES_IN_WORDS = tuple(
    (name, re.compile(text, re.IGNORECASE))
    for name, text in (
        ("free", r"available|free|remaining|left\b|only"),
        ("total", r"total|capacity|limit|maximum|max\b|budget|\bof\b|/ ?$"),
        ("tried", r"tr(?:y|ied|ying)|request|requir|need|alloc|want|size"),
        ("used", r"us(?:ed|age|ing)|held|occupied"),
    )
)


def named_by_words(text: str, start: int, end: int, taken: Mapping[str, int]) -> str:
    """Guess the name of a size in an unknown message by the last telling word before it, or the first after."""
    before, after = re.split(r"[,;(]", text[max(0, start - 40) : start])[-1], text[end : end + 20]
    words = [(match.end(), name) for name, pattern in _NAMES_IN_WORDS for match in pattern.finditer(before)]
    words += [
        (-match.start(), name) for name, pattern in _NAMES_IN_WORDS if not words for match in pattern.finditer(after)
    ]
    name = max(words)[1] if words else "size"
    return name if name not in taken else f"size_{len(taken) + 1}"
