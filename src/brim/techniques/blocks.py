"""Find the blocks of a model by the shape of its module tree, without a list of model names."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

# A smaller share of the model is not worth moving: it stays in the compute tier.
_LOOSE_FRACTION = 1 / 256
# Containers are opened until their parts are at most this share of the model, so that a ring of two slots is small.
_COARSEST_FRACTION = 1 / 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """Parameters that are moved together.

    ``triggers`` are the modules whose calls need them: several where a tensor is tied between modules. ``name`` is
    the first trigger; or all of them, joined by ``+``, where the first has a block of its own too. ``lookups`` are
    the triggers that only pick rows (``nn.Embedding``).
    """

    name: str
    triggers: tuple[str, ...]
    lookups: tuple[str, ...]
    tensors: tuple[str, ...]
    bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Partition:
    """The blocks of a model in definition order, and the loose parameters, which stay in the compute tier."""

    blocks: tuple[Block, ...]
    loose: tuple[str, ...]
    loose_bytes: int  # parameters outside blocks, and every buffer
    mixed: frozenset[str] = frozenset()  # triggers that need parameters outside blocks too

    @property
    def bytes(self) -> int:
        return self.loose_bytes + sum(block.bytes for block in self.blocks)


def tensor_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def inner_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors that ``tensor`` wraps (a DTensor's shard, codes and scales of 8-bit states), or itself."""
    if hasattr(tensor, "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:
            if isinstance(inner := getattr(tensor, name), torch.Tensor):  # a DTensor also has its mesh
                yield from inner_tensors(inner)
    else:
        yield tensor


def with_inner(tensor: torch.Tensor, inner: Iterator[torch.Tensor]) -> torch.Tensor:
    """A tensor like ``tensor`` that wraps the next tensors of ``inner``, or the next of them."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return next(inner)
    names, context = tensor.__tensor_flatten__()
    parts = {name: getattr(tensor, name) for name in names}
    parts = {name: with_inner(p, inner) if isinstance(p, torch.Tensor) else p for name, p in parts.items()}
    wrapper: torch.Tensor = type(tensor).__tensor_unflatten__(parts, context, tensor.shape, tensor.stride())  # type: ignore[attr-defined]
    return wrapper


def moved(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """``tensor``, or one like it that wraps the same tensors, on ``device``."""
    return with_inner(tensor, (inner.to(device) for inner in inner_tensors(tensor)))


def groups_within(
    parameters: Iterable[nn.Parameter], limit_bytes: int, bytes_of: Callable[[nn.Parameter], int]
) -> list[list[nn.Parameter]]:
    """Split ``parameters``, in order, into groups of at most ``limit_bytes``, or of a single parameter."""
    groups: list[list[nn.Parameter]] = []
    group_bytes = 0
    for parameter in parameters:
        size = bytes_of(parameter)
        if not groups or group_bytes + size > limit_bytes:
            groups.append([])
            group_bytes = 0
        groups[-1].append(parameter)
        group_bytes += size
    return groups


def is_transposed(linear: nn.Module) -> bool:
    """Return whether a layer is transformers' ``Conv1D``, a linear layer with a transposed weight."""
    return type(linear).__name__ == "Conv1D"


def find_blocks(
    model: nn.Module, *, largest_bytes: int | None = None, cut_parts: bool = True, stay: Collection[str] = ()
) -> Partition:
    """The blocks of ``model``. Only a block of one indivisible module may be larger than ``largest_bytes``.

    Without ``cut_parts`` the parts of a container are not cut: it is not known whether a module calls its children.
    Parameters in ``stay`` belong to no block, and do not count for its size.
    """
    parameters = dict(model.named_parameters())
    staying = frozenset(id(parameters[name]) for name in stay)
    total = sum(tensor_bytes(p) for p in parameters.values() if id(p) not in staying)
    largest = total if largest_bytes is None or not cut_parts else largest_bytes
    units = list(_units(model, "", False, min(total * _COARSEST_FRACTION, largest_bytes or total), largest, staying))
    users = _owners(model, parameters, units)
    owners = {name: () if name in stay else triggers for name, triggers in users.items()}
    groups = _groups(owners)
    sizes = {triggers: sum(tensor_bytes(parameters[name]) for name in names) for triggers, names in groups.items()}
    small = total * _LOOSE_FRACTION
    if sum(size for triggers, size in sizes.items() if triggers and size < small) > total / 4:
        small *= _LOOSE_FRACTION  # a model of many small units, which must then be moved, but for the smallest
    moved = {triggers for triggers, size in sizes.items() if triggers and size >= small}
    loose = tuple(name for triggers, names in groups.items() if triggers not in moved for name in names)
    return Partition(
        blocks=tuple(_block(model, triggers, groups, sizes[triggers]) for triggers in groups if triggers in moved),
        loose=loose,
        loose_bytes=sum(tensor_bytes(parameters[n]) for n in loose) + sum(tensor_bytes(b) for b in model.buffers()),
        mixed=frozenset(unit for name in loose for unit in users[name]),
    )


def adapters(model: nn.Module) -> frozenset[str]:
    """The trained parameters of blocks that are mostly frozen, as with LoRA.

    They ``stay`` in the compute tier, so that streamed blocks are never written back.
    """
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    sizes = {name: tensor_bytes(parameter) for name, parameter in model.named_parameters()}
    names: set[str] = set()
    for block in find_blocks(model).blocks:
        changed = trained.intersection(block.tensors)
        if 2 * sum(sizes[name] for name in changed) < block.bytes:
            names |= changed
    return frozenset(names)


def _block(model: nn.Module, triggers: tuple[str, ...], groups: dict[tuple[str, ...], list[str]], size: int) -> Block:
    # A maximum norm is applied to the table in place; a sparse gradient needs the table itself.
    modules = ((path, model.get_submodule(path)) for path in triggers)
    lookups = tuple(
        path for path, each in modules if isinstance(each, nn.Embedding) and each.max_norm is None and not each.sparse
    )
    # Parameters that a unit shares with others are a separate block, with another name.
    is_ambiguous = len(triggers) > 1 and (triggers[0],) in groups
    name = "+".join(triggers) if is_ambiguous else triggers[0]
    return Block(name=name, triggers=triggers, lookups=lookups, tensors=tuple(groups[triggers]), bytes=size)


def _units(
    module: nn.Module, path: str, in_container: bool, coarse: float, largest: int, staying: Collection[int]
) -> Iterator[str]:
    """The module paths of blocks: parts of repeated containers, and leaves outside of them.

    A part above ``coarse`` bytes is opened where it holds a container itself, one above ``largest`` in any case.
    """
    size = sum(tensor_bytes(p) for p in module.parameters() if id(p) not in staying)
    children = [(name, child) for name, child in module.named_children() if _holds_parameters(child)]
    is_called = not isinstance(module, (nn.ModuleList, nn.ModuleDict))
    fits = in_container and is_called and (size <= coarse or (size <= largest and not _holds_container(module)))
    if fits or not children or _is_fused(module):
        if size:
            yield path
        return
    repeated = in_container or is_container(module)
    for name, child in children:
        yield from _units(child, f"{path}.{name}" if path else name, repeated, coarse, largest, staying)


def is_container(module: nn.Module) -> bool:
    """Return whether the children are repeated: a list or sequence, or three and more of one composite class."""
    if isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
        return True
    kinds = [type(child) for child in module.children() if any(True for _ in child.children())]
    return any(kinds.count(kind) >= 3 for kind in set(kinds))


def _holds_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


def _holds_container(module: nn.Module) -> bool:
    return any(is_container(part) and _holds_parameters(part) for part in module.modules())


def _is_fused(module: nn.Module) -> bool:
    """Return whether this is a composite of PyTorch that may read its children's weights without calling them."""
    opened = (
        nn.ModuleList,
        nn.ModuleDict,
        nn.Sequential,
        nn.Transformer,
        nn.TransformerEncoder,
        nn.TransformerDecoder,
    )
    # A bare nn.Module is only a container: its owner calls its children.
    bare = type(module) is nn.Module
    return type(module).__module__.startswith("torch.nn.") and not bare and not isinstance(module, opened)


def _owners(model: nn.Module, parameters: dict[str, nn.Parameter], units: list[str]) -> dict[str, tuple[str, ...]]:
    """Parameter -> the units that contain it, in definition order; none where it is directly in a parent."""
    names = {id(parameter): name for name, parameter in parameters.items()}
    owners: dict[str, list[str]] = {name: [] for name in parameters}
    for unit in units:
        for parameter in model.get_submodule(unit).parameters():
            owners[names[id(parameter)]].append(unit)
    return {name: tuple(units_of_parameter) for name, units_of_parameter in owners.items()}


def _groups(owners: dict[str, tuple[str, ...]]) -> dict[tuple[str, ...], list[str]]:
    """Units -> the parameters that they need. Tied groups that share a unit are joined.

    So a unit needs two blocks at most, its own and a shared one, which a ring of two slots can hold.
    """
    shared: list[set[str]] = []
    for units_of in {units_of: None for units_of in owners.values() if len(units_of) > 1}:
        touching = [other for other in shared if not other.isdisjoint(units_of)]
        shared = [other for other in shared if other not in touching] + [set(units_of).union(*touching)]
    groups: dict[tuple[str, ...], list[str]] = {}
    for name, units_of in owners.items():
        together = next((other for other in shared if len(units_of) > 1 and not other.isdisjoint(units_of)), None)
        key = units_of if together is None else tuple(unit for unit in _order(owners) if unit in together)
        groups.setdefault(key, []).append(name)
    return groups


def _order(owners: dict[str, tuple[str, ...]]) -> dict[str, None]:
    return {unit: None for units_of in owners.values() for unit in units_of}
