"""Korthikanti's form against what autograd saves for the layer of the paper (arXiv 2205.05198, Figures 2 and 3)."""

import pytest
import torch
from torch import nn

from support import published_formulas


class Layer(nn.Module):
    """Pre-norm attention and MLP of four times the width, in 16 bits with dropout masks of one byte."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.project = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.widen, self.narrow = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)
        self.gelu = nn.GELU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + drop(self.project(self.attend(self.norm1(x))))
        return x + drop(self.narrow(self.gelu(self.widen(self.norm2(x)))))

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        batch, sequence, hidden = x.shape
        q, k, v = (
            part.view(batch, sequence, self.heads, -1).transpose(1, 2).reshape(batch * self.heads, sequence, -1)
            for part in self.qkv(x).split(hidden, dim=-1)
        )
        weights = drop(torch.softmax(q @ k.transpose(1, 2), dim=-1))
        return (weights @ v).view(batch, self.heads, sequence, -1).transpose(1, 2).reshape(batch, sequence, hidden)


def drop(x: torch.Tensor) -> torch.Tensor:
    return torch.native_dropout(x, 0.1, True)[0]


def saved_bytes(layer: nn.Module, x: torch.Tensor) -> int:
    """Bytes of the distinct storages that autograd keeps, parameters left out."""
    parameters = {p.untyped_storage()._cdata for p in layer.parameters()}
    kept = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in parameters:
            kept[storage._cdata] = tensor  # held, so that no address is used twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        layer(x).sum()
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@pytest.mark.parametrize(
    ("sequence", "batch", "hidden", "heads"), [(128, 2, 256, 4), (256, 1, 512, 16), (64, 3, 768, 12)]
)
def test_one_layer_saves_what_the_form_says(sequence, batch, hidden, heads):
    with torch.device("meta"):
        layer = Layer(hidden, heads).to(torch.bfloat16)
        x = torch.randn(batch, sequence, hidden, dtype=torch.bfloat16, requires_grad=True)
    sizes = {"sequence": sequence, "micro_batch": batch, "hidden": hidden, "heads": heads}
    form = published_formulas.activations_per_layer(**sizes).value
    statistics = 2 * 2 * sequence * batch * 4  # mean and deviation of two norms: left out in the paper
    assert form <= saved_bytes(layer, x) <= form + statistics
