"""TorchRL: a replay buffer, a Q-network and its loss, on the GPU."""

import torch
from tensordict import TensorDict
from torch import nn
from torchrl.data import LazyTensorStorage, OneHot, TensorDictReplayBuffer
from torchrl.modules import QValueActor
from torchrl.objectives import DQNLoss, SoftUpdate

network = nn.Sequential(nn.Linear(8, 256), nn.ReLU(), nn.Linear(256, 4)).cuda()
actor = QValueActor(network, in_keys=["observation"], spec=OneHot(4).to("cuda"))
loss_of = DQNLoss(actor, action_space="one_hot", delay_value=True)
loss_of.make_value_estimator(gamma=0.99)
target, optimizer = SoftUpdate(loss_of, eps=0.99), torch.optim.Adam(loss_of.parameters(), lr=1e-3)
buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(2000, device="cuda"), batch_size=128)
for _ in range(10):
    state = TensorDict({"observation": torch.randn(256, 8, device="cuda")}, batch_size=256)
    actor(state)
    state["next"] = TensorDict(
        {
            "observation": torch.randn(256, 8, device="cuda"),
            "reward": torch.randn(256, 1, device="cuda"),
            "done": torch.zeros(256, 1, dtype=torch.bool, device="cuda"),
            "terminated": torch.zeros(256, 1, dtype=torch.bool, device="cuda"),
        },
        batch_size=256,
    )
    buffer.extend(state)
    loss = loss_of(buffer.sample())["loss"]
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    target.step()
