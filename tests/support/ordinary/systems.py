"""Programs around streams, graphs, compilers, process groups of one, nested tensors and files."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from support.ordinary import Step, program

WIDTH = 128


def _net(classes: int = 10) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(64, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, classes)
    )


def _data(rows: int = 128) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(rows, 64).cuda(), (torch.arange(rows) % 10).cuda()


def _fit(parameters: Iterable[torch.Tensor], loss_of: Callable[[], torch.Tensor]) -> Step:
    optimizer = torch.optim.AdamW(list(parameters), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        loss_of().backward()
        optimizer.step()

    return step


@program
def nested_tensors_of_sentences() -> Step:
    embed, project, head = nn.Embedding(500, 64).cuda(), nn.Linear(64, 192).cuda(), nn.Linear(64, 4).cuda()
    lengths = (12, 30, 7, 22)

    def loss_of() -> torch.Tensor:
        words = torch.nested.nested_tensor([torch.arange(n) % 500 for n in lengths], layout=torch.jagged).cuda()
        q, k, v = (part.unflatten(-1, (4, 16)).transpose(1, 2) for part in project(embed(words)).chunk(3, dim=-1))
        out = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2)
        padded = torch.nested.to_padded_tensor(head(out), 0.0)
        return F.cross_entropy(padded.sum(1), torch.arange(4).cuda())

    return _fit([*embed.parameters(), *project.parameters(), *head.parameters()], loss_of)


@program
def transformer_inference_with_padding() -> Step:
    """The fast path of nn.TransformerEncoder, which drops padding by a nested tensor."""
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    net = nn.TransformerEncoder(layer, 2).cuda().eval()
    x, padding = torch.randn(4, 24, 64).cuda(), torch.zeros(4, 24, dtype=torch.bool)
    padding[1, 20:], padding[2, 15:] = True, True

    def step() -> None:
        with torch.inference_mode():
            net(x, src_key_padding_mask=padding.cuda())

    return step


@program
def attention_module_with_masks_and_weights() -> Step:
    attention = nn.MultiheadAttention(64, 4, dropout=0.1, batch_first=True, kdim=32, vdim=32).cuda()
    query, memory = torch.randn(8, 16, 64).cuda(), torch.randn(8, 20, 32).cuda()
    padding = (torch.arange(20)[None] >= torch.arange(12, 20)[:, None]).cuda()

    def loss_of() -> torch.Tensor:
        out, weights = attention(query, memory, memory, key_padding_mask=padding, average_attn_weights=False)
        return out.pow(2).mean() + 0.1 * (weights * (weights + 1e-9).log()).sum(-1).mean()

    return _fit(attention.parameters(), loss_of)


def _group_of_one() -> None:
    import torch.distributed as dist

    if not dist.is_initialized():
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
        dist.init_process_group("gloo", rank=0, world_size=1)


@program
def metrics_reduced_over_a_group_of_one() -> Step:
    import torch.distributed as dist

    _group_of_one()
    net, (x, y) = _net().cuda(), _data()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def step() -> None:
        out = net(x)
        loss = F.cross_entropy(out, y)
        optimizer.zero_grad()
        loss.backward()
        for parameter in net.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
        optimizer.step()
        right = (out.argmax(1) == y).float().mean()
        dist.all_reduce(right)
        gathered = [torch.zeros_like(right) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, right)
        dist.barrier()
        if dist.get_rank() == 0:
            right.item()

    return step


@program
def data_parallel_over_a_group_of_one() -> Step:
    _group_of_one()
    net = nn.parallel.DistributedDataParallel(_net().cuda(), device_ids=[0])
    x, y = _data()
    return _fit(net.parameters(), lambda: F.cross_entropy(net(x), y))


@program
def training_captured_in_a_cuda_graph() -> Step:
    net, (x, y) = _net().cuda(), _data()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad(set_to_none=True)
        F.cross_entropy(net(x), y).backward()
        optimizer.step()
    graph = torch.cuda.CUDAGraph()
    optimizer.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph):
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()

    def step() -> None:
        x.copy_(torch.randn(x.shape))
        graph.replay()
        loss.item()

    return step


@program
def data_parallel_of_one_gpu() -> Step:
    net, (x, y) = nn.DataParallel(_net().cuda()), _data()
    return _fit(net.parameters(), lambda: F.cross_entropy(net(x), y))


@program(asks=True)
def averages_of_weights_by_swa_utils() -> Step:
    from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, update_bn

    net = nn.Sequential(nn.Linear(64, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10)).cuda()
    x, y = _data()
    averaged = AveragedModel(net)
    moving = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.999), use_buffers=True)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    schedule = SWALR(optimizer, swa_lr=0.05)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()
        averaged.update_parameters(net)
        moving.update_parameters(net)
        schedule.step()
        update_bn([(x, y)], averaged)

    return step


@program
def batches_prefetched_on_a_stream() -> Step:
    net = _net().cuda()
    side = torch.cuda.Stream()
    batches = [(torch.randn(64, 64).pin_memory(), torch.arange(64) % 10) for _ in range(4)]
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def load(batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.cuda.stream(side):
            x, y = batch[0].cuda(non_blocking=True), batch[1].cuda(non_blocking=True)
        return x, y

    def step() -> None:
        following = load(batches[0])
        for number in range(len(batches)):
            torch.cuda.current_stream().wait_stream(side)
            x, y = following
            x.record_stream(torch.cuda.current_stream())
            y.record_stream(torch.cuda.current_stream())
            if number + 1 < len(batches):
                following = load(batches[number + 1])
            optimizer.zero_grad()
            F.cross_entropy(net(x), y).backward()
            optimizer.step()

    return step


@program
def timed_by_events_and_watched_memory() -> Step:
    net, (x, y) = _net().cuda(), _data()
    optimizer = torch.optim.Adam(net.parameters())
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def step() -> None:
        torch.cuda.reset_peak_memory_stats()
        begin.record()
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()
        end.record()
        torch.cuda.synchronize()
        begin.elapsed_time(end)
        torch.cuda.max_memory_allocated()
        torch.cuda.empty_cache()

    return step


@program
def checkpoints_written_and_read() -> Step:
    net, (x, y) = _net().cuda(), _data()
    optimizer = torch.optim.AdamW(net.parameters())
    folder = Path(tempfile.mkdtemp())

    def step() -> None:
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        torch.save({"net": net.state_dict(), "optimizer": optimizer.state_dict()}, folder / "last.pt")
        state = torch.load(folder / "last.pt", map_location="cuda", weights_only=True)
        net.load_state_dict(state["net"])
        optimizer.load_state_dict(state["optimizer"])

    return step


@program
def deterministic_and_seeded() -> Step:
    torch.cuda.manual_seed_all(7)
    net = nn.Sequential(nn.Linear(64, WIDTH), nn.Dropout(0.3), nn.GELU(), nn.Linear(WIDTH, 10)).to("cuda")
    generator = torch.Generator(device="cuda").manual_seed(3)

    def loss_of() -> torch.Tensor:
        x = torch.randn(128, 64, generator=generator, device="cuda")
        state = torch.cuda.get_rng_state()
        out = net(x)
        torch.cuda.set_rng_state(state)
        return F.cross_entropy(out, torch.randint(0, 10, (128,), generator=generator, device="cuda"))

    return _fit(net.parameters(), loss_of)


@program
def several_groups_and_schedules() -> Step:
    net, (x, y) = _net().cuda(), _data()
    decayed = [p for p in net.parameters() if p.dim() > 1]
    others = [p for p in net.parameters() if p.dim() <= 1]
    optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": others, "lr": 1e-2}],
                                  lr=torch.tensor(1e-3), capturable=False)  # fmt: skip
    schedule = torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2),
         torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)],
        milestones=[2],
    )  # fmt: skip

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        total = nn.utils.clip_grad_norm_(net.parameters(), 1.0, foreach=True)
        if torch.isfinite(total):
            optimizer.step()
        schedule.step()

    return step


@program
def capturable_and_fused_optimizers() -> Step:
    first, second, (x, y) = _net().cuda(), _net().cuda(), _data()
    optimizers = [torch.optim.AdamW(first.parameters(), capturable=True),
                  torch.optim.Adam(second.parameters(), fused=True)]  # fmt: skip

    def step() -> None:
        for net, optimizer in zip((first, second), optimizers, strict=True):
            optimizer.zero_grad()
            F.cross_entropy(net(x), y).backward()
            optimizer.step()

    return step


@program
def muon_for_matrices() -> Step:
    net, (x, y) = _net().cuda(), _data()
    matrices = torch.optim.Muon([p for p in net.parameters() if p.dim() == 2], lr=0.02)
    others = torch.optim.AdamW([p for p in net.parameters() if p.dim() != 2])

    def step() -> None:
        matrices.zero_grad()
        others.zero_grad()
        F.cross_entropy(net(x), y).backward()
        matrices.step()
        others.step()

    return step


@program
def fake_quantized_training() -> Step:
    net, (x, y) = _net().cuda(), _data()

    def loss_of() -> torch.Tensor:
        out = x
        for layer in net:
            if isinstance(layer, nn.Linear):
                scale = layer.weight.detach().abs().amax(1) / 127
                weight = torch.fake_quantize_per_channel_affine(
                    layer.weight, scale, torch.zeros_like(scale, dtype=torch.int32), 0, -128, 127
                )
                out = F.linear(out, weight, layer.bias)
            else:
                out = layer(out)
        return F.cross_entropy(out, y)

    return _fit(net.parameters(), loss_of)


@program
def weights_of_eight_bits_by_hand() -> Step:
    weights = [(torch.randint(-127, 127, (256, 256), dtype=torch.int8).cuda(), torch.rand(256, 1).cuda().half())
               for _ in range(4)]  # fmt: skip
    x = torch.randn(16, 256).cuda().half()

    def step() -> None:
        with torch.no_grad():
            out = x
            for weight, scale in weights:
                out = F.silu(out @ (weight.half() * scale).t())

    return step


@program
def records_of_a_run(folder: str = "") -> Step:
    from torch.utils.tensorboard import SummaryWriter

    net, (x, y) = _net().cuda(), _data()
    writer = SummaryWriter(folder or tempfile.mkdtemp())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    number = 0

    def step() -> None:
        nonlocal number
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        writer.add_scalar("loss", loss.item(), number)
        for name, parameter in net.named_parameters():
            writer.add_histogram(name, parameter.detach().cpu(), number)
        number += 1

    return step


@program
def profiled_steps() -> Step:
    net, (x, y) = _net().cuda(), _data()
    optimizer = torch.optim.Adam(net.parameters())

    def step() -> None:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            for _ in range(2):
                with torch.profiler.record_function("step"):
                    optimizer.zero_grad()
                    F.cross_entropy(net(x), y).backward()
                    optimizer.step()
                profile.step()

    return step


@program
def lazy_modules() -> Step:
    net = nn.Sequential(nn.LazyConv2d(16, 3), nn.LazyBatchNorm2d(), nn.ReLU(), nn.Flatten(), nn.LazyLinear(10)).cuda()
    images = torch.randn(8, 3, 32, 32).cuda()
    net(images)
    return _fit(net.parameters(), lambda: F.cross_entropy(net(images), torch.arange(8).cuda()))


@program
def accelerate_loop() -> Step:
    from accelerate import Accelerator

    accelerator = Accelerator(gradient_accumulation_steps=2, mixed_precision="bf16")
    net = _net()
    optimizer = torch.optim.AdamW(net.parameters())
    rows = torch.utils.data.TensorDataset(torch.randn(64, 64), torch.arange(64) % 10)
    loader = torch.utils.data.DataLoader(rows, batch_size=16)
    net, optimizer, loader = accelerator.prepare(net, optimizer, loader)

    def step() -> Any:
        for x, y in loader:
            with accelerator.accumulate(net):
                loss = F.cross_entropy(net(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(net.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        return accelerator.gather(loss.detach()).mean().item()

    return step


@program
def compiled_functions_and_modules() -> Step:
    net, (x, y) = _net().cuda(), _data()

    @torch.compile(dynamic=True)
    def loss_of(out: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(out, y) + 1e-3 * out.pow(2).mean()

    return _fit(net.parameters(), lambda: loss_of(net(x)))
