"""A head whose weights are streamed computes its logits in chunks, too."""

from __future__ import annotations

import torch
from torch import nn

from brim.core.hardware import RAM, VRAM
from brim.memory.pool import PAGE_BYTES, round_up
from brim.techniques.blocks import find_blocks
from brim.techniques.loss import chunked
from brim.techniques.streaming import weight_streaming
from brim.techniques.streaming.weight_streaming import FROM_RAM
from support import streamed_training as streamed

CHUNK = 5


def test_a_streamed_head_computes_a_chunk_at_a_time() -> None:
    net, twin = streamed.Net(), streamed.Net()
    chunked.apply(net, CHUNK, head="head")
    partition, memory = find_blocks(net), streamed.memory_for("ram")
    assert any("head" in block.triggers for block in partition.blocks)
    plan = streamed.plan_of(partition, FROM_RAM, 2)
    handle = weight_streaming.apply(net, partition, plan, memory, weight_streaming.Weights(), training=True)
    rows: list[int] = []
    net.head.register_forward_hook(lambda module, args, output: rows.append(output.shape[0]))
    ids = torch.arange(48).view(3, 16) % streamed.WORDS
    moved = memory.recorder.copied_bytes
    for _ in range(3):  # the order of blocks is learned
        streamed.finish_copies(memory)
        before_bytes = moved.get((RAM, VRAM), 0)
        for one in (net, twin):
            one.zero_grad()
            nn.functional.cross_entropy(one(ids).flatten(0, 1), ids.flatten()).backward()
    streamed.finish_copies(memory)
    assert max(rows) == CHUNK
    assert moved[RAM, VRAM] - before_bytes <= 2 * sum(round_up(block.bytes, PAGE_BYTES) for block in partition.blocks)
    handle.remove()
    assert "inner" not in vars(net.head)
    for (name, one), other in zip(net.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-5, atol=1e-8, msg=name)
