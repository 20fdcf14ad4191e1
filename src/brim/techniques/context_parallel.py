"""Context parallelism: each rank has a stretch of every sequence, and all keys and values in attention.

As in the training of Llama 3 (arXiv 2407.21783, section 3.3.2): keys and values are gathered over the ranks, and a
rank's queries look at those up to their own place, by transformers' own attention. What else a layer does, it does
for each token alone. PyTorch's ring attention (torch/distributed/tensor/experimental/_context_parallel/_attention.py,
``custom_ops``) stands in for CUDA's kernels only, and takes no mask; this runs where PyTorch runs.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional as F

from brim.errors import UnsupportedError
from brim.predict.compiled import is_captured
from brim.techniques.collectives import gathered

NAME = "context_parallel"
_IGNORED = -100  # a label that does not count
_ATTENTION = "brim_context_parallel"
_SLIDING = ("sliding_window", "attention_chunk_size")


def mesh_of(ranks: int, device: str) -> DeviceMesh | None:
    """Neighbours of all ranks that there are, so many together; None for one, who shares with no-one."""
    if ranks == 1:
        return None
    return init_device_mesh(device, (dist.get_world_size() // ranks, ranks), mesh_dim_names=("rest", "cp"))["cp"]


def narrow(config: Any) -> str | None:
    """What in transformers' configuration says that attention does not look at all that went before, if any does."""
    found = next((name for name in _SLIDING if getattr(config, name, None)), None)
    if found is None and any(kind != "full_attention" for kind in getattr(config, "layer_types", None) or ()):
        return "layer_types"
    return found


def apply(model: Any, mesh: DeviceMesh) -> Context:
    """Let transformers' causal language model ``model`` work on this rank's stretch, over ``mesh`` (one axis).

    Raises UnsupportedError for layers that are no attention over all that went before.
    """
    from transformers import AttentionInterface

    windowed = narrow(model.config)
    if windowed is not None:
        raise UnsupportedError(
            f"--cp {mesh.size()} was asked for {type(model).__name__}.",
            f"Its attention does not look at all that went before ({windowed}).", "Leave out --cp.",
        )  # fmt: skip
    context = Context(mesh)
    AttentionInterface.register(_ATTENTION, _attention)
    model.set_attn_implementation(_ATTENTION)
    found = [module for module in model.modules() if hasattr(module, "layer_idx") and hasattr(module, "is_causal")]
    if not found or model.config._attn_implementation != _ATTENTION:
        raise UnsupportedError(
            f"--cp {mesh.size()} was asked for {type(model).__name__}.",
            "Its attention is not one that transformers can exchange.", "Leave out --cp.",
        )  # fmt: skip
    for module in found:
        vars(module)["context"] = context
    return context


class Context:
    """The handle: this rank's stretch."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self._group, self._ranks, self._rank = mesh.get_group(), mesh.size(), mesh.get_local_rank()
        self._mask: torch.Tensor | None = None

    def cut(self, tokens: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """What a causal language model is to be given for this rank's part of ``tokens`` and ``labels`` (batch,
        sequence): labels are those of the next token, which may be another rank's."""
        own = self.stretch(tokens.shape[1])
        following = F.pad(labels[:, 1:], (0, 1), value=_IGNORED)[:, own].contiguous()
        positions = torch.arange(own.start, own.stop, device=tokens.device)[None]
        return {
            "input_ids": tokens[:, own], "position_ids": positions, "labels": following, "shift_labels": following
        }  # fmt: skip

    def stretch(self, tokens: int) -> slice:
        """This rank's of so many tokens."""
        return stretch(tokens, self._rank, self._ranks)

    def whole(self, tensor: torch.Tensor) -> torch.Tensor:
        """(batch, heads, own tokens, width) -> (batch, heads, all tokens, width)."""
        rows = gathered(tensor.permute(2, 0, 1, 3), self._group)
        return rows.permute(1, 2, 0, 3)

    def mask(self, own: int, device: torch.device) -> torch.Tensor:
        """Which of all tokens each of this rank's looks at: (1, 1, own, all); the same for all layers but compiled
        ones, whose graphs make their own."""
        if self._mask is not None and self._mask.shape[2] == own:
            return self._mask
        whole = torch.ones(own, own * self._ranks, dtype=torch.bool, device=device)
        mask = whole.tril_(self._rank * own)[None, None]
        if not is_captured():
            self._mask = mask
        return mask


def stretch(tokens: int, rank: int, ranks: int) -> slice:
    own = tokens // ranks
    return slice(rank * own, (rank + 1) * own)


def _attention(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any,
    **settings: Any,
) -> Any:  # fmt: skip
    """transformers' attention over all ranks' keys and values."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    context: Any = vars(module)["context"]
    mask = context.mask(query.shape[2], query.device)
    settings.pop("is_causal", None)
    return sdpa_attention_forward(
        module, query, context.whole(key), context.whole(value), mask, is_causal=False, **settings
    )
