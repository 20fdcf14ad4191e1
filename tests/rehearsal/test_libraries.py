"""What programs use beyond tensors: recurrent layers, convolutions, graphs, other allocators, GPUs, ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from conftest import OnDevice

MIB = 1 << 20

# Each function is tried; what it raises is in the result under its name, else what it returns.
HEAD = """
    import torch, warnings
    from torch import nn
    from brim.device import loaded
    device, result = loaded(), {}
    def tried(function):
        try:
            result[function.__name__] = function()
        except Exception as error:
            result[function.__name__] = "raised " + repr(error)[:300]
"""

LIBRARIES = """
    def recurrent(kind, dtype=torch.float32, **options):
        layer = kind(32, 64, num_layers=2, **options).to("cuda", dtype)
        inputs = torch.zeros(5, 3, 32, device="cuda", dtype=dtype, requires_grad=True)
        output, _ = layer(inputs)
        output.sum().backward()
        # the weights are views of one buffer, as cuDNN wants them
        buffers = {weight.untyped_storage().data_ptr() for weight in layer.parameters()}
        return [list(output.shape), len(buffers), layer.weight_ih_l1.grad is not None, inputs.grad is not None]

    @tried
    def lstm(): return recurrent(nn.LSTM)
    @tried
    def lstm_both_ways(): return recurrent(nn.LSTM, bidirectional=True, dropout=0.5)
    @tried
    def lstm_projected(): return recurrent(nn.LSTM, proj_size=16)
    @tried
    def gru(): return recurrent(nn.GRU, bias=False)
    @tried
    def gru_half(): return recurrent(nn.GRU, torch.float16)
    @tried
    def rnn(): return recurrent(nn.RNN, nonlinearity="relu")
    @tried
    def packed():
        lengths = torch.tensor([5, 4, 2])
        inputs = nn.utils.rnn.pack_padded_sequence(torch.zeros(5, 3, 32, device="cuda"), lengths)
        nn.LSTM(32, 64).cuda()(inputs)[0].data.sum().backward()

    @tried
    def convolutions():
        for benchmark in (False, True):
            torch.backends.cudnn.benchmark = benchmark
            for memory, dtype in ((torch.contiguous_format, torch.float32), (torch.channels_last, torch.float16)):
                net = nn.Sequential(nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.ConvTranspose2d(8, 8, 3))
                net.to("cuda", dtype=dtype, memory_format=memory)
                net(torch.zeros(2, 8, 16, 16, device="cuda", dtype=dtype).to(memory_format=memory)).sum().backward()

    @tried
    def others():
        numbers = torch.zeros(100, device="cuda")
        torch.fft.irfft(torch.fft.rfft(numbers)), torch.sort(numbers), torch.topk(numbers, 5), numbers.cumsum(0)
        matrix = torch.zeros(32, 32, device="cuda")
        eighth, integers = matrix.to(torch.float8_e4m3fn), matrix.to(torch.int8)
        one = torch.ones((), device="cuda")
        torch._scaled_mm(eighth, eighth.t(), scale_a=one, scale_b=one), torch._int_mm(integers, integers)
        torch.baddbmm(matrix[None], matrix[None], matrix[None])

    @tried
    def graph():
        source, target = torch.zeros(1000).cuda(), torch.ones(1000).cuda()
        captured, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.graph(captured):
            begun = torch.cuda.Event()
            begun.record()
            side.wait_event(begun)
            with torch.cuda.stream(side):
                target.copy_(source)
            torch.cuda.current_stream().wait_stream(side)
            source * 2
        before = [target[0].item(), device.launches()]
        captured.replay()
        return [before[0], target[0].item(), device.launches() - before[1], side.query()]

    @tried
    def timed():
        start, end, plain = (torch.cuda.Event(enable_timing=timing) for timing in (True, True, False))
        start.record(), end.record(), plain.record()
        end.synchronize()
        try:
            start.elapsed_time(plain)
        except (RuntimeError, ValueError):
            return start.elapsed_time(end) >= 0

    @tried
    def second_gpu():
        here = torch.arange(1 << 20).to("cuda:1")
        there = here.to("cuda:0")
        both = [torch.cuda.memory_allocated(i) for i in range(2)]
        return [torch.equal(here.cpu(), there.cpu()), both[1] == here.nbytes, torch.cuda.device_count()]

    @tried
    def profiled():
        with torch.profiler.profile() as profile:
            torch.zeros(10, device="cuda") + 1
        return any("aten::add" in event.name for event in profile.events())
"""

# Whether a factorisation failed is a whole number in memory that other kernels wrote before.
COMPUTED = """
    @tried
    def factorisations():
        square = torch.eye(4, device="cuda")
        batch = square.expand(3, 4, 4).contiguous()
        for matrix in (square, batch):
            for name in ("cholesky", "inv", "qr", "svd", "eigh", "det", "lu_factor", "slogdet", "pinv"):
                getattr(torch.linalg, name)(matrix)
            torch.linalg.solve(matrix, matrix), torch.linalg.lstsq(matrix, matrix)
"""

RANKS = """
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    warnings.simplefilter("ignore")
    dist.init_process_group("nccl", rank=0, world_size=8, store=dist.HashStore(), device_id=torch.device("cuda", 0))

    @tried
    def data_parallel():
        model = nn.parallel.DistributedDataParallel(nn.Linear(10, 10).cuda())
        model(torch.zeros(2, 10, device="cuda")).sum().backward()

    @tried
    def sharded():
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).cuda()
        fully_shard(model, mesh=init_device_mesh("cuda", (2, 4), mesh_dim_names=("copies", "shards")))
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        model(torch.zeros(2, 64, device="cuda")).sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return [list(weight.to_local().shape) for weight in model.parameters()]

    @tried
    def collectives():
        gathered = torch.zeros(32).cuda()
        dist.all_gather_into_tensor(gathered, torch.arange(4.0).cuda())
        guard = torch.full((1 << 10,), 7.0).cuda()  # what lies behind the result of a smaller group stays
        some = dist.new_group([0, 1])
        dist.all_gather_into_tensor(guard[:8], torch.ones(4).cuda(), group=some)
        dist.barrier()
        return [gathered[28:].tolist(), guard[8:].cpu().eq(7).all().item()]
    dist.destroy_process_group()
"""

ALLOCATORS = """
    @tried
    def grows():
        tensors = [torch.empty(30 << 20, dtype=torch.uint8, device="cuda") for _ in range(4)]
        used = device.used_bytes()
        del tensors[1:]
        torch.cuda.empty_cache()
        copy = torch.arange(1000).cuda()
        return [used >> 20, device.used_bytes() >> 20, torch.cuda.memory_reserved() >> 20, copy.sum().is_cuda,
                torch.equal(copy.cpu(), torch.arange(1000))]
"""


@pytest.fixture(scope="module")
def libraries(on_device: OnDevice) -> Any:
    return on_device.run(HEAD + LIBRARIES, gpus=2)


@pytest.fixture(scope="module")
def ranks(on_device: OnDevice) -> Any:
    return on_device.run(HEAD + RANKS)


@pytest.mark.parametrize("layer", ["lstm", "gru", "gru_half", "rnn"])
def test_recurrent_layers_go_through_cudnn(libraries: Any, layer: str) -> None:
    assert libraries[layer] == [[5, 3, 64], 1, True, True]


def test_so_do_their_variants(libraries: Any) -> None:
    assert libraries["lstm_both_ways"] == [[5, 3, 128], 1, True, True]
    assert libraries["lstm_projected"] == [[5, 3, 16], 1, True, True]
    assert libraries["packed"] is None


@pytest.mark.parametrize("what", ["convolutions", "others"])
def test_libraries_run(libraries: Any, what: str) -> None:
    assert libraries[what] is None


def test_factorisations_succeed_where_whole_numbers_are_computed(on_device: OnDevice) -> None:
    assert on_device.run(HEAD + COMPUTED, values="whole") == {"factorisations": None}


def test_a_graphs_copies_happen_when_it_is_replayed(libraries: Any) -> None:
    assert libraries["graph"] == [1.0, 0.0, 1, True]


def test_events_are_timed_where_they_were_made_for_it(libraries: Any) -> None:
    assert libraries["timed"] is True


def test_two_gpus_have_memory_of_their_own(libraries: Any) -> None:
    assert libraries["second_gpu"] == [True, True, 2]


def test_the_profiler_sees_the_hosts_side(libraries: Any) -> None:
    assert libraries["profiled"] is True


def test_one_process_is_a_rank_of_many(ranks: Any) -> None:
    assert ranks["data_parallel"] is None
    assert ranks["sharded"] == [[16, 64], [16], [16, 64], [16]]
    assert ranks["collectives"] == [[0, 1, 2, 3], True]


@pytest.mark.parametrize("kind", ["expandable_segments:True", "backend:cudaMallocAsync", "backend:native"])
def test_pytorchs_allocators_take_and_give_back(
    on_device: OnDevice, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", kind)
    found = on_device.run(HEAD + ALLOCATORS, "T4", context_bytes=100 * MIB)["grows"]
    taken, left, reserved, on_gpu, equal = found
    assert on_gpu and equal and taken >= 100 + 120
    assert left - 100 == pytest.approx(reserved, abs=40) and left < taken - 60
