"""A loop of one's own under ``brim.fit``: the resident set keeps to the budget, not only the tensors."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the resident set is read from /proc")

LOOP = textwrap.dedent("""
    import sys, threading, torch
    from torch import nn
    import brim
    from brim.measure.capacity import resident_bytes
    from brim.measure.monitor import Monitor

    torch.set_num_threads(1)
    torch.manual_seed(0)
    MIB = 1 << 20
    def block(): return nn.Sequential(nn.Linear(768, 2304), nn.GELU(), nn.Linear(2304, 768))
    warm = block()
    torch.optim.AdamW(warm.parameters(), fused=True).step()
    warm(torch.zeros(4, 768)).sum().backward()
    brim.probe()
    # What the first fit of all leaves in caches of Python and PyTorch is no model's.
    first = nn.Sequential(*(nn.Linear(384, 384) for _ in range(8)))
    states = torch.optim.AdamW(first.parameters(), fused=True)
    brim.fit(first, states, ram="9MiB", device="cpu", example=[torch.randn(4, 384)]).remove()
    del first, states
    base = resident_bytes()
    model = nn.Sequential(*(block() for _ in range(8)))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    x = torch.randn(640, 768)
    handle = brim.fit(model, optimizer, ram=sys.argv[1], device="cpu", example=[x])
    losses = []
    with Monitor() as monitor:
        for _ in range(4):
            loss = model(x).square().mean(); loss.backward(); optimizer.step(); optimizer.zero_grad()
            losses.append(loss.item())
    peak = monitor.usage().ram_peak_bytes - base
    promised = handle.plan.promise.peak_bytes["ram"]
    handle.remove()
    print(promised // MIB, peak // MIB, losses, [t.name for t in threading.enumerate()], sep=";")
""")


@pytest.mark.thorough
@pytest.mark.parametrize("budget_mib", [480, pytest.param(600, marks=pytest.mark.slow)])
def test_the_resident_set_keeps_to_the_budget(budget_mib: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOOP, f"{budget_mib}MiB"], capture_output=True, text=True, timeout=250, check=False
    )
    assert done.returncode == 0, done.stderr
    promised, peak, _, threads = done.stdout.strip().split(";")
    assert int(promised) <= budget_mib
    assert int(peak) <= budget_mib
    assert "brim-heap" not in threads
