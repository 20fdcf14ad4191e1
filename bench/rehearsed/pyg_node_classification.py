"""PyTorch Geometric: graph attention on one large graph."""

import torch
import torch.nn.functional as F
from torch_geometric.data import Data
from torch_geometric.nn import GATConv, GCNConv


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = GCNConv(128, 64)
        self.conv2 = GATConv(64, 7, heads=4, concat=False)

    def forward(self, data):
        x = F.dropout(F.relu(self.conv1(data.x, data.edge_index)), training=self.training)
        return F.log_softmax(self.conv2(x, data.edge_index), dim=1)


nodes = 20_000
data = Data(
    x=torch.randn(nodes, 128), edge_index=torch.randint(0, nodes, (2, 200_000)), y=torch.randint(0, 7, (nodes,))
)
data.train_mask = torch.rand(nodes) < 0.3
data = data.to("cuda")
model = Net().cuda()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
for _ in range(10):
    optimizer.zero_grad()
    out = model(data)
    F.nll_loss(out[data.train_mask], data.y[data.train_mask]).backward()
    optimizer.step()
