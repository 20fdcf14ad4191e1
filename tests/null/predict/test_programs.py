"""What people write in their training loops works in a trace, or is refused in words that name the line."""

from __future__ import annotations

import copy
import gc
import math
import socket
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.checkpoint import checkpoint

from brim.core import Category, Trace
from brim.errors import UnsupportedError
from brim.estimation.simulation import simulate
from brim.predict.tracer import trace
from brim.predict.values.known import known

Step = Callable[[], Any]


def on_cuda(build: Callable[[], Step], steps: int = 2, **options: Any) -> Trace:
    return trace(build, steps=steps, target="cuda", **options)


def parameter_bytes(made: Trace) -> int:
    return sum(storage.bytes for storage in made.storages if storage.category is Category.PARAMETER)


def model_on_the_cpu() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))


def model() -> nn.Module:
    return model_on_the_cpu().to("cuda")


def test_a_shuffling_data_loader_with_workers_gives_every_batch():
    seen: list[tuple[int, ...]] = []

    def build() -> Step:
        data = torch.utils.data.TensorDataset(torch.randn(20, 16), torch.randint(0, 4, (20,)))
        loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True, num_workers=2, pin_memory=True)
        layer = model()

        def step() -> None:
            for source, classes in loader:
                nn.functional.cross_entropy(layer(source.cuda()), classes.cuda()).backward()
                seen.append(tuple(source.shape))

        return step

    on_cuda(build, steps=1)
    assert seen == [(8, 16), (8, 16), (4, 16)]


def test_numbers_for_the_log_are_read_and_printed():
    lines: list[str] = []

    def build() -> Step:
        layer, source, classes = model(), torch.randn(8, 16).cuda(), torch.randint(0, 4, (8,)).cuda()

        def step() -> None:
            logits = layer(source)
            loss = nn.functional.cross_entropy(logits, classes)
            right = (logits.argmax(1) == classes).sum().item()
            perplexity = math.exp(loss.item())
            lines.append(f"{loss.item():.1f} {0 <= right <= 8} {perplexity:.1f} {sum([loss.item(), 1.0]):.1f}")

        return step

    on_cuda(build)
    assert lines == ["1.0 True 2.7 2.0", "0.9 True 2.5 1.9"], "losses shrink"


def _shape(count: Any, _: torch.Tensor) -> None:
    torch.zeros(4, count, device="cuda")


def _slice(count: Any, source: torch.Tensor) -> None:
    source[:, :count]


def _loop(count: Any, _: torch.Tensor) -> None:
    for _unused in range(count):
        pass


def _compare(count: Any, _: torch.Tensor) -> None:
    if count > 3:
        pass


def _round_trip(count: Any, _: torch.Tensor) -> None:
    if torch.tensor([count]).item() > 3:
        pass


def _less(count: Any, _: torch.Tensor) -> None:
    if np.less(count, 3):
        pass


@pytest.mark.parametrize("use", [_shape, _slice, _loop, _compare, _round_trip, _less])
def test_a_number_that_depends_on_weights_is_no_shape_and_no_decision_of_a_strict_trace(use):
    def build() -> Step:
        layer, source = model(), torch.randn(8, 16).cuda()
        return lambda: use(layer(source).argmax(-1).max().item(), source)

    with pytest.raises(UnsupportedError, match=r"item\(\) read.*\n.*test_programs\.py:\d+"):
        on_cuda(build, strict=True)
    on_cuda(build)


def test_whole_numbers_that_are_drawn_are_sizes_and_decisions():
    seen = []

    def build() -> Step:
        lengths, source = torch.randint(1, 10, (8,)).cuda(), torch.randn(8, 16).cuda()

        def step() -> None:
            longest = lengths.max().item()
            mask = torch.arange(longest, device="cuda")[None] < lengths[:, None]
            packed = nn.utils.rnn.pad_sequence([source[0, :count] for count in lengths.tolist()], batch_first=True)
            seen.append(
                (longest, int(mask.sum()), tuple(packed.shape), mask.nonzero().size(0), lengths.unique().numel())
            )

        return step

    torch.manual_seed(7)
    on_cuda(build, steps=1, strict=True)
    after = torch.rand(())
    torch.manual_seed(7)
    assert torch.equal(after, torch.rand(())), "the generator's state is restored"
    torch.manual_seed(7)
    true = torch.randint(1, 10, (8,))
    count = int(true.sum())
    assert seen == [(int(true.max()), count, (8, int(true.max())), count, true.unique().numel())]


def test_a_decision_on_a_loss_is_made_and_the_trace_says_where():
    stopped = []

    def build() -> Step:
        layer, source, best = model(), torch.randn(8, 16).cuda(), math.inf

        def step() -> None:
            nonlocal best
            loss = layer(source).square().mean()
            if loss.item() < best:
                best = loss.item()
            while loss > 0.5:
                loss = layer(source).square().mean()
            stopped.append(True)

        return step

    made = on_cuda(build)
    assert stopped == [True, True]
    assert made.notes["decided"].count("test_programs.py:") == 2
    with pytest.raises(UnsupportedError, match="item"):
        on_cuda(build, strict=True)


@pytest.mark.parametrize(("search", "tolerance"), [(None, 1e-3), ("strong_wolfe", 1e-9)])
def test_an_optimizer_that_tests_for_convergence_goes_on_as_long_as_it_may(search, tolerance):
    """L-BFGS keeps a history of what each of its iterations changed."""
    seen = []

    def build() -> Step:
        layer, source = model(), torch.randn(8, 16).cuda()
        optimizer = torch.optim.LBFGS(layer.parameters(), max_iter=12, tolerance_grad=tolerance,
                                      tolerance_change=tolerance, history_size=16, line_search_fn=search)  # fmt: skip

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = layer(source).square().mean()
            loss.backward()
            return loss

        def step() -> None:
            optimizer.step(closure)
            state = optimizer.state_dict()["state"][0]
            seen.append((state["n_iter"], len(state["old_dirs"]), state["func_evals"]))

        return step

    on_cuda(build, steps=2)
    evaluations = 12 if search is None else 13
    assert seen == [(12, 11, evaluations), (24, 16, 2 * evaluations)]


def test_the_closure_of_an_optimizer_is_the_program_s_own():
    seen = []

    def build() -> Step:
        layer, source = model(), torch.randn(8, 16).cuda()
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)

        def closure() -> torch.Tensor:
            loss = layer(source).square().mean()
            seen.append((bool(loss > -1e-6), loss.item() > -1e-6))
            loss.backward()
            return loss

        return lambda: optimizer.step(closure)

    on_cuda(build)
    assert set(seen) == {(True, True)}


@pytest.mark.parametrize(("assume", "kept"), [(1.0, 32), (0.25, 8)])
def test_a_mask_of_what_a_model_computed_is_full_or_has_the_share_that_is_assumed(assume, kept):
    seen = []

    def build() -> Step:
        layer, source = model(), torch.randn(8, 16).cuda()

        def step() -> None:
            scores = layer(source)
            mask = scores.sigmoid() > 0.9
            seen.append((scores[mask].numel(), mask.nonzero().size(0), int(mask.sum()), bool(mask.any())))

        return step

    made = on_cuda(build, steps=1, assume=assume)
    assert seen == [(kept, kept, kept, True)]
    assert "test_programs.py:" in made.notes["assumed"]


def test_values_of_weights_are_neither_computed_nor_kept():
    def build() -> Step:
        layer = nn.Linear(256, 256).cuda()

        def step() -> None:
            out = layer(torch.randn(64, 256, device="cuda"))
            assert getattr(out, "_brim_known", None) is None
            assert known(layer.weight.detach()) is None

        return step

    on_cuda(build)


def test_a_generator_of_the_program_draws_as_it_would():
    seen = []

    def build() -> Step:
        generator = torch.Generator().manual_seed(3)
        few, many = torch.randperm(10, generator=generator), torch.randperm(20_000, generator=generator)
        seen.append((few.tolist(), many[:500].unique().numel()))
        return lambda: None

    on_cuda(build)
    assert seen == [(torch.randperm(10, generator=torch.Generator().manual_seed(3)).tolist(), 500)]


def test_that_any_is_negative_is_a_check_that_holds():
    def build() -> Step:
        layer = model()

        def step() -> None:
            spread = layer(torch.randn(8, 16).cuda())
            if torch.any(spread < 0):
                raise ValueError
            assert spread[spread < 0].numel() == 32

        return step

    on_cuda(build)


def test_large_draws_are_computed_when_somebody_asks():
    def step() -> None:
        images = torch.randn(64, 3, 64, 64)
        kept = images.cuda().flatten(1) > 0
        assert images._brim_known.computed is None
        assert 0.4 < kept.float().mean().item() < 0.6
        images[0].zero_()
        assert not images[0].any()
        assert (images[1] != 0).all()

    on_cuda(lambda: step, steps=1, strict=True)


def test_values_are_finite_and_the_trace_says_that_this_was_asked():
    def build() -> Step:
        layer, source = model(), torch.randn(8, 16).cuda()

        def step() -> None:
            loss = layer(source).square().mean()
            assert torch.isfinite(loss)
            assert not torch.isnan(loss).any()
            assert math.isfinite(loss.item())
            assert not np.isnan(loss.item())
            loss.backward()

        return step

    assert on_cuda(build).notes["finite"] == "values are taken to be finite where the program asks"
    assert "finite" not in on_cuda(lambda: lambda: model()(torch.randn(8, 16).cuda())).notes


@pytest.fixture
def checking() -> Iterator[None]:
    """Distributions check what they are given, as they do until something in the process is compiled."""
    before = torch.distributions.Distribution._validate_args
    torch.distributions.Distribution.set_default_validate_args(True)
    yield
    torch.distributions.Distribution.set_default_validate_args(before)


def test_what_a_distribution_checks_is_taken_to_hold_and_the_trace_says_so(checking):
    def build() -> Step:
        layer, actions = nn.Linear(16, 4).cuda(), torch.randint(4, (8,)).cuda()
        source = torch.randn(8, 16).cuda()

        def step() -> None:
            policy = torch.distributions.Categorical(logits=layer(source))
            spread = torch.distributions.Normal(layer(source), layer(source).exp())
            (-policy.log_prob(actions).mean() - spread.log_prob(spread.rsample()).mean()).backward()

        return step

    assert "checks that all of a tensor is true" in on_cuda(build).notes["checks"]
    assert "checks" not in on_cuda(lambda: lambda: model()(torch.randn(8, 16).cuda())).notes


def test_a_check_that_fails_on_known_values_fails_in_the_trace_too(checking):
    def build() -> Step:
        return lambda: torch.distributions.Normal(torch.zeros(3), -torch.ones(3))

    with pytest.raises(ValueError, match="scale"):
        on_cuda(build)


def test_values_are_known_through_indices_and_masks():
    seen = []

    def build() -> Step:
        def step() -> None:
            numbers, mask = torch.arange(6).float(), torch.arange(6) % 2 == 0
            picked = numbers[torch.tensor([5, 3])]
            kept = numbers[mask]
            kept[kept == 4] = 7.0
            seen.append((picked.tolist(), kept.tolist(), bool((kept > 6).any())))

        return step

    on_cuda(build, steps=1)
    assert seen == [([5.0, 3.0], [0.0, 2.0, 7.0], True)]


def test_an_index_of_unknown_values_has_unknown_values():
    def build() -> Step:
        layer = model()

        def step() -> None:
            if layer(torch.randn(4, 16).cuda())[torch.tensor([0])].any():
                pass

        return step

    with pytest.raises(UnsupportedError, match="needs the values"):
        on_cuda(build, strict=True)


def test_values_for_numpy_are_given_where_known_and_refused_where_not():
    def computed() -> Step:
        def step() -> None:
            assert torch.arange(3).numpy().tolist() == [0, 1, 2]

        return step

    def unknown() -> Step:
        layer = model()

        def step() -> None:
            scores = layer(torch.randn(3, 16).cuda()).detach().cpu().numpy()
            assert scores.shape == (3, 4)
            assert np.isfinite(scores).all()

        return step

    on_cuda(computed)
    assert "test_programs.py:" in on_cuda(unknown).notes["made up"]
    with pytest.raises(UnsupportedError, match=r"numpy\(\) needs the values.*\n.*test_programs\.py"):
        on_cuda(unknown, strict=True)


def test_a_default_device_takes_what_names_no_device():
    def build() -> Step:
        torch.set_default_device("cuda")
        layer, source = nn.Linear(16, 4), torch.randn(8, 16)
        assert torch.get_default_device().type == "cuda"
        return lambda: layer(source).sum().backward()

    assert parameter_bytes(on_cuda(build)) == (16 * 4 + 4) * 4
    assert torch.get_default_device().type == "cpu"


def test_what_a_program_replaces_or_copies_from_is_let_go():
    """A new head in the place of the old one; layers that are copies of a template."""

    def replaced() -> Step:
        layer = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 1000)).cuda()
        layer[1] = nn.Linear(32, 4).cuda()
        return lambda: layer(torch.randn(8, 16).cuda())

    def copied() -> Step:
        template = nn.Linear(16, 16).cuda()
        layers = nn.Sequential(*(copy.deepcopy(template) for _ in range(3)))
        del template
        return lambda: layers(torch.randn(8, 16).cuda())

    def alive(made: Trace) -> int:
        return sum(s.bytes for s in made.storages if s.category is Category.PARAMETER and s.died is None)

    assert alive(on_cuda(replaced)) == (16 * 32 + 32 + 32 * 4 + 4) * 4
    assert alive(on_cuda(copied)) == 3 * (16 * 16 + 16) * 4


def test_checkpoints_are_loaded_to_the_gpu_and_none_is_written(tmp_path):
    file = tmp_path / "weights.pt"
    torch.save({"weight": torch.ones(16, 4)}, file)

    def build() -> Step:
        found = torch.load(file, map_location="cuda")
        assert found["weight"].is_cuda

        def step() -> None:
            found["weight"].sum()
            torch.save(found, tmp_path / "later.pt")

        return step

    assert [s.bytes for s in on_cuda(build).storages][:1] == [16 * 4 * 4]
    assert not (tmp_path / "later.pt").exists()


def test_files_of_safetensors_are_loaded_without_reading_them(tmp_path):
    from safetensors.torch import load_file, save_file

    save_file({"weight": torch.ones(16, 4)}, tmp_path / "weights.safetensors")

    def build() -> Step:
        weight = load_file(tmp_path / "weights.safetensors")["weight"].cuda()
        assert weight.shape == (16, 4)
        return lambda: weight.sum()

    assert on_cuda(build).storages[0].bytes == 16 * 4 * 4


def test_memory_statistics_and_one_replica_are_there():
    def build() -> Step:
        layer, source = nn.DataParallel(model()), torch.cuda.FloatTensor(8, 16).fill_(0)

        def step() -> None:
            with torch.cuda.device(0):
                layer(source).sum().backward()
            assert torch.cuda.memory_stats()["allocated_bytes.all.current"] == torch.cuda.memory_allocated() > 0
            assert "bytes allocated" in torch.cuda.memory_summary()

        return step

    on_cuda(build)


def test_a_graphed_callable_is_refused():
    def build() -> Step:
        torch.cuda.make_graphed_callables(model(), (torch.randn(8, 16, device="cuda"),))
        return lambda: None

    with pytest.raises(UnsupportedError, match="A graphed callable cannot be traced"):
        on_cuda(build)


def test_what_a_cuda_graph_captures_is_traced_and_replayed_for_nothing():
    def build() -> Step:
        layer, source = model(), torch.randn(8, 16, device="cuda")
        graph, second = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            assert torch.cuda.is_current_stream_capturing()
            result = layer(source)
            result.sum().backward()
        with torch.cuda.graph(second, pool=graph.pool()):
            result.exp_()
        assert not torch.cuda.is_current_stream_capturing()

        def step() -> None:
            layer.zero_grad(set_to_none=False)
            source.copy_(torch.randn(8, 16))
            graph.replay()
            second.replay()

        return step

    made = on_cuda(build, steps=2)
    assert all(storage.born < made.step_starts[0] for storage in made.storages)
    streams = {storage.stream for storage in made.storages if storage.category is Category.GRADIENT}
    assert len(streams) == 1 and streams != {0}, "in the graph's pool"
    assert {storage.stream for storage in made.storages if storage.category is Category.PARAMETER} == {0}


def test_pools_of_graphs_keep_what_they_have_when_the_cache_is_emptied():
    def build() -> Step:
        source = torch.ones(8 << 20, device="cuda")  # 32 MiB
        for _ in range(2):
            with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
                (source + 1).sum()
        torch.cuda.empty_cache()
        return lambda: None

    reserved = simulate(on_cuda(build)).peak_bytes.reserved
    assert reserved >= 3 * (32 << 20), "the second capture does not get the first one's"


@pytest.fixture
def one_rank(monkeypatch):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        monkeypatch.setenv("MASTER_PORT", str(free.getsockname()[1]))
    for name, value in (("MASTER_ADDR", "127.0.0.1"), ("RANK", "0"), ("WORLD_SIZE", "1")):
        monkeypatch.setenv(name, value)
    yield
    assert not torch.distributed.is_initialized(), "a group that a program makes ends with its trace"


def test_buckets_have_all_gradients_though_backward_passes_are_nested(one_rank):
    """Of checkpoints that are reentrant each has a backward pass of its own."""

    def build() -> Step:
        torch.distributed.init_process_group("nccl")
        blocks = nn.Sequential(*[nn.Linear(16, 16) for _ in range(4)]).cuda()
        net = nn.parallel.DistributedDataParallel(Checkpointed(blocks), device_ids=[0])

        def step() -> None:
            net.zero_grad()
            net(torch.randn(8, 16, device="cuda").requires_grad_()).sum().backward()

        return step

    class Checkpointed(nn.Module):
        def __init__(self, blocks: nn.Sequential) -> None:
            super().__init__()
            self.blocks = blocks

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=True)
            return x

    made = on_cuda(build, steps=3)
    weights = 4 * (16 * 16 + 16) * 4
    buckets = [storage for storage in made.storages if storage.bytes == weights]
    assert buckets[-1].born > made.step_starts[1], "made anew, in the order in which gradients came"
    assert buckets[-1].died is None


def test_a_wrapper_that_is_gone_leaves_no_hook(one_rank):
    def build() -> Step:
        torch.distributed.init_process_group("nccl", "env://", None, 1, 0)
        layer = nn.Linear(4, 4).cuda()
        net = nn.parallel.DistributedDataParallel(layer, device_ids=[0])
        assert layer.weight._post_accumulate_grad_hooks
        del net
        gc.collect()
        assert not layer.weight._post_accumulate_grad_hooks
        return lambda: None

    on_cuda(build)


def test_several_ranks_are_seen_wherever_they_are_given():
    def build() -> Step:
        torch.distributed.init_process_group("nccl", "env://", None, 2, 0)
        return lambda: None

    with pytest.raises(UnsupportedError, match="group of 2 ranks"):
        on_cuda(build)


def test_data_parallel_training_over_a_group_of_one_asks_for_nccl(one_rank):
    def build() -> Step:
        torch.distributed.init_process_group("nccl", device_id=torch.device("cuda", 0))
        net = nn.parallel.DistributedDataParallel(model(), device_ids=[0])
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

        def step() -> None:
            optimizer.zero_grad()
            net(torch.randn(8, 16, device="cuda")).sum().backward()
            optimizer.step()

        return step

    made = on_cuda(build)
    weights = sum(parameter.numel() for parameter in model_on_the_cpu().parameters()) * 4
    assert parameter_bytes(made) == weights
    assert weights in [storage.bytes for storage in made.storages], "a bucket of all gradients"


def test_a_group_of_several_ranks_is_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "8")

    def build() -> Step:
        torch.distributed.init_process_group("nccl")
        return lambda: None

    with pytest.raises(UnsupportedError, match=r"(?s)group of 8 ranks.*test_programs\.py:\d+"):
        on_cuda(build)


@pytest.mark.parametrize(
    ("shape", "temporary"),
    [
        ((256, 4096), 4096 * 8),  # in place; positions of one row
        ((256, 8192), 16777216 + 25166079),  # row by row in one launch
        ((64, 8192), 2 * 4194304 + 2097152 + 6400511),  # all at once
        ((1, 8192), 65536 + 109055),  # one row
    ],
)
def test_sorting_takes_what_its_kernel_takes(shape, temporary):
    """As PyTorch's CUDA build asks its allocator; published peaks of sparsemax on an RTX 3090 show the first two."""
    made = on_cuda(lambda: lambda: torch.randn(shape, device="cuda").sort(-1), steps=1)
    (sort,) = (op for op in made.ops if op.name.startswith("aten.sort"))
    taken = sorted((s for s in made.storages if s.born > sort.at), key=lambda s: s.born)[2:]  # after both results
    held = peak = 0
    for _, change in sorted([(s.born, s.bytes) for s in taken] + [(s.died or 0, -s.bytes) for s in taken]):
        held += change
        peak = max(peak, held)
    assert peak == temporary


def test_a_linear_layer_adds_its_bias_in_place_to_what_is_not_contiguous():
    layer_bytes = 8 * 6 * 4

    def build() -> Step:
        layer = nn.Linear(4, 4)

        def step() -> None:
            layer(torch.randn(6, 8, 4).transpose(0, 1))

        return step

    made = trace(build, steps=1, target="cpu")
    adds = [op for op in made.ops if op.name.startswith("aten.add")]
    during = [s for s in made.storages if adds and adds[0].at < s.born and s.bytes >= layer_bytes]
    assert len(adds) == 1
    assert during == []


def test_the_loss_of_ctc_is_traced_where_lengths_are_known():
    def build() -> Step:
        logits = torch.randn(50, 2, 20, requires_grad=True)

        def step() -> None:
            targets, lengths = torch.ones(2, 8, dtype=torch.long), torch.tensor([8, 6])
            logps = logits.log_softmax(-1)
            nn.functional.ctc_loss(logps, targets, torch.tensor([50, 50]), lengths).backward()

        return step

    made = trace(build, steps=1, target="cpu")
    assert 2 * 50 * (2 * 8 + 1) * 4 in [storage.bytes for storage in made.storages]


@pytest.mark.parametrize("where", ["within", "in place", "decorated"])
def test_what_is_compiled_runs_as_it_is_written_and_the_trace_says_so(where):
    def build(compiled: bool = True) -> Step:
        layer, source, other = model(), torch.randn(8, 16).cuda(), nn.functional.relu
        if compiled and where == "within":
            layer = torch.compile(layer)._orig_mod
        elif compiled and where == "in place":
            layer.compile()
        elif compiled:
            other = torch.compile(dynamic=True)(other)
        return lambda: other(layer(source)).sum().backward()

    plain, made = on_cuda(lambda: build(compiled=False)), on_cuda(build)
    assert made.not_modelled == ("torch.compile: run as it is written",)
    assert plain.not_modelled == ()
    assert made.storages == plain.storages


@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")  # of the compiler, about itself
def test_what_was_compiled_before_the_trace_is_not_compiled_in_it():
    compiled = torch.compile(nn.functional.gelu, backend="eager")

    def build() -> Step:
        source = torch.randn(8, 16).cuda()
        return lambda: compiled(source)

    assert on_cuda(build).not_modelled == ("torch.compile: run as it is written",)


def test_a_batch_of_more_than_a_million_tokens_is_asked_about_its_mask():
    def step() -> None:
        mask = torch.ones(512, 4096, dtype=torch.int64, device="cuda")
        assert mask.all()
        assert int(mask.sum(-1).max()) == 4096

    on_cuda(lambda: step, steps=1)


def test_a_collective_says_that_the_buffers_of_its_library_are_not_counted():
    def step() -> None:
        torch.ops._c10d_functional.all_reduce(torch.randn(64, device="cuda"), "sum", "0")

    assert on_cuda(lambda: step).not_modelled == ("_c10d_functional.all_reduce: NCCL's buffers",)


def test_a_generator_of_the_gpu_draws():
    def build() -> Step:
        generator = torch.Generator(device="cuda").manual_seed(3)
        assert generator.device.type == "cuda"
        assert isinstance(torch.default_generator, torch.Generator)
        return lambda: torch.randn(16, generator=generator, device="cuda")

    assert [s.bytes for s in on_cuda(build).storages][:1] == [16 * 4]


def test_a_checkpoint_that_the_program_wrote_comes_back(tmp_path):
    def build() -> Step:
        weights = {"layer": {"weight": torch.ones(8, 4).cuda()}, "steps": 3}

        def step() -> None:
            torch.save(weights, tmp_path / "new.pt")
            (tmp_path / "new.pt").rename(tmp_path / "last.pt")
            found = torch.load(tmp_path / "last.pt", weights_only=True)
            assert found["steps"] == 3
            assert found["layer"]["weight"].is_cuda
            assert torch.load(tmp_path / "last.pt", map_location="cpu")["layer"]["weight"].sum().item() == 32

        return step

    on_cuda(build)


def test_numbers_in_tensors_are_read_where_a_list_of_them_is_made_one():
    def build() -> Step:
        parts = [torch.tensor([1, 2, 3]).max() + 1, 7]
        assert torch.tensor(parts, device="cuda").tolist() == [4, 7]
        assert torch.tensor([[torch.tensor(2), 1]]).shape == (1, 2)
        return lambda: None

    on_cuda(build)


def test_tensors_are_compared_by_their_values_and_a_check_of_weights_holds():
    layer = nn.Linear(4, 4)

    def build() -> Step:
        assert torch.equal(torch.arange(3), torch.tensor([0, 1, 2]))
        assert not torch.equal(torch.arange(3), torch.tensor([0, 1, 3]))
        assert not torch.allclose(torch.ones(3), torch.zeros(3))
        return lambda: torch.allclose(layer(torch.ones(2, 4)), torch.zeros(2, 4)) or 1 / 0

    assert "checks" in on_cuda(build).notes


def test_a_stream_keeps_a_tensor_and_a_module_goes_to_meta():
    def build() -> Step:
        layer = nn.Linear(4, 4).cuda()
        layer.weight.data.record_stream(torch.cuda.current_stream())
        empty = nn.Linear(4, 4).cuda().to("meta")
        assert empty.weight.device.type == "meta"
        return lambda: layer(torch.ones(2, 4, device="cuda"))

    on_cuda(build)


def test_jagged_rows_are_traced_by_their_values():
    def build() -> Step:
        embedding, head = nn.Embedding(50, 16).cuda(), nn.Linear(16, 3).cuda()

        def step() -> None:
            words = torch.nested.nested_tensor([torch.arange(n) for n in (3, 7)], layout=torch.jagged).cuda()
            assert words.device.type == "cuda"
            assert words.is_cuda
            torch.nested.to_padded_tensor(head(embedding(words)), 0.0).sum().backward()

        return step

    sizes = [s.bytes for s in on_cuda(build).storages]
    assert 10 * 16 * 4 in sizes  # ten words, and no padding
    assert embedding_bytes(sizes) == 50 * 16 * 4


def embedding_bytes(sizes: list[int]) -> int:
    return max(size for size in sizes if size < 1 << 20)


def test_an_operator_of_another_library_that_chooses_keeps_all():
    library = torch.library.Library("torchvision", "FRAGMENT")
    if not hasattr(torch.ops.torchvision, "nms"):
        library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

        def fake(dets, scores, iou_threshold):
            return dets.new_empty(torch.library.get_ctx().new_dynamic_size(), dtype=torch.long)

        torch.library.register_fake("torchvision::nms", fake, lib=library)

    def build() -> Step:
        boxes, scores = torch.rand(20, 4).cuda(), torch.rand(20).cuda()
        return lambda: boxes[torch.ops.torchvision.nms(boxes, scores, 0.5)]

    made = on_cuda(build)
    assert "test_programs.py" in made.notes["assumed"]
    assert [s.bytes for s in made.storages if s.born >= made.step_starts[0]][:2] == [20 * 8, 20 * 16]


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_zeros_of_forward_gradients_are_viewed_without_memory():
    """A Hessian under vmap, in whose backward pass tensors are added that are known to be zeros."""

    def build() -> Step:
        layer = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1)).cuda()
        points = torch.rand(16, 2).cuda()

        def step() -> None:
            torch.func.vmap(torch.func.hessian(lambda point: layer(point).squeeze(-1)))(points).sum().backward()
            assert all(p.grad.device.type == "cuda" for p in layer.parameters() if p.grad is not None)

        return step

    assert parameter_bytes(on_cuda(build)) == (2 * 8 + 8 + 8 + 1) * 4
    zeros = torch._efficientzerotensor((4, 2))
    assert zeros.view(2, 4)._is_zerotensor()
    seen = []
    on_cuda(lambda: lambda: seen.append(torch._efficientzerotensor((4, 2), device="cuda").view(8)))
    assert all(type(zeros) is FakeTensor for zeros in seen)


@pytest.mark.thorough
def test_counters_that_an_optimizer_counts_on_together_are_known():
    """Adam makes one of each parameter outside of the trace's sight, and reads all of them in one line."""
    seen = []

    def build() -> Step:
        scales = [nn.Parameter(torch.ones(4, device="cuda")) for _ in range(400)]
        optimizer = torch.optim.AdamW(scales)

        def step() -> None:
            torch.stack(scales).sum().backward()
            optimizer.step()
            seen.append(optimizer.state[scales[0]]["step"].item())

        return step

    assert on_cuda(build, steps=2).notes == {}
    assert seen == [1.0, 2.0]
    assert all(type(number) is float for number in seen)


def test_a_group_of_one_listens_to_no_other_machine(one_rank):
    before = listening()

    def build() -> Step:
        torch.distributed.init_process_group("nccl")
        heard.update(listening() - before)
        net = nn.Linear(4, 4).cuda()
        return lambda: net(torch.ones(2, 4, device="cuda")).sum().backward()

    heard: set[str] = set()
    on_cuda(build)
    assert heard <= {"127.0.0.1", "::1"}


def listening() -> set[str]:
    """Addresses at which this process takes connections."""
    return {c.laddr.ip for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN}
