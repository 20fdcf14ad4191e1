"""What the planner knows of a deep model's layers under one way to train, to add those that were not rehearsed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from brim.core.hardware import DISK, VRAM
from brim.estimation.extrapolation import Stack
from brim.planner.cost_model import block_bytes
from brim.planner.step_profile import BACKWARD, OFFLOAD, UPDATE, StepProfile, Way
from brim.techniques.activation_offload.activations import ToDisk, ToRam
from brim.techniques.optimizer_offload.technique import gradient_buffer_bytes, usual_buffer_bytes
from brim.techniques.streaming.placement import RESIDENT


class Layers:
    """The layers of ``stack`` as ``profile`` has them, under ``way`` on a machine that computes in ``compute``."""

    def __init__(self, profile: StepProfile, stack: Stack, way: Way, compute: str) -> None:
        self._profile, self._stack, self._way, self._compute = profile, stack, way, compute
        self._blocks = profile.at(way.frame.micro_batch).blocks
        self._held = self._by_layer()

    def bytes(self, layer: int, tier: str, early: bool) -> int:
        """Of one layer in a tier, in a backward pass (``early``) or while it is updated."""
        return self._held.get(layer, {}).get((tier, BACKWARD if early else UPDATE), 0)

    def _by_layer(self) -> dict[int, dict[tuple[str, str], int]]:
        states, gradients = self._way.frame.homes(self._compute)
        trained = max(1, sum(block.trained_bytes for block in self._profile.blocks))
        bytes_by_layer: dict[int, dict[tuple[str, str], int]] = {}
        for block in self._blocks:
            layer = self._stack.place(block.name)
            if layer is None:
                continue
            mine = bytes_by_layer.setdefault(layer, {})
            block_bytes(block, self._way.weights[block.name], self._way.activations[block.name], self._compute, mine)
            for moment in (BACKWARD, UPDATE):
                share = block.trained_bytes / trained
                mine[states, moment] = mine.get((states, moment), 0) + int(self._profile.state_bytes * share)
                mine[gradients, moment] = mine.get((gradients, moment), 0) + block.trained_bytes
        return bytes_by_layer

    def room(self, at_once_bytes: int) -> Callable[[Collection[int]], int]:
        """RAM through which states and gradients on disk pass, in a model of these layers: three blocks where that
        is little beside all of them. ``at_once_bytes`` of what stays are updated at once."""
        profile, frame = self._profile, self._way.frame
        per_byte = profile.state_bytes / max(1, profile.gradient_bytes)

        def room(layers: Collection[int]) -> int:
            sizes: list[int] = []
            for block in profile.blocks:
                if block.trained_bytes and self._stack.place(block.name) in {None, *layers}:
                    whole = self._way.weights[block.name] != RESIDENT
                    pieces = 1 if whole else -(-block.trained_bytes // at_once_bytes)
                    sizes += [block.trained_bytes // pieces] * pieces
            states = usual_buffer_bytes([int(size * per_byte) for size in sizes]) if frame.states == DISK else 0
            return states + (gradient_buffer_bytes(sizes) if frame.gradients == DISK else 0)

        return room

    def most(self, treatments: Mapping[int, str]) -> dict[str, int]:
        """Activations wait and come back in a window: the layers that fill it do not add what later ones do."""
        window = ToRam.window_bytes if self._compute == VRAM else ToDisk.window_bytes
        most: dict[str, int] = {}
        for block in self._blocks:
            layer = self._stack.place(block.name)
            if layer is not None and layer in treatments and self._way.activations[block.name] == OFFLOAD:
                most[treatments[layer]] = 1 + -(-window // max(1, block.offload_bytes))
        return most
