"""A traced step allocates and frees what a real one would, in its order, and says whose each storage is."""

from __future__ import annotations

import builtins
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from brim.core import Category, Phase, Storage, Trace
from brim.errors import UnsupportedError, UsageError
from brim.predict.tracer import trace


def on_cpu(step, *, steps=1, **options) -> Trace:
    return trace(lambda: step, steps=steps, target="cpu", **options)


def made_by(made: Trace, operation: str) -> list[Storage]:
    """Storages that were allocated while the named operation ran."""
    ops = sorted(made.ops, key=lambda op: op.at)
    found = []
    for storage in made.storages:
        before = [op for op in ops if op.at < storage.born]
        if before and before[-1].name.startswith(f"aten.{operation}"):
            found.append(storage)
    return found


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 128), nn.Linear(128, 32)
        self.register_buffer("scale", torch.ones(32))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(hidden).relu()) * self.scale


def training(optimizer=torch.optim.AdamW):
    model = nn.Sequential(Block(), Block())
    state, batch = optimizer(model.parameters(), lr=0.1), torch.randn(4, 32)

    def step() -> None:
        model(batch).square().mean().backward()
        state.step()
        state.zero_grad()

    return step


def test_views_and_in_place_operations_share_a_storage():
    def step() -> None:
        whole = torch.ones(64, 64)
        whole.t().add_(1)
        whole[0].mul_(2)

    assert [s.bytes for s in on_cpu(step).storages] == [64 * 64 * 4]


def test_a_storage_dies_when_its_last_view_does():
    def step() -> None:
        whole = torch.ones(64)
        part = whole[:2]
        del whole
        torch.ones(32)
        del part
        torch.ones(16)

    whole, middle, last = on_cpu(step).storages
    assert middle.born < whole.died < last.born


def test_autograd_keeps_what_the_backward_pass_needs():
    def step() -> None:
        weight = torch.ones(256, requires_grad=True)
        loss = weight.sin().exp().sum()
        torch.ones(1)
        loss.backward()

    kept = [s for s in on_cpu(step).storages if s.category is Category.ACTIVATION and s.bytes == 1024]
    assert len(kept) == 1, "exp saves its result; sin saves its input, which is the leaf"


def test_every_storage_has_a_category_and_its_module():
    made = trace(training, steps=2, target="cpu")
    sizes = {c: sum(s.bytes for s in made.storages if s.category is c and s.died is None) for c in Category}
    weights = 2 * (32 * 128 * 2 + 128 + 32) * 4
    assert sizes[Category.PARAMETER] == weights
    assert sizes[Category.BUFFER] == 2 * 32 * 4
    assert sizes[Category.INPUT] == 4 * 32 * 4
    assert sizes[Category.OPTIMIZER_STATE] == 2 * weights + 8 * 4, "two moments, and a step counter per parameter"
    gradients = [s for s in made.storages if s.category is Category.GRADIENT]
    assert sum(s.bytes for s in gradients) == 2 * weights
    assert {op.module for op in made.ops if "addmm" in op.name} == {"0.up", "0.down", "1.up", "1.down"}
    assert {op.module for op in made.ops if op.phase is Phase.BACKWARD and op.name == "aten.mm.default"} == {
        "0.up", "0.down", "1.up", "1.down",
    }  # fmt: skip


def test_the_second_step_is_recorded_after_the_first_and_makes_no_optimizer_state():
    made = trace(training, steps=2, target="cpu")
    first, second = made.step_starts
    states = [s for s in made.storages if s.category is Category.OPTIMIZER_STATE]
    assert all(first < s.born < second for s in states)
    assert {op.step for op in made.ops} == {-1, 0, 1}
    assert {op.phase for op in made.ops} == set(Phase)


def test_one_clock_orders_operations_allocations_and_frees():
    made = trace(training, steps=2, target="cpu")
    ticks = [op.at for op in made.ops] + [s.born for s in made.storages]
    ticks += [s.died for s in made.storages if s.died is not None]
    assert len(ticks) == len(set(ticks))


def test_a_product_has_its_flops_and_bytes():
    made = on_cpu(lambda: torch.ones(8, 16) @ torch.ones(16, 4))
    (product,) = [op for op in made.ops if op.name == "aten.mm.default"]
    assert (product.flops, product.read_bytes, product.written_bytes) == (2 * 8 * 16 * 4, (8 * 16 + 16 * 4) * 4, 128)


def test_gradients_that_meet_are_added_in_place():
    def step() -> None:
        weight = torch.ones(1024, requires_grad=True)
        middle = weight * 2
        (middle.sin() + middle.cos()).sum().backward()

    assert not made_by(on_cpu(step), "add_.Tensor")
    assert any(op.name == "aten.add_.Tensor" for op in on_cpu(step).ops)


def test_a_gradient_that_the_user_holds_is_not_overwritten():
    def step() -> None:
        grad = torch.ones(1024)
        middle = torch.ones(1024, requires_grad=True) * 2
        torch.autograd.backward((middle.sin(), middle), (torch.ones(1024), grad))

    assert [s.bytes for s in made_by(on_cpu(step), "add.Tensor")] == [4096]


def test_inference_mode_shows_the_parts_of_composite_operations():
    def step() -> None:
        with torch.inference_mode():
            F.linear(torch.ones(4, 8), torch.ones(16, 8), torch.ones(16))

    assert any(op.name == "aten.addmm.default" for op in on_cpu(step).ops)


def test_a_key_value_cache_is_told_from_activations():
    from transformers import LlamaConfig, LlamaForCausalLM

    def build():
        shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
        model = LlamaForCausalLM(LlamaConfig(**shape, num_key_value_heads=2, vocab_size=100)).eval()
        tokens = torch.randint(0, 100, (2, 16))

        def step() -> None:
            with torch.no_grad():
                model(input_ids=tokens)

        return step

    cached = [s for s in trace(build, steps=1, target="cpu").storages if s.category is Category.KV_CACHE]
    assert [s.bytes for s in cached] == [2 * 2 * 16 * 8 * 4] * 4


def test_tensors_from_outside_are_taken_as_they_are():
    outside = torch.ones(8, 8)
    made = on_cpu(lambda: outside @ outside)
    assert [s.bytes for s in made_by(made, "mm")] == [256]


def test_values_that_follow_from_the_program_can_be_asked_for():
    seen = []

    def step() -> None:
        mask = torch.arange(6) > 3
        seen.append((mask.sum().item(), bool(mask.any()), torch.linspace(0, 1, 3).tolist()))
        seen.append(tuple(mask.nonzero().shape))
        seen.append(tuple(torch.randn(6, 2)[mask].shape))

    on_cpu(step)
    assert seen == [(2, True, [0.0, 0.5, 1.0]), (2, 1), (2, 2)]


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_columns_of_positions_are_contiguous(target: str):
    seen = []

    def step() -> None:
        grid = torch.arange(12).view(3, 4)
        for places in ((grid % 2).nonzero(), nn.Linear(4, 3)(torch.ones(2, 4)).nonzero(), torch.argwhere(grid)):
            seen.append(places.shape[1] == 2 and places.t().is_contiguous())
        seen.append(torch.unique(grid % 2, dim=1).is_contiguous())

    trace(lambda: step, steps=1, target=target)
    assert seen == [True] * 4


def test_a_value_that_is_written_over_is_no_longer_known():
    def step() -> None:
        counts = torch.zeros(4, dtype=torch.long)
        counts.copy_(nn.Linear(4, 4)(torch.ones(4)))
        assert counts.sum().item() > 3

    with pytest.raises(UnsupportedError, match="depends on a value"):
        on_cpu(step, strict=True)


def test_layers_that_are_dropped_with_probability_zero_stay():
    seen = []

    def step() -> None:
        draw = torch.rand(1)
        seen.append((bool(draw > 0.0), bool(torch.rand([]) < 0), bool(draw >= 1), bool(draw < 1.0)))
        draw.add_(1)
        assert draw > 1.0

    on_cpu(step, strict=True)
    assert seen == [(True, False, False, True)]


def test_a_step_that_needs_a_value_names_the_line():
    def step() -> None:
        scores = nn.Linear(4, 4)(torch.ones(4))
        if (scores > 0).any():
            pass

    with pytest.raises(UnsupportedError, match=r"test_tracer\.py:\d+: if \(scores > 0\)\.any\(\)"):
        on_cpu(step, strict=True)


def test_a_loss_may_be_read_for_the_log_but_not_decided_on():
    def log() -> None:
        assert f"{nn.Linear(4, 4)(torch.ones(4)).mean().item() * 2:.3f}" == "2.000"

    def decide() -> None:
        loss = nn.Linear(4, 4)(torch.ones(4)).mean()
        if loss.item() > 1:
            pass

    on_cpu(log, strict=True)
    with pytest.raises(UnsupportedError, match=r"test_tracer\.py:\d+: if loss\.item\(\) > 1"):
        on_cpu(decide, strict=True)


def test_a_gradients_kernel_belongs_to_the_module_whose_forward_asked_for_it():
    """Batch norm counts its batches first, which is no node of the graph: the node before it is the convolution's."""

    def build():
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
        return lambda: model(torch.randn(2, 3, 8, 8)).sum().backward()

    made = trace(build, steps=2, target="cpu")
    modules = {op.name: op.module for op in made.ops if op.phase is Phase.BACKWARD}
    assert modules["aten.convolution_backward.default"] == "0"
    assert modules["aten.native_batch_norm_backward.default"] == "1"
    assert modules["aten.threshold_backward.default"] == "2"


def test_an_operation_without_a_fake_kernel_is_named():
    @torch.library.custom_op("brim_test::opaque", mutates_args=())
    def opaque(value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    with pytest.raises(UnsupportedError, match=r"brim_test\.opaque\.default has no fake kernel"):
        on_cpu(lambda: opaque(torch.ones(4)))


@pytest.mark.parametrize(("wrong", "say"), [({"target": "tpu"}, "target 'tpu'"), ({"steps": 0}, "steps=0")])
def test_a_wrong_call_is_refused(wrong, say):
    with pytest.raises(UsageError, match=say):
        trace(training, **wrong)


def test_build_must_return_the_step():
    with pytest.raises(UsageError, match="It returned int"):
        trace(lambda: 3, target="cpu")


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_nothing_stays_changed_after_a_trace_or_after_an_error(target):
    watched = {
        "max": builtins.max, "available": torch.cuda.is_available, "trunc": nn.init._no_grad_trunc_normal_,
        "swap": torch.utils.swap_tensors, "rng": torch.get_rng_state, "autocast": torch.is_autocast_enabled,
    }  # fmt: skip
    hooks = len(nn.modules.module._global_forward_hooks)
    trace(training, steps=1, target=target)
    with pytest.raises(ZeroDivisionError):
        trace(lambda: 1 // 0, target=target)
    after = {
        "max": builtins.max, "available": torch.cuda.is_available, "trunc": nn.init._no_grad_trunc_normal_,
        "swap": torch.utils.swap_tensors, "rng": torch.get_rng_state, "autocast": torch.is_autocast_enabled,
    }  # fmt: skip
    assert after == watched
    assert len(nn.modules.module._global_forward_hooks) == hooks
    assert type(torch.ones(2)) is torch.Tensor
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.bfloat16
        assert torch.ones(2, dtype=torch.bfloat16).exp().dtype is torch.bfloat16, "on CUDA's list, not on the CPU's"


def test_a_mixture_of_experts_is_traced_with_balanced_routing():
    rows = []

    def step() -> None:
        chosen = nn.Linear(16, 4)(torch.randn(8, 16)).softmax(-1).topk(2, -1).indices
        mask = F.one_hot(chosen, 4).permute(2, 1, 0)
        for expert in (mask.sum(dim=(1, 2)) > 0).nonzero():
            rows.append(torch.where(mask[expert[0]])[1].numel())

    made = on_cpu(step)
    assert rows == [4, 4, 4, 4]
    assert "balanced" in made.notes["routing"]
    assert "routing" not in on_cpu(lambda: torch.ones(3)).notes


def test_a_trace_survives_its_file(tmp_path):
    made = trace(training, steps=1, target="cpu")
    path = tmp_path / "trace.json"
    path.write_text(__import__("json").dumps(made.to_json()))
    assert Trace.read(path) == made


_REPLACED_FIRST = """
import torch
linear = torch.nn.functional.linear
torch.nn.functional.linear = lambda *args: (print("called"), linear(*args))[1]
from brim.predict.tracer import trace

def build():
    net, x = torch.nn.Linear(8, 8), torch.zeros(4, 8)
    return lambda: net(x)

print(len(trace(build, steps=1).storages))  # weight, bias, input, result, and cuBLAS's workspace
"""


@pytest.mark.parametrize("target", ["cuda", "cpu"])
def test_a_linear_function_that_replaces_pytorchs_is_called(monkeypatch, target):
    linear, calls = torch.nn.functional.linear, []

    def replaced(input, weight, bias=None):
        calls.append(tuple(input.shape))
        return linear(input, weight, bias)

    def build():
        net = nn.Linear(8, 8)
        x = torch.zeros(4, 8)
        return lambda: net(x).sum().backward()

    plain = trace(build, steps=1, target=target)
    monkeypatch.setattr(F, "linear", replaced)
    assert trace(build, steps=1, target=target).storages == plain.storages
    assert calls == [(4, 8)]
    assert F.linear is replaced


@pytest.mark.thorough
def test_a_linear_function_may_replace_pytorchs_before_brim_is_imported():
    done = subprocess.run([sys.executable, "-c", _REPLACED_FIRST], capture_output=True, text=True, timeout=250)
    assert (done.stdout.split(), done.returncode) == (["called", "5"], 0), done.stderr


def test_a_caller_may_be_in_inference_mode():
    layer = torch.nn.Linear(4, 4)
    with torch.inference_mode():
        made = trace(lambda: lambda: layer(torch.ones(2, 4)).sum().backward(), target="cpu")
    assert any(op.phase is Phase.BACKWARD for op in made.ops)
