"""Seconds of a rank: what hides behind kernels, what kernels wait for, and a pipeline's bubble."""

from dataclasses import replace

import pytest

from brim import catalog
from brim.core import Op, Phase, Trace
from brim.errors import UsageError
from brim.estimation.ranks.job import StageFacts
from brim.estimation.ranks.script import Sent
from brim.estimation.ranks.split import Split
from brim.estimation.ranks.time import (
    EXPERT_PRODUCT,
    StageTime,
    crossed_s,
    host_s,
    kernels_s,
    sent_s,
    stage_time,
    step_time,
    training_hardware,
)  # fmt: skip

RTX = catalog.gpu("RTX 3090")
SPLIT = Split(gpus=4, gpus_per_node=2, zero=3, offload_shards=True)
HARDWARE = training_hardware(RTX)[0]
SECOND = int(HARDWARE.tier("vram").bytes_per_s)  # bytes that a kernel moves in one
OVER = int(RTX.pcie_bytes_per_s)
KERNEL = Op(name="aten.relu.default", module="", phase=Phase.BACKWARD, step=1, at=0, read_bytes=SECOND)
STAGE = StageTime(forward_s=1.0, backward_s=2.0, communicates_s=0.0, once_s=0.5)


def sent(kind, bytes):
    return Sent(kind=kind, axis="shard", bytes=bytes, phase=Phase.BACKWARD)


def backward_s(*moved, in_ram=()):
    return stage_time(facts(sent=moved, in_ram=in_ram), SPLIT, RTX, HARDWARE).backward_s


def facts(**of):
    return StageFacts(
        **{
            "trace": Trace(model="", target="cuda", ops=(), storages=()),
            "ops": (KERNEL,),
            "sent": (),
            "once": (),
            **of,
        }
    )


def test_kernels_that_are_over_sooner_take_as_long_as_their_launches():
    assert stage_time(facts(launches_s=(3.0, 0.5)), SPLIT, RTX, HARDWARE).forward_s == 3
    assert stage_time(facts(launches_s=(3.0, 0.5)), SPLIT, RTX, HARDWARE).backward_s == pytest.approx(1)


def test_shards_come_and_go_behind_kernels():
    assert backward_s(sent("to_device", OVER // 2), sent("to_ram", OVER // 4)) == pytest.approx(1)
    assert backward_s(sent("to_device", OVER), sent("to_ram", OVER)) == pytest.approx(2)


def test_gradients_that_the_cpu_adds_are_waited_for():
    add = Op(
        name="aten.add_.Tensor", module="", phase=Phase.BACKWARD, step=1, at=0, in_ram=True,
        read_bytes=int(catalog.HOST_BYTES_PER_S // 8),
    )  # fmt: skip
    assert host_s([add], SPLIT, catalog.HOST_BYTES_PER_S) == pytest.approx(1 / 4)  # two ranks share a node's RAM
    assert backward_s(sent("to_ram", OVER // 2), in_ram=[add]) == pytest.approx(1 + 1 / 4 + 1 / 2)


def test_a_gpu_without_a_known_link_is_refused():
    with pytest.raises(UsageError, match="link to the host is not known"):
        crossed_s(sent("to_device", 1), replace(RTX, pcie_bytes_per_s=None))


def split_of(stages, micro_batches, **more):
    return Split(gpus=stages, gpus_per_node=stages, pp=stages, global_batch=micro_batches, **more)


@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 4), (4, 8), (4, 16)])
def test_a_pipeline_takes_what_its_paper_says(stages, micro_batches):
    """1F1B: (p - 1) (F + B) beside the work (arXiv 2104.04473)."""
    time = step_time([STAGE] * stages, split_of(stages, micro_batches))
    assert time.bubble_s == 3 * (stages - 1)
    assert time.step_s == 3 * micro_batches + 3 * (stages - 1) + 0.5


def test_chunks_of_a_rank_shorten_its_wait():
    times = [STAGE] * 2
    one, two = (step_time(times, split_of(2, 8, interleave=chunks)) for chunks in (1, 2))
    assert 0 < two.bubble_s < one.bubble_s


def test_an_expert_s_product_takes_its_launch_at_least():
    small = Op(name=EXPERT_PRODUCT, module="", phase=Phase.FORWARD, step=0, at=0, flops=1, dtype="bfloat16")
    assert kernels_s([small] * 160, HARDWARE) == pytest.approx(160 * 9e-6)
    assert kernels_s([replace(small, name="aten.mm.default")], HARDWARE) < 1e-9
    large = replace(small, flops=int(HARDWARE.flops_per_s["bfloat16"]))
    assert kernels_s([large], HARDWARE) == pytest.approx(1.0)


def test_an_all_to_all_is_slower_than_a_ring():
    network = catalog.network(catalog.gpu("B200"))
    split = Split(gpus=8, ep=8)
    ring, all_to_all = (
        sent_s(Sent(kind=kind, axis="ep", bytes=8 << 30, phase=Phase.FORWARD), split, network) - network.latency_s
        for kind in ("all_gather", "all_to_all")
    )
    assert ring / all_to_all == pytest.approx(0.804)


def test_an_all_to_all_over_nodes_goes_through_each_gpu_s_own_share_of_the_network():
    network = catalog.network(catalog.gpu("H100"))
    sent = Sent(kind="all_to_all", axis="ep", bytes=1 << 30, phase=Phase.FORWARD)
    found = sent_s(sent, Split(gpus=64, ep=64), network) - network.latency_s
    assert found == pytest.approx((1 << 30) * 56 / 64 / network.network_bytes_per_s)
