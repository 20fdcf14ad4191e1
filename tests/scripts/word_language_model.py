"""Re-creates PyTorch's word language model example with a Transformer: clipped gradients, the best model saved."""

import math
import tempfile
from pathlib import Path

import torch
from torch import nn

torch.manual_seed(1111)
WORDS, WIDTH, HEADS, HIDDEN, LAYERS, LENGTH, BATCH = 400, 160, 4, 512, 4, 12, 4


class Positions(nn.Module):
    def __init__(self, width, longest=64):
        super().__init__()
        self.dropout = nn.Dropout(0.2)
        table = torch.zeros(longest, width)
        at = torch.arange(longest).unsqueeze(1)
        pace = torch.exp(torch.arange(0, width, 2) * (-math.log(10000.0) / width))
        table[:, 0::2] = torch.sin(at * pace)
        table[:, 1::2] = torch.cos(at * pace)
        self.register_buffer("table", table.unsqueeze(1))

    def forward(self, x):
        return self.dropout(x + self.table[: x.size(0)])


class LanguageModel(nn.Transformer):
    def __init__(self):
        super().__init__(d_model=WIDTH, nhead=HEADS, dim_feedforward=HIDDEN, num_encoder_layers=LAYERS,
                         num_decoder_layers=0)  # fmt: skip
        self.positions = Positions(WIDTH)
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.output = nn.Linear(WIDTH, WORDS)
        nn.init.uniform_(self.embedding.weight, -0.1, 0.1)

    def forward(self, words):
        mask = torch.log(torch.tril(torch.ones(len(words), len(words))))
        x = self.positions(self.embedding(words) * math.sqrt(WIDTH))
        return nn.functional.log_softmax(self.output(self.encoder(x, mask=mask)), dim=-1)


def batches(corpus):
    for begin in range(0, corpus.size(0) - LENGTH, LENGTH):
        yield corpus[begin : begin + LENGTH], corpus[begin + 1 : begin + 1 + LENGTH].reshape(-1)


def evaluate(model, corpus):
    model.eval()
    with torch.no_grad():
        found = [nn.functional.nll_loss(model(words).view(-1, WORDS), wanted) for words, wanted in batches(corpus)]
    model.train()
    return torch.stack(found).mean().item()


model = LanguageModel()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
train, valid = (torch.randint(0, WORDS, (LENGTH * count + 1, BATCH)) for count in (4, 2))
best = math.inf
with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "model.pt"
    for epoch in range(2):
        for words, wanted in batches(train):
            optimizer.zero_grad()
            loss = nn.functional.nll_loss(model(words).view(-1, WORDS), wanted)
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.25)
            optimizer.step()
            print(loss.item(), norm.item())
        found = evaluate(model, valid)
        print("valid", epoch, found)
        if found < best:
            best = found
            torch.save(model.state_dict(), path)
    model.load_state_dict(torch.load(path))
print("test", evaluate(model, valid))
