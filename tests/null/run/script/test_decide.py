"""What becomes of models under budgets that are too small, shared, or nothing, and when memory runs out anyway."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from brim.errors import BudgetError
from brim.run.script.needs import within_fraction
from brim.run.script.script import Program
from brim.units import MIB, parse_bytes
from support.launching import OWN, Ended, budgeted, plainly

HEAD = """
import torch
from torch import nn
torch.manual_seed(0)
def net(width=384, count=8):
    return nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(count)])
def train(model, optimizer, steps=3):
    for _ in range(steps):
        loss = model(torch.randn(4, 384)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(loss.item())
"""
Run = Callable[..., tuple[Ended, Ended]]


@pytest.fixture
def both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a program plainly and under a budget."""
    monkeypatch.setenv("BRIM_SCRATCH", "/dev/shm" if Path("/dev/shm").is_dir() else str(tmp_path))

    def run(text: str, **settings: Any) -> tuple[Ended, Ended]:
        path = tmp_path / "program.py"
        path.write_text(HEAD + textwrap.dedent(text))
        what = Program(target=str(path))
        return plainly(what, tmp_path, measure=False), budgeted(what, tmp_path, **settings)

    return run


def same(plain: Ended, ended: Ended) -> list[dict[str, Any]]:
    assert (ended.code, ended.out) == (plain.code, plain.out), ended.err
    models: list[dict[str, Any]] = ended.found["models"]
    return models


@pytest.mark.thorough
def test_a_budget_of_nothing_is_one_clear_error(both: Run) -> None:
    _, ended = both("model = net(); train(model, torch.optim.AdamW(model.parameters()))", ram=0)
    assert ended.code == 3
    assert ended.out == ""
    assert ended.err.startswith("Error: Cannot run Sequential in 0 B of RAM.")
    assert "Traceback" not in ended.err and "--mode off" in ended.err


@pytest.mark.thorough
def test_a_budget_of_nothing_for_a_program_without_models_is_no_matter(both: Run) -> None:
    plain, ended = both("print(torch.randn(3).tolist())", ram=0)
    assert same(plain, ended) == []


@pytest.mark.thorough
def test_models_of_the_process_that_starts_the_program_take_no_share_of_its_budget(both: Run) -> None:
    with torch.device("meta"):
        large = nn.Linear(20_000, 30_000)
    plain, ended = both("model = net(); train(model, torch.optim.AdamW(model.parameters()))", ram=12 * MIB)
    assert same(plain, ended) and large.weight.is_meta


@pytest.mark.thorough
def test_mode_off_changes_nothing(both: Run) -> None:
    plain, ended = both("model = net(); train(model, torch.optim.AdamW(model.parameters()))", ram=0, mode="off")
    assert same(plain, ended) == []
    assert ended.err == plain.err


@pytest.mark.thorough
def test_unified_without_cuda_is_one_clear_error(tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    path.write_text("import torch\nprint('here')\n")
    command = [sys.executable, "-m", "brim", "run", "--mode", "unified", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=without_cuda())
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("Error: Cannot use unified memory.\ntorch sees no CUDA device here.")


def without_cuda() -> dict[str, str]:
    return {**os.environ, "CUDA_VISIBLE_DEVICES": ""}


@pytest.mark.thorough
def test_a_program_that_catches_the_refusal_goes_on(both: Run) -> None:
    _, ended = both("""
        try:
            net()(torch.randn(4, 384))
        except Exception as error:
            print(type(error).__name__)
        print("on")
    """, ram=0)  # fmt: skip
    assert (ended.code, ended.out) == (0, "BudgetError\non\n"), ended.err


@pytest.mark.thorough
def test_two_models_share_the_budget_in_proportion(both: Run) -> None:
    plain, ended = both("""
        first, second = net(), net()
        optimizers = [torch.optim.AdamW(m.parameters()) for m in (first, second)]
        for _ in range(3):
            loss = second(first(torch.randn(4, 384))).square().mean()
            for o in optimizers: o.zero_grad()
            loss.backward()
            for o in optimizers: o.step()
            print(loss.item())
    """, ram=22 * MIB)  # fmt: skip
    first, second = same(plain, ended)
    assert first["choice"] == second["choice"] == "fitted"
    assert first["promised_bytes"]["ram"] + second["promised_bytes"]["ram"] <= 22 * MIB
    assert first["budget_bytes"]["ram"] == pytest.approx(second["budget_bytes"]["ram"], rel=0.3)


@pytest.mark.thorough
def test_one_optimizer_of_two_models_makes_them_one(both: Run) -> None:
    plain, ended = both("""
        import itertools
        first, second = net(), net(count=4)
        optimizer = torch.optim.AdamW(itertools.chain(first.parameters(), second.parameters()))
        train(lambda x: second(first(x)), optimizer)
    """, ram=12 * MIB)  # fmt: skip
    (model,) = same(plain, ended)
    assert (model["model"], model["choice"]) == ("Sequential and Sequential", "fitted")


@pytest.mark.thorough
def test_a_model_that_two_optimizers_train_is_left_alone_where_it_fits_and_refused_where_not(both: Run) -> None:
    text = """
        model = net()
        one, other = torch.optim.SGD(model[:4].parameters(), 0.1), torch.optim.SGD(model[4:].parameters(), 0.1)
        model(torch.randn(4, 384)).sum().backward()
        one.step(), other.step()
        print(sum(p.sum().item() for p in model.parameters()))
    """
    plain, ended = both(text, ram=64 * MIB)
    (model,) = same(plain, ended)
    assert model["choice"] == "untouched" and "2 optimizers train it" in ended.err
    _, ended = both(text, ram=7 * MIB)
    assert ended.code == 3 and "2 optimizers train it" in ended.err


@pytest.mark.thorough
def test_gradients_without_an_optimizer(both: Run) -> None:
    plain, ended = both("""
        model = net()
        for _ in range(3):
            model(torch.randn(4, 384)).square().mean().backward()
            print([p.grad.norm().item() for p in model.parameters()][:3])
            model.zero_grad()
    """, ram=7 * MIB)  # fmt: skip
    (model,) = same(plain, ended)
    assert model["choice"] == "fitted" and model["task"] == "train"


@pytest.mark.thorough
def test_a_model_evaluated_first_and_trained_later_is_planned_twice(both: Run) -> None:
    plain, ended = both("""
        model = net()
        with torch.no_grad():
            print(model(torch.randn(4, 384)).sum().item())
        train(model, torch.optim.AdamW(model.parameters()))
    """, ram=9 * MIB)  # fmt: skip
    (model,) = same(plain, ended)
    assert (model["choice"], model["task"]) == ("fitted", "train")


@pytest.mark.thorough
def test_a_forward_that_decides_on_values_is_planned_all_the_same(both: Run) -> None:
    plain, ended = both("""
        class Branching(nn.Module):
            def __init__(self):
                super().__init__()
                self.net = net()
            def forward(self, x):
                print("forward")
                return self.net(x) if x.sum().item() > -1e9 else x
        model = Branching()
        train(model, torch.optim.AdamW(model.parameters()))
    """, ram=11 * MIB)  # fmt: skip
    (model,) = same(plain, ended)
    assert model["choice"] == "fitted"


@pytest.mark.thorough
def test_the_program_s_own_hooks_numbers_and_warnings_are_as_they_were(both: Run) -> None:
    plain, ended = both("""
        import random, warnings
        import numpy as np
        class Telling(nn.Module):
            def __init__(self):
                super().__init__()
                self.net, self.calls = net(), 0
            def forward(self, x):
                self.calls += 1
                warnings.warn("forward")
                return nn.functional.dropout(self.net(x), 0.3) + random.random() + float(np.random.rand())
        warnings.showwarning = lambda message, *a, **k: print("warned of", message)
        random.seed(0); np.random.seed(0)
        model = Telling()
        seen = []
        model.net.register_forward_hook(lambda m, a, o: seen.append(o.sum().item()))
        train(model, torch.optim.AdamW(model.parameters()))
        print(seen, model.calls, random.random(), np.random.rand(), torch.rand(2).tolist())
    """, ram=11 * MIB)  # fmt: skip
    (model,) = same(plain, ended)
    assert model["choice"] == "fitted"
    assert ended.out.count("warned of forward") == 1


@pytest.mark.thorough
def test_copies_and_files_of_a_fitted_model_are_those_of_a_plain_one(both: Run) -> None:
    plain, ended = both("""
        import copy, io
        model = net()
        model[0].register_forward_hook(lambda m, a, o: o * 1.5)
        optimizer = torch.optim.AdamW(model.parameters())
        train(model, optimizer)
        twin = copy.deepcopy(model)
        part = copy.deepcopy(model[3])
        print(sorted(vars(twin)) , sorted(vars(part)), len(twin[0]._forward_hooks))
        print([k for k, v in vars(twin[0]).items() if callable(v)])
        file = io.BytesIO()
        torch.save(copy.deepcopy(model[5]), file)
        x = torch.randn(4, 384)
        with torch.no_grad():
            print(model(x).sum().item(), twin(x).sum().item(), part(x).sum().item())
        train(twin, torch.optim.AdamW(twin.parameters()))
        train(model, optimizer)
        for name, value in model.state_dict().items():
            print(name, value.double().sum().item())
    """, ram=12 * MIB)  # fmt: skip
    models = same(plain, ended)
    assert models[0]["choice"] == "fitted"


@pytest.mark.thorough
def test_a_call_that_runs_out_of_memory_is_repeated_with_a_smaller_plan(both: Run) -> None:
    text = """
        class Hungry(nn.Module):
            def __init__(self):
                super().__init__()
                self.net, self.drop = net(), nn.Dropout(0.2)
            def forward(self, x):
                x = self.drop(self.net(x))
                global hungry
                if hungry:
                    hungry = False
                    raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes.")
                return x
        hungry = False
        model = Hungry()
        optimizer = torch.optim.AdamW(model.parameters())
        train(model, optimizer)
        hungry = {hungry}
        train(model, optimizer)
    """
    plain, _ = both(text.replace("{hungry}", "False"), mode="off")
    _, ended = both(text.replace("{hungry}", "True"), ram=12 * MIB)
    (model,) = same(plain, ended)
    assert "memory ran out in Hungry: a smaller plan is in force" in ended.err
    assert model["promised_bytes"]["ram"] <= 12 * MIB * 0.8


@pytest.mark.thorough
def test_a_call_with_more_than_was_planned_for_is_told_of_once(both: Run) -> None:
    plain, ended = both("""
        model = net()
        train(model, torch.optim.AdamW(model.parameters()))
        with torch.no_grad():
            for rows in (3, 5, 6):
                print(model(torch.randn(rows, 384)).sum().item())
    """, ram=9 * MIB)  # fmt: skip
    (model,) = same(plain, ended)
    assert model["choice"] == "fitted"
    (told,) = [line for line in ended.err.splitlines() if "and planned for" in line]
    assert told.startswith("brim: Sequential was called with 1,920 numbers and planned for 1,536")


@pytest.mark.thorough
def test_a_call_that_has_left_traces_is_not_repeated_and_explained(both: Run) -> None:
    _, ended = both("""
        model = nn.Sequential(net(), nn.BatchNorm1d(384))
        optimizer = torch.optim.AdamW(model.parameters())
        train(model, optimizer)
        def forward(x):
            nn.Sequential.forward(model, x)
            return torch.empty(1 << 55)
        model.forward = forward
        train(model, optimizer)
    """, ram=12 * MIB)  # fmt: skip
    assert ended.code == 1
    assert "not repeated with less memory, because the call has already had side effects" in ended.err
    assert "can't allocate memory" in ended.err
    assert ended.err.splitlines()[-1].startswith("brim: ")


@pytest.mark.thorough
def test_an_error_of_the_program_shows_no_line_of_brim(both: Run) -> None:
    plain, ended = both("""
        model = net()
        optimizer = torch.optim.AdamW(model.parameters())
        train(model, optimizer)
        model(torch.randn(4, 383))
    """, ram=11 * MIB)  # fmt: skip
    assert plain.code == ended.code == 1
    assert OWN not in ended.err
    assert ended.err.strip().splitlines()[-1] == plain.err.strip().splitlines()[-1]


@pytest.mark.thorough
def test_cuda_that_is_the_cpu_is_planned_as_well(both: Run) -> None:
    text = """
        device = torch.device(DEVICE)
        model = net().to(device)
        optimizer = torch.optim.AdamW(model.parameters())
        scaler = torch.amp.GradScaler(DEVICE, init_scale=64.0)
        for _ in range(3):
            x = torch.randn(4, 256, device=device)
            with torch.autocast(DEVICE, dtype=torch.bfloat16):
                loss = model(x).float().square().mean()
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
            print(loss.item(), norm.item())
    """
    plain, _ = both(text.replace("DEVICE", "'cpu'"), mode="off", device="auto")
    _, ended = both(text.replace("DEVICE", "'cuda'"), ram=11 * MIB, device="cpu")
    (model,) = same(plain, ended)
    assert model["choice"] == "fitted"


@pytest.mark.thorough
def test_two_programs_at_once_keep_to_their_budgets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BRIM_SCRATCH", "/dev/shm" if Path("/dev/shm").is_dir() else str(tmp_path))
    path = tmp_path / "program.py"
    # Both train at the same time: neither begins before the other is there.
    meet = """
        import sys, time
        from pathlib import Path
        Path(sys.argv[1]).touch()
        while not Path(sys.argv[2]).exists(): time.sleep(0.01)
    """
    path.write_text(
        textwrap.dedent(meet) + HEAD + "model = net(); train(model, torch.optim.AdamW(model.parameters()))"
    )
    one, other = str(tmp_path / "one"), str(tmp_path / "other")
    Path(one).touch()
    plain = plainly(Program(target=str(path), arguments=(one, one)), tmp_path, measure=False)
    Path(one).unlink()
    begun = []
    for ram, (mine, its) in ((9 * MIB, (one, other)), (12 * MIB, (other, one))):
        command = [
            sys.executable,
            "-m",
            "brim",
            "run",
            "--device",
            "cpu",
            "--ram",
            str(ram),
            "--report",
            f"{mine}.json",
        ]
        pipe, environment = subprocess.PIPE, {**os.environ, "OMP_NUM_THREADS": "1"}
        run = subprocess.Popen([*command, str(path), mine, its], stdout=pipe, stderr=pipe, text=True, env=environment)
        begun.append((run, ram, f"{mine}.json"))
    for run, ram, report in begun:
        out, err = run.communicate(timeout=250)
        assert (run.returncode, out) == (plain.code, plain.out), err
        (model,) = json.loads(Path(report).read_text())["models"]
        assert model["choice"] == "fitted" and model["held_bytes"]["ram"] <= ram


@pytest.mark.thorough
def test_what_a_program_sets_for_its_allocator_is_left_as_it_is(both: Run) -> None:
    text = """
        import os
        print(os.environ.get("PYTORCH_CUDA_ALLOC_CONF"))
        if DEVICE == "cuda":
            torch.cuda.set_per_process_memory_fraction(0.5)
        model = net().to(DEVICE)
        train(model, torch.optim.AdamW(model.parameters()))
        print(os.environ.get("PYTORCH_CUDA_ALLOC_CONF"))
    """
    plain, _ = both(text.replace("DEVICE", "'cpu'"), mode="off", device="auto")
    _, ended = both(text.replace("DEVICE", "'cuda'"), ram=9 * MIB, device="cpu")
    (model,) = same(plain, ended)
    assert model["choice"] == "fitted"


def test_a_program_s_own_memory_fraction_holds_as_well() -> None:
    budget = {"vram": 8 * MIB, "ram": 64 * MIB}
    assert within_fraction(budget, 1.0, 16 * MIB) == budget
    assert within_fraction(budget, 0.25, 16 * MIB) == {"vram": 4 * MIB, "ram": 64 * MIB}


GENERATES = """
    from transformers import LlamaConfig, LlamaForCausalLM
    config = LlamaConfig(hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4,
                         vocab_size=500, pad_token_id=0)
    model = LlamaForCausalLM(config).eval()
    print(model.generate(torch.randint(5, 500, (1, 8)), max_new_tokens=6, do_sample=False).tolist())
"""


@pytest.mark.thorough
@pytest.mark.parametrize(("ram", "choice"), [("1GiB", "untouched"), ("2200KiB", "fitted")])
def test_generation_keeps_its_cache_to_itself(both: Run, ram: str, choice: str) -> None:
    plain, ended = both(GENERATES, ram=ram)
    (model,) = same(plain, ended)
    assert model["choice"] == choice
    assert "cannot" not in ended.err


@pytest.mark.thorough
def test_a_prediction_leaves_the_attributes_of_a_module_alone(both: Run) -> None:
    plain, ended = both(
        """
        class Counting(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner, self.calls, self.outputs = net(), 0, []
            def forward(self, x):
                self.calls += 1
                self.outputs.append(self.inner(x))
                return self.outputs[-1]
        model = Counting()
        with torch.no_grad():
            model(torch.randn(4, 384))
        print(model.calls, [type(output).__name__ for output in model.outputs])
        """,
        ram="3MiB",
    )
    (model,) = same(plain, ended)
    assert model["choice"] == "fitted"


@pytest.mark.thorough
def test_what_cannot_be_copied_leaves_the_program_as_it_is(both: Run) -> None:
    plain, ended = both(
        """
        import threading
        class Guarded(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = net()
            def forward(self, x, lock):
                with lock:
                    return self.inner(x)
        with torch.no_grad():
            print(Guarded()(torch.randn(4, 384), threading.Lock()).sum().item())
        """,
        ram="8MiB",
    )
    same(plain, ended)
    assert ended.err.startswith("brim: cannot predict a step of Guarded: Cannot copy the inputs of Guarded.")
    assert len(ended.err.splitlines()) == 1


@pytest.mark.thorough
def test_an_error_of_brims_own_is_one_line_and_the_program_runs_as_it_is(
    both: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise KeyError("a library that changed")

    text = "model = net(); train(model, torch.optim.AdamW(model.parameters()))"
    monkeypatch.setattr("brim.run.script.decide.machine", broken)
    plain, ended = both(text, ram="8MiB")
    assert (ended.code, ended.out) == (plain.code, plain.out)
    assert ended.err == "brim: Sequential is left as it is: KeyError: 'a library that changed'\n"
    monkeypatch.undo()
    monkeypatch.setattr("brim.run.script.decide.forward_need", broken)
    monkeypatch.setattr("brim.run.script.decide.Search", broken)
    plain, ended = both(text, ram="2GiB")
    assert (ended.code, ended.out) == (plain.code, plain.out)
    assert ended.err == "brim: Sequential is left as it is: KeyError: 'a library that changed'\n"


LEAST = {
    "trained": """
        model = net()
        train(model, torch.optim.AdamW(model.parameters()), steps=2)
        """,
    "attention": """
        class Layer(nn.Module):
            def __init__(self):
                super().__init__()
                self.attention, self.norm = nn.MultiheadAttention(128, 4), nn.LayerNorm(128)
                self.inner = nn.Sequential(nn.Linear(128, 512), nn.ReLU(), nn.Linear(512, 128))
            def forward(self, x):
                x = self.norm(x + self.attention(x, x, x)[0])
                return x + self.inner(x)
        model = nn.Sequential(*[Layer() for _ in range(4)])
        optimizer = torch.optim.Adam(model.parameters())
        for _ in range(2):
            optimizer.zero_grad()
            loss = model(torch.randn(128, 4, 128, requires_grad=True)).mean()
            loss.backward()
            optimizer.step()
            print(loss.item())
        """,
    "a_part_is_called": """
        model = nn.ModuleList([net()])
        train(model[0], torch.optim.AdamW(model.parameters()), steps=2)
        """,
    "forward": """
        with torch.no_grad():
            print(net()(torch.randn(64, 384)).sum().item())
        """,
    "gradients_without_optimizer": """
        model = net()
        model(torch.randn(4, 384)).sum().backward()
        print(sum(p.grad.abs().sum().item() for p in model.parameters()))
        """,
    "two_models": """
        first, second = net(), net(count=4)
        with torch.no_grad():
            print(second(first(torch.randn(4, 384))).sum().item())
        """,
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", LEAST)
def test_the_budget_that_a_refusal_names_does_when_it_is_given(both: Run, name: str) -> None:
    named = "600Ki"
    for _ in range(2 if name == "two_models" else 1):  # what the second is called with is not known before
        _, refused = both(LEAST[name], ram=f"{named}B")
        assert refused.code == BudgetError.exit_code
        (named,) = re.findall(r"Give --ram (\d+Mi)B or more", refused.err)
    plain, ended = both(LEAST[name], ram=f"{named}B")
    models = same(plain, ended)
    assert "fitted" in [model["choice"] for model in models]
    assert sum(model["promised_bytes"]["ram"] for model in models) <= parse_bytes(f"{named}B")


@pytest.mark.thorough
@pytest.mark.parametrize(("count", "code"), [(260_000, 0), (420_000, BudgetError.exit_code)])
def test_memory_that_the_program_had_before_its_first_call_is_no_growth(both: Run, count: int, code: int) -> None:
    """A decision gives the heap's free memory back, in holes here: 150 MB that the program takes again."""
    _, ended = both(f"""
        def objects(count):
            return [bytes(600) for _ in range(count)]
        many = objects(240_000)
        few = many[::40]  # between holes
        del many
        with torch.no_grad():
            net()(torch.randn(4, 384))
        many = objects({count})
    """, ram="4MiB")  # fmt: skip
    assert ended.code == code, ended.err
    assert ("and its budget is 4 MiB" in ended.err) == bool(code)


@pytest.mark.thorough
@pytest.mark.parametrize("ram", ["2GiB", "100MiB"])
def test_a_model_with_tensors_that_have_no_storage_runs_as_without_a_budget(both: Run, ram: str) -> None:
    plain, ended = both("""
        class Graph(nn.Module):
            def __init__(self):
                super().__init__()
                self.linear = nn.Linear(512, 512)
                self.register_buffer("edges", torch.eye(8).to_sparse())
            def forward(self, x):
                return self.linear(x).sum() + torch.sparse.mm(self.edges, torch.ones(8, 1)).sum()
        with torch.no_grad():
            print(Graph()(torch.ones(1, 512)).item())
    """, ram=ram)  # fmt: skip
    assert (ended.code, ended.out) == (plain.code, plain.out), ended.err


FEW_PARAMETERS = """
    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 3000), nn.Linear(3000, 4))
        def forward(self, x):
            return self.parts(x)
    model = Wide()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        loss = model(torch.rand(ROWS, 10)).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(loss.item())
"""


@pytest.mark.thorough
@pytest.mark.parametrize(("rows", "choice"), [("3_000", "untouched"), ("30_000", "refused")])
def test_few_parameters_are_no_bound_of_activations(both: Run, rows: str, choice: str) -> None:
    plain, ended = both(FEW_PARAMETERS.replace("ROWS", rows), ram="120MiB")
    if choice == "refused":
        assert ended.code == BudgetError.exit_code
        assert ended.err.startswith("Error: Cannot run Wide in 120 MiB of RAM.")
    else:
        assert [model["choice"] for model in same(plain, ended)] == [choice]


@pytest.mark.thorough
def test_many_models_alike_are_looked_at_once(both: Run) -> None:
    plain, ended = both("""
        import time
        models = [nn.Linear(4, 4) for _ in range(300)]
        begin = time.perf_counter()
        total = sum(model(torch.ones(1, 4)).sum() for model in models)
        print(time.perf_counter() - begin < 20, total.item())
    """, ram="2GiB")  # fmt: skip
    assert same(plain, ended) == []
