"""Programs rehearsed unchanged: what is said of them, and that it is right."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from brim import cli
from brim.device.environment import find
from brim.processes import python_command
from brim.rehearsal.rehearse import Rehearsal, Request, rehearse_program
from support.planted import plant_modules

if TYPE_CHECKING:
    from conftest import OnDevice

SCRIPTS = Path(__file__).parents[1] / "scripts"
MIB = 1 << 20

TRAINING = """
import argparse, torch
parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=1)
batch = parser.parse_args().batch
model = torch.nn.Sequential(*[torch.nn.Linear(4096, 4096) for _ in range(4)]).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for step in range(100):
    loss = model(torch.randn(batch * 4096, 4096, device="cuda")).square().mean()
    if loss > 1e9:
        break
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    value = loss.item()
    worse = value > 1e9
    if worse:
        break
"""

SHARDED = """
import os, torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
dist.init_process_group("nccl")
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
objects = [None] * dist.get_world_size()
dist.all_gather_object(objects, {"rank": dist.get_rank()})
assert all(one == {"rank": dist.get_rank()} for one in objects)
kind = os.environ["KIND"]
model = torch.nn.Sequential(*[torch.nn.Linear(2048, 2048) for _ in range(4)]).cuda()
if kind == "ddp":
    model = torch.nn.parallel.DistributedDataParallel(model)
else:
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters())
for step in range(20):
    model(torch.randn(64, 2048, device="cuda")).square().mean().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
dist.barrier(group=dist.new_group(backend="gloo"))
dist.destroy_process_group()
"""


def rehearsed(on_device: OnDevice, folder: Path, target: Path, *arguments: str, **asked: Any) -> list[Rehearsal]:
    request = Request(target=str(target), arguments=arguments, **{"gpu": "RTX 4090", **asked})
    with (folder / "output.txt").open("w") as output:
        return rehearse_program(request, on_device.environment, folder, output=output)


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("training") / "train.py"
    made.write_text(TRAINING)
    return made


def test_a_program_ends_when_memory_stops_growing(on_device: OnDevice, training: Path, tmp_path: Path) -> None:
    (found,) = rehearsed(on_device, tmp_path, training)
    assert (found.ended, found.fits) == ("enough", True)
    assert (found.grew_until, found.steps) == (2, 4)  # the states are made after the first backward pass
    weights = 4 * (4096 * 4096 + 4096) * 4
    (device,) = found.devices
    # Weights, gradients, two states; the optimizer's intermediate values; activations and their gradients.
    assert 4 * weights < device.allocated_bytes < 5 * weights + 8 * 64 * MIB
    assert device.allocated_bytes <= device.reserved_bytes
    assert device.process_bytes == device.reserved_bytes + found.context_bytes
    decided = [one for one in found.reads if one["decides"]]
    assert {(one["line"], one["source"], one["times"]) for one in decided} == {
        (10, "if loss > 1e9:", 4), (17, "if worse:", 3)
    }  # fmt: skip
    assert found.host_peak_bytes < 1 << 30, "weights were touched"


def test_running_out_of_memory_is_explained_with_exit_code_3(
    on_device: OnDevice, training: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    snapshot, page = tmp_path / "kept.pickle", tmp_path / "page.html"
    python = str(on_device.environment.python)
    options = ["--gpu", "RTX 3060", "--python", python, "--json", "--snapshot", str(snapshot), "--html", str(page)]
    options += ["--trials", "1"]
    assert cli.main(["rehearse", *options, str(training), "--batch", "64"]) == 3
    captured = capfd.readouterr()
    (found,) = json.loads(captured.out)["processes"]
    assert found["ended"] == "out of memory" and found["fits"] is False
    assert "Tried to allocate" in found["message"] and "torch.OutOfMemoryError" in captured.err
    assert found["memory"][0]["cause"] == "exhausted"
    assert found["memory"][0]["advice"]
    assert found["memory"][0]["replay"]["exact"], "the simulated allocator does not do what PyTorch's did"
    assert page.read_text().startswith("<!doctype html>")
    assert cli.main(["explain", str(snapshot)]) == 0
    assert "train.py" in capfd.readouterr().out


OPTIMIZER = """
import sys, torch
model = torch.nn.Sequential(*[torch.nn.Linear(2048, 2048) for _ in range(16)]).cuda()
fused = "--fused" in sys.argv
optimizer = torch.optim.AdamW(model.parameters(), foreach=not fused, fused=fused)
for step in range(5):
    model(torch.randn(64, 2048, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_what_would_help_is_rehearsed_before_it_is_said_to_fit(
    on_device: OnDevice, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    program, snapshot = tmp_path / "program.py", tmp_path / "kept.pickle"
    program.write_text(OPTIMIZER)
    options = ["--gpu", "RTX 4090", "--vram", "1500MiB", "--python", str(on_device.environment.python), "--json"]
    assert cli.main(["rehearse", *options, "--snapshot", str(snapshot), str(program)]) == 3
    captured = capfd.readouterr()
    assert "Rehearsing it again with: fused optimizer." in captured.err
    (memory,) = json.loads(captured.out)["processes"][0]["memory"]
    held = {share["name"]: share["bytes"] for share in memory["peak"]["by_category"]}
    assert memory["phase"] == "optimizer" and memory["headline"].startswith("Out of memory in the optimizer's step")
    assert held["optimizer_state"] == 2 * held["parameter"]
    assert (
        held["parameter"] <= held["gradient"] < held["parameter"] + 10 * MIB
    )  # and a workspace of autograd's thread
    assert held["optimizer_temporary"] >= 16 * MIB and not held.get("activation")
    first = memory["advice"][0]
    assert first["change"] == "fused optimizer" and first["rehearsed"]["fits"]
    assert cli.main(["rehearse", *options, str(program), "--fused"]) == 0
    (fused,) = json.loads(capfd.readouterr().out)["processes"]
    assert fused["devices"][0]["process_bytes"] == first["rehearsed"]["process_bytes"]
    assert cli.main(["explain", str(snapshot), "--json"]) == 0  # a recording alone tells the same, and no fit
    (recorded,) = json.loads(capfd.readouterr().out)["devices"]
    assert [one["change"] for one in recorded["advice"][:2]] == ["fused optimizer", "foreach=False"]
    assert not any("fits" in one["text"] for one in recorded["advice"])


def test_the_largest_value_that_fits_is_found(
    on_device: OnDevice, training: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    python = str(on_device.environment.python)
    options = ["--gpu", "RTX 3060", "--python", python, "--vary", "batch=1,4,16,64", "--json"]
    assert cli.main(["rehearse", *options, str(training)]) == 0
    document = json.loads(capfd.readouterr().out)
    assert document["largest"] == "16"
    assert [(one["value"], one["fits"]) for one in document["tried"]] == [("16", True), ("64", False)]


ON_THE_CPU = """
import torch
layers = [torch.nn.Linear(8192, 8192) for _ in range(12)]
torch.nn.init.trunc_normal_(layers[1].weight)
with torch.no_grad():
    layers[0].weight[5000:5001].fill_(3)
    layers[0].weight.view(-1)[[1 << 18, (1 << 19) - 1]] = 4  # the first and the last of what is copied at once
model = torch.nn.Sequential(*layers).to(torch.bfloat16)
given = model[0].weight.detach()
assert given[5000].unique().tolist() == [3] and given[4999].unique().tolist() == [0]
assert (given == 4).sum() == 2
assert model[0].bias.unique().numel() > 1000
os.truncate(os.open("kept", os.O_RDWR | os.O_CREAT), 64 << 20)
with open("kept", "r+b") as file:
    file.seek(60 << 20)
    file.write(b"\\xff" * 8)
kept = torch.from_file("kept", shared=False, size=16 << 20, dtype=torch.float32)
assert kept.to(torch.bfloat16)[15 << 20].isnan(), "pages of a file are absent before they are read"
model.cuda()
for row in (0, 1000):  # copies of this size are real
    small = torch.nn.Linear(2048, 2048, bias=False)
    with torch.no_grad():
        small.weight[row, 5] = 5
    there = small.weight.detach().cuda()
    assert torch.equal(there.cpu(), small.weight.detach()) and small.weight[row, 5] == 5
del there
model(torch.ones(1, 8192, device="cuda", dtype=torch.bfloat16)).sum().backward()
"""


def test_weights_that_are_made_on_the_cpu_take_no_ram(on_device: OnDevice, tmp_path: Path) -> None:
    """What is written to them is kept, and so is what is small."""
    program = tmp_path / "program.py"
    program.write_text(f"import os\nos.chdir({str(tmp_path)!r})\n{ON_THE_CPU}")
    (found,) = rehearsed(on_device, tmp_path, program)
    assert found.ended == "finished", found.message
    weights = 12 * 8192**2
    assert 0 <= found.left_bytes - 13 * 4 * weights // 12 <= 2 * 16 * MIB  # the small ones where memory is fresh
    assert 4 * weights < found.devices[0].allocated_bytes < 4 * weights + 300 * MIB
    assert found.host_peak_bytes < 1 << 30, "weights were touched"


def test_ranks_run_without_the_others(on_device: OnDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "sharded.py"
    program.write_text(SHARDED)
    held = {}
    for kind, ranks in (("ddp", (0,)), ("fsdp", (0, 63))):
        monkeypatch.setenv("KIND", kind)
        found = rehearsed(on_device, tmp_path, program, gpu="H100", gpus=64, ranks=ranks)
        assert [(one.rank, one.ended) for one in found] == [(rank, "enough") for rank in ranks]
        assert [[d.device for d in one.devices] for one in found] == [[rank % 8] for rank in ranks]
        held[kind] = {one.devices[0].allocated_bytes for one in found}
    weights = 4 * (2048 * 2048 + 2048) * 4
    assert min(held["ddp"]) > 4 * weights
    assert len(held["fsdp"]) == 1 and max(held["fsdp"]) < 2.5 * weights


def test_models_that_are_not_here_are_made_from_their_configuration(on_device: OnDevice, tmp_path: Path) -> None:
    """Also where transformers is what imports PyTorch."""
    described = {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_layer": 2,
        "n_embd": 768,
        "n_head": 12,
    }
    (tmp_path / "config.json").write_text(json.dumps(described))
    program = tmp_path / "program.py"
    program.write_text(
        "from transformers import AutoModelForCausalLM\n"
        f"model = AutoModelForCausalLM.from_pretrained({str(tmp_path)!r}, dtype='bfloat16').cuda()\n"
        f"assert model.config._name_or_path == model.name_or_path == {str(tmp_path)!r}\n"
        "assert model.lm_head.weight is model.transformer.wte.weight\n"
        "assert model(input_ids=model.dummy_inputs['input_ids'].cuda()).logits.is_cuda\n"
    )
    (found,) = rehearsed(on_device, tmp_path, program, random_weights=True)
    assert found.ended == "finished", found.message
    layer = 12 * 768**2 + 13 * 768
    weights = 2 * (50257 * 768 + 1024 * 768 + 2 * layer + 2 * 768)
    assert weights < found.devices[0].allocated_bytes < weights + (16 << 20)


def test_an_estimate_of_a_program_is_what_its_rehearsal_takes(
    on_device: OnDevice, training: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    if find() is None:
        pytest.skip("the CUDA build is another Python's: `brim estimate` goes by the one that runs it")
    estimates = {}
    for card, batch in (("RTX 3060", "16"), ("RTX 4090", "64")):
        words = ["estimate", "--gpu", card, "--json", str(training), "--", "--batch", batch]
        assert cli.main(words) == (0 if card == "RTX 3060" else 3), capfd.readouterr().err
        captured = capfd.readouterr()
        estimates[batch] = json.loads(captured.out)
        assert "the program really runs" in captured.err
    small, large = estimates["16"], estimates["64"]
    assert cli.main(["rehearse", "--gpu", "RTX 3060", "--json", str(training), "--batch", "16"]) == 0
    (process,) = json.loads(capfd.readouterr().out)["processes"]
    (device,) = process["devices"]
    assert small["peak_bytes"] == {name: device[f"{name}_bytes"] for name in ("allocated", "reserved", "process")}
    assert small["fits"] is True and small["by"] == "rehearsal"
    tensors = sum(small["at_peak_bytes"].values()) - small["at_peak_bytes"]["context"]
    assert tensors == sum(small["per_module"].values()) <= small["peak_bytes"]["allocated"]
    assert large["fits"] is False and large["peak_bytes"]["process"] > 24 << 30, "as if it did fit"
    assert any(note.startswith("it runs out in") and "this helps" in note for note in large["notes"])


def test_an_estimate_names_what_made_up_numbers_decided(
    on_device: OnDevice, training: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    if find() is None:
        pytest.skip("the CUDA build is another Python's: `brim estimate` goes by the one that runs it")
    assert cli.main(["estimate", "--gpu", "RTX 4090", "--json", str(training)]) == 0
    notes = json.loads(capfd.readouterr().out)["notes"]
    assert any(
        note.startswith("decisions by made-up numbers") and f"{training}:10: if loss > 1e9" in note for note in notes
    )
    assert any("brim rehearse --steps runs more" in note for note in notes)
    (tmp_path / "cpu.py").write_text("import torch\ntorch.ones(4)\n")
    assert cli.main(["estimate", "--gpu", "RTX 4090", str(tmp_path / "cpu.py")]) == 2
    assert "The program did not use CUDA." in capfd.readouterr().err


CHEAP = ["mnist", "with_trainer"]
ALL = ["with_accelerate", "with_diffusers"]  # the other scripts use the CPU alone


@pytest.mark.parametrize(
    "name", [*CHEAP, *(pytest.param(name, marks=pytest.mark.slow) for name in ALL)], ids=lambda name: name
)
def test_scripts_are_rehearsed_unchanged(on_device: OnDevice, tmp_path: Path, name: str) -> None:
    copied = tmp_path / f"{name}.py"  # what it writes is written beside it
    copied.write_bytes((SCRIPTS / f"{name}.py").read_bytes())
    (found,) = rehearsed(on_device, tmp_path, copied)
    assert found.fits, found.message
    assert found.devices and found.not_computed == ()


def test_the_page_shows_what_a_rehearsal_prints(on_device: OnDevice, tmp_path: Path) -> None:
    """docs/using.md has some of the lines for tests/scripts/mnist.py, which is copied: it may write beside itself."""
    text = (SCRIPTS.parents[1] / "docs/using.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```\n(It fits on .*?)^```", text, re.MULTILINE | re.DOTALL)
    (tmp_path / "tests/scripts").mkdir(parents=True)
    (tmp_path / "tests/scripts/mnist.py").write_bytes((SCRIPTS / "mnist.py").read_bytes())
    command = [sys.executable, "-m", "brim", "rehearse", "--gpu", "RTX 4090", "--python"]
    command += [str(on_device.environment.python), "tests/scripts/mnist.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env={**os.environ, "COLUMNS": "200"})
    printed = {" ".join(line.split()) for line in done.stdout.splitlines()}
    assert {" ".join(line.split()) for line in block.splitlines()} <= printed, done.stdout + done.stderr


def test_a_step_of_a_notebook_runs_in_a_process_of_its_own(on_device: OnDevice, tmp_path: Path) -> None:
    """``brim.rehearse`` as a program with that build calls it: this one has none."""
    module = tmp_path / "steps.py"
    module.write_text(
        "def step():\n"
        "    import torch\n"
        "    layer = torch.nn.Linear(1024, 1024, device='cuda')\n"
        "    layer(torch.ones(8, 1024, device='cuda')).sum().backward()\n"
    )
    program = (
        "import brim, steps\nfound = brim.rehearse(steps.step, gpu='L40S')\n"
        "print(found.ended, found.devices[0].allocated_bytes)"
    )
    variables = on_device.variables("H100")
    variables["PYTHONPATH"] += f":{tmp_path}"
    done = subprocess.run(
        [on_device.environment.python, "-c", program], env=variables, capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    ended, allocated = done.stdout.split()[-2:]
    assert ended == "finished" and int(allocated) > 8 * MIB


@pytest.mark.parametrize("words", [["SCRIPT"], ["-m", "module"]], ids=["a file", "a module"])
def test_only_the_program_itself_imports_from_the_current_folder(
    on_device: OnDevice, tmp_path: Path, words: list[str]
) -> None:
    """A file imports its own neighbours, and ``-m`` what the current folder has, as for python."""
    here, there = tmp_path / "here", tmp_path / "there"
    for folder in (here, there):
        folder.mkdir()
        (folder / "neighbour.py").write_text(f"NAME = {folder.name!r}\n")
        (folder / "module.py").write_text("import sys, neighbour\nprint('beside', neighbour.NAME, sys.path[0])\n")
    marker = None
    if "-m" not in words:
        marker = plant_modules(here)
    words = [str(there / "module.py") if word == "SCRIPT" else word for word in words]
    brim = python_command("-m", "brim", "rehearse", "--gpu", "L40S", f"--python={on_device.environment.python}")
    done = subprocess.run([*brim, *words], cwd=here, capture_output=True, text=True)
    beside = there if marker is not None else here
    assert f"beside {beside.name} {beside}" in done.stderr, done.stdout + done.stderr
    assert marker is None or not marker.exists(), marker.read_text()


@pytest.mark.parametrize("before", [[], ["--"]])
def test_arguments_of_a_program_go_after_it_with_and_without_dashes(
    on_device: OnDevice, tmp_path: Path, before: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "program.py").write_text("import sys\nprint('given', sys.argv[1:])\n")
    python = f"--python={on_device.environment.python}"
    words = ["rehearse", "--gpu", "L40S", python, str(tmp_path / "program.py"), *before, "--batch", "2", "--", "x"]
    assert cli.main(words) == 0
    assert "given ['--batch', '2', '--', 'x']" in capfd.readouterr().err
