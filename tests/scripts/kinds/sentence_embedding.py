"""Embeddings of sentences: tokens are made inside, and features are a dictionary that the model writes to."""

import torch
import torch.nn.functional as F
from transformers import BertConfig, BertModel

torch.manual_seed(0)


class SentenceEncoder(torch.nn.Module):
    """tokenizes inside forward, sorts by length, pools by the mask, batch by batch"""

    def __init__(self):
        super().__init__()
        self.bert = BertModel(
            BertConfig(
                hidden_size=128, num_hidden_layers=3, num_attention_heads=4, intermediate_size=256, vocab_size=3000
            )
        )

    def tokenize(self, texts):
        rows = [[1] + [5 + hash_(w) % 2900 for w in t.split()] + [2] for t in texts]
        n = max(map(len, rows))
        ids = torch.tensor([r + [0] * (n - len(r)) for r in rows])
        return {"input_ids": ids, "attention_mask": (ids != 0).long()}

    def forward(self, features):
        out = self.bert(**features).last_hidden_state
        m = features["attention_mask"].unsqueeze(-1).float()
        features.update({"sentence_embedding": F.normalize((out * m).sum(1) / m.sum(1).clamp(min=1e-9), dim=-1)})
        return features

    def encode(self, texts, batch_size=2):
        self.eval()
        order = sorted(range(len(texts)), key=lambda i: -len(texts[i]))
        rows = {}
        for i in range(0, len(order), batch_size):
            part = order[i : i + batch_size]
            with torch.no_grad():
                e = self.forward(self.tokenize([texts[j] for j in part]))["sentence_embedding"]
            rows |= dict(zip(part, e, strict=False))
        return torch.stack([rows[i] for i in range(len(texts))])


def hash_(w):
    return sum(ord(c) * 31**i for i, c in enumerate(w))


m = SentenceEncoder()
print(m.encode(["a short one", "a rather longer sentence here", "x", "and one more"]).double().sum(1).tolist())
f = m.tokenize(["hello there", "you"])
out = m(f)
print(out is f, sorted(f), f["sentence_embedding"].double().sum().item())
