"""Steps with results whose sizes depend on values; on a device, also what each takes, and whether it is right."""

import gc
import warnings

import torch

warnings.simplefilter("ignore")
drawn = torch.Generator().manual_seed(0)
MASK = torch.rand(500, 400, generator=drawn) < 0.3
ROWS = torch.randint(0, 20_000, (1, 60_000), generator=drawn)
EDGES = torch.randint(0, 300, (2, 30_000), generator=drawn)
IDS = torch.randint(0, 5000, (9000,), generator=drawn)


def gradient(device):
    rows, values = ROWS.to(device), torch.ones(ROWS.size(1), 16, device=device)
    return lambda: torch.sparse_coo_tensor(rows, values, (20_000, 16)).coalesce()


def matrix(device):
    return torch.sparse_coo_tensor(EDGES.to(device), torch.ones(EDGES.size(1), device=device), (300, 300))


def of_edges(function):
    def build(device):
        edges = matrix(device)
        return lambda: function(edges)

    return build


def places(device):
    mask = MASK.to(device)
    return lambda: mask.nonzero().t().contiguous()


def picked(device):
    mask, values = MASK.to(device), torch.ones(500, 400, device=device)
    return lambda: values[mask]


CASES = {
    "nonzero": places,
    "mask": picked,
    "gradient": gradient,
    "edges": of_edges(lambda edges: edges.coalesce()),
    "added": of_edges(lambda edges: (edges + edges.t()).coalesce()),
    "summed": of_edges(lambda edges: torch.sparse.sum(edges, 0)),
    "multiplied": of_edges(lambda edges: torch.sparse.mm(edges, edges.t())),
    "selected": of_edges(lambda edges: edges.index_select(0, torch.arange(7, device=edges.device))),
    "columns": lambda device: (lambda rows: lambda: rows.index_select(1, rows._indices()[0, :3]))(
        torch.eye(40, 50).to(device).to_sparse(1)
    ),
    "by rows": of_edges(lambda edges: edges.to_sparse_csr()),
    "from dense": lambda device: (lambda dense: lambda: dense.to_sparse_csr())(torch.eye(50).to(device)),
}


def parts(found):
    if found.layout is torch.sparse_csr:
        return [found.crow_indices(), found.col_indices(), found.values()]
    return [found._indices(), found._values()] if found.is_sparse else [found]


def difference(build):
    found, wanted = (parts(build(device)()) for device in ("cuda", "cpu"))  # strides of sparse parts differ on GPUs
    for one, other in zip(found, wanted, strict=True):
        if one.shape != other.shape:
            return f"{[*one.shape]} is not {[*other.shape]}"
        computed = not one.is_floating_point() or one.numel() <= 1 << 16
        if computed and not torch.equal(one.cpu(), other):
            return f"{one} is not {other}"
    return None


if torch.cuda.is_available():
    result = {"differing": {}, "taken": {}}
    for name, build in CASES.items():
        if differing := difference(build):
            result["differing"][name] = differing
        step = build("cuda")
        gc.collect()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        result["taken"][name] = torch.cuda.max_memory_allocated() - before
