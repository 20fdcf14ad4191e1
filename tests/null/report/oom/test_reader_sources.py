"""Messages made after the sources of PyTorch and the programs around it: family, device, numbers, cause, advice."""

from __future__ import annotations

import re

import pytest

from brim.report.oom.formats import SIZE, to_bytes
from brim.report.oom.reader import Cause, read_oom
from brim.units import GIB, MIB


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
DERIVED = {
    "exhausted": (
        cuda("22.00 MiB", "11.06 MiB", OWN.format("23.60 GiB") + held("22.90 GiB", "194.87 MiB")),
        "torch-cuda-2.5",
        Cause.EXHAUSTED,
        {"tried": 22 * MIB, "unallocated": round(194.87 * MIB)},
    ),
    "fragmented": (
        cuda("2.00 GiB", "100.00 MiB", OWN.format("23.50 GiB") + held("15.00 GiB", "8.00 GiB")),
        "torch-cuda-2.5",
        Cause.FRAGMENTATION,
        {"process": round(23.5 * GIB)},
    ),
    "another process": (
        cuda(
            "2.00 GiB",
            "100.00 MiB",
            "Process 77 has 15.00 GiB memory in use. " + OWN.format("8.00 GiB") + held("7.00 GiB", "10.00 MiB"),
        ),
        "torch-cuda-2.5",
        Cause.OTHER_PROCESS,
        {"process_77": 15 * GIB},
    ),
    "a fraction": (
        cuda("2.00 GiB", "15.00 GiB", OWN.format("8.00 GiB") + "8.00 GiB allowed; " + held("7.00 GiB", "10.00 MiB")),
        "torch-cuda-2.5",
        Cause.MEMORY_FRACTION,
        {"allowed": 8 * GIB},
    ),
    "private pools": (
        cuda(
            "2.00 GiB",
            "100.00 MiB",
            OWN.format("23.50 GiB")
            + held("23.00 GiB", "10.00 MiB", "with 9.00 GiB allocated in private pools (e.g., CUDA Graphs), "),
        ),
        "torch-cuda-2.5",
        Cause.PRIVATE_POOLS,
        {"private_pools": 9 * GIB},
    ),
    "spilled": (
        cuda("2.00 GiB", "0 bytes", OWN.format("31.00 GiB") + held("30.00 GiB", "10.00 MiB")),
        "torch-cuda-2.5",
        Cause.SPILL,
        {"free": 0},
    ),
    "too large": (
        cuda("99.00 GiB", "20.00 GiB", held("1.00 GiB", "0 bytes")),
        "torch-cuda-2.5",
        Cause.TOO_LARGE,
        {"tried": 99 * GIB},
    ),
    "impossible": (
        "CUDA out of memory. Tried to allocate more than 1EB memory.",
        "torch-cuda-impossible",
        Cause.TOO_LARGE,
        {},
    ),
    "free is misleading": (
        cuda("1.00 GiB", "10.00 GiB", held("1.00 GiB", "0 bytes")),
        "torch-cuda-2.5",
        Cause.MISLEADING_FREE,
        {"free": 10 * GIB},
    ),
    "hip of old": (
        "RuntimeError: HIP out of memory. Tried to allocate 20.00 MiB (GPU 2; 15.98 GiB total capacity; 15.00 GiB "
        "already allocated; 10.00 MiB free; 15.50 GiB reserved in total by PyTorch)",
        "torch-hip",
        Cause.EXHAUSTED,
        {"reserved": round(15.5 * GIB)},
    ),
    "npu": (
        "RuntimeError: NPU out of memory. Tried to allocate 2.00 GiB (NPU 1; 60.97 GiB total capacity; 57.10 GiB "
        "already allocated; 57.20 GiB current active; 1.14 GiB free; 58.85 GiB reserved in total by PyTorch)",
        "torch-npu",
        Cause.EXHAUSTED,
        {"active": round(57.2 * GIB)},
    ),
    "mps in old units": (
        "RuntimeError: MPS backend out of memory (MPS allocated: 18.04 GB, other allocations: 94.99 MB, max allowed: "
        "18.13 GB). Tried to allocate 7.00 MB on private pool.",
        "torch-mps",
        Cause.EXHAUSTED,
        {"tried": 7 * MIB, "other_allocations": round(94.99 * MIB)},
    ),
    "cpu on linux": (
        "[enforce fail at alloc_cpu.cpp:73] . DefaultCPUAllocator: can't allocate memory: you tried to allocate "
        "8589934592 bytes. Error code 12 (Cannot allocate memory)",
        "torch-cpu",
        Cause.HOST_MEMORY,
        {"tried": 8 * GIB},
    ),
    "cpu of old": (
        "$ Torch: not enough memory: you tried to allocate 2GB. Buy new RAM! at /aten/src/TH/THGeneral.cpp:201",
        "torch-cpu",
        Cause.HOST_MEMORY,
        {"tried_rounded": 2 * GIB},
    ),
    "shared memory": (
        "RuntimeError: DataLoader worker (pid 4) is killed by signal: Bus error. It is possible that dataloader's "
        "workers are out of shared memory. Please try to raise your shared memory limit.",
        "dataloader",
        Cause.HOST_MEMORY,
        {},
    ),
    "mapping": (
        "RuntimeError: unable to mmap 16777216 bytes from file </torch_77_1>: Cannot allocate memory (12)",
        "dataloader",
        Cause.HOST_MEMORY,
        {"tried": 16 * MIB},
    ),
    "cublas": (
        "RuntimeError: CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
        "torch-cublas",
        Cause.EXHAUSTED,
        {},
    ),
    "cudnn": ("RuntimeError: cuDNN error: CUDNN_STATUS_ALLOC_FAILED", "torch-cudnn", Cause.EXHAUSTED, {}),
    "nccl": (
        "NCCL error, ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nFailed to CUDA calloc async "
        "4194304 bytes: out of memory",
        "torch-nccl",
        Cause.EXHAUSTED,
        {"tried": 4 * MIB},
    ),
    "jax": (
        "jaxlib.xla_extension.XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate "
        "2147483648 bytes.",
        "jax",
        Cause.EXHAUSTED,
        {"tried": 2 * GIB},
    ),
    "tensorflow": (
        "failed to allocate 2.25G (2415919104 bytes) from device: CUDA_ERROR_OUT_OF_MEMORY: out of memory",
        "tensorflow",
        Cause.EXHAUSTED,
        {"tried": 2415919104, "tried_rounded": 2415919104},
    ),
    "llama.cpp": (
        "ggml_gallocr_reserve_n: failed to allocate CUDA1 buffer of size 1048576000",
        "llama.cpp",
        Cause.EXHAUSTED,
        {"tried": 1048576000},
    ),
    "vllm": (
        "ValueError: Free memory on device (13.06/14.58 GiB) on startup is less than desired GPU memory utilization "
        "(0.9, 13.12 GiB). Decrease GPU memory utilization or reduce GPU memory used by other processes.",
        "vllm",
        Cause.MEMORY_FRACTION,
        {"free": round(13.06 * GIB), "total": round(14.58 * GIB), "wanted": round(13.12 * GIB)},
    ),
    "vllm cache": (
        "ValueError: To serve at least one request with the model's max seq len (8192), (1.00 GiB KV cache is "
        "needed, which is larger than the available KV cache memory (0.50 GiB).",
        "vllm",
        Cause.EXHAUSTED,
        {"needed": GIB, "available": GIB // 2},
    ),
    "a hole for a tensor but not in one piece": (
        cuda("2.00 GiB", "1.20 GiB", OWN.format("22.45 GiB") + held("17.90 GiB", "4.10 GiB")),
        "torch-cuda-2.5",
        Cause.FRAGMENTATION,
        {"tried": 2 * GIB, "unallocated": round(4.1 * GIB), "free": round(1.2 * GIB)},
    ),
    "fragmented on a large device": (
        cuda("764.00 MiB", "442.88 MiB", held("42.40 GiB", "3.24 GiB"), total="47.37 GiB"),
        "torch-cuda-2.5",
        Cause.FRAGMENTATION,
        {"tried": 764 * MIB, "unallocated": round(3.24 * GIB)},
    ),
    "another process holds more than the fragments": (
        cuda(
            "1.00 GiB",
            "100.00 MiB",
            "Process 77 has 15.00 GiB memory in use. " + OWN.format("8.50 GiB") + held("6.50 GiB", "1.50 GiB"),
        ),
        "torch-cuda-2.5",
        Cause.OTHER_PROCESS,
        {"process_77": 15 * GIB},
    ),
    "alone in a container": (
        cuda(
            "1.25 GiB",
            "1.18 GiB",
            "Process 2752205 has 91.82 GiB memory in use. " + held("90.63 GiB", "120.54 MiB"),
            total="93.02 GiB",
        ),
        "torch-cuda-2.5",
        Cause.EXHAUSTED,
        {"process_2752205": round(91.82 * GIB)},
    ),
    "outside of the allocator": (
        cuda("60.00 MiB", "39.06 MiB", OWN.format("79.14 GiB") + held("52.36 GiB", "71.59 MiB"), total="79.19 GiB"),
        "torch-cuda-2.5",
        Cause.EXHAUSTED,
        {"process": round(79.14 * GIB)},
    ),
    "a hip fraction": (
        "torch.OutOfMemoryError: HIP out of memory. Tried to allocate 512.00 MiB. GPU 1 has a total capacity of "
        "63.98 GiB of which 40.00 GiB is free. 20.00 GiB allowed; Of the allocated memory 19.80 GiB is allocated by "
        "PyTorch, and 10.00 MiB is reserved by PyTorch but unallocated.",
        "torch-hip",
        Cause.MEMORY_FRACTION,
        {"allowed": 20 * GIB, "total": round(63.98 * GIB)},
    ),
    "xpu of old": (
        "torch.OutOfMemoryError: XPU out of memory. Tried to allocate 34.00 MiB. GPU 0 has a total capacity of 11.93 "
        "GiB of which 34.20 MiB is free. Of the allocated memory 10.80 GiB is allocated by PyTorch, and 1.10 MiB is "
        "reserved by PyTorch but unallocated. Please use `empty_cache` to release all unoccupied cached memory.",
        "torch-xpu",
        Cause.EXHAUSTED,
        {"allocated": round(10.8 * GIB), "free": round(34.2 * MIB)},
    ),
    "xpu runtime": (
        "RuntimeError: level_zero backend failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)",
        "torch-xpu-runtime",
        Cause.EXHAUSTED,
        {},
    ),
    "npu workspace": (
        "NPU out of memory. NPUWorkspaceAllocator tried to allocate 1.89 GiB(NPU 7; 60.96 GiB total capacity; 1.82 "
        "GiB free). If you want to reduce memory usage, take a try to set the variable TASK_QUEUE_ENABLE=1.",
        "torch-npu",
        Cause.OTHER_PROCESS,
        {"tried": round(1.89 * GIB), "total": round(60.96 * GIB), "free": round(1.82 * GIB)},
    ),
    "directml": (
        "RuntimeError: Could not allocate tensor with 1048576 bytes. There is not enough GPU video memory available!",
        "torch-directml",
        Cause.EXHAUSTED,
        {"tried": MIB},
    ),
    "mps in one buffer": ("RuntimeError: Invalid buffer size: 372.53 GiB", "torch-mps", Cause.EXHAUSTED, {}),
    "runtime": ("RuntimeError: CUDA error: out of memory", "torch-cuda-runtime", Cause.EXHAUSTED, {}),
    "hip runtime": ("RuntimeError: HIP error: out of memory", "torch-hip-runtime", Cause.EXHAUSTED, {}),
    "pinned of old": (
        "THCudaCheck FAIL file=/pytorch/aten/src/THC/THCCachingHostAllocator.cpp line=278 error=2 : out of memory",
        "torch-cuda-thc",
        Cause.HOST_MEMORY,
        {},
    ),
    "cusolver": (
        "RuntimeError: cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`",
        "torch-cuda-library",
        Cause.EXHAUSTED,
        {},
    ),
    "numpy": (
        "numpy.core._exceptions._ArrayMemoryError: Unable to allocate 5.96 GiB for an array with shape (20000, "
        "40000) and data type float64",
        "numpy",
        Cause.HOST_MEMORY,
        {"tried": round(5.96 * GIB)},
    ),
    "linux": (
        "Out of memory: Killed process 4242 (python) total-vm:98765432kB, anon-rss:61234567kB, file-rss:2048kB, "
        "shmem-rss:4096kB, UID:0 pgtables:120000kB oom_score_adj:0",
        "linux-oom-killer",
        Cause.HOST_MEMORY,
        {"virtual": 98765432 << 10, "resident": 61234567 << 10, "resident_shared": 4 * MIB},
    ),
    "tpu": (
        "jax.errors.JaxRuntimeError: RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in "
        "memory space hbm. Used 49.34G of 32.00G hbm. Exceeded hbm capacity by 17.34G.",
        "jax-tpu",
        Cause.EXHAUSTED,
        {"tried": round(49.34 * GIB), "total": 32 * GIB, "short": round(17.34 * GIB)},
    ),
    "jax with a device": (
        "RESOURCE_EXHAUSTED: Failed to allocate request for 2.00GiB (2147483648B) on device ordinal 0",
        "jax",
        Cause.EXHAUSTED,
        {"tried": 2 * GIB, "tried_rounded": 2 * GIB},
    ),
    "tensorflow's shape": (
        "OOM when allocating tensor with shape[256,1024,1024] and type float on /job:localhost/device:GPU:1 by "
        "allocator GPU_1_bfc",
        "tensorflow",
        Cause.EXHAUSTED,
        {"tried": GIB},
    ),
    "llama.cpp's cache": (
        "ggml_backend_cuda_buffer_type_alloc_buffer: allocating 6710.78 MiB on device 0: cudaMalloc failed: out of "
        "memory\nllama_kv_cache_init: failed to allocate buffer for kv cache",
        "llama.cpp",
        Cause.EXHAUSTED,
        {"tried_rounded": round(6710.78 * MIB)},
    ),
    "llama.cpp on vulkan": (
        "ggml_vulkan: Device memory allocation of size 31457280 failed.\nErrorOutOfDeviceMemory",
        "llama.cpp",
        Cause.EXHAUSTED,
        {"tried": 30 * MIB},
    ),
    "vllm without a bracket": (
        "ValueError: To serve at least one request with the models's max seq len (262144), 28.00 GiB KV cache is "
        "needed, which is larger than the available KV cache memory (13.69 GiB).",
        "vllm",
        Cause.EXHAUSTED,
        {"needed": 28 * GIB, "available": round(13.69 * GIB)},
    ),
    "vllm beside another": (
        "ValueError: Free memory on device cuda:0 (6.9/8.0 GiB) on startup is less than desired GPU memory "
        "utilization (0.9, 7.2 GiB).",
        "vllm",
        Cause.MEMORY_FRACTION,
        {"free": round(6.9 * GIB), "total": 8 * GIB, "wanted": round(7.2 * GIB)},
    ),
    "triton": (
        "triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: 147456, Hardware limit: "
        "101376. Reducing block sizes or `num_stages` may help.",
        "triton",
        Cause.TOO_LARGE,
        {"tried": 147456, "total": 101376},
    ),
    "address space": (
        "[ExpandableSegmentVA] Failed to reserve 95630131200 (89.06 GiB) of virtual address space for an expandable "
        "CUDA segment on device 2 (Cannot allocate memory). 12 live expandable segment(s) reserving 1147561574400 "
        "bytes of virtual address space.",
        "torch-cuda-address-space",
        Cause.ADDRESS_SPACE,
        {"tried_exact": 95630131200, "reserved_addresses": 1147561574400, "tried": round(89.06 * GIB)},
    ),
}


DEVICES = {
    "impossible": "cuda",
    "hip of old": "hip:2",
    "a hip fraction": "hip:1",
    "npu": "npu:1",
    "npu workspace": "npu:7",
    "xpu of old": "xpu:0",
    "jax with a device": "gpu:0",
    "tensorflow's shape": "gpu:1",
    "address space": "cuda:2",
    "llama.cpp": "cuda:1",
    "llama.cpp's cache": "cuda:0",
    "vllm beside another": "cuda:0",
} | dict.fromkeys(("mps in old units", "mps in one buffer"), "mps")
DEVICES |= {"hip runtime": "hip", "xpu runtime": "xpu", "tpu": "tpu", "llama.cpp on vulkan": "vulkan"}
DEVICES |= dict.fromkeys(("jax", "tensorflow", "directml"), "gpu")
DEVICES |= dict.fromkeys(("cpu on linux", "cpu of old", "shared memory", "mapping", "numpy", "linux"), "cpu")
ADVICE = {  # in the first advice
    Cause.FRAGMENTATION: "expandable_segments:True",
    Cause.OTHER_PROCESS: "nvidia-smi",
    Cause.PRIVATE_POOLS: "graph",
    Cause.SPILL: "smaller",
    Cause.MISLEADING_FREE: "nvidia-smi",
    Cause.HOST_MEMORY: "free -h",
    Cause.ADDRESS_SPACE: "expandable_segments_reserve",
    Cause.ALLOCATOR: "MemPool",
}


FIRST_ADVICE = {"npu workspace": "npu-smi", "shared memory": "--shm-size", "mapping": "--shm-size"}


@pytest.mark.parametrize("name", DERIVED)
@pytest.mark.parametrize("wrapped", [False, True], ids=["one line", "wrapped"])
def test_a_message_from_the_sources_is_understood(name, wrapped):
    text, family, cause, numbers = DERIVED[name]
    if wrapped:
        text = "\n[rank0]: ".join(re.findall(r".{1,60}(?: |$)", text.replace("\n", " ")))
    (message,) = read_oom(f"Traceback (most recent call last):\n[rank0]: {text}\n")
    assert (message.family, message.cause) == (family, cause)
    assert numbers.items() <= message.numbers_bytes.items()
    printed = {to_bytes(*match.groups()) for match in re.finditer(SIZE, text)}
    assert printed <= set(message.numbers_bytes.values())
    assert message.device == DEVICES.get(name, "cuda:3" if family == "torch-cuda-2.5" else "cuda")
    first = message.advice[0]
    assert first.helps
    words = FIRST_ADVICE.get(name, ADVICE.get(cause, ""))
    assert words in first.text + first.paste


XLA_TABLE = """jaxlib.xla_extension.XlaRuntimeError: \
RESOURCE_EXHAUSTED: Out of memory while trying to allocate 29995136256 bytes.
BufferAssignment OOM Debugging.
BufferAssignment stats:
             parameter allocation:    7.75GiB
              constant allocation:         0B
        maybe_live_out allocation:  301.25MiB
     preallocated temp allocation:    3.75GiB
  preallocated temp fragmentation:         0B (0.00%)
                 total allocation:   11.75GiB
              total fragmentation:     5.5KiB (0.00%)
Peak buffers:
\tBuffer 1:
\t\tSize: 3.75GiB
\t\tOperator: op_name="jit(main)/lm_head/convert_element_type" source_file="/home/u/dtypes.py" source_line=97
\t\tXLA Label: convert
\t\tShape: f32[250880,4096]
\t\t==========================

\tBuffer 2:
\t\tSize: 384.0KiB
\t\tEntry Parameter Subshape: f32[256,128,3]
\t\t==========================
"""
BFC_TABLE = """2022-10-25 21:52:08.2194: W external/xla/xla/tsl/framework/bfc_allocator.cc:482] \
Allocator (GPU_0_bfc) ran out of memory trying to allocate 2.00GiB (rounded to 2147483648)requested by op
2022-10-25 21:52:08.2194: I external/xla/xla/tsl/framework/bfc_allocator.cc:1101] Sum Total of in-use chunks: 10.50GiB
2022-10-25 21:52:08.2194: I external/xla/xla/tsl/framework/bfc_allocator.cc:1103] Total bytes in pool: 11274289152 \
memory_limit_: 12884901888 available bytes: 1610612736 curr_region_allocation_bytes_: 25769803776
2022-10-25 21:52:08.2194: I external/xla/xla/tsl/framework/bfc_allocator.cc:1109] Stats:
Limit:                     12884901888
InUse:                     11274289151
MaxInUse:                  11274289152
NumAllocs:                          42
MaxAllocSize:               2147483649
Reserved:                            0
PeakReserved:                        1
LargestFreeBlock:                    7

RESOURCE_EXHAUSTED: Failed to allocate request for 2.00GiB (2147483648B) on device ordinal 0
"""


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        (
            XLA_TABLE,
            {
                "tried": 29995136256,
                "tried_rounded": 29995136256,
                "parameters": 31 * GIB // 4,
                "constants": 0,
                "live_out": 1205 * MIB // 4,
                "temporary": 15 * GIB // 4,
                "temporary_fragmentation": 0,
                "program": 47 * GIB // 4,
                "program_fragmentation": 5632,
                "buffer_1": 15 * GIB // 4,
                "buffer_2": 384 << 10,
            },
        ),
        (
            BFC_TABLE,
            {
                "tried": 2 * GIB,
                "tried_rounded": 2 * GIB,
                "in_use_chunks": 21 * GIB // 2,
                "limit": 12884901888,
                "allocated": 11274289151,
                "allocated_peak": 11274289152,
                "largest": 2147483649,
                "reserved": 0,
                "reserved_peak": 1,
                "largest_free": 7,
                "pool": 11274289152,
                "available": 1610612736,
            },
        ),
    ],
)
def test_every_size_of_a_jax_table_is_read(text, numbers):
    (message,) = read_oom(text)
    assert (message.family, dict(message.numbers_bytes)) == ("jax", numbers)
