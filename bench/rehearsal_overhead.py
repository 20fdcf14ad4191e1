"""What a rehearsal takes: seconds and RAM of the host, for Llamas from 135M to 70B parameters.

    python bench/rehearsal_overhead.py [--python PYTHON] [--only 135M 70B] [--made-on cuda cpu] [--json rows.json]

One row a model, and place where it is made: a training step (AdamW, bfloat16, checkpointing) is rehearsed until
memory stops growing, on as much memory as it takes. CPU time tells more than seconds where other programs run. PYTHON
has a CUDA build of PyTorch, or brim fetched one for it (`brim rehearse`).
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
from pathlib import Path

from brim.device.environment import find
from brim.rehearsal import values_library
from brim.rehearsal.rehearse import Request, rehearse_program
from brim.units import format_bytes

# hidden, intermediate, layers, heads, key-value heads, vocabulary: configurations as published
MODELS = {
    "135M": (576, 1536, 30, 9, 3, 49152),  # HuggingFaceTB/SmolLM2-135M
    "1.2B": (2048, 8192, 16, 32, 8, 128256),  # meta-llama/Llama-3.2-1B
    "8B": (4096, 14336, 32, 32, 8, 128256),  # meta-llama/Llama-3.1-8B
    "70B": (8192, 28672, 80, 64, 8, 128256),  # meta-llama/Llama-3.1-70B
}

PROGRAM = """
import sys, torch
from transformers import LlamaConfig, LlamaForCausalLM
hidden, intermediate, layers, heads, kv, vocabulary = map(int, sys.argv[2:])
config = LlamaConfig(hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers, use_cache=False,
                     num_attention_heads=heads, num_key_value_heads=kv, vocab_size=vocabulary, dtype=torch.bfloat16)
torch.set_default_dtype(torch.bfloat16)
with torch.device(sys.argv[1]):
    model = LlamaForCausalLM(config)
model.cuda()
model.gradient_checkpointing_enable()  # deprecated, and in every version
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
for step in range(20):
    tokens = torch.randint(0, vocabulary, (1, 2048), device="cuda")
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print(sum(one.numel() for one in model.parameters()))
"""


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", type=Path)
    parser.add_argument("--only", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--made-on", nargs="+", choices=("cuda", "cpu"), default=("cuda", "cpu"))
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    environment = find(given.python)
    if environment is None:
        raise SystemExit("There is no CUDA build of PyTorch: see `brim rehearse --help`.")
    values_library.build(environment.site_packages)  # once for a PyTorch: no part of a rehearsal
    rows = []
    for name, place in ((name, place) for place in given.made_on for name in given.only):
        with tempfile.TemporaryDirectory() as scratch, tempfile.TemporaryFile("w") as output:
            program = Path(scratch) / "step.py"
            program.write_text(PROGRAM, encoding="utf-8")
            arguments = (place, *map(str, MODELS[name]))
            request = Request(target=str(program), arguments=arguments, gpu="H100", memory_bytes=4 << 40)
            before_s = _cpu_s()
            (found,) = rehearse_program(request, environment, Path(scratch), output=output)
            cpu_s = _cpu_s() - before_s
        assert found.fits, found.message
        (device,) = found.devices
        rows.append(
            {
                "model": name,
                "made_on": place,
                "ended": found.ended,
                "steps": found.steps,
                "allocated_bytes": device.allocated_bytes,
                "reserved_bytes": device.reserved_bytes,
                "seconds": round(found.seconds, 1),
                "cpu_seconds": round(cpu_s, 1),
                "host_peak_bytes": found.host_peak_bytes,
            }
        )
        print(
            f"{name}, made on {place}: {found.seconds:.1f} s ({cpu_s:.1f} s of CPU time), "
            f"{format_bytes(found.host_peak_bytes)} RAM, {found.steps} steps, "
            f"{format_bytes(device.reserved_bytes)} reserved on the device",
            flush=True,
        )
    if given.json:
        given.json.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
