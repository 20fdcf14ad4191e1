"""Training programs whose memory grows with every step, and programs whose memory only seems to."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

MIB = 1 << 20
_HEAD = """
import collections, copy, itertools, random, torch
from torch import nn

random.seed(0)
net = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512)).cuda()
optimizer = torch.optim.AdamW(net.parameters())
kept, cache, total = [], {}, 0

def train(length=2048, **options):
    x = torch.randn(length, 512, device="cuda")
    loss = net(x).square().mean()
    loss.backward(**options)
    optimizer.step()
    optimizer.zero_grad()
    return x, loss
"""


@dataclass(frozen=True, kw_only=True)
class Program:
    """A program's text. ``bytes_per_step``: what one step of its optimizer leaves behind; 0: it does not leak.

    ``line``: what stands in the line that asks for most of it.
    """

    text: str
    bytes_per_step: int = 0
    line: str = ""

    @property
    def line_number(self) -> int:
        return next(number for number, text in enumerate(self.text.splitlines(), 1) if self.line in text)


def _program(body: str, mib_per_step: float = 0, line: str = "") -> Program:
    text = f"{_HEAD}\nfor step in range(60):\n{textwrap.indent(textwrap.dedent(body).strip(), '    ')}\n"
    return Program(text=text, bytes_per_step=round(mib_per_step * MIB), line=line)


_WORKERS = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

def main():
    net = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 512)).cuda()
    average = torch.optim.swa_utils.AveragedModel(net, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.99))
    optimizer = torch.optim.AdamW(net.parameters())
    data, seen = TensorDataset(torch.randn(2048, 512)), []
    for epoch in range(8):
        loader = DataLoader(data, batch_size=256, shuffle=True, num_workers=2, multiprocessing_context="fork")
        for (rows,) in loader:
            with torch.autocast("cuda", torch.bfloat16):
                outputs = net(rows.cuda())
            outputs.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            average.update_parameters(net)
            seen.append({kept})

main()
"""

LEAKS = {
    "workers, autocast and a moving average": Program(
        text=_WORKERS.replace("{kept}", "outputs.detach()"), bytes_per_step=MIB // 4, line="outputs = net("
    ),
    "graphs of losses": _program(  # the input, what both layers give, and the mask of the ReLU are its own output
        """
        _, loss = train(retain_graph=True)
        total = total + loss
        """,
        12,
        "loss = net(x)",
    ),
    "outputs": _program("x, _ = train()\nkept.append(net(x).detach())", 4, "kept.append"),
    "a hook": _program(
        """
        if step == 0:
            net[0].register_forward_hook(lambda module, inputs, output: kept.append(output.detach()))
        train()
        """,
        4,
        "loss = net(x)",
    ),
    "a cache": _program("x, _ = train()\ncache[step] = x + 1", 4, "cache[step]"),
    "every third step": _program("x, _ = train()\nif step % 3 == 0:\n    kept.append(x * 2)", 4 / 3, "kept.append"),
    "inputs of other lengths": _program(
        "train(random.randrange(64, 2048))\nkept.append(net[0].weight * 2)", 1, "kept.append"
    ),
    "micro-batches": _program(
        """
        for _ in range(4):
            x = torch.randn(2048, 512, device="cuda")
            (net(x).square().mean() / 4).backward()
            kept.append(x)
        optimizer.step()
        optimizer.zero_grad()
        """,
        16,
        "x = torch.randn(2048,",
    ),
    "beneath an early peak": _program(
        """
        if step == 0:
            large = torch.empty(2048, 1 << 20, dtype=torch.uint8, device="cuda")
            del large
        x, _ = train()
        kept.append(x + 1)
        """,
        4,
        "kept.append",
    ),
}

NO_LEAKS = {
    "workers, autocast and a moving average": Program(text=_WORKERS.replace("{kept}", "outputs.float().mean()")),
    "AdamW": _program("train()"),
    "scalars for the log": _program("_, loss = train()\nkept.append(loss.detach())"),
    "the last eight outputs": _program("x, _ = train()\nkept = [*kept, x + 1][-8:]"),
    "a list that is emptied": _program("x, _ = train()\nkept.append(x + 1)\nif step % 10 == 9:\n    kept.clear()"),
    "inputs of other lengths": _program("train(random.randrange(64, 2048))"),
    "inputs of other lengths, and the last eight": _program(
        "x, _ = train(random.randrange(64, 2048))\nkept = [*kept, x + 1][-8:]"
    ),
    "a moving average from the third step": _program(
        """
        train()
        if step == 2:
            average = copy.deepcopy(net)
        if step > 2:
            for old, new in zip(average.parameters(), net.parameters()):
                old.data.lerp_(new.data, 0.1)
        """
    ),
    "a layer that is trained from the fourth step": _program(
        """
        train()
        if step == 3:
            net.append(nn.Linear(512, 512).cuda())
            optimizer.add_param_group({"params": net[-1].parameters()})
        """
    ),
    "a cache by length": _program(
        "length = 512 * (1 + step % 4)\ntrain(length)\ncache.setdefault(length, torch.ones(length, 512).cuda())"
    ),
    "keys and values up to a bound": _program(
        "train()\nif step < 16:\n    cache[step] = torch.randn(512, 512, device='cuda')"
    ),
    "accumulated gradients": _program(
        """
        for _ in range(4):
            (net(torch.randn(2048, 512, device="cuda")).square().mean() / 4).backward()
        optimizer.step()
        optimizer.zero_grad()
        """
    ),
    "autocast and a scaler": _program(
        """
        if step == 0:
            scaler = torch.amp.GradScaler("cuda")
        with torch.autocast("cuda", torch.float16):
            loss = net(torch.randn(2048, 512, device="cuda")).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        """
    ),
}
