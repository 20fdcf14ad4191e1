"""A program written for CUDA is traced on a machine that has none."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from brim.core import Category, Trace
from brim.errors import BrimError, OperationError
from brim.estimation.simulation import lives
from brim.predict.tracer import trace
from support.cuda_operators import MADE_ONE, REFUSED

WORKSPACE = 4096 * 1024 * 2 + 16 * 1024 * 8


def on_cuda(step, **options) -> Trace:
    return trace(lambda: step, steps=1, target="cuda", **options)


def sizes(made: Trace) -> list[int]:
    return [s.bytes for s in made.storages if s.category is not Category.WORKSPACE]


def test_only_what_is_put_on_the_gpu_is_recorded():
    def step() -> None:
        torch.ones(1000)
        torch.ones(10, device="cuda")
        torch.ones(20).cuda()
        torch.ones(30).to("cuda:0")
        torch.ones(40).to(torch.device("cuda"), torch.float16)
        torch.ones_like(torch.ones(50, device="cuda"))
        torch.as_tensor([1.0] * 60, device="cuda")
        torch.ones(70, device="cuda").cpu().sin()

    assert sizes(on_cuda(step)) == [40, 80, 120, 80, 200, 200, 240, 280]


def test_what_lies_on_the_meta_device_takes_nothing():
    def step() -> None:
        weight = torch.ones(10, device="cuda")
        shapes = copy.deepcopy(weight).to("meta")
        (shapes + torch.empty(10, device="meta")).sum()
        torch.empty_like(shapes, device="cuda").add_(1)

    made = on_cuda(step)
    assert sizes(made) == [40, 40, 40]
    assert not any("_to_copy" in op.name or "sum" in op.name for op in made.ops)


def test_what_lies_on_the_meta_device_cannot_be_copied_out_of_it():
    def step() -> None:
        nn.Linear(4, 4, device="meta").cuda()

    with pytest.raises(OperationError, match="Cannot copy out of meta tensor"):
        on_cuda(step)


@pytest.mark.parametrize(("non_blocking", "temporary"), [(False, 1 << 20), (True, 2 << 20)])
def test_what_is_laid_out_otherwise_on_its_way_takes_a_copy(non_blocking, temporary):
    """As it comes: converted before where somebody waits for it, after it has come where nobody does."""

    def step() -> None:
        source = torch.ones(8, 16, 64, 64)
        source.to("cuda", torch.bfloat16, non_blocking=non_blocking, memory_format=torch.channels_last)

    assert sorted(sizes(on_cuda(step))) == sorted([temporary, 1 << 20])


def test_a_batch_norm_without_statistics():
    x = torch.ones(2, 3, 4)
    made = on_cuda(lambda: torch.native_batch_norm(x.cuda(), None, None, None, None, True, 0.1, 1e-5))
    assert 2 * 3 * 4 * 4 in sizes(made)


def test_a_program_that_never_names_cuda_is_taken_to_run_there():
    assert sizes(on_cuda(lambda: torch.ones(10))) == [40]


def test_a_module_moves_its_parameters_one_by_one_and_its_copies_on_the_host_do_not_count():
    made = trace(lambda: nn.Linear(8, 4).cuda().forward.__self__.zero_grad, steps=1, target="cuda")
    assert [s.bytes for s in made.storages] == [128, 16]
    assert {s.category for s in made.storages} == {Category.PARAMETER}


def test_the_gpu_looks_present_while_tracing():
    seen = []

    def step() -> None:
        value = torch.ones(4, device="cuda")
        seen.append((torch.cuda.is_available(), value.is_cuda, value.device.type, value.sum().device.index))
        seen.append((torch.cuda.get_device_capability(), torch.ones(2).is_cuda, torch.cuda.memory_allocated()))
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            value.add_(1)

    on_cuda(step, capability=(9, 0))
    assert seen[0] == (True, True, "cuda", 0)
    assert seen[1] == ((9, 0), False, 16)
    assert not torch.cuda.is_available()


def test_with_a_default_device_everything_is_made_there():
    def step() -> None:
        with torch.device("cuda"):
            torch.ones(8)

    assert sizes(on_cuda(step)) == [32]


def test_forward_and_backward_threads_take_a_cublas_workspace_each():
    def step() -> None:
        weight = torch.ones(8, 8, device="cuda", requires_grad=True)
        for _ in range(3):
            (weight @ weight).sum().backward()

    kept = [s for s in on_cuda(step).storages if s.category is Category.WORKSPACE]
    assert [(s.bytes, s.died, s.module) for s in kept] == [(WORKSPACE, None, "cuBLAS")] * 2
    for capability in ((9, 0), (10, 0), (12, 0)):
        newer = on_cuda(step, capability=capability).storages
        assert [s.bytes for s in newer if s.category is Category.WORKSPACE] == [32 << 20] * 2


def test_a_program_that_names_no_device_is_meant_to_be_on_it():
    def step() -> None:
        weight = torch.ones(8, 8, requires_grad=True)
        (weight @ weight).sum().backward()

    kept = [s.bytes for s in on_cuda(step).storages if s.category is Category.WORKSPACE]
    assert kept == [WORKSPACE] * 2


def test_products_on_the_host_take_no_workspace_of_the_device_and_do_not_stand_for_its_first():
    def step() -> None:
        weight = torch.ones(8, 8)
        made = (weight @ weight).cuda().requires_grad_()
        (made @ made).sum().backward()

    kept = [s.bytes for s in on_cuda(step).storages if s.category is Category.WORKSPACE]
    assert kept == [WORKSPACE] * 2


def test_dropout_keeps_a_mask_of_one_byte():
    def step() -> None:
        F.dropout(torch.ones(1000, device="cuda", requires_grad=True), 0.5)

    assert sorted(sizes(on_cuda(step))) == [1000, 4000, 4000]


def test_autocast_follows_the_lists_of_cuda_and_keeps_lowered_weights():
    seen = []

    def step() -> None:
        weight = torch.ones(32, 32, device="cuda", requires_grad=True)
        source = torch.ones(4, 32, device="cuda")
        with torch.autocast("cuda", dtype=torch.bfloat16):
            first, second = F.linear(source, weight), F.linear(source, weight)
            seen.extend([first.dtype, second.dtype, first.exp().dtype, first.softmax(-1).dtype, (first + 1).dtype])
            seen.append(torch.is_autocast_enabled("cuda"))
        with torch.autocast("cuda"):
            seen.append((source @ weight).dtype)

    lowered = [size for size in sizes(on_cuda(step)) if size == 32 * 32 * 2]
    assert seen[:6] == [torch.bfloat16, torch.bfloat16, torch.float32, torch.float32, torch.bfloat16, True]
    assert seen[6] is torch.float16
    assert len(lowered) == 2, "once per region: the copy is kept until the region ends"


def test_autocasts_copy_from_a_pass_without_gradients_has_gradients_later():
    seen = []

    def step() -> None:
        weight, source = torch.ones(32, 32, device="cuda", requires_grad=True), torch.ones(4, 32, device="cuda")
        with torch.autocast("cuda", dtype=torch.bfloat16):
            with torch.no_grad():
                F.linear(source, weight)
            F.linear(source, weight).sum().backward()
        seen.append(weight.grad.shape)

    lowered = [s for s in on_cuda(step).storages if s.bytes == 32 * 32 * 2]
    assert seen == [(32, 32)]
    assert len(lowered) == 2, "the copy and its gradient"


def test_attention_in_parts_keeps_float32_within_itself_under_autocast():
    def step() -> None:
        query = torch.ones(1, 16, 64, device="cuda")
        with torch.autocast("cuda", dtype=torch.bfloat16):
            F.scaled_dot_product_attention(query, query, query)

    assert 16 * 16 * 4 in sizes(on_cuda(step))


def test_a_gradient_scaler_takes_its_step():
    taken = []

    def build():
        model = nn.Linear(8, 8).cuda()
        optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cuda")
        optimizer.register_step_post_hook(lambda *args: taken.append(True))

        def step() -> None:
            with torch.autocast("cuda"):
                loss = model(torch.ones(4, 8, device="cuda")).sum()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

        return step

    trace(build, steps=2, target="cuda")
    assert taken == [True, True]


def test_optimizers_use_their_multi_tensor_form_as_on_a_gpu():
    def build():
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))).cuda()
        optimizer = torch.optim.AdamW(model.parameters())

        def step() -> None:
            model(torch.ones(2, 8, device="cuda")).sum().backward()
            optimizer.step()

        return step

    names = {op.name for op in trace(build, steps=1, target="cuda").ops}
    assert any(name.startswith("aten._foreach_addcdiv_") for name in names)


def attention(dtype=torch.float16, *, size=64, mask=False, dropout=0.0, capability=(8, 0)) -> set[str]:
    def step() -> None:
        query = torch.ones(2, 4, 128, size, dtype=dtype, device="cuda", requires_grad=True)
        bias = torch.zeros(2, 1, 128, 128, dtype=dtype, device="cuda") if mask else None
        F.scaled_dot_product_attention(query, query, query, attn_mask=bias, dropout_p=dropout).sum().backward()

    return {op.name.split(".")[1] for op in on_cuda(step, capability=capability).ops}


@pytest.mark.parametrize(
    ("options", "kernel"),
    [
        ({}, "_scaled_dot_product_flash_attention"),
        ({"dropout": 0.1}, "_scaled_dot_product_flash_attention"),
        ({"mask": True}, "_scaled_dot_product_efficient_attention"),
        ({"dtype": torch.float32}, "_scaled_dot_product_efficient_attention"),
        ({"capability": (7, 5)}, "_scaled_dot_product_efficient_attention"),
        ({"capability": (9, 0)}, "_scaled_dot_product_cudnn_attention"),
        ({"dtype": torch.float64}, "_safe_softmax"),
        ({"dtype": torch.float32, "size": 63}, "_safe_softmax"),
    ],
)
def test_attention_runs_the_kernel_that_cuda_would_choose(options, kernel):
    assert kernel in attention(**options)


def test_flash_attention_saves_no_matrix_of_scores():
    def step() -> None:
        query = torch.ones(1, 8, 512, 64, dtype=torch.float16, device="cuda", requires_grad=True)
        F.scaled_dot_product_attention(query, query, query, is_causal=True).sum().backward()

    assert max(sizes(on_cuda(step))) < 8 * 512 * 512 * 2


def test_checkpointing_works_with_the_pretended_gpu():
    from torch.utils.checkpoint import checkpoint

    def build(save: bool):
        layers = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4)
        ).cuda()
        batch = torch.ones(128, 64, device="cuda")

        def step() -> None:
            hidden = batch
            with torch.autocast("cuda", dtype=torch.bfloat16):
                for layer in layers:
                    hidden = checkpoint(layer, hidden, use_reentrant=False) if save else layer(hidden)
            hidden.sum().backward()

        return step

    from brim.estimation.simulation import simulate

    peaks = [
        simulate(trace(lambda save=save: build(save), steps=2, target="cuda")).peak_bytes.allocated
        for save in (False, True)
    ]
    assert peaks[1] < peaks[0]


def test_a_root_mean_square_norm_keeps_one_number_a_row():
    def step() -> None:
        norm = nn.RMSNorm(1024, device="cuda", dtype=torch.bfloat16)
        norm(torch.ones(64, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)).sum().backward()

    made = on_cuda(step)
    names = [op.name for op in made.ops]
    forward = names.index("aten._fused_rms_norm.default")
    taken = [s.bytes for s in made.storages if made.ops[forward].at < s.born < made.ops[forward + 1].at]
    assert taken == [64 * 1024 * 2, 64 * 4]
    assert "aten._fused_rms_norm_backward.default" in names
    assert not any("rsqrt" in name for name in names)


@pytest.mark.parametrize(
    ("shape", "dims", "taken"),
    [
        ((1024, 4096), (0,), [4096 * 4 * 16 * 128, 128]),  # 16 blocks of threads for each of 4,096 sums
        ((8, 128, 4096), (0, 1), [4096 * 4 * 16 * 128, 128]),
        ((1024, 256), (0,), [256 * 4 * 16 * 128, 8]),
        ((512, 4096), (0,), []),
        ((4096, 1024), (1,), []),
    ],
)
def test_a_sum_of_many_rows_takes_the_parts_of_several_blocks(shape, dims, taken):
    """As PyTorch's CUDA build asks its allocator for them on an H100 (132 multiprocessors)."""
    made = on_cuda(lambda: torch.ones(shape, device="cuda").sum(dims), capability=(9, 0))
    assert [s.bytes for s in made.storages if s.bytes][2:] == taken


def test_packed_sequences_are_as_long_as_they_are_said_to_be():
    seen = []

    def step() -> None:
        lstm = nn.LSTM(8, 16, batch_first=True, bidirectional=True).cuda()
        source, lengths = torch.ones(3, 7, 8, device="cuda", requires_grad=True), torch.tensor([7, 4, 2])
        packed = nn.utils.rnn.pack_padded_sequence(source, lengths, batch_first=True)
        padded, back = nn.utils.rnn.pad_packed_sequence(lstm(packed)[0], batch_first=True)
        padded.sum().backward()
        seen.append((tuple(packed.data.shape), tuple(padded.shape), back.tolist(), tuple(source.grad.shape)))

    on_cuda(step)
    assert seen == [((13, 8), (3, 7, 32), [7, 4, 2], (3, 7, 8))]


def test_autocast_casts_the_last_argument_first_and_leaves_a_float16_softmax_to_its_kernel():
    def step() -> None:
        layer, source = nn.Linear(32, 64).cuda(), torch.ones(4, 32, device="cuda")
        with torch.autocast("cuda", dtype=torch.float16):
            F.log_softmax(layer(source), -1)

    assert sizes(on_cuda(step))[-5:] == [64 * 2, 64 * 32 * 2, 4 * 32 * 2, 4 * 64 * 2, 4 * 64 * 4]


def _flex(attend, **options):
    from torch.nn.attention.flex_attention import create_block_mask

    def build():
        query = torch.ones(2, 4, 256, 64, device="cuda", requires_grad=True)
        mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 256, 256, device="cuda")
        return lambda: attend()(query, query, query, block_mask=mask, **options).sum().backward()

    made = trace(build, steps=1, target="cuda")
    return made, [storage.bytes for storage in made.storages if storage.born > made.step_starts[0]]


def _compiled(**options):
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, **options)


class _Block(nn.Module):
    def forward(self, query, *others, **options):
        from torch.nn.attention.flex_attention import flex_attention

        return flex_attention(query, *others, **options)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("attend", "before"),
    [(_compiled, False), (lambda: torch.compile(_Block()), False),
     pytest.param(_compiled, True, marks=pytest.mark.thorough)],
    ids=["function", "block", "before the trace"],
)  # fmt: skip
def test_flex_attention_that_is_compiled_takes_what_its_kernel_takes(attend, before):
    wrapped = attend() if before else None
    made, during = _flex(attend if wrapped is None else lambda: wrapped)
    assert during[:2] == [2 * 4 * 256 * 64 * 4, 2 * 4 * 256 * 4]
    assert max(during) < 2 * 4 * 256 * 256 * 4
    assert "flex_attention: as its compiled kernel" in made.not_modelled


@pytest.mark.filterwarnings("ignore:flex_attention called without:UserWarning")
@pytest.mark.parametrize("attend", [_Block, lambda: _compiled(backend="eager")], ids=["plain", "eager"])
def test_flex_attention_that_is_not_compiled_makes_all_scores(attend):
    made, during = _flex(attend)
    assert during.count(2 * 4 * 256 * 256 * 4) > 10
    assert made.not_modelled == ()


@pytest.mark.parametrize("move", [lambda it: it.cuda(), lambda it: it.to("cuda")], ids=["cuda", "to"])
def test_what_was_made_before_the_trace_is_copied_to_the_device(move):
    layer, batch = torch.nn.Linear(64, 32), torch.randn(16, 64)

    def build():
        moved = move(layer)
        return lambda: moved(move(batch)).sum().backward()

    made = trace(build, steps=1, target="cuda")
    assert sizes(made)[:2] == [64 * 32 * 4, 32 * 4]  # the layer's weights
    assert 16 * 64 * 4 in sizes(made)


def test_the_gradient_of_what_went_to_the_host_comes_back_to_the_device():
    places = []

    def build():
        weight = torch.randn(300, 500, device="cuda", requires_grad=True)

        def step() -> None:
            loss = (weight.cpu() * 2).sum()
            loss.backward()
            places.append((loss.device.type, weight.grad.device.type))

        return step

    made = trace(build, steps=1)
    assert places == [("cpu", "cuda")]
    assert [storage.bytes for storage in made.storages] == [600_000, 600_000], "weight and gradient"


def test_lazy_modules_take_their_shapes_from_the_first_batch():
    def build(*layers: nn.Module):
        net = nn.Sequential(*layers).cuda()
        net(torch.randn(2, 3, 16, 16, device="cuda"))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

        def step() -> None:
            net(torch.randn(4, 3, 16, 16, device="cuda")).sum().backward()
            optimizer.step()

        return step

    lazy = trace(
        lambda: build(nn.LazyConv2d(8, 3), nn.LazyBatchNorm2d(), nn.ReLU(), nn.Flatten(), nn.LazyLinear(10)), steps=2
    )
    plain = trace(lambda: build(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(1568, 10)))
    assert held(lazy, Category.PARAMETER) == held(plain, Category.PARAMETER)
    assert held(lazy, Category.BUFFER) == held(plain, Category.BUFFER)
    assert [storage.bytes for storage in lazy.storages if storage.born > lazy.step_starts[0]] == [
        storage.bytes for storage in plain.storages if plain.step_starts[0] < storage.born < plain.step_starts[2]
    ]


def held(made: Trace, category: Category) -> int:
    return sum(storage.bytes for storage in made.storages if storage.category is category)


def test_where_to_split_is_read_on_the_host():
    shapes = []

    def build():
        whole = torch.randn(10, 3, device="cuda")

        def step() -> None:
            shapes.append([len(part) for part in torch.tensor_split(whole, torch.tensor([3, 4]))])
            whole.tensor_split(torch.tensor([3], device="cuda"))

        return step

    with pytest.raises(OperationError, match="to be on cpu"):
        trace(build, steps=1)
    assert shapes == [[3, 1, 6]]


def test_a_mask_that_is_broadcast_keeps_its_values():
    shapes = []

    def build():
        source, mask = torch.randn(30, 5, device="cuda"), torch.arange(30, device="cuda")[:, None] < 7
        return lambda: shapes.append(tuple(source.masked_select(mask).shape))

    assert not trace(build, steps=1).notes
    assert shapes == [(35,)]


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: torch.histogram(torch.randn(30, device="cuda"), 5), "histogram.*runs on the CPU only"),
        (lambda: torch.randn(4, device="cuda").as_strided((4,), (2,)), "out of bounds for storage of size 16"),
    ],
)
def test_what_cuda_refuses_is_refused_with_its_line(call, said: str):
    with pytest.raises(BrimError, match=rf"(?s){said}.*test_pretend_cuda\.py:\d+"):
        trace(lambda: call, steps=1)


@pytest.mark.parametrize("name", REFUSED)
def test_dtypes_that_cuda_refuses_are_refused_with_their_line(name: str):
    with pytest.raises(OperationError, match=r"(?s)(dtype|not implemented for).*cuda_operators\.py:\d+"):
        trace(lambda: REFUSED[name], steps=1)


@pytest.mark.parametrize("name", MADE_ONE)
def test_dtypes_that_autocast_makes_one_are_taken(name: str):
    def step():
        with torch.autocast("cuda", dtype=torch.bfloat16):
            MADE_ONE[name]()

    trace(lambda: step, steps=1)


def test_nodes_of_backward_passes_are_numbered_by_the_thread_of_the_device():
    """On PyTorch's CUDA build the numbers are 4, 5, 4 and 12, then 15, 16, 17 and 25."""
    orders = []

    def build():
        net = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 1)).cuda()
        places = torch.rand(40, 2, device="cuda")

        def step():
            at = places.clone().requires_grad_(True)
            value = net(at)
            slope = torch.autograd.grad(value, at, torch.ones_like(value), create_graph=True)[0]
            part = slope[:, :1]
            curve = torch.autograd.grad(part, at, torch.ones_like(part), create_graph=True)[0]
            (slope.pow(2).mean() + curve.pow(2).mean()).backward()
            orders.append([made.grad_fn._sequence_nr() for made in (value, part, slope, curve)])

        return step

    trace(build, steps=2)
    (first, part, slope, curve), second = orders
    assert first == slope < part < curve
    assert second == sorted(second)


def test_unique_elements_are_let_go_once_they_are_joined():
    """TensorCompare.cpp, ``isin_sorting``: 353,280 bytes on PyTorch's CUDA build."""

    def build():
        elements, wanted = torch.arange(5000, device="cuda"), torch.arange(1000, device="cuda")
        return lambda: torch.isin(elements, wanted)

    made = trace(build, steps=1)
    held = peak = 0
    for storage, born, _ in lives(made):
        if (storage.born if born else storage.died or 0) >= made.step_starts[0]:
            held += -(-storage.bytes // 512) * 512 * (1 if born else -1)
            peak = max(peak, held)
    assert peak == 353_280
