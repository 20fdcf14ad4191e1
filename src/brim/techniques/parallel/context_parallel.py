"""Context parallelism: each rank has two chunks of every sequence, and attends to all ranks' keys and values.

As in the training of Llama 3 (arXiv 2407.21783, section 3.3.2): keys and values are gathered over the ranks, and
chunks are distributed so that all ranks have equal work (``context_attention``). All other operations of a layer work
on each token separately. PyTorch's ring attention
(torch/distributed/tensor/experimental/_context_parallel/_attention.py, ``custom_ops``) replaces CUDA's kernels only;
this works on every device.
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
from brim.techniques.micro_batch import IGNORED_LABEL
from brim.techniques.parallel.collectives import gathered
from brim.techniques.parallel.context_attention import Ring, attention, kernel_for

_ATTENTION = "brim_context_parallel"
_SLIDING = ("sliding_window", "attention_chunk_size")
_GROWING = ("dynamic", "longrope")  # rotary positions whose frequencies depend on the longest sequence so far


def mesh_of(ranks: int, device: str, tensor_parallel: int = 1) -> DeviceMesh | None:
    """The mesh of ``ranks`` that share sequences, each with tensor parallel ranks of its own; None for one rank."""
    if ranks == 1:
        return None
    rest = dist.get_world_size() // (ranks * tensor_parallel)
    return init_device_mesh(device, (rest, ranks, tensor_parallel), mesh_dim_names=("rest", "cp", "tp"))["cp"]


def narrow(config: Any) -> str | None:
    """The setting of transformers' configuration by which attention does not reach all earlier tokens, or None."""
    setting = next((name for name in _SLIDING if getattr(config, name, None)), None)
    if setting is None and any(kind != "full_attention" for kind in getattr(config, "layer_types", None) or ()):
        return "layer_types"
    return setting


def length_dependent(config: Any) -> str | None:
    """The kind of rotary positions that depend on the length of the sequence, which ranks have parts of, or None."""
    kind = (getattr(config, "rope_parameters", None) or {}).get("rope_type")
    return kind if kind in _GROWING else None


def apply(model: Any, mesh: DeviceMesh, place: int | None = None) -> Context:
    """Let transformers' causal language model ``model`` work on this rank's tokens, over ``mesh`` (one axis).
    ``place``: act as that one of these ranks, in a prediction.

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
    windowed, rotary = narrow(model.config), length_dependent(model.config)
    why = f"Its attention does not attend to all earlier tokens ({windowed})." if windowed else ""
    why = (
        why
        or f"Its rotary positions depend on the length of the sequence ({rotary}), and a rank has only a part of it."
    )
    if windowed or rotary:
        raise UnsupportedError(f"Cannot use --cp {ranks} for {type(model).__name__}.", why, "Leave out --cp.")


class Context:
    """The handle, which selects this rank's tokens."""

    def __init__(self, mesh: DeviceMesh, place: int | None = None) -> None:
        rank = mesh.get_local_rank() if place is None else place
        self.ring = Ring(group=mesh.get_group(), rank=rank, ranks=mesh.size())
        self._mask: torch.Tensor | None = None

    def own(self, tokens: torch.Tensor) -> torch.Tensor:
        return own(tokens, self.ring.rank, self.ring.ranks)

    def following(self, labels: torch.Tensor) -> torch.Tensor:
        """The label of the token after each of this rank's, out of (batch, sequence)."""
        return self.own(F.pad(labels[:, 1:], (0, 1), value=IGNORED_LABEL)).contiguous()

    def positions(self, count: int, device: torch.device) -> torch.Tensor:
        """The positions of this rank's ``count`` tokens in their sequence: (1, count)."""
        return _positions(self.ring.rank, self.ring.ranks, count, device)[None]

    def gather_tokens(self, tensor: torch.Tensor) -> torch.Tensor:
        """Gather (batch, heads, own tokens, width) to (batch, heads, all tokens, width), rank after rank."""
        rows = gathered(tensor.permute(2, 0, 1, 3), self.ring.group)
        return rows.permute(1, 2, 0, 3)

    def mask(self, count: int, device: torch.device) -> torch.Tensor:
        """The mask (1, 1, own, all) of this rank's tokens over all tokens, rank after rank. All layers share it,
        except compiled ones, whose graphs make their own.
        """
        if self._mask is not None and self._mask.shape[2] == count:
            return self._mask
        ranks = self.ring.ranks
        all_positions = torch.cat([_positions(rank, ranks, count, device) for rank in range(ranks)])
        mask = (all_positions[None] <= self.positions(count, device)[0][:, None])[None, None]
        if not is_captured():
            self._mask = mask
        return mask


def own(tokens: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
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
    """Attend to all ranks' keys and values, as a function of transformers' attention interface."""
    context: Context = vars(module)["context"]
    plain = not settings.get("dropout") and all(settings.get(name) is None for name in ("softcap", "position_bias"))
    kernel = kernel_for(query, key, value) if plain else None
    if kernel is None:
        return _masked(module, query, key, value, context, settings)
    return attention(query, key, value, context.ring, kernel, settings.get("scaling")), None


def _masked(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, context: Context,
    settings: dict[str, Any],
) -> Any:  # fmt: skip
    """Attend by transformers' own function and a mask, where no fused kernel supports it, such as dropout."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    mask = context.mask(query.shape[2], query.device)
    settings = {name: value for name, value in settings.items() if name != "is_causal"}
    return sdpa_attention_forward(
        module, query, context.gather_tokens(key), context.gather_tokens(value), mask, is_causal=False, **settings
    )
