"""Re-creates PyTorch's tutorial on classifying names with a character-level recurrent network."""

import random

import torch
from torch import nn

torch.manual_seed(2)
random.seed(2)
LETTERS = "abcdefghijklmnopqrstuvwxyz '-."
LANGUAGES = ("Alvish", "Borean", "Cymrite", "Dalian", "Eastern")


def line_to_tensor(line):
    made = torch.zeros(len(line), 1, len(LETTERS))
    for position, letter in enumerate(line):
        made[position][0][LETTERS.index(letter)] = 1
    return made


class NameReader(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.first = nn.LSTM(len(LETTERS), hidden)
        self.second = nn.LSTM(hidden, hidden)
        self.out = nn.Linear(hidden, len(LANGUAGES))

    def forward(self, line):
        found, _ = self.first(line)
        _, (state, _) = self.second(found)
        return nn.functional.log_softmax(self.out(state[0]), dim=1)


names = [("".join(random.choices(LETTERS[:26], k=7)), random.randrange(len(LANGUAGES))) for _ in range(12)]
model = NameReader(320)
criterion = nn.NLLLoss()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for epoch in range(2):
    random.shuffle(names)
    total = 0.0
    for begin in range(0, len(names), 4):
        loss = 0
        for name, language in names[begin : begin + 4]:
            loss = loss + criterion(model(line_to_tensor(name)), torch.tensor([language]))
        optimizer.zero_grad()
        (loss / 4).backward()
        optimizer.step()
        total += loss.item()
    print(epoch, total)
with torch.no_grad():
    for name, _ in names[:3]:
        print(name, model(line_to_tensor(name)).argmax(1).item())
