"""Settings of the programs around PyTorch: every one that is named exists, and what a message advises is read."""

from __future__ import annotations

import pytest

from brim.report import read_table
from brim.report.oom.programs import OF_FAMILY, program_of, remedies, settings_of
from brim.report.oom.reader import read_oom

PROGRAMS = read_table("oom/programs.toml")["program"]
ORDERS = [
    (name, order)
    for name, program in PROGRAMS.items()
    if "order" in program
    for order in (
        program["order"],
        *(order for _, order in [*program.get("places", ()), *program.get("by_text", ())]),
    )
]


@pytest.mark.parametrize(("program", "order"), ORDERS)
def test_every_setting_that_is_advised_exists(program, order):
    assert len(settings_of(program, order.split(), "", {})) == len(order.split())


def test_every_program_of_a_family_has_settings():
    with_settings = {name for name, program in PROGRAMS.items() if "settings" in program}
    assert set(OF_FAMILY.values()) <= with_settings == {program for program, _ in ORDERS}


REMEDIES = {
    "two settings, one direction": (
        "vllm",
        "Please try lowering `max_num_seqs` or `gpu_memory_utilization` when initializing the engine.",
        ["--max-num-seqs 16", "--gpu-memory-utilization 0.8"],
    ),
    "two directions": (
        "vllm",
        "Try increasing `gpu_memory_utilization` or decreasing `max_model_len` when initializing the engine.",
        ["--gpu-memory-utilization 0.95", "--max-model-len 8192"],
    ),
    "the direction after the setting": (
        "sglang",
        "Possible solutions: 1. set --mem-fraction-static to a smaller value (e.g., 0.8 or 0.7) 2. set "
        "--cuda-graph-max-bs to a smaller value (e.g., 16)",
        ["--mem-fraction-static 0.7", "--cuda-graph-max-bs 16"],
    ),
    "up": ("sglang", "Please try to increase --mem-fraction-static.", ["--mem-fraction-static 0.9"]),
    "a value": (
        "vllm",
        "the estimated maximum model length is 5120. Try decreasing `max_model_len`.",
        ["--max-model-len 5120"],
    ),
    "no direction": ("vllm", "gpu_memory_utilization is 0.9.", []),
    "another program's": ("sglang", "Try increasing `gpu_memory_utilization`.", []),
}


@pytest.mark.parametrize("name", REMEDIES)
def test_what_a_message_advises_is_read_in_its_order_and_direction(name):
    program, text, pastes = REMEDIES[name]
    assert [advice.paste for advice in remedies(program, f"{text} Based on the available memory, {text}", {})][
        : len(pastes)
    ] == pastes
    assert bool(pastes) == bool(remedies(program, text, {}))


def test_the_innermost_frame_tells_the_program():
    frames = ['File "/x/vllm/v1/worker/gpu_worker.py", line 3, in sleep', 'File "/x/trl/trainer/grpo_trainer.py"']
    assert program_of("torch-cuda-2.5", frames, "", "") == "vllm"
    assert program_of("torch-cuda-2.5", frames[::-1], "", "") == "hf-trainer"
    assert program_of("torch-cuda-2.5", ['File "train.py", line 3'], "", "vllm") == ""
    assert program_of("torch-cuda-2.5", [], "", "vllm") == "vllm"
    assert program_of("llama.cpp", [], "", "ollama") == "ollama"
    assert program_of("llama.cpp", [], "", "vllm") == "llama.cpp"


@pytest.mark.parametrize(
    ("stated", "advised"),
    [
        ("gpu_memory_utilization=0.95", "--gpu-memory-utilization 0.85"),
        ("the current instance can use total_gpu_memory (79.14GiB) x gpu_memory_utilization (0.25)", "0.15"),
        ("gpu_memory_utilization: 0.1", "0.05"),
        ("no share is stated", "0.8"),
    ],
)
def test_a_share_shrinks_from_the_one_in_force(stated, advised):
    log = (
        f"INFO {stated}, total 79.14 GiB of GPU memory\n"
        '  File "/x/vllm/v1/worker/gpu_worker.py", line 3, in execute_model\n'
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity "
        "of 79.14 GiB "
        "of which 1.00 GiB is free. Including non-PyTorch memory, this process has 78.00 GiB memory in use. Of the "
        "allocated memory 77.00 GiB is allocated by PyTorch, and 100.00 MiB is reserved by PyTorch but unallocated."
    )
    first = read_oom(log)[0].advice[0]
    assert first.paste.endswith(advised)
    assert "smaller share" in first.text


def test_a_share_grows_from_the_one_in_force():
    log = "--mem-fraction-static 0.84\nRuntimeError: Not enough memory. Please try to increase --mem-fraction-static."
    assert read_oom(log)[0].advice[0].paste == "--mem-fraction-static 0.89"
