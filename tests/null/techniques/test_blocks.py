"""Blocks are found from the shape of the module tree."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from brim.techniques.blocks import Partition, find_blocks, is_container


def linear(size: int = 32) -> nn.Linear:
    return nn.Linear(size, size, bias=False)


def mlp(size: int = 32) -> nn.Module:
    part = nn.Module()
    part.up, part.down, part.norm = linear(size), linear(size), nn.LayerNorm(size)
    return part


def model_of(**parts: nn.Module) -> nn.Module:
    model = nn.Module()
    for name, part in parts.items():
        model.add_module(name, part)
    return model


def names(partition: Partition) -> list[str]:
    return [block.name for block in partition.blocks]


def check(model: nn.Module, partition: Partition) -> None:
    """Every parameter is in exactly one block or loose, and nothing is counted twice."""
    placed = [*partition.loose, *(name for block in partition.blocks for name in block.tensors)]
    assert sorted(placed) == sorted(name for name, _ in model.named_parameters())
    assert len(set(names(partition))) == len(partition.blocks)
    state = [*model.parameters(), *model.buffers()]
    assert partition.bytes == sum(t.numel() * t.element_size() for t in state)
    for block in partition.blocks:
        assert block.bytes == sum(model.get_parameter(name).nbytes for name in block.tensors)
        for name in block.tensors:
            owners = [
                p for p in block.triggers if any(q is model.get_parameter(name) for q in parameters_of(model, p))
            ]
            assert owners


def parameters_of(model: nn.Module, path: str) -> list[nn.Parameter]:
    return list(model.get_submodule(path).parameters())


def test_the_parts_of_a_list_are_blocks_and_leaves_beside_it_too() -> None:
    model = model_of(embed=nn.Embedding(99, 32), layers=nn.ModuleList(mlp() for _ in range(12)), head=linear())
    partition = find_blocks(model)
    assert names(partition) == ["embed", *(f"layers.{i}" for i in range(12)), "head"]
    assert partition.loose == ()
    check(model, partition)


@pytest.mark.parametrize(
    "container",
    [
        lambda: nn.ModuleList(mlp() for _ in range(10)),
        lambda: nn.Sequential(*(mlp() for _ in range(10))),
        lambda: nn.ModuleDict({f"part{i}": mlp() for i in range(10)}),
        lambda: model_of(**{f"part{i}": mlp() for i in range(10)}),  # three and more of one composite class
    ],
)
def test_any_repeated_container_is_one(container: Any) -> None:
    held = container()
    assert is_container(held)
    assert len(find_blocks(model_of(parts=held)).blocks) == 10


def test_a_class_with_a_few_different_parts_is_none() -> None:
    assert not is_container(mlp())
    assert not is_container(model_of(a=linear(), b=linear(), c=linear(), d=linear()))  # leaves do not make one


def test_containers_in_containers_are_opened_until_parts_are_small() -> None:
    stages = nn.ModuleList(nn.ModuleList(mlp() for _ in range(6)) for _ in range(3))
    partition = find_blocks(model_of(stages=stages))
    assert names(partition) == [f"stages.{i}.{j}" for i in range(3) for j in range(6)]


def test_a_part_that_is_a_large_share_but_holds_no_container_stays_whole() -> None:
    partition = find_blocks(model_of(layers=nn.ModuleList(mlp() for _ in range(2))))
    assert names(partition) == ["layers.0", "layers.1"]


def test_smaller_blocks_where_they_are_asked_for() -> None:
    model = model_of(layers=nn.ModuleList(mlp(256) for _ in range(2)))
    largest = max(block.bytes for block in find_blocks(model).blocks)
    finer = find_blocks(model, largest_bytes=largest - 1)
    assert names(finer) == ["layers.0.up", "layers.0.down", "layers.1.up", "layers.1.down"]
    assert {name.split(".")[2] for name in finer.loose} == {"norm"}
    check(model, finer)
    finest = find_blocks(model, largest_bytes=1)
    assert names(finest) == names(finer)  # a single module cannot be divided


def test_small_units_stay_and_are_counted_with_the_buffers() -> None:
    model = model_of(norm=nn.LayerNorm(4), layers=nn.ModuleList(mlp() for _ in range(10)))
    model.register_buffer("table", torch.zeros(7))
    partition = find_blocks(model)
    assert partition.loose == ("norm.weight", "norm.bias")
    assert partition.loose_bytes == 8 * 4 + 7 * 4


def test_a_model_of_small_units_only_is_moved_all_the_same() -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(600)))
    partition = find_blocks(model)
    assert len(partition.blocks) == 600
    assert partition.loose == ()


def test_tiny_tables_stay_in_a_model_of_small_units() -> None:
    """A table of relative positions is not looked up in RAM, by indices that must leave the GPU first."""
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(600)), nn.Embedding(8, 1))
    partition = find_blocks(model)
    assert len(partition.blocks) == 600
    assert partition.loose == ("600.weight",)


def test_parameters_directly_in_a_parent_stay() -> None:
    model = model_of(layers=nn.ModuleList(mlp() for _ in range(10)))
    model.register_parameter("scale", nn.Parameter(torch.ones(100)))
    partition = find_blocks(model)
    assert partition.loose == ("scale",)
    check(model, partition)


def test_a_tied_tensor_is_one_block_that_every_holder_needs() -> None:
    model = model_of(
        embed=nn.Embedding(99, 32), layers=nn.ModuleList(mlp() for _ in range(8)), head=nn.Linear(32, 99)
    )
    model.head.weight = model.embed.weight  # type: ignore[union-attr, assignment]
    partition = find_blocks(model)
    (tied,) = (block for block in partition.blocks if len(block.triggers) > 1)
    assert tied.name == "embed" and tied.triggers == ("embed", "head") and tied.lookups == ("embed",)
    assert tied.tensors == ("embed.weight",)
    check(model, partition)


def test_what_a_unit_shares_is_a_block_beside_its_own() -> None:
    model = model_of(layers=nn.ModuleList(mlp() for _ in range(8)))
    model.layers[2].up.weight = model.layers[0].up.weight  # type: ignore[index, union-attr]
    partition = find_blocks(model)
    assert names(partition)[:3] == ["layers.0+layers.2", "layers.0", "layers.1"]
    check(model, partition)


def test_no_unit_needs_more_than_two_blocks() -> None:
    model = model_of(layers=nn.ModuleList(mlp() for _ in range(8)))
    layers: Any = model.layers
    layers[2].up.weight = layers[0].up.weight
    layers[2].down.weight = layers[5].down.weight
    layers[6].up.weight = layers[7].up.weight  # of another group
    partition = find_blocks(model)
    check(model, partition)
    for layer in range(8):
        assert sum(f"layers.{layer}" in block.triggers for block in partition.blocks) <= 2
    shared = [block.triggers for block in partition.blocks if len(block.triggers) > 1]
    assert shared == [("layers.0", "layers.2", "layers.5"), ("layers.6", "layers.7")]


def test_torch_s_own_composites_are_not_opened() -> None:
    """Their fast paths read their children's weights without calling them."""
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    model = model_of(encoder=nn.TransformerEncoder(layer, 6, enable_nested_tensor=False), lstm=nn.LSTM(32, 32, 2))
    expected = [*(f"encoder.layers.{i}" for i in range(6)), "lstm"]
    assert names(find_blocks(model)) == expected
    assert names(find_blocks(model, largest_bytes=1)) == expected
    assert names(find_blocks(model_of(attention=nn.MultiheadAttention(32, 4)))) == ["attention"]


@pytest.mark.parametrize(("options", "looks_up"), [({}, True), ({"max_norm": 1.0}, False), ({"sparse": True}, False)])
def test_an_embedding_looks_up_unless_it_needs_its_whole_table(options: dict[str, Any], looks_up: bool) -> None:
    (block,) = find_blocks(model_of(embed=nn.Embedding(99, 32, **options))).blocks
    assert block.lookups == (("embed",) if looks_up else ())


def test_a_model_without_parameters_and_a_single_leaf() -> None:
    empty = find_blocks(nn.Sequential(nn.ReLU()))
    assert (empty.blocks, empty.loose, empty.bytes) == ((), (), 0)
    (block,) = find_blocks(linear()).blocks
    assert (block.name, block.triggers) == ("", ("",))


@settings(max_examples=60, deadline=None)
@given(
    tree=st.recursive(st.integers(1, 12), lambda inner: st.lists(inner, min_size=1, max_size=4), max_leaves=12),
    ties=st.lists(st.tuples(st.integers(0, 11), st.integers(0, 11)), max_size=3),
    largest=st.integers(1, 2000),
)
def test_every_parameter_has_one_place(tree: Any, ties: list[tuple[int, int]], largest: int) -> None:
    def build(node: Any) -> nn.Module:
        if isinstance(node, int):
            return nn.Linear(4, node, bias=node % 2 == 0)
        kind = nn.ModuleList if len(node) > 2 else nn.Sequential
        return kind([build(child) for child in node]) if kind is nn.ModuleList else nn.Sequential(*map(build, node))

    model = nn.Sequential(build(tree))
    leaves = [module for module in model.modules() if isinstance(module, nn.Linear)]
    for one, other in ties:
        a, b = leaves[one % len(leaves)], leaves[other % len(leaves)]
        if a.weight.shape == b.weight.shape:
            b.weight = a.weight
    for partition in (find_blocks(model), find_blocks(model, largest_bytes=largest)):
        check(model, partition)
        for path, _ in model.named_modules():
            assert sum(path in block.triggers for block in partition.blocks) <= 2


def test_parameters_that_must_stay_belong_to_no_block() -> None:
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    partition = find_blocks(model, stay={"1.weight"})
    assert "1.weight" in partition.loose
    assert not any("1.weight" in block.tensors for block in partition.blocks)
