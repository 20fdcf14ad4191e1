"""Logs that people posted, in small: who ran out of what, every size, the true cause, and what helps first.

The lines are written after the formats of the programs; who asked, how much, of what and why are the reports'.
Where a report shows a part of its message only, further numbers are filled in so that they agree. Sources without a
number are messages as the program's own source has them.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest

from brim.report.oom.reader import Cause, primary, read_oom
from brim.units import GIB, KIB, MIB


class Report(NamedTuple):
    """A log and what is right about it: words of the first advice that helps, and of none that does."""

    source: str
    log: str
    family: str
    device: str
    cause: Cause
    numbers: dict[str, float]
    first: str = ""
    never: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()


def torch(tried: str, total: str, free: str, rest: str = "", kind: str = "CUDA", gpu: int = 0) -> str:
    return (
        f"torch.OutOfMemoryError: {kind} out of memory. Tried to allocate {tried}. GPU {gpu} has a total capacity of "
        f"{total} of which {free} is free. {rest}"
    )


def held(allocated: str, unallocated: str, process: str = "") -> str:
    before = f"Including non-PyTorch memory, this process has {process} memory in use. " if process else ""
    return (
        f"{before}Of the allocated memory {allocated} is allocated by PyTorch, and {unallocated} is reserved by "
        "PyTorch but unallocated."
    )


# What no server's log should get: it is for a training.
TRAINING = ("checkpoint", "brim generate", "accumulation")
REPORTS = [
    Report(
        "ggml-org/llama.cpp#26297",
        "0.10.520.077 E ggml_backend_cuda_buffer_type_alloc_buffer: allocating 40000.00 MiB on device 1: cudaMalloc "
        "failed: out of memory\n"
        "0.10.520.084 E ggml_gallocr_reserve_n_impl: failed to allocate CUDA1 buffer of size 41943041024\n"
        "1.10.520.086 E graph_reserve: failed to allocate compute buffers",
        "llama.cpp",
        "cuda:1",
        Cause.EXHAUSTED,
        {"tried": 41943041024, "tried_rounded": 40000 * MIB},
        "-ngl",
        TRAINING,
    ),
    Report(
        "axolotl-ai-cloud/axolotl#998",
        torch("64.00 MiB", "12.00 GiB", "0 bytes", held("11.20 GiB", "90.00 MiB", "17179869184.00 GiB")),
        "torch-cuda-2.5",
        "cuda:0",
        Cause.EXHAUSTED,
        {"tried": 64 * MIB, "total": 12 * GIB, "allocated": 11.2 * GIB, "unallocated": 90 * MIB, "free": 0},
        "smaller",
        unknown=("process",),
    ),
    Report(
        "lemonade-sdk/vllm-rocm#5",
        torch("13.00 GiB", "127.00 GiB", "18.50 GiB", held("99.40 GiB", "120.00 MiB"), kind="HIP"),
        "torch-hip",
        "hip:0",
        Cause.MISLEADING_FREE,
        {"tried": 13 * GIB, "free": 18.5 * GIB},
        "amd-smi",
    ),
    Report(
        "ggml-org/llama.cpp#8101",
        "llama_new_context_with_model: n_ctx      = 1048576\n"
        "ggml_backend_cpu_buffer_type_alloc_buffer: failed to allocate buffer of size 137438953504\n"
        "llama_kv_cache_init: failed to allocate buffer for kv cache",
        "llama.cpp",
        "cpu",
        Cause.HOST_MEMORY,
        {"tried": 137438953504},
        "context",
        (*TRAINING, "-ngl"),
    ),
    Report(
        "vllm-project/vllm#27174",
        "(EngineCore_DP0 pid=7) ERROR 10-19 23:25:24 [core.py:792] ValueError: Free memory on device "
        "(21.5/23.6 GiB) on "
        "startup is less than desired GPU memory utilization (0.95, 22.4 GiB). Decrease GPU memory utilization or "
        "reduce GPU memory used by other processes.",
        "vllm",
        "cuda",
        Cause.MEMORY_FRACTION,
        {"free": 21.5 * GIB, "total": 23.6 * GIB, "wanted": 22.4 * GIB},
        "--gpu-memory-utilization 0.91",
        (*TRAINING, "0.95"),
    ),
    Report(
        "vllm-project/vllm#24436",
        '(EngineCore_0 pid=9) ERROR 09-08 19:01:04 [core.py:700]   File "vllm/v1/sample/ops/topk_topp_sampler.py", '
        "line 189, in apply_top_k_top_p\n"
        "(EngineCore_0 pid=9) ERROR 09-08 19:01:04 [core.py:700] "
        + torch("300.00 MiB", "23.60 GiB", "100.00 MiB", held("20.30 GiB", "75.00 MiB", "23.50 GiB"))
        + "\n(EngineCore_0 pid=9) ERROR 09-08 19:01:04 [core.py:700] RuntimeError: CUDA out of memory occurred when "
        "warming up sampler with 256 dummy requests. Please try lowering `max_num_seqs` or `gpu_memory_utilization` "
        "when initializing the engine.",
        "torch-cuda-2.5",
        "cuda:0",
        Cause.EXHAUSTED,
        {"tried": 300 * MIB, "process": 23.5 * GIB},
        "--max-num-seqs",
        TRAINING,
    ),
    Report(
        "Comfy-Org/ComfyUI#8540",
        "2025-06-15T12:51:04.907573 - !!! Exception during processing !!! Allocation on device \n"
        'File "C:\\Users\\a\\ComfyUI\\execution.py", line 349, in execute\n'
        "torch.OutOfMemoryError: Allocation on device \n"
        "2025-06-15T12:51:05.049151 - Got an OOM, unloading all loaded models.",
        "torch-cudaMallocAsync",
        "cuda",
        Cause.EXHAUSTED,
        {},
        "--lowvram",
        TRAINING,
    ),
    Report(
        "sgl-project/sglang#393",
        "[2025-06-18 18:11:03 TP0] Prefill out of memory. Try to lower your batch size.\nTry to allocate "
        "8192 tokens.",
        "sglang",
        "cuda",
        Cause.EXHAUSTED,
        {},
        "--max-running-requests",
        TRAINING,
    ),
    Report(
        "ray-project/ray (memory monitor)",
        "ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory.\n"
        "Memory on the node (IP: 10.0.0.4, ID: ab12) where the task (actor ID: ff, name=Worker.__init__, pid=4451, "
        "memory used=41.92GB) was running was 120.01GB / 125.40GB (0.957), which exceeds the memory usage threshold.",
        "ray",
        "cpu",
        Cause.HOST_MEMORY,
        {"worker": 41.92 * GIB, "used": 120.01 * GIB, "total": 125.4 * GIB},
        "num_cpus",
        TRAINING,
    ),
    Report(
        "ollama/ollama (server)",
        "Error: model requires more system memory (61.3 GiB) than is available (31.2 GiB)",
        "ollama",
        "cpu",
        Cause.HOST_MEMORY,
        {"needed": 61.3 * GIB, "available": 31.2 * GIB},
        "num_ctx",
        (*TRAINING, "num_gpu"),
    ),
    Report(
        "huggingface/transformers#22328",
        "2023-03-23 02:02:23.05: W tensorflow/core/framework/op_kernel.cc:1830] OP_REQUIRES failed at "
        "tpu_execute_op.cc:266 : RESOURCE_EXHAUSTED: Attempting to reserve 10.51G at the bottom of memory. "
        "That was not "
        "possible. There are 8.97G free, 0B reserved, and 8.97G reservable.",
        "jax-tpu",
        "tpu",
        Cause.EXHAUSTED,
        {"tried": 10.51 * GIB, "free": 8.97 * GIB, "reservable": 8.97 * GIB, "reserved": 0},
        "smaller",
    ),
    Report(
        "pytorch/xla#3470",
        "RESOURCE_EXHAUSTED: Attempting to reserve 6.48G at the bottom of memory. That was not possible. There are "
        "6.78G free, 0B reserved, and 3.33G reservable.",
        "jax-tpu",
        "tpu",
        Cause.FRAGMENTATION,
        {"tried": 6.48 * GIB, "free": 6.78 * GIB, "reservable": 3.33 * GIB},
        "programs",
    ),
    # Killed for RAM: the GPU has no part in it.
    Report(
        "nextflow-io/nextflow#5932",
        "slurmstepd: error: Detected 1 oom_kill event in StepId=11300781.0. Some of the step tasks have "
        "been OOM Killed.\n"
        "srun: error: sdumont6156: task 0: Out Of Memory",
        "slurm",
        "cpu",
        Cause.HOST_MEMORY,
        {},
        "--mem",
        TRAINING,
    ),
    Report(
        "lanl/PyBNF#118",
        "slurmstepd: error: Detected 2 oom-kill event(s) in step 3756240.batch cgroup.",
        "slurm",
        "cpu",
        Cause.HOST_MEMORY,
        {},
        "--mem",
    ),
    Report(
        "ArjunaCluster/ArjunaUsers#52",
        "Epoch: [0][511/1736]\t Loss 0.5117 MAE 0.6075\n"
        "/var/spool/slurmd/job00191/slurm_script: line 28:  8156 Killed                  python3 main.py "
        "--epochs 400\n"
        "slurmstepd: error: Detected 1 oom-kill event(s) in StepId=191.batch cgroup. Some of your processes "
        "may have been "
        "killed by the cgroup out-of-memory handler.",
        "slurm",
        "cpu",
        Cause.HOST_MEMORY,
        {},
        "--mem",
    ),
    Report(
        "ArjunaCluster/ArjunaUsers#52 (interactive)",
        "Epoch: [0][479/1736]\t Loss 0.5569\nEpoch: [0][511/1736]\t Loss 0.5117\nKilled\n(abnn) "
        "me@c002:~/case1    $ ",
        "killed",
        "cpu",
        Cause.HOST_MEMORY,
        {},
        "dmesg",
        TRAINING,
    ),
    Report(
        "equinor/ert#7797",
        "2024-04-29T14:55:41,678628+02:00 pool invoked oom-killer: gfp_mask=0x6200ca(GFP_HIGHUSER_MOVABLE), order=0\n"
        "2024-04-29T14:55:41,679685+02:00 "
        "oom-kill:constraint=CONSTRAINT_NONE,nodemask=(null),cpuset=/,mems_allowed=0,"
        "global_oom,task_memcg=/user.slice,task=perl,pid=1440763,uid=21417\n"
        "2024-04-29T14:55:41,679700+02:00 Out of memory: Killed process 1440763 (perl) total-vm:87033376kB, "
        "anon-rss:60356340kB, file-rss:0kB, shmem-rss:0kB, UID:21417 pgtables:169956kB oom_score_adj:0\n"
        "2024-04-29T14:55:46,947445+02:00 oom_reaper: reaped process 1440763 (perl), now anon-rss:0kB, file-rss:0kB",
        "linux-oom-killer",
        "cpu",
        Cause.HOST_MEMORY,
        {"virtual": 87033376 * KIB, "resident": 60356340 * KIB, "page_tables": 169956 * KIB},
        "dmesg",
        TRAINING,
    ),
    Report(
        "reportportal/kubernetes#203",
        "[ 7063.247407] Memory cgroup out of memory: Killed process 63214 (uwsgi) total-vm:3149468kB, "
        "anon-rss:164992kB, "
        "file-rss:52176kB, shmem-rss:92kB, UID:0 pgtables:1372kB oom_score_adj:986\n"
        "[ 7063.263325] oom_reaper: reaped process 63214 (uwsgi), now anon-rss:0kB, file-rss:0kB, shmem-rss:92kB",
        "linux-oom-killer",
        "cpu",
        Cause.HOST_MEMORY,
        {"resident": 164992 * KIB, "resident_shared": 92 * KIB},
        "dmesg",
    ),
    Report(
        "Azure/WALinuxAgent#2805",
        "Apr 17 09:17:11 aks-vmss000006 kernel: python3 invoked oom-killer: gfp_mask=0xcc0(GFP_KERNEL), order=0\n"
        "Apr 17 09:17:11 aks-vmss000006 kernel: memory: usage 30720kB, limit 30720kB, failcnt 121\n"
        "Apr 17 09:17:11 aks-vmss000006 kernel: memory+swap: usage 0kB, limit 9007199254740988kB, failcnt 0",
        "linux-oom-killer",
        "cpu",
        Cause.HOST_MEMORY,
        {"used": 30720 * KIB, "limit": 30720 * KIB},
        "dmesg",
    ),
    Report(
        "linux-test-project/ltp#1080",
        "Aug 16 20:29:54 hgz kernel: Memory cgroup out of memory: Kill process 42424 (memcg_test_1) score 0 "
        "or sacrifice "
        "child\nAug 16 20:29:54 hgz kernel: Killed process 42424 (memcg_test_1), UID 0, total-vm:7296kB, "
        "anon-rss:96kB",
        "linux-oom-killer",
        "cpu",
        Cause.HOST_MEMORY,
        {"virtual": 7296 * KIB, "resident": 96 * KIB},
        "dmesg",
    ),
    Report(
        "meta-llama/llama#856",
        "> initializing pipeline with size 1\n"
        "[2023-10-13 17:40:02,544] torch.distributed.elastic.multiprocessing.api: [ERROR] failed (exitcode: -9) "
        "local_rank: 0 (pid: 62498) of binary: /home/u/bin/python",
        "killed",
        "cpu",
        Cause.HOST_MEMORY,
        {},
        "dmesg",
        TRAINING,
    ),
    Report(
        "meta-llama/llama-models#334",
        "Root Cause (first observed failure):\n[0]:\n  time      : 2025-04-29_10:00:00\n  rank      : 0 "
        "(local_rank: 0)\n"
        "  exitcode  : -9 (pid: 2198)\n  error_file: <N/A>\n  traceback : Signal 9 (SIGKILL) received by PID 2198",
        "killed",
        "cpu",
        Cause.HOST_MEMORY,
        {},
        "dmesg",
    ),
    Report(
        "haotian-liu/LLaVA#1085",
        "[2024-02-06 06:23:39,510] [ERROR] [launch.py:321:sigkill_handler] ['/mnt/d/bin/python', '-u', "
        "'train_mem.py', "
        "'--deepspeed', './scripts/zero2.json'] exits with return code = -9",
        "killed",
        "cpu",
        Cause.HOST_MEMORY,
        {},
        "dmesg",
    ),
    Report(
        "ogx-ai/llama-stack-apps#10",
        "E0724 19:33:34.565000 128818126430656 torch/distributed/elastic/multiprocessing/api.py:702] "
        "torch.multiprocessing.spawn.ProcessExitedException: process 0 terminated with signal SIGKILL",
        "killed",
        "cpu",
        Cause.HOST_MEMORY,
        {},
        "dmesg",
    ),
    Report(
        "pytorch/pytorch#5040",
        "RuntimeError: DataLoader worker (pid 13) is killed by signal: Bus error. It is possible that dataloader's "
        "workers are out of shared memory. Please try to raise your shared memory limit.",
        "dataloader",
        "cpu",
        Cause.HOST_MEMORY,
        {},
        "--shm-size",
        TRAINING,
    ),
    Report(
        "ray-project/ray#13093",
        "ObjectStoreFullError: Failed to put object ffffffff0100000001000000 in object store because it is "
        "full. Object "
        "size is 8388608252 bytes.\nThe local object store is full of objects that are still in scope.",
        "ray-object-store",
        "cpu",
        Cause.HOST_MEMORY,
        {"tried": 8388608252},
        "object-store-memory",
        TRAINING,
    ),
    Report(
        "Comfy-Org/ComfyUI#11009",
        "2025-11-28T21:22:46.272540 - !!! Exception during processing !!! El archivo de paginación es "
        "demasiado pequeño "
        "para completar la operación. (os error 1455)",
        "windows-paging-file",
        "cpu",
        Cause.HOST_MEMORY,
        {},
        "page file",
        TRAINING,
    ),
    Report(
        "lmstudio-ai/lmstudio-bug-tracker#1202",
        "Model loading was stopped due to insufficient system resources. Under the current settings, this "
        "model requires "
        "approximately 273.25 GB of memory, and continuing to load it would likely overload your system.",
        "lm-studio",
        "cpu",
        Cause.HOST_MEMORY,
        {"needed": 273.25 * GIB},
        "context",
        TRAINING,
    ),
    Report(
        "lmstudio-ai/lmstudio-bug-tracker#1038",
        "Error: Model loading was stopped due to insufficient system resources. Under the current settings, "
        "this model "
        "requires approximately NaN undefined of memory, and continuing to load it would likely overload "
        "your system.",
        "lm-studio",
        "cpu",
        Cause.HOST_MEMORY,
        {},
        "context",
        unknown=("needed",),
    ),
    # Servers and applications.
    Report(
        "sgl-project/sglang#5285",
        '[2025-04-11 10:00:00 TP7]   File "/x/sglang/srt/model_executor/cuda_graph_runner.py", '
        "line 269, in __init__\n[2025-04-11 10:00:00 TP7]     raise Exception(\n"
        "[2025-04-11 10:00:00 TP7] Exception: Capture cuda graph failed: "
        + torch("448.00 MiB", "95.00 GiB", "91.00 MiB", held("90.10 GiB", "200.00 MiB", "94.80 GiB"), gpu=7)
        + "\nPossible solutions:\n1. set --mem-fraction-static to a smaller value (e.g., 0.8 or 0.7)\n"
        "2. set --cuda-graph-max-bs to a smaller value (e.g., 16)\n"
        "3. disable torch compile by not using --enable-torch-compile\n4. disable CUDA graph by "
        "--disable-cuda-graph.",
        "torch-cuda-2.5",
        "cuda:7",
        Cause.EXHAUSTED,
        {"tried": 448 * MIB, "process": 94.8 * GIB},
        "--mem-fraction-static 0.7",
        TRAINING,
    ),
    Report(
        "sgl-project/sglang#4330",
        "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.",
        "sglang",
        "cuda",
        Cause.EXHAUSTED,
        {},
        "--mem-fraction-static 0.9",
        (*TRAINING, "0.7"),
    ),
    Report(
        "sgl-project/sglang-jax#113",
        "[2026-01-05 06:12:41] RuntimeError: Decode out of memory. Try to lower your batch size.\n"
        "Try to allocate 127 tokens.\nAvailable tokens: 5248 (available_size=5248 + evictable_size=0)",
        "sglang",
        "cuda",
        Cause.EXHAUSTED,
        {},
        "--max-running-requests",
        TRAINING,
    ),
    Report(
        "vllm-project/vllm#12529",
        'ERROR 03-13 09:00:43 [core.py:330]   File "/x/vllm/v1/worker/gpu_model_runner.py", line 1400, in '
        'profile_run\nERROR 03-13 09:00:43 [core.py:330]   File "/x/vllm/model_executor/layers/x.py", line 1, in '
        "forward\nERROR 03-13 09:00:43 [core.py:330] "
        + torch("1.16 GiB", "7.75 GiB", "1.17 GiB", held("4.81 GiB", "18.97 MiB", "5.02 GiB")),
        "torch-cuda-2.5",
        "cuda:0",
        Cause.OTHER_PROCESS,
        {"tried": 1.16 * GIB, "free": 1.17 * GIB, "process": 5.02 * GIB},
        "nvidia-smi",
        TRAINING,
    ),
    Report(
        "vllm-project/vllm#47654",
        "(EngineCore_DP0 pid=91) ERROR 07-05 09:00:43 [core.py:700] RuntimeError: CUDA Error: out of memory at "
        "/workspace/csrc/cumem_allocator.cpp:163",
        "torch-cuda-runtime",
        "cuda",
        Cause.EXHAUSTED,
        {},
        "--gpu-memory-utilization",
        TRAINING,
    ),
    Report(
        "vllm-project/vllm#17117 (sleep)",
        '[rank0]:   File "/x/vllm/device_allocator/cumem.py", line 239, in sleep\n'
        + "[rank0]: "
        + torch("2.00 GiB", "79.14 GiB", "1.10 GiB", held("96.40 GiB", "300.00 MiB", "77.90 GiB")),
        "torch-cuda-2.5",
        "cuda:0",
        Cause.EXHAUSTED,
        {"allocated": 96.4 * GIB, "process": 77.9 * GIB},
        "--gpu-memory-utilization",
        TRAINING,
    ),
    Report(
        "huggingface/text-generation-inference#755",
        'Error: Warmup(Generation("Not enough memory to handle 4096 prefill tokens. You need to decrease '
        '`--max-batch-prefill-tokens`"))',
        "tgi",
        "cuda",
        Cause.EXHAUSTED,
        {},
        "--max-batch-prefill-tokens",
        TRAINING,
    ),
    Report(
        "huggingface/text-generation-inference#710",
        "Not enough memory to handle 16000 total tokens with 2 prefill tokens. You need to decrease "
        "`--max-batch-total-tokens` or `--max-batch-prefill-tokens`",
        "tgi",
        "cuda",
        Cause.EXHAUSTED,
        {},
        "--max-batch-total-tokens",
    ),
    Report(
        "NVIDIA/TensorRT-LLM#2335",
        "[TensorRT-LLM][ERROR] Encountered an error in forwardAsync function: [TensorRT-LLM][ERROR] CUDA "
        "runtime error in "
        "::cudaMallocAsync(ptr, n, mMemPool->getPool(), mCudaStream->get()): out of memory "
        "(/x/runtime/tllmBuffers.h:125)",
        "tensorrt",
        "cuda",
        Cause.EXHAUSTED,
        {},
        "free_gpu_memory_fraction",
        TRAINING,
    ),
    Report(
        "NVIDIA/TensorRT-LLM#2398",
        torch(
            "2.00 MiB",
            "22.19 GiB",
            "1.50 MiB",
            "Process 885415 has 22.18 GiB memory in use. " + held("0 bytes", "0 bytes"),
        ),
        "torch-cuda-2.5",
        "cuda:0",
        Cause.EXHAUSTED,
        {"process_885415": 22.18 * GIB, "allocated": 0},
        "nvidia-smi",
    ),
    Report(
        "NVIDIA/TensorRT-LLM#7818",
        "[09/17/2025-21:24:19] [TRT-LLM] [RANK 2] [E] Error executing load_single_module: "
        + torch(
            "40.00 MiB",
            "22.07 GiB",
            "20.62 MiB",
            "Process 157 has 270.00 MiB memory in use. Process 451 has 1.16 GiB memory in use. Including non-PyTorch "
            "memory, this process has 1.12 GiB memory in use. Process 450 has 7.69 GiB memory in use. "
            + held("880.00 MiB", "20.00 MiB"),
        ),
        "torch-cuda-2.5",
        "cuda:0",
        Cause.OTHER_PROCESS,
        {"process": 1.12 * GIB, "process_450": 7.69 * GIB},
        "nvidia-smi",
        TRAINING,
    ),
    Report(
        "ggml-org/llama.cpp#18160",
        "ggml_vulkan: Requested buffer size exceeds device buffer size limit: ErrorOutOfDeviceMemory\n"
        "ggml_gallocr_reserve_n_impl: failed to allocate Vulkan0 buffer of size 8753520640\n"
        "graph_reserve: failed to allocate compute buffers",
        "llama.cpp",
        "vulkan:0",
        Cause.EXHAUSTED,
        {"tried": 8753520640},
        "-ngl",
        TRAINING,
    ),
    Report(
        "ggml-org/llama.cpp#15256",
        "ggml_vulkan: Device memory allocation of size 118497280 failed.\n"
        "ggml_vulkan: vk::Device::allocateMemory: ErrorOutOfDeviceMemory",
        "llama.cpp",
        "vulkan",
        Cause.EXHAUSTED,
        {"tried": 118497280},
        "-ngl",
    ),
    Report(
        "ggml-org/llama.cpp#9701",
        "ggml_metal_graph_compute: command buffer 0 failed with status 5\n"
        "error: Insufficient Memory (00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory)",
        "llama.cpp",
        "mps",
        Cause.EXHAUSTED,
        {},
        "-ngl",
    ),
    Report(
        "ollama/ollama#9782",
        "Dec 31 01:55:57 FORGE ollama[555324]: ggml_backend_cuda_buffer_type_alloc_buffer: allocating 6710.78 MiB on "
        "device 0: cudaMalloc failed: out of memory\n"
        "Dec 31 01:55:57 FORGE ollama[555324]: time=2024-12-31T01:55:57.100Z level=ERROR source=sched.go:455 "
        'msg="error loading llama server" error="llama runner process has terminated: cudaMalloc failed: out of '
        'memory"',
        "llama.cpp",
        "cuda:0",
        Cause.EXHAUSTED,
        {"tried_rounded": 6710.78 * MIB},
        "num_ctx",
        (*TRAINING, "llama-server"),
    ),
    Report(
        "ml-explore/mlx#479",
        "libc++abi: terminating due to uncaught exception of type std::runtime_error: [METAL] Command "
        "buffer execution "
        "failed: Insufficient Memory (00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory)",
        "mlx",
        "mps",
        Cause.EXHAUSTED,
        {},
        "4 bits",
        TRAINING,
    ),
    Report(
        "Comfy-Org/ComfyUI#8767",
        'File "/home/debian/ComfyUI/execution.py", line 349, in execute\n'
        "RuntimeError: XPU out of memory. Tried to allocate 5.12 GiB (GPU 0; 15.11 GiB total capacity; "
        "13.40 GiB already "
        "allocated; 13.90 GiB reserved in total by PyTorch)",
        "torch-xpu",
        "xpu:0",
        Cause.EXHAUSTED,
        {"tried": 5.12 * GIB, "total": 15.11 * GIB, "allocated": 13.4 * GIB, "reserved": 13.9 * GIB},
        "--lowvram",
        TRAINING,
    ),
    Report(
        "Comfy-Org/ComfyUI#7004",
        "KSampler : XPU out of memory. Tried to allocate 128.00 GiB. GPU 0 has a total capacity of 15.56 GiB. "
        + held("2.50 GiB", "39.26 MiB"),
        "torch-xpu",
        "xpu:0",
        Cause.TOO_LARGE,
        {"tried": 128 * GIB, "total": 15.56 * GIB},
    ),
    Report(
        "city96/ComfyUI-GGUF#282",
        "!!! Exception during processing !!! Native API failed. Native API returns: 39 "
        '(UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)\nFile "/ai/ComfyUI/comfy/model_patcher.py", line 909, in load',
        "torch-xpu-runtime",
        "xpu",
        Cause.EXHAUSTED,
        {},
        "--lowvram",
        TRAINING,
    ),
    Report(
        "kyuz0/amd-strix-halo-image-video-toolboxes#3",
        'File "/opt/venv/lib64/python3.13/site-packages/torch/utils/_device.py", line 104, in __torch_function__\n'
        + torch("3.31 GiB", "128.00 GiB", "780.24 MiB", held("57.70 GiB", "75.82 MiB"), kind="HIP"),
        "torch-hip",
        "hip:0",
        Cause.OTHER_PROCESS,
        {"tried": 3.31 * GIB, "total": 128 * GIB, "allocated": 57.7 * GIB},
    ),
    Report(
        "SYSTRAN/faster-whisper#442",
        'File "/home/u/site-packages/faster_whisper/transcribe.py", line 584, in generate_with_fallback\n'
        "    result = self.model.generate(\nRuntimeError: CUDA failed with error out of memory",
        "cuda-runtime",
        "cuda",
        Cause.EXHAUSTED,
        {},
        "compute_type",
        TRAINING,
    ),
    Report(
        "meizhong986/WhisperJAV#118",
        "2026-01-08 00:35:04 - whisperjav - ERROR - Failed: 1,MP4 - CUDA out of memory. Tried to allocate "
        "20.00 MiB. GPU "
        "0 has a total capacity of 4.00 GiB of which 0 bytes is free. " + held("3.27 GiB", "257.08 MiB"),
        "torch-cuda-2.5",
        "cuda:0",
        Cause.EXHAUSTED,
        {"tried": 20 * MIB, "total": 4 * GIB, "free": 0, "allocated": 3.27 * GIB, "unallocated": 257.08 * MIB},
    ),
    # Other libraries.
    Report(
        "microsoft/onnxruntime#20038",
        "onnx runtime error 6: Non-zero status code returned while running Mul node. Name:'Mul_8702' Status Message: "
        "/workspace/onnxruntime/core/framework/bfc_arena.cc:368 void* "
        "onnxruntime::BFCArena::AllocateRawInternal(size_t, "
        "bool) Failed to allocate memory for requested buffer of size 2830172160",
        "onnxruntime",
        "gpu",
        Cause.EXHAUSTED,
        {"tried": 2830172160},
        "batch",
        TRAINING,
    ),
    Report(
        "microsoft/onnxruntime#22702",
        "onnxruntime::BFCArena::AllocateRawInternal(size_t) Failed to allocate memory for requested buffer of size "
        "4585490524328388608",
        "onnxruntime",
        "gpu",
        Cause.TOO_LARGE,
        {"tried": 4585490524328388608},
    ),
    Report(
        "cupy/cupy#7678",
        "cupy.cuda.memory.OutOfMemoryError: Out of memory allocating 805,306,368 bytes (allocated so far: "
        "536,870,912 "
        "bytes, limit set to: 1,073,741,824 bytes).",
        "cupy",
        "cuda",
        Cause.EXHAUSTED,
        {"tried": 805306368, "allocated": 512 * MIB, "limit": GIB},
        "free_all_blocks",
        TRAINING,
    ),
    Report(
        "cupy/cupy#1912",
        "cupy.cuda.memory.OutOfMemoryError: out of memory to allocate 1073741824 bytes (total 12373894656 bytes)",
        "cupy",
        "cuda",
        Cause.EXHAUSTED,
        {"tried": GIB, "allocated": 12373894656},
        "free_all_blocks",
    ),
    Report(
        "rapidsai/rmm#496",
        "MemoryError: std::bad_alloc: CUDA error at: ../include/rmm/mr/device/cuda_memory_resource.hpp68: "
        "cudaErrorMemoryAllocation out of memory",
        "rmm",
        "cuda",
        Cause.EXHAUSTED,
        {},
        "CUDF_SPILL",
        TRAINING,
    ),
    Report(
        "NVIDIA/cudf#9232",
        "MemoryError: std::bad_alloc: RMM failure at:/envs/rap/include/rmm/mr/device/pool_memory_resource.hpp:182: "
        "Maximum pool size exceeded",
        "rmm",
        "cuda",
        Cause.EXHAUSTED,
        {},
        "CUDF_SPILL",
    ),
    Report(
        "NVIDIA/cudf-spark#1365",
        "Lost task 2.3 in stage 1568.0 (TID 267491, executor 8): java.lang.OutOfMemoryError: Could not "
        "allocate native "
        "memory: std::bad_alloc: RMM failure "
        "at:/usr/local/rapids/include/rmm/mr/device/detail/arena.hpp:382: Maximum "
        "pool size exceeded",
        "rmm",
        "cuda",
        Cause.EXHAUSTED,
        {},
        "CUDF_SPILL",
    ),
    Report(
        "NVIDIA/cudf#17789",
        "[2025-01-23 14:33:04.213] [RMM] [error] [A][Stream 0x1][Upstream 67108864B][FAILURE maximum pool "
        "size exceeded]",
        "rmm",
        "cuda",
        Cause.EXHAUSTED,
        {"upstream": 64 * MIB},
        "CUDF_SPILL",
    ),
    Report(
        "google-deepmind/jax_privacy#10",
        "RESOURCE_EXHAUSTED: Failed to allocate request for 176.00MiB (184549376B) on device ordinal 0",
        "jax",
        "gpu:0",
        Cause.EXHAUSTED,
        {"tried": 184549376, "tried_rounded": 176 * MIB},
        "XLA_PYTHON_CLIENT_MEM_FRACTION=0.95",
        TRAINING[1:],
    ),
    Report(
        "patrickbryant1/AFProfile#8",
        "jaxlib.xla_extension.XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 4770354232 "
        "bytes.\nBufferAssignment OOM Debugging.\nBufferAssignment stats:\n"
        "             parameter allocation:  372.76MiB\n              constant allocation:    48.5KiB\n"
        "        maybe_live_out allocation:    9.64GiB\n     preallocated temp allocation:    4.44GiB\n"
        "                 total allocation:   14.44GiB\n              total fragmentation:  680.30MiB (4.60%)",
        "jax",
        "gpu",
        Cause.EXHAUSTED,
        {
            "tried": 4770354232,
            "parameters": 372.76 * MIB,
            "live_out": 9.64 * GIB,
            "temporary": 4.44 * GIB,
            "program": 14.44 * GIB,
            "program_fragmentation": 680.3 * MIB,
        },
    ),
    Report(
        "flatironinstitute/nemos#345",
        "2025-05-18 21:59:55.086788: W external/xla/xla/tsl/framework/bfc_allocator.cc:310] Allocator "
        "(GPU_0_bfc) ran out "
        "of memory trying to allocate 3.37GiB with freed_by_count=0. The caller indicates that this is not "
        "a failure, but "
        "this may mean that there could be performance gains if more memory were available.\n"
        "jaxlib.xla_extension.XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 3199993600 "
        "bytes.",
        "jax",
        "gpu",
        Cause.EXHAUSTED,
        {"tried": 3199993600},
    ),
    Report(
        "philip-huang/PIXOR#31",
        "2022-05-19 10:00:00.1: E tensorflow/stream_executor/cuda/cuda_driver.cc:893] failed to allocate 17.79G "
        "(19104890880 bytes) from device: CUDA_ERROR_OUT_OF_MEMORY: out of memory",
        "tensorflow",
        "gpu",
        Cause.EXHAUSTED,
        {"tried": 19104890880},
        "ALLOW_GROWTH",
        TRAINING,
    ),
    # Trainings: the phase tells what helps.
    Report(
        "huggingface/trl#2776",
        "[rank0]: Traceback (most recent call last):\n"
        '[rank0]:   File "/x/transformers/trainer.py", line 2500, in _inner_training_loop\n'
        "[rank0]:     self.optimizer.step()\n"
        '[rank0]:   File "/x/torch/optim/optimizer.py", line 487, in wrapper\n'
        "[rank0]:     out = func(*args, **kwargs)\n"
        '[rank0]:   File "/x/torch/optim/adamw.py", line 606, in _multi_tensor_adamw\n'
        "[rank0]:     exp_avg_sq_sqrt = torch._foreach_sqrt(device_exp_avg_sqs)\n"
        "[rank0]: " + torch("130.00 MiB", "94.99 GiB", "87.19 MiB", held("93.00 GiB", "200.00 MiB", "94.80 GiB")),
        "torch-cuda-2.5",
        "cuda:0",
        Cause.EXHAUSTED,
        {"tried": 130 * MIB},
        "adamw_torch_fused",
        ("batch", *TRAINING),
    ),
    Report(
        "bmaltais/kohya_ss#1048",
        "│ C:\\kohya_ss\\venv\\lib\\site-packages\\torch\\optim\\adamw.py:566 in _multi_tensor_adamw        "
        "       │\n"
        "│   565 │   │   │   │   torch._foreach_div_(exp_avg_sq_sqrt, bias_correction2_sqrt)                │\n"
        "│ ❱ 566 │   │   │   │   denom = torch._foreach_add(exp_avg_sq_sqrt, eps)                           │\n"
        "OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 23.99 GiB total "
        "capacity; 22.90 GiB "
        "already allocated; 0 bytes free; 23.20 GiB reserved in total by PyTorch)",
        "torch-cuda-reserved",
        "cuda:0",
        Cause.EXHAUSTED,
        {"tried": 20 * MIB, "reserved": 23.2 * GIB},
        "fused=True",
        ("batch", *TRAINING),
    ),
    Report(
        "msakarvadia/AttentionLens#25",
        'ERROR:  File "/home/u/site-packages/torch/optim/adam.py", line 505, in _multi_tensor_adam\n'
        "    exp_avg_sq_sqrt = torch._foreach_sqrt(device_exp_avg_sqs)\n"
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 246.00 MiB (GPU 3; 39.59 GiB "
        "total capacity; "
        "37.60 GiB already allocated; 99.69 MiB free; 38.17 GiB reserved in total by PyTorch) If reserved "
        "memory is >> "
        "allocated memory try setting max_split_size_mb to avoid fragmentation.",
        "torch-cuda-reserved-hint",
        "cuda:3",
        Cause.EXHAUSTED,
        {"tried": 246 * MIB, "free": 99.69 * MIB},
        "fused=True",
        ("batch", *TRAINING),
    ),
    Report(
        "hiyouga/LlamaFactory#10367",
        '[rank0]:   File "/x/llamafactory/train/sft/trainer.py", line 9, in compute_loss\n'
        '[rank0]:   File "/x/transformers/models/qwen3_5/modeling_qwen3_5.py", line 1960, in forward\n'
        "[rank0]:     loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size)\n"
        '[rank0]:   File "/x/transformers/loss/loss_utils.py", line 36, in fixed_cross_entropy\n'
        "[rank0]:     loss = nn.functional.cross_entropy(source, target, ignore_index=ignore_index)\n"
        "[rank0]:            ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^\n"
        '[rank0]:   File "/x/torch/nn/functional.py", line 3504, in cross_entropy\n'
        "[rank0]:     return torch._C._nn.cross_entropy_loss(\n"
        "[rank0]: " + torch("7.58 GiB", "79.25 GiB", "6.20 GiB", held("71.00 GiB", "500.00 MiB", "73.00 GiB")),
        "torch-cuda-2.5",
        "cuda:0",
        Cause.EXHAUSTED,
        {"tried": 7.58 * GIB},
        "use_liger_kernel",
        TRAINING,
    ),
    Report(
        "huggingface/transformers#17089",
        'File "/venv/site-packages/transformers/trainer.py", line 2515, in evaluation_loop\n'
        "    preds_host = logits if preds_host is None else nested_concat(preds_host, logits, padding_index=-100)\n"
        'File "/venv/site-packages/transformers/trainer_pt_utils.py", line 58, in torch_pad_and_concatenate\n'
        "    return torch.cat((tensor1, tensor2), dim=0)\n"
        "RuntimeError: CUDA out of memory. Tried to allocate 4.00 GiB (GPU 0; 22.17 GiB total capacity; "
        "17.00 GiB already "
        "allocated; 2.00 GiB free; 19.00 GiB reserved in total by PyTorch)",
        "torch-cuda-reserved",
        "cuda:0",
        Cause.EXHAUSTED,
        {"tried": 4 * GIB},
        "per_device_eval_batch_size",
        TRAINING[:2],
    ),
    # The same programs, in other forms.
    Report(
        "gimlet-io/gimlet#649",
        "Last State:     Terminated\n  Reason:       OOMKilled\n  Exit Code:    137\n"
        "  Started:      Fri, 15 Sep 2023 09:56:14 +0200",
        "kubernetes",
        "cpu",
        Cause.HOST_MEMORY,
        {},
        "limits",
        TRAINING,
    ),
    Report(
        "kubernetes/kubernetes#122256",
        "    Last State: Terminated\n      Reason: Error\n      Exit Code: 137\n      Started: Mon, 13 Nov "
        "2023 03:48:52 +0100",
        "killed",
        "cpu",
        Cause.HOST_MEMORY,
        {},
        "dmesg",
    ),
    Report(
        "DifferentiableUniverseInitiative/flowpm#27",
        "Compilation failure: Ran out of memory in memory space hbm. Used 41.74G of 16.00G hbm. Exceeded "
        "hbm capacity by "
        "25.74G.\n\nTotal hbm usage >= 41.74G:\n    reserved        528.00M\n    program          41.22G",
        "jax-tpu",
        "tpu",
        Cause.EXHAUSTED,
        {"tried": 41.74 * GIB, "total": 16 * GIB, "short": 25.74 * GIB},
    ),
    Report(
        "Comfy-Org/ComfyUI#7440",
        'File "/Applications/ComfyUI.app/Contents/Resources/ComfyUI/execution.py", line 516, in execute\n'
        "MPS backend out of memory (MPS allocated: 9.57 GiB, other allocations: 17.35 GiB, max allowed: "
        "27.20 GiB). Tried "
        "to allocate 292.50 MiB on private pool. Use PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0 to disable upper limit for "
        "memory allocations (may cause system failure).",
        "torch-mps",
        "mps",
        Cause.EXHAUSTED,
        {"allocated": 9.57 * GIB, "other_allocations": 17.35 * GIB, "allowed": 27.2 * GIB, "tried": 292.5 * MIB},
        "--lowvram",
        ("WATERMARK", *TRAINING),
    ),
    Report(
        "AUTOMATIC1111/stable-diffusion-webui#11848",
        '      File "/Users/t/AI/stable-diffusion-webui/modules/processing.py", line 525, in decode_first_stage\n'
        "        x = model.decode_first_stage(x)\n"
        "    RuntimeError: MPS backend out of memory (MPS allocated: 4.06 GB, other allocations: 2.73 GB, "
        "max allowed: 6.77 "
        "GB). Tried to allocate 5.00 MB on private pool.",
        "torch-mps",
        "mps",
        Cause.EXHAUSTED,
        {"allocated": 4.06 * GIB, "tried": 5 * MIB},
        "--medvram",
        TRAINING,
    ),
    Report(
        "deepspeedai/DeepSpeed#237",
        'File "/x/deepspeed/pt/deepspeed_zero_optimizer.py", line 333, in __init__\n'
        "    self.initialize_optimizer_states()\n"
        'File "/x/torch/optim/adam.py", line 90, in step\n'
        "    state['exp_avg'] = torch.zeros_like(p.data)\n"
        "RuntimeError: CUDA out of memory. Tried to allocate 7.37 GiB (GPU 3; 31.75 GiB total capacity; "
        "29.00 GiB already "
        "allocated; 1.50 GiB free; 29.20 GiB reserved in total by PyTorch)",
        "torch-cuda-reserved",
        "cuda:3",
        Cause.EXHAUSTED,
        {"tried": 7.37 * GIB},
        "8 bits",
        ("batch", *TRAINING),
    ),
    Report(
        "ByteDance-Seed/Bagel#157",
        '[rank7]:   File "/fsx/dev/Bagel/train/fsdp_utils.py", line 109, in fsdp_save_ckpt\n'
        "[rank7]:     ema_state_dict = ema_model.state_dict()\n"
        '[rank7]:   File "/x/torch/distributed/fsdp/_state_dict_utils.py", line 303, in _full_pre_state_dict_hook\n'
        "[rank7]:     _common_unshard_pre_state_dict_hook(\n"
        "[rank7]: " + torch("27.00 GiB", "79.15 GiB", "12.00 GiB", held("64.00 GiB", "1.00 GiB", "67.00 GiB"), gpu=7),
        "torch-cuda-2.5",
        "cuda:7",
        Cause.EXHAUSTED,
        {"tried": 27 * GIB},
        "RAM",
        TRAINING,
    ),
    Report(
        "tatsu-lab/stanford_alpaca#65",
        "/x/torch/distributed/fsdp/fully_sharded_data_parallel.py:2224: UserWarning: Failed to clone() "
        "tensor with name "
        "lm_head.weight. Error: CUDA out of memory. Tried to allocate 502.00 MiB (GPU 1; 39.59 GiB total "
        "capacity; 35.54 "
        "GiB already allocated; 276.19 MiB free; 37.22 GiB reserved in total by PyTorch) If reserved memory is >> "
        "allocated memory try setting max_split_size_mb to avoid fragmentation.",
        "torch-cuda-reserved-hint",
        "cuda:1",
        Cause.FRAGMENTATION,
        {"tried": 502 * MIB, "allocated": 35.54 * GIB, "free": 276.19 * MIB, "reserved": 37.22 * GIB},
    ),
    Report(
        "Victarry/stable-dreambooth#4",
        "RuntimeError: CUDA out of memory. Tried to allocate 4.00 GiB (GPU 0; 47.54 GiB total capacity; "
        "30.76 GiB already "
        "allocated; 1.22 GiB free; 33.29 GiB reserved in total by PyTorch)",
        "torch-cuda-reserved",
        "cuda:0",
        Cause.OTHER_PROCESS,
        {"tried": 4 * GIB, "total": 47.54 * GIB, "free": 1.22 * GIB},
        "nvidia-smi",
    ),
    Report(
        "LostRuins/koboldcpp#1882",
        "Welcome to KoboldCpp - Version 1.104\nDetected Available GPU Memory: 49140 MB\n"
        "ggml_backend_cuda_buffer_type_alloc_buffer: allocating 23910.35 MiB on device 0: cudaMalloc "
        "failed: out of memory",
        "llama.cpp",
        "cuda:0",
        Cause.EXHAUSTED,
        {"tried_rounded": 23910.35 * MIB},
        "--gpulayers",
        (*TRAINING, "llama-server"),
    ),
    Report(
        "LostRuins/koboldcpp#1158",
        "ggml_cuda_host_malloc: failed to allocate 10965.24 MiB of pinned memory: invalid argument",
        "llama.cpp-pinned",
        "cpu",
        Cause.HOST_MEMORY,
        {"tried": 10965.24 * MIB},
        "free -h",
        TRAINING,
    ),
    Report(
        "AMAP-ML/FluxText#25",
        '[rank0]:   File "/x/torch/optim/adamw.py", line 197, in step\n'
        "[rank0]:     loss = closure()\n"
        '[rank0]:   File "/x/lightning/pytorch/strategies/strategy.py", line 635, in wrapped_forward\n'
        "[rank0]:     out = method(*_args, **_kwargs)\n"
        '[rank0]:   File "/x/torch/nn/modules/linear.py", line 117, in forward\n'
        "[rank0]:     return F.linear(input, self.weight, self.bias)\n"
        "[rank0]: " + torch("72.00 MiB", "79.15 GiB", "30.00 MiB", held("77.00 GiB", "900.00 MiB", "79.00 GiB")),
        "torch-cuda-2.5",
        "cuda:0",
        Cause.EXHAUSTED,
        {"tried": 72 * MIB},
        "accumulate_grad_batches",
        ("fused=True",),
    ),
    Report(
        "turboderp-org/exllamav3#50",
        "RuntimeError: Insufficient VRAM in split for model and cache",
        "exllama",
        "cuda",
        Cause.EXHAUSTED,
        {},
        "cache_mode",
        TRAINING,
    ),
    Report(
        "ggml-org/llama.cpp#16653",
        "llama_params_fit_impl: projected to use 410593 MiB of device memory vs. 97017 MiB of free device memory\n"
        "llama_params_fit_impl: cannot fulfill margin of 1024 MiB on all devices, need to use 316493 MiB "
        "less in total",
        "llama.cpp",
        "gpu",
        Cause.EXHAUSTED,
        {"margin": 1024 * MIB, "short": 316493 * MIB},
        "-ngl",
        TRAINING,
    ),
    Report(
        "dmlc/xgboost#11684",
        "Exception: \"XGBoostError('[11:17:11] /workspace/src/common/device_vector.cu:23: Memory allocation error on "
        "worker 0: std::bad_alloc: cudaErrorMemoryAllocation: out of memory\\\\n- Free memory: "
        "53.1098GB\\\\n- Requested "
        "memory: 64GB",
        "xgboost",
        "cuda",
        Cause.EXHAUSTED,
        {"free": 53.1098 * GIB, "tried": 64 * GIB},
        "QuantileDMatrix",
        TRAINING,
    ),
    Report(
        "NVIDIA/Megatron-LM#1509",
        "node:47604:53083 [0] include/alloc.h:103 NCCL WARN Cuda failure 2 'out of memory'\n"
        "node:47604:53083 [0] include/alloc.h:206 NCCL WARN Failed to CUDA calloc async 24 bytes\n"
        "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "torch-nccl",
        "cuda",
        Cause.EXHAUSTED,
        {"tried": 24},
    ),
    Report(
        "facebookresearch/metaseq#314",
        "2022-08-21 00:29:47 | WARNING | metaseq.trainer | OOM: Ran out of memory with exception: CUDA out "
        "of memory. "
        "Tried to allocate 93.75 GiB (GPU 4; 79.17 GiB total capacity; 1.52 GiB already allocated; 74.14 "
        "GiB free; 1.54 "
        "GiB reserved in total by PyTorch)",
        "torch-cuda-reserved",
        "cuda:4",
        Cause.TOO_LARGE,
        {"tried": 93.75 * GIB, "free": 74.14 * GIB},
    ),
    Report(
        "unslothai/unsloth#1629",
        "ValueError: Some modules are dispatched on the CPU or the disk. Make sure you have enough GPU RAM "
        "to fit the "
        "quantized model. If you want to dispatch the model on the CPU or the disk while keeping these "
        "modules in 32-bit, "
        "you need to set `llm_int8_enable_fp32_cpu_offload=True`",
        "transformers",
        "gpu",
        Cause.EXHAUSTED,
        {},
        "smaller model",
        ("checkpoint", "accumulation"),
    ),
    Report(
        "vllm-project/vllm#10439",
        "vllm-1  | ERROR 11-18 18:07:28 engine.py:366] ValueError: No available memory for the cache blocks. Try "
        "increasing `gpu_memory_utilization` when initializing the engine.",
        "vllm",
        "cuda",
        Cause.EXHAUSTED,
        {},
        "--gpu-memory-utilization 0.95",
        (*TRAINING, "0.8"),
    ),
    Report(
        "jax-ml/jax (a share that is larger than what is free)",
        "2024-05-01 12:00:00.1: E external/xla/xla/stream_executor/cuda/cuda_driver.cc:1068] failed to "
        "allocate 21.61GiB "
        "(23203938304 bytes) from device: CUDA_ERROR_OUT_OF_MEMORY: out of memory",
        "jax",
        "gpu",
        Cause.EXHAUSTED,
        {"tried": 23203938304},
        "XLA_PYTHON_CLIENT_PREALLOCATE=false",
        ("FRACTION=0.95", *TRAINING[1:]),
    ),
    Report(
        "tensorflow/tensorflow (an operation)",
        "W tensorflow/core/framework/op_kernel.cc:1839] OP_REQUIRES failed at conv_ops.cc: "
        "RESOURCE_EXHAUSTED: OOM when "
        "allocating tensor with shape[64,512,56,56] and type float on "
        "/job:localhost/replica:0/task:0/device:GPU:0 by "
        "allocator GPU_0_bfc",
        "tensorflow",
        "gpu:0",
        Cause.EXHAUSTED,
        {"tried": 64 * 512 * 56 * 56 * 4},
        "batch",
        TRAINING,
    ),
    Report(
        "ollama/ollama#8963 (lines of its server)",
        'time=2025-02-09T17:58:30.136+08:00 level=INFO source=server.go:168 msg="system memory" free="12.1 GiB"\n'
        "ggml_backend_cuda_buffer_type_alloc_buffer: allocating 9000.00 MiB on device 0: cudaMalloc failed: "
        "out of memory\n"
        "ggml_gallocr_reserve_n: failed to allocate CUDA0 buffer of size 9437184000",
        "llama.cpp",
        "cuda:0",
        Cause.EXHAUSTED,
        {"tried": 9437184000},
        "num_ctx",
        (*TRAINING, "llama-server"),
    ),
    Report(
        "verl-project/verl (in a container)",
        '  File "/x/verl/utils/torch_functional.py", line 70, in logprobs_from_logits\n'
        + torch("11.59 GiB", "79.11 GiB", "5.80 GiB", held("60.28 GiB", "9.59 GiB", "0 bytes")),
        "torch-cuda-2.5",
        "cuda:0",
        Cause.EXHAUSTED,
        {"tried": 11.59 * GIB, "allocated": 60.28 * GIB},
        "chunks",
        TRAINING,
        unknown=("process",),
    ),
    Report(
        "jax-ml/jax (a kernel's own memory)",
        "Ran out of memory in memory space vmem while allocating on stack for %fusion. Scoped allocation "
        "with size 18.02M "
        "and limit 16.00M exceeded scoped vmem limit by 2.02M.",
        "jax-tpu",
        "tpu",
        Cause.TOO_LARGE,
        {"tried": 18.02 * MIB, "total": 16 * MIB, "short": 2.02 * MIB},
        "blocks",
        ("Recompute",),
    ),
    Report(
        "jax-ml/jax (the driver's refusal)",
        "E0000 00:00:1748 cuda_executor.cc:1228] failed to allocate 2.00GiB (2147483648 bytes) from device: "
        "RESOURCE_EXHAUSTED: : CUDA_ERROR_OUT_OF_MEMORY: out of memory",
        "jax",
        "gpu",
        Cause.EXHAUSTED,
        {"tried": 2 * GIB},
        "PREALLOCATE=false",
    ),
    Report(
        "opencv/opencv (an image)",
        "cv2.error: OpenCV(4.9.0) error: (-4:Insufficient memory) Failed to allocate 3145728000 bytes in function "
        "'OutOfMemoryError'",
        "host",
        "cpu",
        Cause.HOST_MEMORY,
        {"tried": 3145728000},
        "free -h",
        TRAINING,
    ),
    Report(
        "ollama/ollama (killed for RAM)",
        "Out of memory: Killed process 3127 (ollama) total-vm:91234567kB, anon-rss:29876543kB, file-rss:0kB",
        "linux-oom-killer",
        "cpu",
        Cause.HOST_MEMORY,
        {"resident": 29876543 * KIB},
        "dmesg",
        ("DataLoader", "num_gpu"),
    ),
    Report(
        "huggingface/diffusers (on Windows)",
        'File "/x/diffusers/models/autoencoders/autoencoder_kl.py", line 250, in _decode\n'
        + torch("4.50 GiB", "11.99 GiB", "0 bytes", held("20.10 GiB", "600.00 MiB")),
        "torch-cuda-2.5",
        "cuda:0",
        Cause.SPILL,
        {"tried": 4.5 * GIB},
        "enable_tiling",
        TRAINING,
    ),
    Report(
        "numba/numba (an array)",
        "numba.cuda.cudadrv.driver.CudaAPIError: [2] Call to cuMemAlloc results in CUDA_ERROR_OUT_OF_MEMORY",
        "cuda-runtime",
        "cuda",
        Cause.EXHAUSTED,
        {},
        "nvidia-smi",
        TRAINING,
    ),
    Report(
        "Project-HAMi/HAMi#662",
        "[HAMI-core ERROR (pid:30 thread=140382094939712 allocator.c:53)]: Device 0 OOM 3171158016 / 3145728000",
        "hami",
        "cuda:0",
        Cause.MEMORY_FRACTION,
        {"needed": 3171158016, "limit": 3145728000},
        "gpumem",
    ),
    Report(
        "Project-HAMi/HAMi#1181",
        "[HAMI-core ERROR (pid:1 thread=140160828682240 allocator.c:53)]: Device 0 OOM 18446744073707737660 "
        "/ 24146608128",
        "hami",
        "cuda:0",
        Cause.MEMORY_FRACTION,
        {"limit": 24146608128},
        "gpumem",
        unknown=("needed",),
    ),
    Report(
        "pytorch/pytorch#112377",
        'RuntimeError: NVML_SUCCESS == r INTERNAL ASSERT FAILED at "/c10/cuda/CUDACachingAllocator.cpp":1154, please '
        "report a bug to PyTorch.",
        "torch-cuda-runtime",
        "cuda",
        Cause.EXHAUSTED,
        {},
    ),
    Report(
        "carolchenyx/MGFN.#35",
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.70 GiB. GPU 0 has a total "
        "capacty of 6.00 "
        "GiB of which 0 bytes is free. " + held("2.93 GiB", "2.30 GiB"),
        "torch-cuda-2.1",
        "cuda:0",
        Cause.FRAGMENTATION,
        {"tried": 1.7 * GIB, "unallocated": 2.3 * GIB},
        "expandable_segments",
    ),
    Report(
        "zihaosheng/VLM-RL#12",
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 258.00 MiB (GPU 0; 23.54 GiB "
        "total capacity; "
        "11.75 GiB already allocated; 572.50 MiB free; 12.40 GiB reserved in total by PyTorch)",
        "torch-cuda-reserved",
        "cuda:0",
        Cause.OTHER_PROCESS,
        {"tried": 258 * MIB, "free": 572.5 * MIB, "reserved": 12.4 * GIB},
        "nvidia-smi",
    ),
    Report(
        "lllyasviel/stable-diffusion-webui-forge#1984",
        torch(
            "268.00 MiB",
            "23.64 GiB",
            "34.81 MiB",
            "Process 1193254 has 23.60 GiB memory in use. " + held("22.60 GiB", "528.55 MiB"),
        ),
        "torch-cuda-2.5",
        "cuda:0",
        Cause.EXHAUSTED,
        {"tried": 268 * MIB, "process_1193254": 23.6 * GIB},
    ),
    Report(
        "Wan-Video/Wan2.1#465",
        torch("100.00 MiB", "31.37 GiB", "15.88 MiB", held("30.74 GiB", "19.41 MiB", "31.34 GiB")),
        "torch-cuda-2.5",
        "cuda:0",
        Cause.EXHAUSTED,
        {"tried": 100 * MIB, "process": 31.34 * GIB},
    ),
    Report(
        "lllyasviel/FramePack#608",
        torch("28.87 GiB", "15.83 GiB", "4.00 GiB", held("11.31 GiB", "392.97 MiB")),
        "torch-cuda-2.5",
        "cuda:0",
        Cause.TOO_LARGE,
        {"tried": 28.87 * GIB},
        "attention is not fused",
    ),
]


def _plain(report: Report) -> str:
    return report.source.replace("/", " ").replace("#", " ")


@pytest.mark.parametrize("report", REPORTS, ids=map(_plain, REPORTS))
def test_a_posted_log_is_understood(report: Report) -> None:
    message = primary(read_oom(report.log))
    assert (message.family, message.device, message.cause) == (report.family, report.device, report.cause)
    expected = {name: round(count) for name, count in report.numbers.items()}
    assert {name: count for name, count in message.numbers_bytes.items() if name in expected} == expected
    assert set(message.unknown) == set(report.unknown)
    helpful = [f"{advice.text} {advice.paste}" for advice in message.advice if advice.helps]
    assert report.first in helpful[0]
    assert not [word for word in report.never for advice in helpful if word in advice]
    if not message.family.startswith("torch-"):
        assert not any("PyTorch has emptied" in advice.text for advice in message.advice)
