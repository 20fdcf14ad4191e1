"""A model that a forked child calls first."""

import multiprocessing as mp

import torch
from torch import nn


def work(q, m):
    torch.set_num_threads(1)
    with torch.no_grad():
        q.put(m(torch.ones(2, 256)).double().sum().item())


if __name__ == "__main__":
    torch.manual_seed(0)
    m = nn.Sequential(*[nn.Linear(256, 256) for _ in range(6)])
    q = mp.get_context("fork").Queue()
    p = mp.get_context("fork").Process(target=work, args=(q, m))
    p.start()
    print(q.get())
    p.join()
    with torch.no_grad():
        print(m(torch.ones(2, 256)).double().sum().item())
