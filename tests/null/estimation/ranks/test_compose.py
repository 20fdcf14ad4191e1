"""A pipeline's step, put together from a trace of two micro-batches, is the one that a program in that order
takes."""

import pytest
import torch
from torch import nn

from brim.core import Category
from brim.estimation.ranks.compose import BACKWARD, FORWARD, OPTIMIZER, Composer, traced_order
from brim.estimation.ranks.schedule import Turn, turns
from brim.estimation.ranks.split import Split
from brim.estimation.simulation import simulate
from brim.predict.dispatch import mark
from brim.predict.tracer import trace

THREE = [Turn(micro_batch=m, chunk=0, forward=forward) for m in range(3) for forward in (True, False)]


def program(order):
    """Three layers that are trained by micro-batches in ``order``."""

    def build():
        model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(3)), nn.GELU()).cuda()
        optimizer = torch.optim.AdamW(model.parameters())

        def step():
            outputs = {}
            for turn in order:
                mark(FORWARD if turn.forward else BACKWARD)
                if turn.forward:
                    outputs[turn.micro_batch] = model(torch.zeros(256, 512, device="cuda"))
                else:
                    output = outputs.pop(turn.micro_batch)
                    output.backward(torch.zeros(256, 512, device="cuda"))
                    del output
            mark(OPTIMIZER)
            optimizer.step()
            optimizer.zero_grad()

        return step

    return trace(build, steps=2, target="cuda")


@pytest.fixture(scope="module")
def composer():
    return Composer(program(THREE), THREE)


@pytest.mark.parametrize("stages", [1, 3, 4])
@pytest.mark.parametrize("micro_batches", [3, 5])
def test_a_composed_step_takes_what_the_program_in_that_order_takes(composer, stages, micro_batches):
    order = turns(Split(gpus=stages, gpus_per_node=stages, pp=stages, global_batch=micro_batches), 0)
    direct, composed = program(order), composer.composed(order)
    one, other = (simulate(made, None).peak_bytes for made in (direct, composed))
    assert (other.allocated, other.reserved) == (one.allocated, one.reserved)


def test_more_in_flight_takes_an_activation_more_each(composer):
    def peak(stages):
        split = Split(gpus=stages, gpus_per_node=stages, pp=stages, global_batch=stages)
        return simulate(composer.composed(turns(split, 0)), None).peak_bytes.allocated

    assert peak(3) - peak(2) == peak(4) - peak(3) > 0


def test_every_storage_of_a_composed_step_is_let_go_as_in_the_trace(composer):
    order = turns(Split(gpus=4, gpus_per_node=4, pp=4, global_batch=8), 0)
    composed = composer.composed(order)
    for storage in composed.storages:
        assert storage.died is None or storage.died > storage.born
    alive = [s for s in composed.storages if s.died is None]
    assert len(alive) == len([s for s in composer.trace.storages if s.died is None])
    assert {s.category for s in alive} >= {Category.PARAMETER, Category.OPTIMIZER_STATE}


def test_one_micro_batchs_kernels_are_those_between_its_marks(composer):
    ops = composer.usual_ops()
    assert [op.name for op in ops if op.name.startswith("brim.")] == [FORWARD, BACKWARD]
    assert {op.phase.value for op in ops if op.flops} == {"forward", "backward"}
    assert all(op.phase.value == "optimizer" for op in composer.optimizer_ops() if op.flops or "adam" in op.name)


def gathering(order, chunks):
    """Chunks whose weights are gathered by a forward that does not find them, and let go by each backward, as FSDP2
    does it; what is sent is kept until the step ends."""

    def build():
        models = [nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256)).cuda() for _ in range(chunks)]
        optimizer = torch.optim.AdamW([weight for model in models for weight in model.parameters()])

        def step():
            outputs, gathered, sent = {}, {}, []
            for turn in order:
                mark(FORWARD if turn.forward else BACKWARD)
                if turn.chunk not in gathered:
                    gathered[turn.chunk] = torch.zeros(4 << 20, device="cuda")
                if turn.forward:
                    made = models[turn.chunk](torch.zeros(512, 256, device="cuda"))
                    outputs[turn] = made
                    sent.append(made.detach())
                else:
                    outputs.pop(Turn(micro_batch=turn.micro_batch, chunk=turn.chunk, forward=True)).sum().backward()
                    del gathered[turn.chunk]
                made = None
            mark(OPTIMIZER)
            sent.clear()
            optimizer.step()
            optimizer.zero_grad()

        return step

    return trace(build, steps=2, target="cuda")


@pytest.mark.parametrize(
    ("stages", "chunks", "micro_batches", "stage"), [(2, 1, 7, 0), (4, 1, 9, 1), (2, 2, 8, 0), (2, 2, 6, 1)]
)
def test_chunks_and_weights_that_forwards_share_are_composed_as_they_run(stages, chunks, micro_batches, stage):
    split = Split(
        gpus=stages, gpus_per_node=stages, pp=stages, interleave=chunks, global_batch=micro_batches
    )  # fmt: skip
    order = turns(split, stage)
    few = traced_order(order)
    assert len(few) < len(order)
    composed = Composer(gathering(few, chunks), few).composed(order)
    one, other = (simulate(made, None).peak_bytes for made in (gathering(order, chunks), composed))
    assert (other.allocated, other.reserved) == (one.allocated, one.reserved)


def test_few_turns_are_traced_as_they_are():
    order = turns(Split(gpus=2, gpus_per_node=2, pp=2, global_batch=2), 0)
    assert traced_order(order) == order
