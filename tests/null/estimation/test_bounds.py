"""The safe upper bound is a sum of named margins with reasons."""

from brim import simulate
from brim.catalog import gpu, known_contexts
from brim.core import Category, Op, Phase, Storage, Trace
from brim.estimation.bounds import margins
from brim.estimation.simulation import place_of


def found(ops=(), target="cuda", not_modelled=(), notes=None, config=None, card=None):
    storage = Storage(id=0, bytes=512, category=Category.INPUT, module="", born=1)
    trace = Trace(
        model="m", target=target, ops=ops, storages=(storage,), not_modelled=not_modelled, notes=notes or {}
    )  # fmt: skip
    timeline = simulate(trace)
    return {margin.name: margin for margin in margins(trace, timeline, place_of(card), "", config or {})}


def op(name, module="", moved=1000):
    return Op(name=name, module=module, phase=Phase.FORWARD, step=0, at=0, read_bytes=moved)


def test_a_context_that_nobody_measured_may_be_as_large_as_the_largest_known():
    added = found()
    largest = max(context.bytes for context in known_contexts())
    assert added["context"].bytes == largest - gpu("RTX 4090").context().bytes
    assert list(added) == ["context"]


def test_a_convolution_may_take_a_workspace_as_large_as_its_operands():
    assert (
        found(ops=(op("aten.convolution.default"), op("aten.mm.default", moved=5000)))["convolution workspaces"].bytes
        == 1000
    )


def test_an_operation_that_is_not_modelled_may_take_as_much_as_its_operands():
    added = found(ops=(op("aten.sort.default", moved=700),), not_modelled=("aten.sort: its workspace",))
    assert added["operations not modelled"].bytes == 700
    assert all(margin.why for margin in added.values())


def test_all_tokens_may_choose_one_expert():
    config = {"num_experts": 8, "num_experts_per_tok": 2}
    added = found(ops=(op("aten.mm.default", "layers.0.experts.3"),), notes={"routing": "balanced"}, config=config)
    assert added["routing"].bytes == 3000


def test_a_trace_of_the_cpu_needs_no_margin():
    assert found(target="cpu") == {}
