"""Graph networks by scatter and sparse products; recommenders; tables."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from support.ordinary import Step, program

NODES, EDGES = 500, 2000


def _edges() -> torch.Tensor:
    return torch.stack(((torch.arange(EDGES) * 7) % NODES, (torch.arange(EDGES) * 13) % NODES))


def _fit(parameters, loss_of) -> Step:
    optimizer = torch.optim.Adam(parameters, lr=0.01, weight_decay=5e-4)

    def step() -> None:
        optimizer.zero_grad()
        loss_of().backward()
        optimizer.step()

    return step


@program(merges=True)
def gcn_by_sparse_adjacency() -> Step:
    edges = _edges()
    adjacency = torch.sparse_coo_tensor(edges, torch.ones(EDGES), (NODES, NODES)).coalesce().cuda()
    first, second = nn.Linear(64, 32).cuda(), nn.Linear(32, 7).cuda()
    x, y = torch.randn(NODES, 64).cuda(), (torch.arange(NODES) % 7).cuda()
    train = (torch.arange(NODES) < 140).cuda()

    def loss_of() -> torch.Tensor:
        hidden = torch.sparse.mm(adjacency, first(x)).relu()
        out = torch.sparse.mm(adjacency, second(hidden))
        return F.cross_entropy(out[train], y[train])

    return _fit([*first.parameters(), *second.parameters()], loss_of)


@program
def message_passing_by_index_add() -> Step:
    source, target = _edges().cuda()
    layer, head = nn.Linear(64, 64).cuda(), nn.Linear(64, 7).cuda()
    x, y = torch.randn(NODES, 64).cuda(), (torch.arange(NODES) % 7).cuda()

    def loss_of() -> torch.Tensor:
        out = torch.zeros_like(x).index_add_(0, target, layer(x)[source])
        degree = torch.bincount(target, minlength=NODES).clamp(min=1)
        return F.cross_entropy(head(out / degree[:, None]), y)

    return _fit([*layer.parameters(), *head.parameters()], loss_of)


@program
def graph_attention_by_scatter() -> Step:
    source, target = _edges().cuda()
    layer, score, head = nn.Linear(64, 64).cuda(), nn.Linear(128, 1).cuda(), nn.Linear(64, 7).cuda()
    x, y = torch.randn(NODES, 64).cuda(), (torch.arange(NODES) % 7).cuda()

    def loss_of() -> torch.Tensor:
        hidden = layer(x)
        weight = F.leaky_relu(score(torch.cat((hidden[source], hidden[target]), -1))).squeeze(-1)
        most = torch.full((NODES,), -torch.inf, device=x.device).scatter_reduce(0, target, weight, "amax")
        weight = (weight - most[target]).exp()
        total = torch.zeros(NODES, device=x.device).scatter_add(0, target, weight)
        weight = weight / (total[target] + 1e-16)
        out = torch.zeros_like(hidden).index_add(0, target, weight[:, None] * hidden[source])
        return F.cross_entropy(head(out), y)

    return _fit([*layer.parameters(), *score.parameters(), *head.parameters()], loss_of)


@program
def graph_batches_pooled_by_segment() -> Step:
    sizes = [10 + (i * 7) % 20 for i in range(16)]
    batch = torch.repeat_interleave(torch.arange(16), torch.tensor(sizes)).cuda()
    x = torch.randn(sum(sizes), 32).cuda()
    net, head = nn.Linear(32, 64).cuda(), nn.Linear(64, 2).cuda()

    def loss_of() -> torch.Tensor:
        hidden = net(x).relu()
        count = int(batch.max()) + 1
        pooled = torch.zeros(count, 64, device="cuda").index_add_(0, batch, hidden)
        pooled = pooled / torch.bincount(batch, minlength=count)[:, None]
        return F.cross_entropy(head(pooled), torch.arange(count, device="cuda") % 2)

    return _fit([*net.parameters(), *head.parameters()], loss_of)


@program
def neighbours_sampled_on_the_host() -> Step:
    neighbours = (torch.arange(NODES * 10).view(NODES, 10) * 31) % NODES
    embed, head = nn.Embedding(NODES, 64).cuda(), nn.Linear(128, 7).cuda()

    def loss_of() -> torch.Tensor:
        seeds = torch.arange(64)
        around = neighbours[seeds][:, torch.randperm(10)[:5]]
        nodes, inverse = torch.cat((seeds, around.flatten())).unique(return_inverse=True)
        x = embed(nodes.cuda())
        inverse = inverse.cuda()
        own, other = x[inverse[:64]], x[inverse[64:]].view(64, 5, -1).mean(1)
        return F.cross_entropy(head(torch.cat((own, other), -1)), (seeds % 7).cuda())

    return _fit([*embed.parameters(), *head.parameters()], loss_of)


@program
def link_prediction_with_negatives() -> Step:
    edges = _edges().cuda()
    embed = nn.Embedding(NODES, 64).cuda()

    def loss_of() -> torch.Tensor:
        negatives = torch.randint(0, NODES, edges.size(), dtype=torch.long, device="cuda")
        z = embed.weight
        good = (z[edges[0]] * z[edges[1]]).sum(-1)
        bad = (z[negatives[0]] * z[negatives[1]]).sum(-1)
        labels = torch.cat((torch.ones_like(good), torch.zeros_like(bad)))
        return F.binary_cross_entropy_with_logits(torch.cat((good, bad)), labels)

    return _fit(embed.parameters(), loss_of)


@program
def dlrm_with_embedding_bags() -> Step:
    bags = nn.ModuleList(nn.EmbeddingBag(1000, 16, mode="sum", sparse=False) for _ in range(4)).cuda()
    bottom, top = nn.Linear(13, 16).cuda(), nn.Linear(16 * 5, 1).cuda()
    dense = torch.randn(128, 13).cuda()
    indices, offsets = (torch.arange(512) % 1000).cuda(), torch.arange(0, 512, 4).cuda()

    def loss_of() -> torch.Tensor:
        parts = [bottom(dense).relu(), *(bag(indices, offsets) for bag in bags)]
        return F.binary_cross_entropy_with_logits(top(torch.cat(parts, 1)).squeeze(1), torch.ones(128, device="cuda"))

    return _fit([*bags.parameters(), *bottom.parameters(), *top.parameters()], loss_of)


@program
def text_classification_by_embedding_bag() -> Step:
    bag, head = nn.EmbeddingBag(5000, 64).cuda(), nn.Linear(64, 4).cuda()
    lengths = [20 + (i * 11) % 40 for i in range(64)]

    def loss_of() -> torch.Tensor:
        text = torch.cat([torch.arange(n) % 5000 for n in lengths])
        offsets = torch.tensor([0, *lengths[:-1]]).cumsum(dim=0)
        return F.cross_entropy(head(bag(text.cuda(), offsets.cuda())), (torch.arange(64) % 4).cuda())

    return _fit([*bag.parameters(), *head.parameters()], loss_of)


@program(merges=True)
def matrix_factorization_with_sparse_adam() -> Step:
    users, items = nn.Embedding(1000, 32, sparse=True).cuda(), nn.Embedding(2000, 32, sparse=True).cuda()
    optimizer = torch.optim.SparseAdam([*users.parameters(), *items.parameters()], lr=0.01)

    def step() -> None:
        user, item = (torch.arange(256) * 3 % 1000).cuda(), (torch.arange(256) * 7 % 2000).cuda()
        optimizer.zero_grad()
        F.mse_loss((users(user) * items(item)).sum(1), torch.ones(256, device="cuda")).backward()
        optimizer.step()

    return step


@program
def two_towers_in_batch_negatives() -> Step:
    query = nn.Sequential(nn.Embedding(1000, 64), nn.Linear(64, 64)).cuda()
    item = nn.Sequential(nn.Embedding(2000, 64), nn.Linear(64, 64)).cuda()

    def loss_of() -> torch.Tensor:
        a = F.normalize(query(torch.arange(128).cuda()), dim=-1)
        b = F.normalize(item(torch.arange(128).cuda()), dim=-1)
        return F.cross_entropy(a @ b.t() / 0.05, torch.arange(128, device="cuda"))

    return _fit([*query.parameters(), *item.parameters()], loss_of)


@program
def tabular_with_entity_embeddings() -> Step:
    embeds = nn.ModuleList(nn.Embedding(n, 8) for n in (10, 50, 200)).cuda()
    net = nn.Sequential(nn.BatchNorm1d(34), nn.Linear(34, 64), nn.ReLU(), nn.BatchNorm1d(64), nn.Dropout(0.2),
                        nn.Linear(64, 1)).cuda()  # fmt: skip
    numbers = torch.randn(512, 10)
    numbers[numbers.isnan()] = 0
    groups = (torch.arange(512)[:, None] * torch.tensor([1, 3, 7])) % torch.tensor([10, 50, 200])

    def loss_of() -> torch.Tensor:
        x = [embed(groups[:, i].cuda()) for i, embed in enumerate(embeds)]
        return F.huber_loss(net(torch.cat((*x, numbers.cuda()), 1)).squeeze(1), numbers[:, 0].cuda())

    return _fit([*embeds.parameters(), *net.parameters()], loss_of)


@program
def point_cloud_neighbours() -> Step:
    net, head = nn.Linear(6, 64).cuda(), nn.Linear(64, 10).cuda()
    points = torch.randn(4, 128, 3).cuda()

    def loss_of() -> torch.Tensor:
        near = torch.cdist(points, points).topk(8, largest=False).indices
        batch = torch.arange(4, device="cuda")[:, None, None]
        around = points[batch, near]
        edges = torch.cat((around - points[:, :, None], points[:, :, None].expand_as(around)), -1)
        return F.cross_entropy(head(net(edges).amax(2).amax(1)), torch.arange(4, device="cuda"))

    return _fit([*net.parameters(), *head.parameters()], loss_of)


@program(merges=True)
def gcn_by_csr_adjacency() -> Step:
    edges = _edges()
    coo = torch.sparse_coo_tensor(edges, torch.ones(EDGES), (NODES, NODES)).coalesce()
    adjacency = coo.to_sparse_csr().to("cuda")
    first, second = nn.Linear(64, 32).cuda(), nn.Linear(32, 7).cuda()
    x, y = torch.randn(NODES, 64).cuda(), (torch.arange(NODES) % 7).cuda()

    def loss_of() -> torch.Tensor:
        hidden = (adjacency @ first(x)).relu()
        return F.cross_entropy(adjacency @ second(hidden), y)

    return _fit([*first.parameters(), *second.parameters()], loss_of)


@program(merges=True)
def gcn_of_kipf_with_normalized_adjacency() -> Step:
    """As pygcn has it: parameters of its own, torch.spmm, an adjacency with self-loops divided by degrees."""
    edges = torch.cat((_edges(), torch.arange(NODES).repeat(2, 1)), 1)
    degree = torch.zeros(NODES).scatter_add_(0, edges[0], torch.ones(edges.size(1)))
    values = degree.pow(-0.5)[edges[0]] * degree.pow(-0.5)[edges[1]]
    adjacency = torch.sparse_coo_tensor(edges, values, (NODES, NODES), device="cuda")
    weights = [nn.Parameter(torch.randn(a, b, device="cuda") * 0.1) for a, b in ((64, 16), (16, 7))]
    bias = nn.Parameter(torch.zeros(7, device="cuda"))
    x, y = torch.randn(NODES, 64).cuda(), (torch.arange(NODES) % 7).cuda()

    def loss_of() -> torch.Tensor:
        hidden = F.dropout(F.relu(torch.spmm(adjacency, torch.mm(x, weights[0]))), 0.5)
        out = torch.spmm(adjacency, torch.mm(hidden, weights[1])) + bias
        return F.nll_loss(F.log_softmax(out, dim=1)[:140], y[:140])

    return _fit([*weights, bias], loss_of)


@program(merges=True)
def graph_convolution_with_learned_edges() -> Step:
    edges = _edges().cuda()
    weights = nn.Parameter(torch.rand(EDGES, device="cuda"))
    layer, head = nn.Linear(64, 64).cuda(), nn.Linear(64, 7).cuda()
    x, y = torch.randn(NODES, 64).cuda(), (torch.arange(NODES) % 7).cuda()

    def loss_of() -> torch.Tensor:
        adjacency = torch.sparse_coo_tensor(edges, weights.sigmoid(), (NODES, NODES))
        return F.cross_entropy(head(torch.sparse.mm(adjacency, layer(x)).relu()), y)

    return _fit([weights, *layer.parameters(), *head.parameters()], loss_of)


@program
def label_propagation_by_powers_of_sparse_adjacency() -> Step:
    adjacency = torch.sparse_coo_tensor(_edges(), torch.full((EDGES,), 0.25), (NODES, NODES)).coalesce().cuda()
    head = nn.Linear(64, 7).cuda()
    x, y = torch.randn(NODES, 64).cuda(), (torch.arange(NODES) % 7).cuda()
    with torch.no_grad():
        for _ in range(3):
            x = 0.9 * torch.sparse.mm(adjacency, x) + 0.1 * x

    return _fit(head.parameters(), lambda: F.cross_entropy(head(x), y))


@program
def dense_batches_from_sparse_features() -> Step:
    """Bags of words that rest on the host as a sparse matrix; batches are made dense."""
    rows, words = torch.arange(4000) % 400, (torch.arange(4000) * 31) % 2000
    bags = torch.sparse_coo_tensor(torch.stack((rows, words)), torch.ones(4000), (400, 2000)).coalesce()
    net = nn.Sequential(nn.Linear(2000, 64), nn.ReLU(), nn.Linear(64, 4)).cuda()
    chosen = torch.arange(64)

    def loss_of() -> torch.Tensor:
        batch = bags.index_select(0, chosen).to_dense().cuda()
        return F.cross_entropy(net(batch), (chosen % 4).cuda())

    return _fit(net.parameters(), loss_of)


@program
def skip_gram_with_sparse_embeddings() -> Step:
    words, contexts = nn.Embedding(3000, 64, sparse=True).cuda(), nn.Embedding(3000, 64, sparse=True).cuda()
    optimizer = torch.optim.SGD([*words.parameters(), *contexts.parameters()], lr=0.1)

    def step() -> None:
        center = (torch.arange(256) * 3 % 3000).cuda()
        around, noise = (torch.arange(256) * 7 % 3000).cuda(), torch.randint(0, 3000, (256, 5)).cuda()
        optimizer.zero_grad()
        w = words(center)
        good = F.logsigmoid((w * contexts(around)).sum(-1))
        bad = F.logsigmoid(-(contexts(noise) @ w.unsqueeze(-1)).squeeze(-1)).sum(-1)
        (-(good + bad)).mean().backward()
        optimizer.step()

    return step


@program(merges=True)
def embedding_bags_with_sparse_adagrad() -> Step:
    bag = nn.EmbeddingBag(5000, 32, mode="mean", sparse=True).cuda()
    head = nn.Linear(32, 4).cuda()
    sparse = torch.optim.Adagrad(bag.parameters(), lr=0.1)
    dense = torch.optim.Adam(head.parameters())
    text, offsets = (torch.arange(1024) * 11 % 5000).cuda(), torch.arange(0, 1024, 16).cuda()

    def step() -> None:
        sparse.zero_grad()
        dense.zero_grad()
        F.cross_entropy(head(bag(text, offsets)), (torch.arange(64) % 4).cuda()).backward()
        sparse.step()
        dense.step()

    return step


@program
def embedding_bags_weighted_and_of_maxima() -> Step:
    weighted = nn.EmbeddingBag(3000, 32, mode="sum", padding_idx=0).cuda()
    largest = nn.EmbeddingBag(3000, 32, mode="max").cuda()
    head = nn.Linear(64, 3).cuda()
    words = (torch.arange(128 * 20).view(128, 20) * 13 % 3000).cuda()
    weights = torch.rand(128, 20).cuda()

    def loss_of() -> torch.Tensor:
        both = torch.cat((weighted(words, per_sample_weights=weights), largest(words)), 1)
        return F.cross_entropy(head(both), (torch.arange(128) % 3).cuda())

    return _fit([*weighted.parameters(), *largest.parameters(), *head.parameters()], loss_of)


@program
def graph_transformer_with_laplacian_positions() -> Step:
    edges = _edges()
    adjacency = torch.zeros(NODES, NODES)
    adjacency[edges[0], edges[1]] = 1
    laplacian = torch.diag(adjacency.sum(1)) - (adjacency + adjacency.t()) / 2
    positions = torch.linalg.eigh(laplacian)[1][:, 1:9].cuda()
    embed = nn.Linear(64 + 8, 64).cuda()
    layer, head = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True).cuda(), nn.Linear(64, 7).cuda()
    x, y = torch.randn(NODES, 64).cuda(), (torch.arange(NODES) % 7).cuda()

    def loss_of() -> torch.Tensor:
        signs = torch.randint(0, 2, (1, 8), device="cuda") * 2 - 1
        hidden = layer(embed(torch.cat((x, positions * signs), 1)).unsqueeze(0))
        return F.cross_entropy(head(hidden.squeeze(0)), y)

    return _fit([*embed.parameters(), *layer.parameters(), *head.parameters()], loss_of)


@program
def two_tower_recommender_with_hashed_features() -> Step:
    table = nn.EmbeddingBag(10_000, 32, mode="sum").cuda()
    net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32)).cuda()

    def loss_of() -> torch.Tensor:
        features = (torch.arange(256 * 8).view(256, 8).cuda() * 2654435761) % 10_000
        users, items = net(table(features)).chunk(2)
        return F.cross_entropy(users @ items.t(), torch.arange(128, device="cuda"))

    return _fit([*table.parameters(), *net.parameters()], loss_of)


@program
def graphs_pooled_by_best_scores() -> Step:
    """Top-k pooling of dense graphs, as Graph U-Nets have it (arXiv 1905.05178), and back by scattering."""
    embed, score, mix, out = (layer.cuda() for layer in (
        nn.Linear(16, 64), nn.Linear(64, 1), nn.Linear(64, 64), nn.Linear(64, 5)
    ))  # fmt: skip
    optimizer = torch.optim.Adam([p for layer in (embed, score, mix, out) for p in layer.parameters()])
    nodes, labels = torch.randn(16, 100, 16, device="cuda"), torch.arange(1600, device="cuda").view(16, 100) % 5
    edges = (torch.rand(16, 100, 100, device="cuda") < 0.1).float()

    def step() -> None:
        hidden = F.relu(embed(edges @ nodes / edges.sum(dim=-1, keepdim=True).clamp(min=1)))
        values, chosen = score(hidden).squeeze(-1).topk(50, dim=1)
        rows = chosen[..., None].expand(-1, -1, 64)
        pooled = hidden.gather(1, rows) * torch.sigmoid(values)[..., None]
        part = edges.gather(1, chosen[..., None].expand(-1, -1, 100)).gather(2, chosen[:, None].expand(-1, 50, -1))
        pooled = F.relu(mix((part @ part) @ pooled))
        whole = torch.zeros_like(hidden).scatter(1, rows, pooled) + hidden
        optimizer.zero_grad()
        F.cross_entropy(out(whole).flatten(0, 1), labels.flatten()).backward()
        optimizer.step()

    return step
