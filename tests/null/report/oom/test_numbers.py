"""Numbers of messages: where one ends, which the program did not know, and what they say together."""

from __future__ import annotations

import pytest

from brim.cli.explain.text import of_message
from brim.errors import FormatError
from brim.report.oom.reader import Cause, read_oom
from brim.units import GIB, MIB

TRIED = 41943041024
NEXT_LINES = {
    "llama.cpp's prefix": "1.10.520.086 E graph_reserve: failed to allocate compute buffers",
    "seconds": "12.50 s since the start",
    "a size": "1.50 GiB are left",
    "a size after a bracket": "(12.00 GiB) left",
    "a date": "2025-06-15 12:00:00 ended",
    "a time": "12:00:00.123 ended",
    "a rate": "0.12 it/s",
    "a number": "7",
    "a rank's number": "12: ended",
}


@pytest.mark.parametrize("line", NEXT_LINES.values(), ids=NEXT_LINES)
def test_a_number_at_the_end_of_a_line_does_not_go_on_in_the_next(line):
    log = f"ggml_gallocr_reserve_n_impl: failed to allocate CUDA1 buffer of size {TRIED}\n{line}"
    assert read_oom(log)[0].numbers_bytes["tried"] == TRIED


@pytest.mark.parametrize("line", NEXT_LINES.values(), ids=NEXT_LINES)
def test_a_number_before_a_line_that_begins_with_a_number_is_its_own(line):
    log = f"onnxruntime: Failed to allocate memory for requested buffer of size 2830172160\n{line}"
    assert read_oom(log)[0].numbers_bytes["tried"] == 2830172160


def cuda(free: str, process: str, *, total: str = "12.00 GiB", allocated: str = "11.20 GiB") -> str:
    own = f"Including non-PyTorch memory, this process has {process} memory in use. " if process else ""
    return (
        f"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 64.00 MiB. GPU 0 has a total "
        f"capacity of {total} "
        f"of which {free} is free. {own}Of the allocated memory {allocated} is allocated by PyTorch, and "
        f"90.00 MiB is "
        "reserved by PyTorch but unallocated."
    )


UNKNOWN = (
    "17179869184.00 GiB",
    "18446744073709551615 bytes",
    "N/A",
    "[Not Supported]",
    "-1 bytes",
    "-1.00 GiB",
    "nan GiB",
)


@pytest.mark.parametrize("printed", UNKNOWN)
def test_what_a_driver_does_not_know_is_no_number(printed):
    (message,) = read_oom(cuda("0 bytes", printed))
    assert message.unknown == ("process",)
    assert "process" not in message.numbers_bytes
    assert (message.cause, message.numbers_bytes["free"]) == (Cause.EXHAUSTED, 0)
    (message,) = read_oom(cuda(printed, "11.50 GiB"))
    assert message.unknown == ("free",)
    assert "free" not in message.numbers_bytes


def test_nothing_of_nothing_is_a_device_that_is_not_known():
    (message,) = read_oom(cuda("0 bytes", "11.50 GiB", total="0 bytes"))
    assert set(message.unknown) == {"total", "free"}
    assert "larger than the device" not in message.why


def test_a_limit_that_is_not_set_is_none():
    log = "memory: usage 125829120kB, limit 9007199254740988kB, failcnt 0\npython3 invoked oom-killer: gfp_mask=0x14"
    (message,) = read_oom(f"python3 invoked oom-killer: order=0\n{log}")
    assert message.unknown == ("limit",)
    assert "limit" not in message.numbers_bytes


SLEEP = '  File "/x/vllm/device_allocator/cumem.py", line 8, in wake_up\n'
ABOVE_TOTAL = {
    "the process is within": (cuda("10.00 MiB", "11.90 GiB", allocated="19.00 GiB"), Cause.EXHAUSTED),
    "the process is above, too": (cuda("0 bytes", "19.50 GiB", allocated="19.00 GiB"), Cause.SPILL),
    "a driver that lists no process": (cuda("0 bytes", "", allocated="19.00 GiB"), Cause.SPILL),
    "an allocator that unmaps": (SLEEP + cuda("10.00 MiB", "", allocated="19.00 GiB"), Cause.EXHAUSTED),
    "processes are listed": (
        cuda("10.00 MiB", "", allocated="19.00 GiB").replace(
            "Of the allocated", "Process 7 has 11.90 GiB memory in use. Of the allocated"
        ),
        Cause.EXHAUSTED,
    ),
    "another process": (cuda("10.00 MiB", "5.00 GiB", allocated="19.00 GiB"), Cause.OTHER_PROCESS),
}


@pytest.mark.parametrize("name", ABOVE_TOTAL)
def test_more_allocated_than_the_device_has_is_a_spill_only_where_the_driver_holds_it(name):
    log, cause = ABOVE_TOTAL[name]
    (message,) = read_oom(log)
    assert message.cause is cause
    assert ("still counts" in message.why) == (cause is Cause.EXHAUSTED)


FREE = {  # tried, free, allocated, of
    "refused although free": ("13.00 GiB", "18.50 GiB", "99.40 GiB", "127.00 GiB", Cause.MISLEADING_FREE),
    "refused on an empty device": ("2.00 GiB", "2.80 GiB", "0 bytes", "4.00 GiB", Cause.MISLEADING_FREE),
    "full but for a remainder": ("20.00 MiB", "25.00 MiB", "23.20 GiB", "23.65 GiB", Cause.EXHAUSTED),
    "full": ("2.00 GiB", "100.00 MiB", "23.20 GiB", "23.65 GiB", Cause.EXHAUSTED),
}


@pytest.mark.parametrize("name", FREE)
def test_a_request_below_what_is_free_was_refused_by_the_driver(name):
    tried, free, allocated, total, cause = FREE[name]
    (message,) = read_oom(
        f"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {tried}. GPU 0 has a total capacity "
        f"of {total} of "
        f"which {free} is free. Of the allocated memory {allocated} is allocated by PyTorch, and 1.00 MiB "
        f"is reserved by "
        "PyTorch but unallocated."
    )
    assert message.cause is cause
    assert ("only" in message.why) == (name == "full")


BUFFERS = {
    "ggml_backend_cpu_buffer_type_alloc_buffer: failed to allocate buffer of size 1000": "cpu",
    "ggml_backend_cuda_host_buffer_type_alloc_buffer: failed to allocate buffer of size 1000": "cpu",
    "alloc_tensor_range: failed to allocate CPU buffer of size 1000": "cpu",
    "alloc_tensor_range: failed to allocate CPU_REPACK buffer of size 1000": "cpu",
    "alloc_tensor_range: failed to allocate CUDA_Host buffer of size 1000": "cpu",
    "ggml_gallocr_reserve_n_impl: failed to allocate CUDA1 buffer of size 1000": "cuda:1",
    "ggml_gallocr_reserve_n_impl: failed to allocate ROCm0 buffer of size 1000": "hip:0",
    "ggml_gallocr_reserve_n_impl: failed to allocate Vulkan2 buffer of size 1000": "vulkan:2",
    "ggml_gallocr_reserve_n_impl: failed to allocate SYCL0 buffer of size 1000": "xpu:0",
    "ggml_gallocr_reserve_n_impl: failed to allocate Metal buffer of size 1000": "mps",
}


@pytest.mark.parametrize("line", BUFFERS)
def test_a_buffer_of_llama_cpp_lies_where_its_name_says(line):
    (message,) = read_oom(line)
    assert (message.device, message.numbers_bytes["tried"]) == (BUFFERS[line], 1000)
    assert (message.cause is Cause.HOST_MEMORY) == (message.device == "cpu")


OTHERS = {
    "FATAL: not enough GPU memory: 13.5 GiB required, 8.0 GiB available": (
        "gpu",
        {"tried": 13.5 * GIB, "free": 8 * GIB},
    ),
    "loader: insufficient RAM: requires 61.3 GB of 31.2 GB total": (
        "cpu",
        {"tried": 61.3 * GIB, "total": 31.2 * GIB},
    ),
    "the pool ran out of memory": ("unknown", {}),
}


@pytest.mark.parametrize("line", OTHERS)
def test_a_message_of_no_known_kind_is_shown_with_its_sizes(line):
    device, numbers = OTHERS[line]
    (message,) = read_oom(f"step 3\n{line}\n")
    assert (message.family, message.device, message.cause) == ("other", device, Cause.UNKNOWN)
    assert dict(message.numbers_bytes) == {name: round(count) for name, count in numbers.items()}


def test_a_message_of_a_known_kind_is_explained_before_one_of_none():
    messages = read_oom("insufficient memory: 3 GiB required\n" + "x\n" * 60 + cuda("0 bytes", "11.50 GiB"))
    assert {message.family for message in messages} == {"other", "torch-cuda-2.5"}


def test_sizes_that_have_no_name_are_shown_with_their_words():
    (message,) = read_oom(
        "slurmstepd: error: Detected 1 oom_kill event in StepId=1.0. The job had asked for 16.00 GiB of memory."
    )
    assert [size for size in message.not_read if "asked for 16.00 GiB of memory" in size]


def test_a_log_without_a_message_is_refused_with_the_sizes_of_its_lines():
    with pytest.raises(FormatError, match=r"(?s)known forms.*GPU memory 21\.5 GiB of 24\.0 GiB"):
        read_oom("step 1\nGPU memory 21.5 GiB of 24.0 GiB\nstep 2\n")
    with pytest.raises(FormatError, match=r"loss 0\.5 memory 3 GiB"):
        read_oom("loss 0.5 memory 3 GiB")


KILLED = {
    "bash": "train.sh: line 5: 12345 Killed                  python train.py",
    "a job of bash": "[1]+  Killed                  python train.py",
    "zsh": "zsh: killed     python train.py",
    "alone": "Killed",
    "an editor": "Process finished with exit code 137 (interrupted by signal 9: SIGKILL)",
    "subprocess": "subprocess.CalledProcessError: Command '['python']' died with <Signals.SIGKILL: 9>.",
    "accelerate": "exitcode  : -9 (pid: 12)",
    "deepspeed": "[launch.py:321:sigkill_handler] ['python'] exits with return code = -9",
    "loky": "The exit codes of the workers are {SIGKILL(-9)}",
    "docker": "container main exited with code 137",
    "kubectl": "command terminated with exit code 137",
    "go": "llama runner process has terminated: signal: killed",
    "mpirun": "mpirun noticed that process rank 3 with PID 0 on node a exited on signal 9 (Killed).",
    "intel mpi": "=   KILLED BY SIGNAL: 9 (Killed)",
    "macos": "Killed: 9",
    "fish": "fish: Job 1, 'python train.py' terminated by signal SIGKILL (Forced quit)",
    "github": "##[error]Process completed with exit code 137.",
    "tgi": "Shard process was signaled to shutdown with signal 9 (SIGKILL)",
}


@pytest.mark.parametrize("name", KILLED)
def test_a_process_that_was_killed_is_known_by_who_started_it(name):
    messages = read_oom(f"step 1, loss 0.5\n{KILLED[name]}\n(base) user@host:~$")
    assert [(one.family, one.cause) for one in messages] == [("killed", Cause.HOST_MEMORY)]


@pytest.mark.parametrize(
    "line",
    [
        '"OOMKilled": false',
        "forcefully exiting via Signals.SIGKILL",
        "Killed by the user",
        "3 workers Killed",
        "exit code 1",
        "code 1370",
    ],
)
def test_a_process_that_ended_otherwise_was_not_killed(line):
    with pytest.raises(FormatError):
        read_oom(f"step 1\n{line}\nstep 2")


def test_who_was_killed_is_a_consequence_of_what_says_more():
    log = cuda("0 bytes", "11.50 GiB") + "\n" + "x\n" * 40 + "exitcode  : -9 (pid: 12)\n"
    assert {message.family for message in read_oom(log)} == {"torch-cuda-2.5", "killed"}


def test_a_pool_of_xla_in_pieces_is_fragmented():
    log = (
        "external/xla/xla/tsl/framework/bfc_allocator.cc:482] Allocator (GPU_0_bfc) ran out of memory "
        "trying to allocate "
        "2.00GiB (rounded to 2147483648)requested by op\nStats:\nLimit:  12884901888\nInUse:  6442450944\n"
    )
    (message,) = read_oom(log)
    assert message.cause is Cause.FRAGMENTATION
    assert f"{6} GiB of the pool" in message.why
    assert message.numbers_bytes["tried"] == 2048 * MIB


FURTHER: dict[str, tuple[str, str, Cause, dict[str, float]]] = {
    "[Rank:0] FATAL ERROR :: MODULE:PT_DEVMEM Allocation failed for size::8589934592 (8192)MB": (
        *("habana", "hpu", Cause.EXHAUSTED),
        {"tried": 8 * GIB},
    ),
    "EL0004: Failed to allocate memory.": ("torch-npu", "npu", Cause.EXHAUSTED, {}),
    "=>> PBS: job killed: mem 67190584kb exceeded limit 67108864kb": (
        *("batch-scheduler", "cpu", Cause.HOST_MEMORY),
        {"used": 67190584 * 1024, "limit": 64 * GIB},
    ),
    "TERM_MEMLIMIT: job killed after reaching LSF memory usage limit.": (
        *("batch-scheduler", "cpu", Cause.HOST_MEMORY),
        {},
    ),
    "slurmstepd: error: Step 123.0 exceeded memory limit (9213856 > 8388608), being killed": (
        *("slurm", "cpu", Cause.HOST_MEMORY),
        {"used": 9213856 * 1024, "limit": 8 * GIB},
    ),
    "Killed /user.slice/app.scope due to memory pressure for /user.slice being 66.22% > 50.00% for > 20s": (
        *("oomd", "cpu", Cause.HOST_MEMORY),
        {},
    ),
    'sending SIGTERM to process 1234 uid 1000 "python": badness 1200, VmRSS 61234 MiB': (
        *("oomd", "cpu", Cause.HOST_MEMORY),
        {"resident": 61234 * MIB},
    ),
    "The node was low on resource: memory. Threshold quantity: 100Mi, available: 52Mi. Container main was "
    "using 12Gi": (
        *("kubernetes", "cpu", Cause.HOST_MEMORY),
        {"threshold": 100 * MIB, "available": 52 * MIB, "used": 12 * GIB},
    ),
    "train.service: Failed with result 'oom-kill'.": ("oomd", "cpu", Cause.HOST_MEMORY, {}),
    "train.service: A process of this unit has been killed by the OOM killer.": (
        *("oomd", "cpu", Cause.HOST_MEMORY),
        {},
    ),
    'WARN msg="model request too large for system" requested="61.3 GiB" available="31.2 GiB" total="31.9 GiB"': (
        *("ollama", "cpu", Cause.HOST_MEMORY),
        {"needed": 61.3 * GIB, "available": 31.2 * GIB, "total": 31.9 * GIB},
    ),
    "Your session crashed after using all available RAM.": ("host", "cpu", Cause.HOST_MEMORY, {}),
    "llama_kv_cache_init: failed to allocate buffer for kv cache": ("llama.cpp", "gpu", Cause.EXHAUSTED, {}),
    "Attempting to allocate 1.00G. That was not possible. There are 304.00M free.; (0x0x0_HBM0)": (
        *("jax-tpu", "tpu", Cause.EXHAUSTED),
        {"tried": GIB, "free": 304 * MIB},
    ),
    "Failed to allocate memory for requested buffer of size 18446744073709551615": (
        *("onnxruntime", "gpu", Cause.TOO_LARGE),
        {"tried": (1 << 64) - 1},
    ),
    "State: OUT_OF_MEMORY (exit code 0) Memory Utilized: 62.11 GB Memory Efficiency: 97.05% of 64.00 GB": (
        *("slurm", "cpu", Cause.HOST_MEMORY),
        {"used": 62.11 * GIB, "limit": 64 * GIB},
    ),
    "HSA_STATUS_ERROR_OUT_OF_RESOURCES: the runtime failed": ("torch-hip-runtime", "hip", Cause.EXHAUSTED, {}),
    "NCCL WARN Error while creating shared memory segment /dev/shm/nccl-abc (size 9637888)": (
        *("shared-memory", "cpu", Cause.HOST_MEMORY),
        {"tried": 9637888},
    ),
    "[TRT] [E] Requested amount of GPU memory (17179869184 bytes) could not be allocated.": (
        *("tensorrt", "cuda", Cause.EXHAUSTED),
        {"tried": 16 * GIB},
    ),
    "Not enough memory resources are available to complete this operation.": (
        *("torch-directml", "gpu", Cause.EXHAUSTED),
        {},
    ),
    "[metal::malloc] Attempting to allocate 40000000000 bytes which is greater than the maximum allowed "
    "buffer size of "
    "30150672384 bytes.": (
        *("mlx", "mps", Cause.TOO_LARGE),
        {"tried": 40000000000, "largest_buffer": 30150672384},
    ),
    "memory allocation of 17179869184 bytes failed": ("host", "cpu", Cause.HOST_MEMORY, {"tried": 16 * GIB}),
    "OSError: [Errno 12] Cannot allocate memory": ("host", "cpu", Cause.HOST_MEMORY, {}),
    "RuntimeError: unable to write to file </torch_77_1>: No space left on device (28)": (
        *("dataloader", "cpu", Cause.HOST_MEMORY),
        {},
    ),
    "ggml_aligned_malloc: insufficient memory (attempted to allocate 12345.50 MB)": (
        *("llama.cpp", "cpu", Cause.HOST_MEMORY),
        {"tried_rounded": 12345.5 * MIB},
    ),
    "Failed copying input tensor from CPU:0 to GPU:0 in order to run _EagerConst: Dst tensor is not initialized.": (
        *("tensorflow", "gpu:0", Cause.EXHAUSTED),
        {},
    ),
    "NvMapMemAllocInternalTagged: 1075072515 error 12": ("torch-cuda-runtime", "cuda", Cause.EXHAUSTED, {}),
    "ValueError: The memory capacity is unbalanced. Some GPUs may be occupied by other processes.": (
        *("sglang-unbalanced", "cuda", Cause.OTHER_PROCESS),
        {},
    ),
}


@pytest.mark.parametrize("line", FURTHER)
def test_a_line_of_another_program_is_understood(line):
    family, device, cause, numbers = FURTHER[line]
    (message,) = read_oom(f"step 1\n{line}\nstep 2\n")
    assert (message.family, message.device, message.cause) == (family, device, cause)
    assert dict(message.numbers_bytes) == {name: round(count) for name, count in numbers.items()}
    assert message.advice[0].helps


@pytest.mark.parametrize(
    ("constraint", "words"),
    [("CONSTRAINT_MEMCG", "container or job"), ("CONSTRAINT_NONE", "The whole machine ran out")],
)
def test_whose_ram_ran_out_is_told_by_the_kernels_constraint(constraint, words):
    (message,) = read_oom(f"oom-kill:constraint={constraint},nodemask=(null),cpuset=/,task=python,pid=12,uid=0")
    assert words in message.why


def test_what_is_not_known_and_what_has_no_name_is_printed():
    (message,) = read_oom(cuda("0 bytes", "17179869184.00 GiB") + " The allocator's pool had 3.50 GiB before.")
    printed = "\n".join(of_message(message, []))
    assert "process             unknown to the program that printed the message" in printed
    assert "also in the message:" in printed
    assert "pool had 3.50 GiB before" in printed
