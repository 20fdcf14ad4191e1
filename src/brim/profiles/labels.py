"""What each gap was waiting for, in words."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from brim.profiles.activity import ALLOCATE, SYNCHRONIZE, Numbers, Texts
from brim.profiles.figures import CAUSES
from brim.profiles.idle import Host, Idle

PYTHON = "Python"  # no operation was running
DATA_LOADER = "DataLoader"


class Rows(Protocol):
    """What one device did, in order."""

    start: Numbers
    name: Numbers
    computing: Numbers
    collective: Numbers
    memory: Numbers


def labels_of(idle: Idle, host: Host, texts: Texts, rows: Rows) -> Numbers:
    """One number of a text per gap, of what its largest part waited for.

    The name of a copy or a collective, of the operation that synchronized or allocated, of the one that launched
    the next kernel, or of the next kernel.
    """
    ends = idle.spans.ends
    main = idle.parts.argmax(axis=0)
    labels = np.full(len(ends), texts.number(""))
    kernels = rows.name[rows.computing]
    came_next = idle.following >= 0
    labels[came_next] = kernels[idle.following[came_next]]
    for cause, chosen in (("collective", rows.collective), ("copy", rows.memory)):
        mine = np.flatnonzero(main == CAUSES.index(cause))
        if len(mine):
            index = np.searchsorted(rows.start[chosen], ends[mine]) - 1
            labels[mine] = rows.name[chosen][np.maximum(index, 0)]
    for cause, kind in (("synchronization", SYNCHRONIZE), ("allocation", ALLOCATE)):
        mine = np.flatnonzero(main == CAUSES.index(cause))
        if len(mine):
            labels[mine] = _called(host, texts, host.last_call(kind, ends[mine]))
    labels[main == CAUSES.index("data loader")] = texts.number(DATA_LOADER)
    mine = np.flatnonzero((main == CAUSES.index("cpu")) & (idle.launch >= 0))
    if len(mine):
        launch = idle.launch[mine]
        running = host.operation(host.start[launch], host.thread[launch])
        labels[mine] = np.where(running >= 0, running, texts.number(PYTHON))
    return labels


def _called(host: Host, texts: Texts, calls: Numbers) -> Numbers:
    """ "aten::item (cudaStreamSynchronize)" for each call; its own name where no operation made it."""
    names = host.name[calls]
    operations = host.operation(host.start[calls], host.thread[calls])
    all_texts = texts.all()
    pairs, inverse = np.unique(np.stack([operations, names]), axis=1, return_inverse=True)
    labels = [
        texts.number(f"{all_texts[operation]} ({all_texts[name]})") if operation >= 0 else int(name)
        for operation, name in pairs.T
    ]
    return np.array(labels)[inverse.ravel()]
