"""What stands around a model: checkpoints, early stopping, metrics, optimizers, schedules, precision, losses."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from support.ordinary import Step, program

WIDTH = 256


def _net(classes: int = 10) -> nn.Sequential:
    first, second = nn.Linear(64, WIDTH), nn.Linear(WIDTH, WIDTH)
    return nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), nn.Linear(WIDTH, classes))


def _data() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(128, 64).cuda(), (torch.arange(128) % 10).cuda()


def _with_optimizer(make: Callable[[Any], torch.optim.Optimizer]) -> Step:
    net, (x, y) = _net().cuda(), _data()
    optimizer = make(net.parameters())

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()

    return step


@program
def adagrad() -> Step:
    return _with_optimizer(lambda p: torch.optim.Adagrad(p, lr=0.01))


@program
def adamax() -> Step:
    return _with_optimizer(lambda p: torch.optim.Adamax(p))


@program
def nadam() -> Step:
    return _with_optimizer(lambda p: torch.optim.NAdam(p))


@program
def radam() -> Step:
    return _with_optimizer(lambda p: torch.optim.RAdam(p))


@program
def rprop() -> Step:
    return _with_optimizer(lambda p: torch.optim.Rprop(p))


@program
def asgd() -> Step:
    return _with_optimizer(lambda p: torch.optim.ASGD(p))


@program
def adafactor() -> Step:
    return _with_optimizer(lambda p: torch.optim.Adafactor(p))


@program
def adam_amsgrad_one_by_one() -> Step:
    return _with_optimizer(lambda p: torch.optim.Adam(p, amsgrad=True, foreach=False))


@program
def sgd_fused() -> Step:
    return _with_optimizer(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True))


@program(asks=True)
def lbfgs() -> Step:
    net, (x, y) = _net().cuda(), _data()
    optimizer = torch.optim.LBFGS(net.parameters(), lr=1, max_iter=4, history_size=4)

    def step() -> None:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(net(x), y)
            loss.backward()
            return loss

        optimizer.step(closure)

    return step


@program(asks=True)
def lbfgs_with_line_search() -> Step:
    net, (x, y) = _net().cuda(), _data()
    optimizer = torch.optim.LBFGS(net.parameters(), max_iter=4, line_search_fn="strong_wolfe")

    def step() -> None:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(net(x), y)
            loss.backward()
            return loss

        optimizer.step(closure)

    return step


@program(asks=True)
def sharpness_aware_minimization() -> Step:
    net, (x, y) = _net().cuda(), _data()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def step() -> None:
        F.cross_entropy(net(x), y).backward()
        with torch.no_grad():
            norm = torch.norm(torch.stack([p.grad.norm(p=2) for p in net.parameters()]), p=2)
            moved = []
            for p in net.parameters():
                e = p.grad * (0.05 / (norm + 1e-12))
                p.add_(e)
                moved.append(e)
        net.zero_grad()
        F.cross_entropy(net(x), y).backward()
        with torch.no_grad():
            for p, e in zip(net.parameters(), moved, strict=True):
                p.sub_(e)
        optimizer.step()
        optimizer.zero_grad()

    return step


@program
def early_stopping_and_best_weights() -> Step:
    net, (x, y) = _net().cuda(), _data()
    optimizer = torch.optim.Adam(net.parameters())
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)
    best, patience, kept = math.inf, 0, None

    def step() -> None:
        nonlocal best, patience, kept
        net.train()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        net.eval()
        with torch.no_grad():
            loss = F.cross_entropy(net(x), y).item()
        scheduler.step(loss)
        if loss < best - 1e-4:
            best, patience, kept = loss, 0, copy.deepcopy(net.state_dict())
        else:
            patience += 1

    return step


@program
def metrics_by_numpy() -> Step:
    net, (x, y) = _net().cuda(), _data()
    optimizer = torch.optim.Adam(net.parameters())

    def step() -> None:
        out = net(x)
        loss = F.cross_entropy(out, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        predicted = out.argmax(-1).cpu().numpy()
        scores = F.softmax(out.detach(), -1)[:, 1].cpu().numpy()
        confusion = np.zeros((10, 10))
        np.add.at(confusion, (y.cpu().numpy(), predicted), 1)
        order = np.argsort(-scores)
        assert order.shape == (128,) and confusion.sum() == 128
        assert len(out.tolist()) == 128

    return step


@program
def confusion_by_bincount() -> Step:
    net, (x, y) = _net().cuda(), _data()
    optimizer = torch.optim.Adam(net.parameters())
    total = torch.zeros(10, 10, device="cuda")

    def step() -> None:
        out = net(x)
        F.cross_entropy(out, y).backward()
        optimizer.step()
        optimizer.zero_grad()
        total.add_(torch.bincount(y * 10 + out.argmax(1), minlength=100).reshape(10, 10))
        (total.diag() / total.sum(1).clamp(min=1)).mean().item()

    return step


@program(asks=True)
def checks_of_gradients() -> Step:
    net, (x, y) = _net().cuda(), _data()
    optimizer = torch.optim.AdamW(net.parameters())

    def step() -> None:
        loss = F.cross_entropy(net(x), y)
        if not torch.isfinite(loss):
            raise ValueError(f"loss is {loss.item()}")
        loss.backward()
        norm = nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        if torch.isnan(norm) or torch.isinf(norm):
            optimizer.zero_grad()
            return
        if norm > 100:
            print(end="")
        optimizer.step()
        optimizer.zero_grad()

    return step


@program
def checkpointed_blocks() -> Step:
    net, (x, y) = _net().cuda(), _data()
    optimizer = torch.optim.AdamW(net.parameters())

    def step() -> None:
        hidden = checkpoint(net[:2], x, use_reentrant=False)
        hidden = checkpoint(net[2:4], hidden, use_reentrant=False)
        F.cross_entropy(net[4](hidden), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@program
def checkpoint_sequential_with_dropout() -> Step:
    layers = [nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.1)) for _ in range(6)]
    net, (x, _) = nn.Sequential(*layers).cuda(), _data()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def step() -> None:
        checkpoint_sequential(net, 3, x, use_reentrant=False).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@program
def averaged_models() -> Step:
    net, (x, y) = _net().cuda(), _data()
    average = torch.optim.swa_utils.AveragedModel(net, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.99))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def step() -> None:
        F.cross_entropy(net(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(net)

    return step


@program
def accumulation_and_schedule() -> Step:
    net, (x, y) = _net().cuda(), _data()
    optimizer = torch.optim.AdamW(net.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=100)

    def step() -> None:
        for part, classes in zip(x.chunk(4), y.chunk(4), strict=True):
            (F.cross_entropy(net(part), classes) / 4).backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        assert schedule.get_last_lr()[0] > 0

    return step


@program
def spectral_and_weight_norm() -> Step:
    norm = torch.nn.utils.parametrizations
    net = nn.Sequential(norm.spectral_norm(nn.Linear(64, 64)), nn.ReLU(), norm.weight_norm(nn.Linear(64, 10))).cuda()
    x, y = _data()
    optimizer = torch.optim.Adam(net.parameters())

    def step() -> None:
        F.cross_entropy(net(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@program
def gradient_scaler_with_unscale() -> Step:
    net, (x, y) = _net().cuda(), _data()
    optimizer, scaler = torch.optim.SGD(net.parameters(), lr=0.1), torch.amp.GradScaler("cuda")

    def step() -> None:
        with torch.autocast("cuda", dtype=torch.float16):
            loss = F.cross_entropy(net(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scale = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        if scaler.get_scale() < scale:
            print(end="")
        optimizer.zero_grad()

    return step


@program
def pure_bf16() -> Step:
    net, (x, y) = _net().to("cuda", torch.bfloat16), _data()
    optimizer = torch.optim.AdamW(net.parameters(), foreach=True)

    def step() -> None:
        F.cross_entropy(net(x.bfloat16()).float(), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@program
def bf16_autocast_with_cache() -> Step:
    net, (x, y) = _net().cuda(), _data()
    optimizer = torch.optim.AdamW(net.parameters())

    def step() -> None:
        with torch.autocast(device_type="cuda", dtype=torch.bfloat16):
            first, second = net(x), net(x * 0.9)
            loss = F.cross_entropy(first, y) + F.kl_div(first.log_softmax(-1), second.softmax(-1).detach())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@program
def distillation() -> Step:
    student, teacher, (x, y) = _net().cuda(), _net().cuda().eval(), _data()
    optimizer = torch.optim.Adam(student.parameters())

    def step() -> None:
        with torch.no_grad():
            wanted = teacher(x)
        out = student(x)
        soft = F.kl_div(F.log_softmax(out / 2, 1), F.softmax(wanted / 2, 1), reduction="batchmean") * 4
        (soft + F.cross_entropy(out, y)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@program
def triplet_margin() -> Step:
    net, (x, _) = _net(64).cuda(), _data()
    optimizer = torch.optim.Adam(net.parameters())

    def step() -> None:
        F.triplet_margin_loss(net(x), net(x + 0.1), net(x.flip(0))).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@program(asks=True)
def hardest_triplets_of_a_batch() -> Step:
    net, (x, y) = _net(64).cuda(), _data()
    optimizer = torch.optim.Adam(net.parameters())

    def step() -> None:
        e = F.normalize(net(x), dim=1)
        distance = torch.cdist(e, e)
        same = y[:, None] == y[None]
        positive = (distance * same).max(1).values
        negative = (distance + 1e5 * same).min(1).values
        losses = F.relu(positive - negative + 0.2)
        hard = losses[losses > 0]
        (hard.mean() if len(hard) else losses.sum()).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@program
def focal_and_binary_losses() -> Step:
    net, (x, y) = _net().cuda(), _data()
    optimizer = torch.optim.Adam(net.parameters())

    def step() -> None:
        out = net(x)
        truth = F.one_hot(y, 10).float()
        bce = F.binary_cross_entropy_with_logits(out, truth, reduction="none")
        p = torch.sigmoid(out)
        p_t = p * truth + (1 - p) * (1 - truth)
        (0.25 * bce * (1 - p_t) ** 2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@program(asks=True)
def label_smoothing_and_class_weights() -> Step:
    net, (x, y) = _net().cuda(), _data()
    criterion = nn.CrossEntropyLoss(weight=1 / torch.bincount(y).float(), label_smoothing=0.1)
    optimizer = torch.optim.Adam(net.parameters())

    def step() -> None:
        criterion(net(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@program
def poisson_and_gaussian_likelihoods() -> Step:
    net, (x, _) = _net(2).cuda(), _data()
    optimizer = torch.optim.Adam(net.parameters())

    def step() -> None:
        mean, spread = net(x).unbind(-1)
        target = x[:, 0].abs()
        (F.poisson_nll_loss(mean, target) + F.gaussian_nll_loss(mean, target, F.softplus(spread))).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@program
def physics_informed_second_derivatives() -> Step:
    net = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 1)).cuda()
    optimizer = torch.optim.Adam(net.parameters())

    def step() -> None:
        points = torch.rand(256, 2, device="cuda", requires_grad=True)
        u = net(points)
        first = torch.autograd.grad(u, points, torch.ones_like(u), create_graph=True)[0]
        second = torch.autograd.grad(first[:, 0], points, torch.ones_like(first[:, 0]), create_graph=True)[0][:, 0]
        loss = (first[:, 1] - 0.01 * second).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


@program
def meta_learning_by_functional_call() -> Step:
    net, (x, y) = _net().cuda(), _data()
    optimizer = torch.optim.Adam(net.parameters())

    def step() -> None:
        weights = dict(net.named_parameters())
        inner = F.cross_entropy(torch.func.functional_call(net, weights, (x[:64],)), y[:64])
        gradients = torch.autograd.grad(inner, tuple(weights.values()), create_graph=True)
        fast = {name: w - 0.01 * g for (name, w), g in zip(weights.items(), gradients, strict=True)}
        optimizer.zero_grad()
        F.cross_entropy(torch.func.functional_call(net, fast, (x[64:],)), y[64:]).backward()
        optimizer.step()

    return step
