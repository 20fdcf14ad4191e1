"""Programs as people write them: their own layers, loops, losses and tricks, to be run on a CPU and predicted."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, vmap

from support.cpu.zoo import Build, Step


def gan() -> Step:
    """Two networks, two optimizers."""
    noise_size, image = 32, 3 * 16 * 16
    maker = nn.Sequential(nn.Linear(noise_size, 128), nn.ReLU(), nn.Linear(128, image), nn.Tanh())
    judge = nn.Sequential(nn.Linear(image, 128), nn.LeakyReLU(0.2), nn.Dropout(0.3), nn.Linear(128, 1))
    makers, judges = (torch.optim.Adam(m.parameters(), lr=2e-4, betas=(0.5, 0.999)) for m in (maker, judge))
    real = torch.rand(16, image)

    def step() -> None:
        fake = maker(torch.randn(16, noise_size))
        judges.zero_grad()
        told = F.binary_cross_entropy_with_logits(judge(real), torch.ones(16, 1))
        missed = F.binary_cross_entropy_with_logits(judge(fake.detach()), torch.zeros(16, 1))
        (told + missed).backward()
        judges.step()
        makers.zero_grad()
        F.binary_cross_entropy_with_logits(judge(fake), torch.ones(16, 1)).backward()
        makers.step()

    return step


def recurrent(kind: type[nn.RNNBase]) -> Build:
    def build() -> Step:
        words, body, head = nn.Embedding(500, 48), kind(48, 64, num_layers=2, batch_first=True), nn.Linear(64, 500)
        parameters = [p for part in (words, body, head) for p in part.parameters()]
        optimizer, ids = torch.optim.RMSprop(parameters), torch.randint(0, 500, (8, 24))

        def step() -> None:
            hidden, _ = body(words(ids))
            loss = F.cross_entropy(head(hidden).flatten(0, 1), ids.flatten())
            loss.backward()
            nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            optimizer.zero_grad()

        return step

    return build


class _Messages(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.own, self.other = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, nodes: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        sent = self.other(nodes)[edges[0]]
        total = torch.zeros_like(nodes).index_add_(0, edges[1], sent)
        count = torch.zeros(len(nodes)).scatter_add_(0, edges[1], torch.ones(edges.size(1)))
        highest = torch.zeros_like(nodes).scatter_reduce(
            0, edges[1].unsqueeze(1).expand_as(sent), sent, "amax", include_self=False
        )
        return F.relu(self.own(nodes) + total / count.clamp(min=1).unsqueeze(1) + highest)


def graph() -> Step:
    """Messages along edges: gathers and scatters."""
    layers = nn.ModuleList(_Messages(32) for _ in range(3))
    head, optimizer = nn.Linear(32, 7), torch.optim.AdamW(layers.parameters())
    nodes, edges, classes = torch.randn(200, 32), torch.randint(0, 200, (2, 1500)), torch.randint(0, 7, (200,))

    def step() -> None:
        hidden = nodes
        for layer in layers:
            hidden = layer(hidden, edges)
        F.cross_entropy(head(hidden), classes).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


class _Swish(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, source: torch.Tensor) -> torch.Tensor:
        context.save_for_backward(source)
        return source * torch.sigmoid(source)

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> torch.Tensor:
        (source,) = context.saved_tensors
        gate = torch.sigmoid(source)
        return gradients[0] * (gate * (1 + source * (1 - gate)))


def own_function() -> Step:
    first, second, source = nn.Linear(64, 256), nn.Linear(256, 10), torch.randn(32, 64)
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1, momentum=0.9)

    def step() -> None:
        hidden: Any = _Swish.apply(first(source))
        second(hidden).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def per_sample_gradients() -> Step:
    """torch.func: a gradient per example, clipped and averaged, as for differential privacy."""
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 5))
    source, classes = torch.randn(16, 32), torch.randint(0, 5, (16,))
    parameters = {name: value.detach() for name, value in model.named_parameters()}

    def loss(values: dict[str, torch.Tensor], one: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(functional_call(model, values, (one.unsqueeze(0),)), label.unsqueeze(0))

    def step() -> None:
        found = vmap(grad(loss), in_dims=(None, 0, 0))(parameters, source, classes)
        for name, value in found.items():
            parameters[name] = parameters[name] - 0.1 * value.mean(0)

    return step


def averaged() -> Step:
    """A slowly moving copy of the model beside the one that is trained, and gradients over four small batches."""
    model = nn.Sequential(nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 10))
    mean, optimizer = copy.deepcopy(model).requires_grad_(False), torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    source, classes = torch.randn(32, 64), torch.randint(0, 10, (32,))

    def step() -> None:
        for part, labels in zip(source.chunk(4), classes.chunk(4), strict=True):
            (F.cross_entropy(model(part), labels, label_smoothing=0.1) / 4).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        with torch.no_grad():
            for slow, fast in zip(mean.parameters(), model.parameters(), strict=True):
                slow.mul_(0.99).add_(fast, alpha=0.01)

    return step


def penalized() -> Step:
    """A gradient of a gradient (WGAN's penalty)."""
    judge = nn.Sequential(nn.Linear(64, 128), nn.Softplus(), nn.Linear(128, 1))
    optimizer = torch.optim.Adam(judge.parameters())

    def step() -> None:
        source = torch.randn(16, 64, requires_grad=True)
        (slope,) = torch.autograd.grad(judge(source).sum(), source, create_graph=True)
        ((slope.norm(dim=1) - 1) ** 2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def contrastive() -> Step:
    """Two views, cosine similarities, a learned temperature, weight norm."""
    encoder = nn.Sequential(
        nn.Conv2d(3, 16, 3, 2, 1), nn.GELU(), nn.Conv2d(16, 32, 3, 2, 1), nn.GELU(), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.utils.parametrizations.weight_norm(nn.Linear(32, 24)),
    )  # fmt: skip
    scale = nn.Parameter(torch.tensor(2.0))
    optimizer, images = torch.optim.AdamW([*encoder.parameters(), scale]), torch.randn(8, 3, 32, 32)

    def step() -> None:
        views = [images + torch.randn_like(images), images.flip(-1)]
        first, second = (F.normalize(encoder(view), dim=-1) for view in views)
        scores = first @ second.t() * scale.exp()
        targets = torch.arange(len(scores))
        ((F.cross_entropy(scores, targets) + F.cross_entropy(scores.t(), targets)) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def transformer() -> Step:
    """PyTorch's own layers, encoder and decoder."""
    model = nn.Transformer(64, 4, 2, 2, 128, batch_first=True)
    optimizer, source, target = torch.optim.NAdam(model.parameters()), torch.randn(4, 20, 64), torch.randn(4, 12, 64)
    mask = nn.Transformer.generate_square_subsequent_mask(12)

    def step() -> None:
        F.mse_loss(model(source, target, tgt_mask=mask), target).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def autoencoder() -> Step:
    """Convolutions down and up, a random code, Huber's loss."""
    down = nn.Sequential(nn.Conv2d(1, 16, 4, 2, 1), nn.ELU(), nn.Conv2d(16, 32, 4, 2, 1), nn.ELU(), nn.Flatten())
    code, back = nn.Linear(32 * 49, 32), nn.Linear(16, 32 * 49)
    up = nn.Sequential(
        nn.Unflatten(1, (32, 7, 7)), nn.ConvTranspose2d(32, 16, 4, 2, 1), nn.ELU(),
        nn.Upsample(scale_factor=2, mode="bilinear"), nn.Conv2d(16, 1, 3, padding=1), nn.Sigmoid(),
    )  # fmt: skip
    parts = nn.ModuleList([down, code, back, up])
    optimizer, images = torch.optim.Adamax(parts.parameters()), torch.rand(8, 1, 28, 28)

    def step() -> None:
        mean, logvar = code(down(images)).chunk(2, dim=-1)
        made = up(back(mean + torch.randn_like(mean) * (0.5 * logvar).exp()))
        spread = -0.5 * (1 + logvar - mean.pow(2) - logvar.exp()).mean()
        (F.huber_loss(made, images) + spread).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def policy() -> Step:
    """Reinforcement learning: distributions, returns, a clipped ratio, an entropy bonus."""
    actor, critic = (nn.Sequential(nn.Linear(12, 64), nn.Tanh(), nn.Linear(64, size)) for size in (4, 1))
    optimizer = torch.optim.Adam([*actor.parameters(), *critic.parameters()])
    states, rewards = torch.randn(128, 12), torch.randn(128)
    actions, before = torch.randint(0, 4, (128,)), torch.randn(128)

    def step() -> None:
        chances = torch.distributions.Categorical(logits=actor(states), validate_args=False)
        values = critic(states).squeeze(-1)
        ratio = (chances.log_prob(actions) - before).exp()
        gain = rewards - values.detach()
        gained = torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()
        (F.smooth_l1_loss(values, rewards) - gained - 0.01 * chances.entropy().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def loaded() -> Step:
    """A data loader, running averages for the log, accuracy read as a number."""
    data = torch.utils.data.TensorDataset(torch.randn(64, 40), torch.randint(0, 5, (64,)))
    loader = torch.utils.data.DataLoader(data, batch_size=16, shuffle=True)
    model, seen = nn.Sequential(nn.Linear(40, 80), nn.SiLU(), nn.LayerNorm(80), nn.Linear(80, 5)), []
    optimizer = torch.optim.Adagrad(model.parameters())

    def step() -> None:
        for source, classes in loader:
            optimizer.zero_grad()
            logits = model(source)
            loss = F.cross_entropy(logits, classes)
            loss.backward()
            optimizer.step()
            right = (logits.argmax(1) == classes).sum().item()
            seen.append(f"{loss.item():.3f} {right / len(classes):.2f}")

    return step


def compiled() -> Step:
    model, source = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 8)), torch.randn(16, 64)
    scripted, optimizer = torch.jit.script(model), torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        scripted(source).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


PROGRAMS: dict[str, Callable[[], Step]] = {
    "autoencoder": autoencoder,
    "averaged": averaged,
    "contrastive": contrastive,
    "gan": gan,
    "graph": graph,
    "gru": recurrent(nn.GRU),
    "loaded": loaded,
    "lstm": recurrent(nn.LSTM),
    "own-function": own_function,
    "penalized": penalized,
    "per-sample-gradients": per_sample_gradients,
    "policy": policy,
    "rnn": recurrent(nn.RNN),
    "scripted": compiled,
    "transformer": transformer,
}
CONFIGURATIONS = PROGRAMS
