"""Re-creates PyTorch's translation tutorial: an encoder and a decoder with attention, and an optimizer for each."""

import random

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(9)
random.seed(9)
WORDS, WIDTH, LENGTH = 300, 256, 6


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.gru = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, words):
        return self.gru(self.embedding(words))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.query, self.key = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.score = nn.Linear(WIDTH, 1)
        self.gru = nn.GRU(2 * WIDTH, WIDTH, batch_first=True)
        self.out = nn.Linear(WIDTH, WORDS)

    def forward(self, encoded, hidden, wanted):
        word = torch.zeros(encoded.size(0), 1, dtype=torch.long)
        found = []
        for position in range(LENGTH):
            query = hidden.permute(1, 0, 2)
            scores = self.score(torch.tanh(self.query(query) + self.key(encoded))).squeeze(2).unsqueeze(1)
            context = torch.bmm(F.softmax(scores, dim=-1), encoded)
            step, hidden = self.gru(torch.cat((self.embedding(word), context), dim=2), hidden)
            step = self.out(step)
            found.append(step)
            word = wanted[:, position].unsqueeze(1) if wanted is not None else step.topk(1)[1].squeeze(-1).detach()
        return F.log_softmax(torch.cat(found, dim=1), dim=-1)


encoder, decoder = Encoder(), Decoder()
optimizers = [torch.optim.Adam(part.parameters(), lr=1e-3) for part in (encoder, decoder)]
for step in range(4):
    source, target = torch.randint(0, WORDS, (4, LENGTH)), torch.randint(0, WORDS, (4, LENGTH))
    for optimizer in optimizers:
        optimizer.zero_grad()
    encoded, hidden = encoder(source)
    loss = F.nll_loss(decoder(encoded, hidden, target).view(-1, WORDS), target.view(-1))
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
    print(step, loss.item())
with torch.no_grad():
    print(decoder(*encoder(source), None).argmax(-1).tolist())
