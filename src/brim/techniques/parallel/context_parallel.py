"""Context parallelism: each rank has two chunks of every sequence, and looks at all ranks' keys and values.

As in the training of Llama 3 (arXiv 2407.21783, section 3.3.2): keys and values are gathered over the ranks, and
chunks are dealt out so that all ranks have as much to look at (``context_attention``). What else a layer does, it
does for each token alone. PyTorch's ring attention (torch/distributed/tensor/experimental/_context_parallel/
_attention.py, ``custom_ops``) stands in for CUDA's kernels only; this runs where PyTorch runs.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional as F

from brim.errors import UnsupportedError
from brim.predict.compiled.torch_compile import is_captured
from brim.techniques.parallel import attention_kernels
from brim.techniques.parallel.collectives import gathered
from brim.techniques.parallel.context_attention import Ring, attention

_IGNORED = -100  # a label that does not count
_ATTENTION = "brim_context_parallel"
_SLIDING = ("sliding_window", "attention_chunk_size")
_GROWING = ("dynamic", "longrope")  # rotary positions whose frequencies follow the longest sequence that was seen


def mesh_of(ranks: int, device: str, tensor_parallel: int = 1) -> DeviceMesh | None:
    """So many ranks that share sequences, each with neighbours of its own that share tensors; None for one, who
    shares with no-one."""
    if ranks == 1:
        return None
    rest = dist.get_world_size() // (ranks * tensor_parallel)
    return init_device_mesh(device, (rest, ranks, tensor_parallel), mesh_dim_names=("rest", "cp", "tp"))["cp"]


def narrow(config: Any) -> str | None:
    """What in transformers' configuration says that attention does not look at all that went before, if any does."""
    setting = next((name for name in _SLIDING if getattr(config, name, None)), None)
    if setting is None and any(kind != "full_attention" for kind in getattr(config, "layer_types", None) or ()):
        return "layer_types"
    return setting


def growing(config: Any) -> str | None:
    """The kind of rotary positions that ranks with different parts of a sequence would not turn alike, if it is."""
    kind = (getattr(config, "rope_parameters", None) or {}).get("rope_type")
    return kind if kind in _GROWING else None


def apply(model: Any, mesh: DeviceMesh, place: int | None = None) -> Context:
    """Let transformers' causal language model ``model`` work on this rank's tokens, over ``mesh`` (one axis).
    ``place``: as if it were that one of these ranks, which are not there.

    Raises UnsupportedError for layers that do not attend to all earlier tokens.
    """
    from transformers import AttentionInterface

    _check(model, mesh.size())
    context = Context(mesh, place)
    AttentionInterface.register(_ATTENTION, _attention)
    model.set_attn_implementation(_ATTENTION)
    attentions = [
        module for module in model.modules() if hasattr(module, "layer_idx") and hasattr(module, "is_causal")
    ]
    if not attentions or model.config._attn_implementation != _ATTENTION:
        raise UnsupportedError(
            f"Cannot use --cp {mesh.size()} for {type(model).__name__}.",
            "transformers cannot replace its attention.", "Leave out --cp.",
        )  # fmt: skip
    for module in attentions:
        vars(module)["context"] = context
    return context


def _check(model: Any, ranks: int) -> None:
    windowed, turned = narrow(model.config), growing(model.config)
    why = f"Its attention does not attend to all earlier tokens ({windowed})." if windowed else ""
    why = why or f"Its rotary positions depend on the length of the sequence ({turned}), and a rank has a part of it."
    if windowed or turned:
        raise UnsupportedError(f"Cannot use --cp {ranks} for {type(model).__name__}.", why, "Leave out --cp.")


class Context:
    """The handle: this rank's tokens."""

    def __init__(self, mesh: DeviceMesh, place: int | None = None) -> None:
        rank = mesh.get_local_rank() if place is None else place
        self.ring = Ring(group=mesh.get_group(), rank=rank, ranks=mesh.size())
        self._mask: torch.Tensor | None = None

    def own(self, tokens: torch.Tensor) -> torch.Tensor:
        """This rank's of (batch, sequence, ...)."""
        return own(tokens, self.ring.rank, self.ring.ranks)

    def following(self, labels: torch.Tensor) -> torch.Tensor:
        """(batch, sequence) -> for each of this rank's tokens the label of the next one, which may be another
        rank's."""
        return self.own(F.pad(labels[:, 1:], (0, 1), value=_IGNORED)).contiguous()

    def positions(self, count: int, device: torch.device) -> torch.Tensor:
        """Of this rank's ``count`` tokens in their sequence: (1, count)."""
        return _positions(self.ring.rank, self.ring.ranks, count, device)[None]

    def whole(self, tensor: torch.Tensor) -> torch.Tensor:
        """(batch, heads, own tokens, width) -> (batch, heads, all tokens, width), rank after rank."""
        rows = gathered(tensor.permute(2, 0, 1, 3), self.ring.group)
        return rows.permute(1, 2, 0, 3)

    def mask(self, count: int, device: torch.device) -> torch.Tensor:
        """Which of all tokens, rank after rank, each of this rank's looks at: (1, 1, own, all); the same for all
        layers but compiled ones, whose graphs make their own."""
        if self._mask is not None and self._mask.shape[2] == count:
            return self._mask
        ranks = self.ring.ranks
        every = torch.cat([_positions(rank, ranks, count, device) for rank in range(ranks)])
        mask = (every[None] <= self.positions(count, device)[0][:, None])[None, None]
        if not is_captured():
            self._mask = mask
        return mask


def own(tokens: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    """Chunks ``rank`` and ``2 ranks - 1 - rank`` of ``2 ranks`` of each sequence: (batch, sequence, ...)."""
    if ranks == 1:
        return tokens
    length = tokens.shape[1] // (2 * ranks)
    starts = (rank * length, (2 * ranks - 1 - rank) * length)
    return torch.cat([tokens[:, start : start + length] for start in starts], 1)


def _positions(rank: int, ranks: int, count: int, device: torch.device) -> torch.Tensor:
    return own(torch.arange(count * ranks, device=device)[None], rank, ranks)[0]


def _attention(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any,
    **settings: Any,
) -> Any:  # fmt: skip
    """transformers' attention over all ranks' keys and values."""
    context: Context = vars(module)["context"]
    plain = not settings.get("dropout") and all(settings.get(name) is None for name in ("softcap", "position_bias"))
    kernel = attention_kernels.chosen(query, key, value) if plain else None
    if kernel is None:
        return _masked(module, query, key, value, context, settings)
    return attention(query, key, value, context.ring, kernel, settings.get("scaling")), None


def _masked(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, context: Context,
    settings: dict[str, Any],
) -> Any:  # fmt: skip
    """What no fused kernel does, such as dropout of scores: transformers' own, with a mask over all tokens."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    mask = context.mask(query.shape[2], query.device)
    settings = {name: value for name, value in settings.items() if name != "is_causal"}
    return sdpa_attention_forward(
        module, query, context.whole(key), context.whole(value), mask, is_causal=False, **settings
    )
