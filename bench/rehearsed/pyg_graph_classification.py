"""PyTorch Geometric: batches of small graphs, pooled by their number."""

import torch
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import MLP, GINConv, SAGPooling, global_add_pool


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = GINConv(MLP([16, 64, 64]), train_eps=True)
        self.pool = SAGPooling(64, ratio=0.5)
        self.conv2 = GINConv(MLP([64, 64, 64]))
        self.classify = MLP([64, 64, 2], norm=None, dropout=0.5)

    def forward(self, x, edge_index, batch):
        x = self.conv1(x, edge_index).relu()
        x, edge_index, _, batch, _, _ = self.pool(x, edge_index, None, batch)
        return self.classify(global_add_pool(self.conv2(x, edge_index).relu(), batch))


def graph():
    nodes = int(torch.randint(10, 60, ()))
    return Data(
        x=torch.randn(nodes, 16), edge_index=torch.randint(0, nodes, (2, 4 * nodes)), y=torch.randint(0, 2, (1,))
    )


model = Net().cuda()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for batch in DataLoader([graph() for _ in range(640)], batch_size=64, shuffle=True):
    batch = batch.to("cuda")
    loss = torch.nn.functional.cross_entropy(model(batch.x, batch.edge_index, batch.batch), batch.y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
