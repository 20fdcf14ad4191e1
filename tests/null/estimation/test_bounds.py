"""The safe upper bound is a sum of named margins with reasons."""

import pytest
import torch

from brim import simulate, trace
from brim.catalog import general_context, gpu, known_contexts
from brim.core import Category, Op, Phase, Storage, Trace
from brim.estimation.bounds import margins
from brim.estimation.simulation import Place, place_of
from brim.predict.tracer import ROUTINGS
from brim.units import MIB


def found(ops=(), target="cuda", not_modelled=(), card=None):
    storage = Storage(id=0, bytes=512, category=Category.INPUT, module="", born=1)
    made = Trace(model="m", target=target, ops=ops, storages=(storage,), not_modelled=not_modelled)
    return {margin.name: margin for margin in margins(made, simulate(made), place_of(card), "")}


def op(name, module="", moved=1000):
    return Op(name=name, module=module, phase=Phase.FORWARD, step=0, at=0, read_bytes=moved)


def test_a_context_that_nobody_measured_may_be_as_large_as_the_largest_known():
    added = found()
    largest = max(context.bytes for context in known_contexts())
    assert added["context"].bytes == largest - gpu("RTX 4090").context().bytes
    assert list(added) == ["context"]


def convolutions():
    """A result of 20 MiB, then its backward pass with both gradients."""
    names = ("aten.convolution.default", "aten.convolution_backward.default")
    phases = (Phase.FORWARD, Phase.BACKWARD)
    ops = tuple(
        Op(name=name, module="stem", phase=phase, step=0, at=10 * i, read_bytes=20 * MIB, written_bytes=20 * MIB)
        for i, (name, phase) in enumerate(zip(names, phases, strict=True))
    )
    lives = ((20 * MIB, 1, None), (20 * MIB, 11, None), (2 * MIB, 12, None))
    storages = tuple(
        Storage(id=i, bytes=size, category=Category.ACTIVATION, module="", born=born, died=died)
        for i, (size, born, died) in enumerate(lives)
    )
    return Trace(model="m", target="cuda", ops=ops, storages=storages)


def test_a_convolution_may_take_a_workspace_as_large_as_its_transformed_operands():
    made = convolutions()
    added = {m.name: m for m in margins(made, simulate(made), place_of(None), "")}["convolution workspaces"]
    # 45 MiB of transforms for each gradient, in segments of 46; the first one's block then serves the weight's
    # gradient of 2 MiB, which has a segment of 20 MiB otherwise.
    assert added.bytes == (46 + 46 - 20) * MIB
    assert "transforms its operands" in added.why


def test_a_workspace_that_the_gpu_has_no_room_for_is_not_taken():
    made = convolutions()
    used = simulate(made).peak_bytes.reserved
    place = Place(name="", total_bytes=used + general_context().bytes + 8 * MIB, context=general_context())
    added = {m.name: m for m in margins(made, simulate(made), place, "")}["convolution workspaces"]
    assert added.bytes == 8 * MIB


def test_an_operation_that_is_not_modelled_may_take_as_much_as_its_operands():
    added = found(ops=(op("aten.sort.default", moved=700),), not_modelled=("aten.sort: its workspace",))
    assert added["operations not modelled"].bytes == 700
    assert all(margin.why for margin in added.values())


def experts(grouped):
    """Eight experts, two of them for each of 64 tokens; one after the other, or grouped."""

    def build():
        router = torch.randn(64, 8, device="cuda", requires_grad=True)
        source = torch.randn(64, 4096, device="cuda", dtype=torch.bfloat16)
        weights = torch.randn(8, 4096, 4096, device="cuda", dtype=torch.bfloat16)

        def one_after_the_other():
            chosen = router.softmax(-1).topk(2, -1).indices
            mask = torch.nn.functional.one_hot(chosen, 8).permute(2, 1, 0)
            for expert in mask.sum(dim=(1, 2)).greater(0).nonzero():
                _, tokens = torch.where(mask[expert[0]])
                source[tokens] @ weights[expert[0]]

        def together():
            chosen = router.softmax(-1).topk(2, -1).indices.flatten()
            order = chosen.argsort()
            ends = torch.histc(chosen[order].int(), bins=8, min=0, max=7).cumsum(0, dtype=torch.int32)
            torch._grouped_mm(source[order // 2], weights, offs=ends)

        return together if grouped else one_after_the_other

    return build


@pytest.mark.parametrize("grouped", [False, True])
def test_the_bound_holds_when_all_tokens_choose_the_same_experts(grouped):
    balanced, crowded = (trace(experts(grouped), steps=1, routing=routing) for routing in ROUTINGS)
    timeline = simulate(balanced)
    added = margins(balanced, timeline, place_of(None), "", crowded)
    most = timeline.peak_bytes.process + sum(margin.bytes for margin in added)
    assert most >= simulate(crowded).peak_bytes.process


def test_experts_that_run_grouped_take_the_same_however_tokens_are_spread():
    balanced, crowded = (trace(experts(grouped=True), steps=1, routing=routing) for routing in ROUTINGS)
    assert "routing" not in balanced.notes
    assert [s.bytes for s in balanced.storages] == [s.bytes for s in crowded.storages]


def test_experts_one_after_the_other_take_more_when_all_tokens_choose_the_same():
    balanced, crowded = (trace(experts(grouped=False), steps=1, routing=routing) for routing in ROUTINGS)
    assert simulate(crowded).peak_bytes.allocated > simulate(balanced).peak_bytes.allocated
    assert "same experts" in crowded.notes["routing"]


def test_a_trace_of_the_cpu_needs_no_margin():
    assert found(target="cpu") == {}
