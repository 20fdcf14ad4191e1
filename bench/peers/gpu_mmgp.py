"""mmgp: blocks up to a budget, the next ones copied from pinned memory meanwhile."""

from __future__ import annotations

from mmgp import offload

from peers.gpu import Applied, Task

TITLE = "mmgp"
WARMUP = 2
CAPPED = True


def apply(task: Task) -> Applied:
    # "The real usage is twice this number" with asynchronous transfers, its documentation says.
    budget_mib = (task.budget_bytes - task.working_bytes) / 2 / (1 << 20)
    manager = offload.all(
        {"transformer": task.module},
        pinnedMemory=True,
        quantizeTransformer=False,
        budgets={"transformer": budget_mib},
        asyncTransfers=True,
    )
    return Applied(remove=manager.release)
