"""The modules of a decoder layer that tensor parallelism splits, by names and shapes.

Products that read the residual stream are split by outputs, those that write to it by inputs. Weights in between get
a rank's part of the activations: a norm of single heads is the same for all of them, other modules must be known.
Unknown layers are refused, as a wrong split silently computes something else.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from brim.errors import UnsupportedError
from brim.techniques.blocks import is_transposed

# Products that read the residual stream, and those that write to it, as transformers' models name them.
READS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "fc1", "fc_in", "c_fc", "dense_h_to_4h")
WRITES = ("o_proj", "out_proj", "down_proj", "fc2", "fc_out", "c_proj", "dense", "dense_4h_to_h")
FUSED = {"c_attn": 3}  # GPT-2's queries, keys and values, which are interleaved before they are split


@dataclass(frozen=True, kw_only=True)
class TensorParts:
    """Paths in a decoder layer: of products that are split by outputs and by inputs, of norms between them that are
    the same for every head, and of the layer's children with other weights, such as experts."""

    reads: tuple[str, ...]
    writes: tuple[str, ...]
    head_norms: tuple[str, ...]
    unsplit: tuple[str, ...]

    @property
    def parents(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(_parent(name) for name in (*self.reads, *self.writes)))

    def in_unsplit(self, name: str) -> bool:
        return name.partition(".")[0] in self.unsplit


def parts_of(block: nn.Module) -> TensorParts:
    linear = [name for name, module in block.named_modules() if is_product(module)]
    reads = tuple(name for name in linear if _leaf(name) in READS or _is_fused(name, block.get_submodule(name)))
    writes = tuple(name for name in linear if _leaf(name) in WRITES)
    parents = {_parent(name) for name in (*reads, *writes)}
    norms = tuple(
        name for name, module in block.named_modules()
        if _parent(name) in parents and _is_of_heads(module, block.get_submodule(_parent(name)))
    )  # fmt: skip
    split = {*reads, *writes, *norms}
    unsplit = tuple(
        name for name, child in block.named_children()
        if not is_norm(child) and any(path not in split for path in _weighted(name, child))
    )  # fmt: skip
    return TensorParts(reads=reads, writes=writes, head_norms=norms, unsplit=unsplit)


def why_not_split(block: nn.Module) -> str | None:
    """The reason why a decoder layer's products are not split, or None."""
    parts, fused, others = parts_of(block), list[str](), list[str]()
    for parent in parts.parents:
        reads, writes = ([name for name in names if _parent(name) == parent] for names in (parts.reads, parts.writes))
        inside = (
            _weighted(parent, block.get_submodule(parent)) if parent else (name for name, _ in block.named_children())
        )
        unknown = [path for path in inside if path not in (*reads, *writes, *parts.head_norms)]
        fused += [path for path in unknown if writes and is_product(block.get_submodule(path))]
        if not (reads and writes):
            others.append(
                f"{', '.join((*reads, *writes))} is split, and brim does not know the layer that belongs to it."
            )
        elif other := _of_other_sizes(block, reads, writes):
            others.append(f"the output size of {', '.join(other)} is not the input size of {', '.join(writes)}.")
        elif parent and unknown:
            weights = [f"{path}.{name}" for path in unknown for name in block.get_submodule(path)._parameters]
            others.append(
                f"{', '.join(weights)} lies between split linear layers, and brim does not know how to split it."
            )
    if fused:
        return f"{', '.join(fused)} combines several matrices in one, and a rank would need its part of each."
    return others[0] if others else None


def _of_other_sizes(block: nn.Module, reads: Iterable[str], writes: Iterable[str]) -> list[str]:
    """The products in ``reads`` whose outputs are not the inputs of ``writes``: they combine several products, whose
    shares are different. Keys and values are fewer than queries."""
    takes = {_sizes(block.get_submodule(name))[1] for name in writes}
    gives = {name: _sizes(block.get_submodule(name))[0] // FUSED.get(_leaf(name), 1) for name in reads}
    return [name for name, size in gives.items() if {size} != takes and _leaf(name) not in ("k_proj", "v_proj")]


def _sizes(product: nn.Module) -> tuple[int, int]:
    shape: Any = product.weight.shape
    outputs, inputs = reversed(shape) if is_transposed(product) else shape
    return int(outputs), int(inputs)


def check_parts(blocks: Iterable[nn.Module], ranks: int, model: str) -> None:
    """Raise UnsupportedError for decoder layers whose products cannot be split."""
    why = next((why for block in blocks if (why := why_not_split(block))), None)
    if ranks > 1 and why:
        raise UnsupportedError(
            f"Cannot use --tp {ranks} for {model}.", f"In its layers, {why}", "Split it by --zero or --pp."
        )


def has_transposed(block: nn.Module) -> bool:
    """Return whether a block has transposed weights, with queries, keys and values in one: split ones can be traced,
    but not saved in a checkpoint."""
    return any(is_transposed(module) for module in block.modules())


def _is_fused(name: str, module: nn.Module) -> bool:
    return _leaf(name) in FUSED and is_transposed(module)


def is_product(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or is_transposed(module)


def is_norm(module: nn.Module) -> bool:
    return "Norm" in type(module).__name__ and any(True for _ in module.parameters(recurse=False))


def _is_of_heads(module: nn.Module, attention: nn.Module) -> bool:
    """Return whether a module is a norm of the size of a head, for all heads."""
    shapes = {tuple(parameter.shape) for parameter in module.parameters()}
    return is_norm(module) and shapes == {(getattr(attention, "head_dim", None),)}


def _weighted(name: str, module: nn.Module) -> Iterator[str]:
    """The paths of a module and its parts that have parameters of their own."""
    for path, part in module.named_modules(prefix=name):
        if any(True for _ in part.parameters(recurse=False)):
            yield path


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]
