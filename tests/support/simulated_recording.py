"""The simulated allocator writing down what it does as PyTorch's memory history does: a recording without a GPU."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

from brim.allocator.blocks import DEFAULT_POOL, Block, BlockPool
from brim.allocator.config import AllocatorConfig
from brim.allocator.device_memory import SimulatedDevice
from brim.allocator.out_of_memory import OutOfMemory
from brim.units import GIB
from support.streams_and_captures import StreamsAndCaptures


class _Reusing(SimulatedDevice):
    """Gives address space out again that was given back."""

    def __init__(self, capacity_bytes: int, total_bytes: int) -> None:
        super().__init__(capacity_bytes, total_bytes)
        self._given_back: list[int] = []

    def reserve(self, size: int) -> int:
        return self._given_back.pop() if self._given_back else super().reserve(size)

    def unreserve(self, address: int, size: int) -> None:
        self._given_back.append(address)


class Recording(StreamsAndCaptures):
    """Writes down what it does, as PyTorch's memory history does."""

    def __init__(
        self,
        text: str,
        capacity_bytes: int,
        *,
        names_pools: bool = False,
        by_age: bool = False,
        reuses_space: bool = False,
    ) -> None:
        self.text, self.names_pools = text, names_pools
        self.pool_at: dict[int, tuple[int, int]] = {}  # where segments began, by address
        self.events: list[dict[str, Any]] = []
        device = (_Reusing if reuses_space else SimulatedDevice)(capacity_bytes, 64 * GIB)  # space is never short
        config = replace(AllocatorConfig.parse(text), oldest_segment_first=by_age)
        super().__init__(config, device=device, on_segment=self.write)

    def write(self, action: str, address: int, size: int, stream: int) -> None:
        row = {"action": action, "size": size, "stream": stream, "time_us": len(self.events)}
        row["device_free" if action == "oom" else "addr"] = address
        if self.names_pools:  # as torch 2.10 and later do
            if action in ("segment_alloc", "segment_map", "oom"):
                self.pool_at[address] = self.current_pool
            row["pool_id"] = self.pool_at[max(at for at in self.pool_at if at <= address)]
        self.events.append(row)

    def _pool_for(self, size: int, stream: int, pool: tuple[int, int] | None) -> BlockPool:
        found = super()._pool_for(size, stream, pool)
        owners = (name for name, one in self.private_pools.items() if found in (one.small, one.large))
        self.current_pool = next(owners, DEFAULT_POOL)
        return found

    def malloc(self, nbytes: int, stream: int = 0, pool: tuple[int, int] | None = None) -> Block:
        try:
            block = super().malloc(nbytes, stream, pool)
        except OutOfMemory as error:
            self.write("oom", error.free_bytes, self.config.round_size(nbytes), stream)
            raise
        self.write("alloc", block.address, nbytes, stream)
        return block

    def request_free(self, block: Block) -> None:
        self.write("free_requested", block.address, block.requested, block.stream)
        super().request_free(block)

    def complete_free(self, block: Block) -> None:
        self.write("free_completed", block.address, block.requested, block.stream)
        super().complete_free(block)

    def all_blocks(self) -> dict[int, tuple[Block, tuple[int, int]]]:
        pools = [(self.small, DEFAULT_POOL), (self.large, DEFAULT_POOL)]
        for name, private in self.private_pools.items():
            pools += [(private.small, name), (private.large, name)]
        names = {id(pool): name for pool, name in pools}
        known = [block for pool, _ in pools for block in pool.blocks.values()]
        waiting = [self.deferred, *self.queues.values()]
        known += [*self.live.values(), *(block for queue in waiting for block in queue)]
        return {block.address: (block, names[id(block.pool)]) for block in known}

    def segments(self) -> list[dict[str, Any]]:
        made = []
        blocks = self.all_blocks()
        for address in sorted(blocks):
            block, pool = blocks[address]
            if block.prev is not None and block.prev.mapped:
                continue
            found: list[dict[str, Any]] = []
            one: Block | None = block
            while one is not None and one.mapped:
                state = "active_allocated" if one.allocated else "inactive" if one.is_free else "active_awaiting_free"
                found.append(
                    {"address": one.address, "size": one.size, "requested_size": one.requested, "state": state}
                )
                one = one.next
            made.append(
                {
                    "device": 0,
                    "address": address,
                    "total_size": sum(part["size"] for part in found),
                    "stream": block.stream,
                    "segment_type": "small" if block.pool.small else "large",
                    "segment_pool_id": pool,
                    "is_expandable": block.segment is not None,
                    "blocks": found,
                }
            )
        return made

    def dump(self, drop: int = 0) -> bytes:
        """The snapshot as a file, of a ring that lost its first ``drop`` events."""
        settings = {"PYTORCH_CUDA_ALLOC_CONF": self.text}
        document = {
            "segments": self.segments(),
            "device_traces": [self.events[drop:]],
            "allocator_settings": settings,
        }
        return pickle.dumps(document)
