"""What runs on CUDA runs on an accelerator that PyTorch asks by other words: one that plays Intel's XPU in RAM."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from brim.errors import ABOVE_BUDGET
from support import simulated_accelerator

TESTS = Path(__file__).parents[1]

HEAD = """
    import json, sys
    from pathlib import Path
    import torch
    from torch import nn
    from support import simulated_accelerator
    xpu = simulated_accelerator.register(Path(sys.argv[1]))
    folder = Path(sys.argv[2])
    import brim

    brim.probe(device="xpu")  # what measuring takes is no part of a run

    def net():
        torch.manual_seed(0)
        return nn.Sequential(*[nn.Sequential(nn.Linear(512, 512), nn.ReLU()) for _ in range(12)])

    def kinds(handle):
        return sorted(set(handle.plan.choices("weight_streaming").values()))

    def within(handle):
        return xpu.max_memory_reserved() <= handle.plan.promise.peak_bytes["vram"] <= handle.plan.budget_bytes["vram"]
"""

FORWARD = """
    x, whole, model = torch.randn(4, 512), net().to("xpu"), net()
    with torch.no_grad():
        wanted = whole(x.to("xpu")).cpu()
        del whole
        xpu.reset_peak_memory_stats()
        handle = brim.fit(model, vram="24MiB", ram="1GiB", device="xpu:0", example=x)
        same = torch.equal(model(x.to("xpu")).cpu(), wanted)
        result = {"kinds": kinds(handle), "same": same, "within": within(handle)}
    handle.remove()
    result["back"] = str(next(model.parameters()).device)
"""

TRAINING = """
    def losses(model, optimizer, x):
        found = []
        for _ in range(3):
            loss = model(x).square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    x, whole, model = torch.randn(4, 512).to("xpu"), net().to("xpu"), net()
    wanted = losses(whole, torch.optim.AdamW(whole.parameters()), x)
    weights = [parameter.detach().cpu() for parameter in whole.parameters()]
    del whole
    xpu.reset_peak_memory_stats()
    optimizer = torch.optim.AdamW(model.parameters())
    handle = brim.fit(model, optimizer, vram="32MiB", ram="1GiB", device="xpu", example=x)
    result = {"same": losses(model, optimizer, x) == wanted, "within": within(handle)}
    handle.remove()
    made = [parameter.detach().cpu() for parameter in model.parameters()]
    result["weights"] = all(torch.equal(one, other) for one, other in zip(made, weights, strict=True))
"""

GENERATION = """
    from transformers import AutoModelForCausalLM
    from support.generating import save

    path, ids = save(folder / "model", "llama"), torch.arange(12)[None].to("xpu")
    whole = AutoModelForCausalLM.from_pretrained(path).to("xpu")
    options = {"max_new_tokens": 8, "do_sample": False}
    with torch.no_grad():
        logits, tokens = whole(ids).logits.cpu(), whole.generate(ids, **options).cpu()
        model = brim.load(path, vram="66MiB", ram="1GiB", device="xpu")
        result = {
            "kinds": kinds(model.brim),
            "same": torch.equal(model(ids).logits.cpu(), logits),
            "tokens": torch.equal(model.generate(ids, **options).cpu(), tokens),
        }
"""

COMMANDS = """
    from brim.cli import main
    from support.tiny_model import save_llama

    save_llama(folder / "model")
    (folder / "text.txt").write_text("".join(f"{n} pieces of text, one after another. " for n in range(400)))
    place = ["--device", "xpu", "--ram", "2GiB", "--vram"]
    model, data = str(folder / "model"), str(folder / "text.txt")
    result = {
        "generate": main(["generate", model, "--prompt", "one two", "--max-new-tokens", "4", *place, "85MiB"]),
        "train": main(["train", model, "--data", data, "--output", str(folder / "out"), "--steps", "2", "--seq", "64",
                       "--batch", "2", *place, "300MiB"]),
        "written": sorted(path.name for path in (folder / "out").glob("*.safetensors")),
        "none": main(["generate", model, "--prompt", "one", "--device", "npu"]),
    }
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if simulated_accelerator.compiler() is None:
        pytest.skip("no C++ compiler")
    return simulated_accelerator.compile_into(tmp_path_factory.mktemp("device"))


def run(library: Path, folder: Path, program: str) -> dict[str, Any]:
    """The program's ``result``, of a process with the device."""
    text = "".join(map(textwrap.dedent, (HEAD, program, '\nprint("\\n" + json.dumps(result))')))
    code = f"import sys; sys.path.insert(0, {str(TESTS)!r})\n{text}"
    done = subprocess.run([sys.executable, "-c", code, library, folder], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found | {"said": done.stderr}


@pytest.mark.thorough
def test_a_forward_pass_is_that_of_the_model_in_place(library: Path, tmp_path: Path) -> None:
    found = run(library, tmp_path, FORWARD)
    assert "stream:ram" in found["kinds"]
    assert (found["same"], found["within"], found["back"]) == (True, True, "cpu")


@pytest.mark.thorough
def test_a_training_is_that_of_the_model_in_place(library: Path, tmp_path: Path) -> None:
    found = run(library, tmp_path, TRAINING)
    assert (found["same"], found["weights"], found["within"]) == (True, True, True)


@pytest.mark.thorough
def test_a_model_is_loaded_and_generates(library: Path, tmp_path: Path) -> None:
    found = run(library, tmp_path, GENERATION)
    assert "stream:ram" in found["kinds"]
    assert (found["same"], found["tokens"]) == (True, True)


@pytest.mark.thorough
def test_commands_take_the_device_and_refuse_one_that_is_not_there(library: Path, tmp_path: Path) -> None:
    found = run(library, tmp_path, COMMANDS)
    # What the device holds is in RAM here, where no promise for RAM has it: 3 says so.
    assert (found["generate"], found["train"], found["written"]) == (0, ABOVE_BUDGET, ["model.safetensors"])
    assert found["none"] == 2
    assert "Ascend NPU" in found["said"]
