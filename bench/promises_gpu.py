"""A Llama of random weights on a GPU, fitted and loaded into less than it takes: what was promised, and what it took.

    python bench/promises_gpu.py [--layers 8] [--hidden 4096] [--output measurements/promises_gpu.jsonl]

Each case runs in a process of its own: all of it resident; streamed from RAM; from the disk; a model that was on the
GPU fitted into a quarter of it; loaded, removed and dropped five times over, whose RAM must not grow; a DataLoader's
workers beside page-locked weights, whose copies must not grow; and one that takes 60 % of the card, which must stay
resident. Logits are compared bit for bit with the resident run. Seconds are medians of five forwards after two. One
JSON line per case is appended to --output.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import _harness as harness
import brim
from brim.core import Plan
from brim.estimation.step_memory import Inputs
from brim.measure.capacity import resident_bytes
from brim.units import format_bytes

TOKENS = 512
MIB = 1 << 20


def config(options: argparse.Namespace) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        hidden_size=options.hidden, intermediate_size=options.hidden * 11 // 4, num_hidden_layers=options.layers,
        num_attention_heads=options.hidden // 128, num_key_value_heads=options.hidden // 128, vocab_size=32_000,
        bos_token_id=1, eos_token_id=2, pad_token_id=0, tie_word_embeddings=False, dtype="bfloat16",
    )  # fmt: skip


def make(options: argparse.Namespace, folder: Path) -> None:
    """A checkpoint of random weights, drawn on the GPU."""
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    with torch.device("cuda"):
        model = LlamaForCausalLM(config(options)).to(torch.bfloat16)
    model.cpu().save_pretrained(folder)


def opened(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder).eval().requires_grad_(False)


def ids(device: str = "cuda") -> torch.Tensor:
    return torch.randint(3, 32_000, (1, TOKENS), generator=torch.Generator().manual_seed(1)).to(device)


def forwards(model: Any, folder: Path) -> dict[str, Any]:
    """Seconds of a forward, what PyTorch reserved, and whether the logits are those of the first run."""
    torch.cuda.reset_peak_memory_stats()
    seconds, tokens = [], ids()
    with torch.no_grad():
        for _ in range(7):
            torch.cuda.synchronize()
            begin_s = time.perf_counter()
            logits = model(input_ids=tokens, use_cache=False).logits
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - begin_s)
    found = {
        "forward_s": statistics.median(seconds[2:]), "allocated_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(), "finite": bool(logits.isfinite().all()),
    }  # fmt: skip
    reference = folder / "logits.pt"
    if not reference.exists():
        torch.save(logits.cpu(), reference)
        return found
    return found | {"logits_equal": torch.equal(logits.cpu(), torch.load(reference, weights_only=True))}


def promised(plan: Plan) -> dict[str, Any]:
    promise = plan.promise
    return {
        "promised_bytes": dict(promise.peak_bytes), "promised_s": promise.step_s, "limited_by": promise.limited_by,
        "budget_bytes": dict(plan.budget_bytes), "settings": dict(plan.settings),
    }  # fmt: skip


# -- cases


def resident(folder: Path) -> dict[str, Any]:
    return forwards(opened(folder).cuda(), folder)


def from_ram(folder: Path) -> dict[str, Any]:
    model = opened(folder)
    handle = brim.fit(model, vram=weights_bytes(model) // 3, example={"input_ids": ids("cpu"), "use_cache": False})
    return promised(handle.plan) | forwards(model, folder)


def from_disk(folder: Path) -> dict[str, Any]:
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    inputs = Inputs(batch=1, prompt=TOKENS, total=TOKENS)
    model: Any = brim.load(folder, vram=size // 3, ram=size // 6 + 600 * MIB, device="cuda", inputs=inputs)
    handle: Any = model.brim
    return promised(handle.plan) | forwards(model, folder)


def from_the_gpu(folder: Path) -> dict[str, Any]:
    """What was reserved for the whole model is given back."""
    model = opened(folder).cuda()
    before = torch.cuda.memory_reserved()
    example = {"input_ids": ids(), "use_cache": False}
    handle = brim.fit(model, vram=before // 3, example=example)
    return {"reserved_before_bytes": before} | promised(handle.plan) | forwards(model, folder)


def again_and_again(folder: Path) -> dict[str, Any]:
    """The process must not grow, and what lies where page-locked memory was must be copied as it is."""
    grown, same = [], True
    for _ in range(5):
        model = opened(folder)
        handle = brim.fit(model, vram=weights_bytes(model) // 2, device="cuda")
        with torch.no_grad():
            model(input_ids=ids(), use_cache=False)
        handle.remove()
        del model, handle
        gc.collect()
        for _ in range(4):
            pageable = torch.randint(0, 255, (64 * MIB,), dtype=torch.uint8)
            same &= torch.equal(pageable.cuda().cpu(), pageable)
        grown.append(resident_bytes())
    return {"resident_bytes": grown, "grown_bytes": grown[-1] - grown[1], "pageable_copies_same": same}


class Rows(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        own = [line for line in Path("/proc/self/smaps_rollup").read_text().splitlines() if "Private_Dirty" in line]
        return torch.tensor(int(own[0].split()[1]) << 10)


def workers(folder: Path) -> dict[str, Any]:
    """The most that a worker has of its own, beside what page-locked weights take."""
    model = opened(folder)
    brim.fit(model, vram=weights_bytes(model) // 2, device="cuda")
    loader = torch.utils.data.DataLoader(Rows(), batch_size=8, num_workers=4)
    own = max(int(batch.max()) for batch in loader)
    with torch.no_grad():
        model(input_ids=ids(), use_cache=False)
    return {"worker_private_bytes": own, "weights_bytes": weights_bytes(model)}


def most_of_the_card(folder: Path) -> dict[str, Any]:
    """A stack of layers of 60 % of what is free: nothing of it may be streamed."""
    free = torch.cuda.mem_get_info()[0]
    width = 8192
    count = int(0.6 * free) // (2 * width * width)
    with torch.device("cuda"):
        layers = [nn.Linear(width, width, bias=False, dtype=torch.bfloat16) for _ in range(count)]
    model = nn.Sequential(*layers).requires_grad_(False)
    x = torch.randn(16, width, device="cuda", dtype=torch.bfloat16)
    handle = brim.fit(model, example=(x,))
    with torch.no_grad():
        model(x)
    torch.cuda.synchronize()
    streamed = [choice for choice in handle.plan.choices("weight_streaming").values() if choice != "resident"]
    return promised(handle.plan) | {
        "weights_bytes": weights_bytes(model), "streamed_blocks": len(streamed), "free_bytes": free,
        "reserved_bytes": torch.cuda.max_memory_reserved(),
    }  # fmt: skip


def weights_bytes(model: nn.Module) -> int:
    return sum(weight.nbytes for weight in model.parameters())


CASES: dict[str, Callable[[Path], dict[str, Any]]] = {
    case.__name__: case
    for case in (resident, from_ram, from_disk, from_the_gpu, again_and_again, workers, most_of_the_card)
}


# -- all of them


def told(name: str, row: dict[str, Any]) -> str:
    if "error" in row:
        return f"{name:18} {row['error'].strip().splitlines()[-1][:200]}"
    parts = []
    if "forward_s" in row:
        parts.append(f"{row['forward_s'] * 1e3:.1f} ms")
        if row.get("promised_s"):
            parts.append(f"promised {row['promised_s'] * 1e3:.1f} ms by {row['limited_by']}")
    if "reserved_bytes" in row:
        parts.append(f"reserved {format_bytes(row['reserved_bytes'])}")
        if "promised_bytes" in row:
            parts.append(f"of {format_bytes(row['promised_bytes']['vram'])} promised")
    parts += [f"{key} {value}" for key, value in row.items() if key in _ALSO]
    return f"{name:18} {', '.join(parts)}"


_ALSO = (
    "logits_equal", "finite", "reserved_before_bytes", "grown_bytes", "pageable_copies_same", "worker_private_bytes",
    "streamed_blocks",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=4096, help="a multiple of 128")
    parser.add_argument("--only", nargs="+", choices=tuple(CASES), default=tuple(CASES))
    parser.add_argument("--output", type=Path, help="append JSON lines here")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case == "make":
        make(options, options.folder)
        return
    if options.case:
        print(json.dumps(CASES[options.case](options.folder)))
        return
    with tempfile.TemporaryDirectory() as scratch:
        shape = ["--layers", str(options.layers), "--hidden", str(options.hidden)]
        for name in ("make", *dict.fromkeys(("resident", *options.only))):
            command = [sys.executable, __file__, *shape, "--case", name, "--folder", scratch]
            done = subprocess.run(command, capture_output=True, text=True)
            if name == "make":
                done.check_returncode()
                continue
            row = json.loads(done.stdout.splitlines()[-1]) if not done.returncode else {"error": done.stderr[-3000:]}
            print(told(name, row), flush=True)
            if options.output:
                facts = {"case": name, "layers": options.layers, "hidden": options.hidden, "tokens": TOKENS}
                machine = harness.machine_facts(("brim", "torch", "transformers"))
                machine |= {"device": torch.cuda.get_device_name()}
                with options.output.open("a", encoding="utf-8") as handle:
                    handle.write(json.dumps(facts | {"machine": machine} | row) + "\n")


if __name__ == "__main__":
    main()
