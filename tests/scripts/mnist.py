"""Re-creates PyTorch's basic MNIST example on random digits: argparse, Adadelta, a schedule, a test each epoch."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import StepLR


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, 1)
        self.conv2 = nn.Conv2d(8, 16, 3, 1)
        self.dropout1 = nn.Dropout(0.25)
        self.dropout2 = nn.Dropout(0.5)
        self.fc1 = nn.Linear(16 * 5 * 5, 640)
        self.fc2 = nn.Linear(640, 640)
        self.fc3 = nn.Linear(640, 10)

    def forward(self, x):
        x = F.relu(self.conv2(F.relu(self.conv1(x))))
        x = torch.flatten(self.dropout1(F.max_pool2d(x, 2)), 1)
        x = self.dropout2(F.relu(self.fc2(F.relu(self.fc1(x)))))
        return F.log_softmax(self.fc3(x), dim=1)


def main():
    parser = argparse.ArgumentParser(description="digits")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--lr", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    digits = torch.utils.data.TensorDataset(torch.randn(32, 1, 14, 14), torch.randint(0, 10, (32,)))
    loader = torch.utils.data.DataLoader(digits, batch_size=8, shuffle=True)
    model = Net().to(device)
    optimizer = torch.optim.Adadelta(model.parameters(), lr=args.lr)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
    for epoch in range(1, args.epochs + 1):
        model.train()
        for index, (data, target) in enumerate(loader):
            data, target = data.to(device), target.to(device)
            optimizer.zero_grad()
            loss = F.nll_loss(model(data), target)
            loss.backward()
            optimizer.step()
            print(f"epoch {epoch} batch {index} loss {loss.item()!r}")
        model.eval()
        with torch.no_grad():
            lost = sum(F.nll_loss(model(d.to(device)), t.to(device), reduction="sum").item() for d, t in loader)
        print(f"test {lost!r}, lr {scheduler.get_last_lr()}")
        scheduler.step()


if __name__ == "__main__":
    main()
