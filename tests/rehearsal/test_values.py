"""Values on the rehearsal device: what is computed is right, the rest plausible and told; nothing is allocated."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import brim
from brim.errors import UsageError
from brim.estimation.simulation import lives
from brim.rehearsal import force

if TYPE_CHECKING:
    from conftest import OnDevice

PROGRAMS = Path(__file__).with_name("programs")

WHOLE = """
    import subprocess, sys
    import torch
    from brim.rehearsal.force import InForce

    result = {}
    x = torch.arange(10, device="cuda")
    result["compared"] = [(x > 4).any().item(), x[x > 4].tolist(), torch.nonzero(x).shape[0]]
    result["places"] = torch.eye(5, device="cuda").nonzero().stride()
    result["by rows"] = torch.eye(3, device="cuda").to_sparse_csr().crow_indices().tolist()
    result["cast"] = (x.float() * 2).int().tolist()
    ids = torch.tensor([3, 1, 3], device="cuda")
    result["unique"] = [one.tolist() for one in torch.unique(ids, return_counts=True)]
    result["repeated"] = torch.repeat_interleave(torch.tensor([1, 2, 3], device="cuda")).tolist()
    result["counted"] = torch.bincount(ids).tolist()
    result["hot"] = torch.nn.functional.one_hot(ids, 4).sum(0).tolist()
    mask = torch.ones(4, 4096, dtype=torch.bool, device="cuda")
    mask[2, 7:] = False
    result["mask"] = [mask.all().item(), mask.sum(1).tolist(), mask.masked_select(mask).numel()]
    drawn = torch.randint(5, 9, (1000,), device="cuda")
    result["drawn"] = [drawn.min().item(), drawn.max().item(), torch.randperm(50, device="cuda").sort()[0].tolist()]
    torch.manual_seed(3)
    one = torch.randint(0, 99, (8,), device="cuda").tolist()
    torch.manual_seed(3)
    result["again"] = one == torch.randint(0, 99, (8,), device="cuda").tolist()
    result["read so far"] = InForce.now.reads.to_json()

    weights = torch.randn(2000, 2000, device="cuda")
    loss = (weights @ weights).sum()
    result["loss"] = loss.item()
    result["finite"] = [loss.isfinite().item(), torch.isnan(weights).any().item(), torch.isinf(weights).any().item()]
    result["chosen"] = weights.argmax(-1).tolist()
    places = torch.softmax(weights, -1).topk(2)[1]
    result["distinct"] = bool((places[:, 0] != places[:, 1]).all())
    result["within"] = bool(((places >= 0) & (places < 2000)).all())
    if loss > 3:
        result["branch"] = True
    picked = weights.requires_grad_()[weights > 0.5]
    picked.sum().backward()
    drawn, graph = torch.zeros(1000, dtype=torch.int64, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        drawn.random_(5, 9)
        noise = torch.randn(16, device="cuda")
    result["captured"] = [drawn.min().item(), drawn.max().item(), noise.unique().numel()]
    result["reads"] = InForce.now.reads.to_json()
    result["not computed"] = InForce.now.not_computed
    child = "from brim.rehearsal.force import InForce; import torch; print(InForce.now.mode)"
    result["child"] = subprocess.run([sys.executable, "-c", child], capture_output=True, text=True).stdout.strip()
"""

LATE = """
    import torch
    from brim import device

    result = {}
    side, host = torch.cuda.Stream(), torch.arange(1 << 16).pin_memory()
    for waits in (True, False):
        with torch.cuda.stream(side):
            x = host.to("cuda", non_blocking=True)
        if waits:
            torch.cuda.current_stream().wait_stream(side)
        found = (x + 1).sum()
        result["waits" if waits else "does not"] = [found.item(), bool(device.loaded().hazards())]
"""

GRAPH = """
    import torch
    from brim import device

    result, counted = {}, device.loaded()
    x, total, side = torch.ones(8, device="cuda"), torch.zeros(8, device="cuda"), torch.cuda.Stream()
    weights, host = torch.arange(64.0, device="cuda").view(8, 8), torch.arange(8.0).pin_memory()
    with torch.cuda.stream(side):
        x @ weights  # its workspace is not the graph's
    torch.cuda.synchronize()
    graph, copied = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph, stream=side):
        product = (x @ weights) * 2
        total.add_(product)
        drawn = torch.rand(4, device="cuda"), torch.rand(4, device="cuda")
    result["captured"] = total.tolist()
    result["draws"], result["right"] = [], []
    counted.reset()
    for _ in range(2):
        with torch.cuda.stream(copied):
            x.copy_(host, non_blocking=True)
        torch.cuda.current_stream().wait_stream(copied)
        graph.replay()
        copied.wait_stream(torch.cuda.current_stream())
        result["draws"] += [one.tolist() for one in drawn]
        result["right"].append(torch.equal(product, (host @ weights.cpu() * 2).cuda()))
    result["added"] = torch.equal(total, 2 * product)
    result["hazards"] = len(counted.hazards())
    x.fill_(1)
    counted.reset()
    graph.replay()
    result["launches"] = [counted.host_launches(), counted.launches() > 2]
    with torch.cuda.stream(copied):
        x.copy_(host, non_blocking=True)
    result["unordered"] = len(counted.hazards())
    result["refused"] = []
    for name in ("nonzero", "item"):
        try:
            with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=side):
                getattr(x[:1], name)()
        except RuntimeError as error:
            result["refused"].append("capturing" in str(error))
"""


@pytest.fixture(scope="module")
def whole(on_device: OnDevice) -> Any:
    return on_device.run(WHOLE, values="whole")


def test_whole_numbers_and_what_they_size_are_right(whole: Any) -> None:
    assert whole["compared"] == [True, [5, 6, 7, 8, 9], 9]
    assert whole["places"] == [1, 5] and whole["by rows"] == [0, 1, 2, 3]
    assert whole["cast"] == list(range(0, 20, 2))
    assert whole["unique"] == [[1, 3], [1, 2]]
    assert whole["repeated"] == [0, 1, 1, 2, 2, 2]
    assert whole["counted"] == [0, 1, 0, 2]
    assert whole["hot"] == [0, 1, 0, 2]
    assert whole["mask"] == [False, [4096, 4096, 7, 4096], 3 * 4096 + 7]


def test_random_whole_numbers_are_drawn_in_range_and_again(whole: Any) -> None:
    assert whole["drawn"] == [5, 8, list(range(50))]
    assert whole["again"]


def test_numbers_that_are_made_up_are_plausible(whole: Any) -> None:
    assert whole["loss"] == 1.0
    assert whole["finite"] == [True, False, False]
    assert len(set(whole["chosen"])) == 2000 and max(whole["chosen"]) < 2000
    assert whole["distinct"] and whole["within"]


def test_what_is_decided_by_made_up_numbers_is_told(whole: Any) -> None:
    assert whole["read so far"] == []
    decided = [one for one in whole["reads"] if one["decides"]]
    lines = WHOLE.splitlines()
    told = {lines[one["line"] - 1].strip() for one in decided}
    assert {"if loss > 3:", 'result["chosen"] = weights.argmax(-1).tolist()'} <= told
    assert not any(one["decides"] for one in whole["reads"] if "loss.item()" in lines[one["line"] - 1])
    assert not whole["not computed"]


def test_reads_in_a_backward_pass_are_told_without_a_place(whole: Any) -> None:
    assert [one["decides"] for one in whole["reads"] if not one["file"]] == [True]


def test_draws_go_on_while_a_graph_is_captured(whole: Any) -> None:
    assert whole["captured"] == [5, 8, 16]


def test_children_are_under_it_too(whole: Any) -> None:
    assert whole["child"] == "whole"


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(UsageError, match="whole and all"):
        force.environment("some")


def test_what_a_forked_child_has_written_is_copied_there(on_device: OnDevice) -> None:
    """As a worker of a DataLoader does: its pages are its own, though the parent looked at some of its own before."""
    program = """
        import os
        import torch

        x = torch.ones(3 << 20)
        assert x.double().sum() == 3 << 20  # 12 MiB and more, that somebody has written
        child = os.fork()
        if not child:
            y = torch.ones(5 << 20)
            os._exit(0 if float(y.double()[-1]) == 1 and float(y.clone()[-1]) == 1 else 1)
        result = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        """
    assert on_device.run(program, values="whole") == 0


def test_weights_that_nobody_drew_decide_nothing_in_silence(on_device: OnDevice) -> None:
    program = """
        import torch
        from torch import nn
        from brim.rehearsal.force import InForce

        table = nn.Embedding(4096, 1024).cuda()  # 16 MiB
        if table.weight[0].abs().sum() > 1:
            pass
        result = [one["decides"] for one in InForce.now.reads.to_json()]
        """
    assert on_device.run(program, values="whole") == [True]


def test_allocations_are_those_without_values(on_device: OnDevice) -> None:
    program = (PROGRAMS / "allocations.py").read_text(encoding="utf-8")
    plain = on_device.run(program)
    computed = on_device.run(program, values="whole")
    for name, found in computed.items():
        assert found["events"] == plain[name]["events"], name
        assert found["scale"] in (None, 65536.0), "a step was skipped"


def test_operators_compute_what_the_cpu_computes(on_device: OnDevice) -> None:
    found = on_device.run((PROGRAMS / "computed_operators.py").read_text(encoding="utf-8"), timeout_s=280)
    assert found["cases"] >= 230
    assert found["differing"] == {}


@pytest.mark.parametrize("order", ["at_once", "seeded"])
def test_training_computes_the_losses_of_the_cpu(on_device: OnDevice, order: str) -> None:
    program = (PROGRAMS / "computed_training.py").read_text(encoding="utf-8")
    for name, (cpu, device) in on_device.run(program, order=order).items():
        assert device == pytest.approx(cpu, rel=1e-4), name


def test_an_operator_waits_for_what_its_stream_waits_for_and_nothing_else(on_device: OnDevice) -> None:
    found = on_device.run(LATE, values="all", order="late")
    size = 1 << 16
    assert found["waits"] == [size * (size + 1) // 2, False]
    assert found["does not"][1], "a missing wait was not noticed"


@pytest.mark.parametrize("order", ["at_once", "late"])
def test_a_replayed_graph_computes(on_device: OnDevice, order: str) -> None:
    """A capture itself computes nothing; a replay is ordered as a kernel is."""
    found = on_device.run(GRAPH, values="all", order=order)
    assert found["captured"] == [0.0] * 8
    assert found["right"] == [True, True] and found["added"]
    assert len({tuple(draw) for draw in found["draws"]}) == 4
    assert found["launches"][1] and found["launches"][0] <= 3  # the graph, and where its draws begin
    assert found["hazards"] == 0 and (order == "at_once" or found["unordered"])
    assert found["refused"] == [True, True]


@pytest.mark.parametrize("rows", [2048, 16384])
def test_places_among_made_up_numbers_are_spread(on_device: OnDevice, rows: int) -> None:
    """Of a router's few numbers as of many."""
    program = f"""
        import torch
        from brim.rehearsal.force import InForce

        x, w = torch.randn({rows}, 256, device="cuda"), torch.randn(8, 256, device="cuda")
        gates = (x @ w.T).softmax(-1)
        chosen = {{
            "argmax": gates.argmax(-1), "argmin": gates.argmin(-1), "max": gates.max(-1)[1], "min": gates.min(-1)[1],
            "kthvalue": gates.kthvalue(2, -1)[1], "median": gates.median(-1)[1], "topk": gates.topk(2, -1)[1],
            "sort": gates.sort(-1, descending=True)[1][:, 0], "argsort": gates.argsort(-1)[:, 0],
        }}
        result = {{name: places.flatten().bincount(minlength=8).tolist() for name, places in chosen.items()}}
        result["told"] = len(InForce.now.reads.to_json())
        whole = torch.arange(8, device="cuda").float()
        result["computed"] = [whole.argmax().item(), whole.topk(2)[1].tolist()]
        """
    found = on_device.run(program, values="whole")
    assert found.pop("told") > 0
    assert found.pop("computed") == [7, [7, 6]]
    assert len(found) == 9
    for name, counts in found.items():
        assert max(counts) - min(counts) <= 8, (name, counts)


ATTENTION = """
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from brim.rehearsal.force import InForce

    q = torch.randn(1, 8, 64, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward()
    result = [dict(InForce.now.attention)]
    with sdpa_kernel(SDPBackend.MATH):
        torch.nn.functional.scaled_dot_product_attention(q, q, q).sum().backward()
        with torch.inference_mode():
            torch.nn.functional.scaled_dot_product_attention(*[torch.ones_like(q)] * 3)
    assert q.grad is not None
    result.append(dict(InForce.now.attention))
"""


@pytest.mark.parametrize(("card", "kind"), [("H100", "cudnn"), ("A100-SXM4-80GB", "flash")])
def test_which_kernel_attention_took_is_counted(on_device: OnDevice, card: str, kind: str) -> None:
    assert on_device.run(ATTENTION, card, values="whole") == [{kind: 1}, {kind: 1, "math": 2}]


SIZED = "sized_by_values.py"
TRACED = ("nonzero", "mask", "gradient", "edges", "added", "by rows")  # a trace follows all of their kernels


@pytest.fixture(scope="module")
def sized(on_device: OnDevice) -> Any:
    return on_device.run((PROGRAMS / SIZED).read_text(encoding="utf-8"), values="whole")


def test_results_that_values_size_are_those_of_the_cpu(sized: Any) -> None:
    """Positions, and entries of sparse tensors: as many, the same, and of positions in the same order."""
    assert len(sized["taken"]) == 11
    assert sized["differing"] == {}


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("name", TRACED)
def test_kernels_that_values_size_take_what_a_trace_says(sized: Any, name: str) -> None:
    build = runpy.run_path(str(PROGRAMS / SIZED))["CASES"][name]
    made = brim.trace(lambda: build("cuda"), steps=1, target="cuda", capability=(9, 0))
    held = peak = 0
    for storage, born, _ in lives(made):
        if (storage.born if born else storage.died or 0) >= made.step_starts[0]:
            held += -(-storage.bytes // 512) * 512 * (1 if born else -1)
            peak = max(peak, held)
    assert peak == sized["taken"][name]


def test_entries_at_made_up_places_are_plausible_and_told(on_device: OnDevice) -> None:
    """Places that follow from numbers nobody computed are counted; too many to look at are taken as distinct."""
    program = """
        import torch
        from brim.rehearsal.force import InForce

        def reads():
            return sum(one["times"] for one in InForce.now.reads.to_json() if one["decides"])

        def found(places, size, function=torch.Tensor.coalesce):
            entries = torch.sparse_coo_tensor(places, torch.ones(places.size(1), device="cuda"), size)
            told = reads()
            return [function(entries)._nnz(), reads() - told]

        chosen = torch.randn(3000, 2000, device="cuda").argmax(-1)[None]
        many = torch.randint(0, 1000, (1, 5 << 20), device="cuda")  # 40 MiB
        few = torch.arange(3000, device="cuda")[None] % 7
        dense = torch.ones(900, 900, dtype=torch.bool, device="cuda").nonzero().t()
        result = {"chosen": found(chosen, (2000,)), "many": found(many, (1 << 23,)), "cramped": found(many, (1000,))}
        result["known"] = found(few, (2000,))
        result["product"] = found(dense, (900, 900), lambda factor: torch.sparse.mm(factor, factor))
        """
    assert on_device.run(program, values="whole") == {
        "chosen": [2000, 1], "many": [5 << 20, 1], "cramped": [1000, 1], "known": [7, 0], "product": [810_000, 1],
    }  # fmt: skip
