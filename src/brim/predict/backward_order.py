"""The order in which autograd runs nodes that a backward pass created, as on CUDA.

Autograd runs the node with the highest number first, and each thread counts its own nodes. With CUDA, backward passes
run in a thread of the device (torch/csrc/autograd/engine.cpp): nodes that ``create_graph`` makes there are numbered
separately from those of forward passes. A trace's backward passes run in the program's own thread, which numbers all
nodes in one sequence.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

_LATER = 1 << 40  # added to the number of a node that is created before the program has as many of its own
_counted: Callable[[], int] | None = getattr(torch.autograd, "_get_sequence_nr", None)


class BackwardOrder:
    """Renumbers the nodes that backward passes create as the device's thread would: among those of forward passes."""

    def __init__(self) -> None:
        self._created = 0  # nodes created by all backward passes
        self._has_later = False  # True if nodes are numbered above all of the program's
        # (first number of the program's nodes, the offset that is added to numbers from there on)
        self._starts, self._excess = [0], [_counted() if _counted is not None else 0]

    def run(self, engine: Callable[..., Any], outputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a backward pass. A pass within another is a part of it."""
        if _counted is None or torch._C._current_graph_task_id() != -1:
            return engine(outputs, *args, **kwargs)
        begin = _counted()
        own = begin - self._excess[-1]
        if self._has_later:
            for node in _reached(outputs, lambda number: True):
                if _LATER <= node._sequence_nr() < _LATER + own:
                    node._set_sequence_nr(self._among_own(node._sequence_nr() - _LATER))
        results = engine(outputs, *args, **kwargs)
        created = _counted() - begin
        if created:
            self._starts.append(own)
            self._excess.append(self._excess[-1] + created)
            for node in _reached(results, lambda number: begin <= number < begin + created):
                number = self._created + node._sequence_nr() - begin
                self._has_later |= number >= own
                node._set_sequence_nr(self._among_own(number) if number < own else _LATER + number)
            self._created += created
        return results

    def _among_own(self, number: int) -> int:
        return number + self._excess[bisect_right(self._starts, number) - 1]


def _reached(tensors: Iterable[Any] | None, follow: Callable[[int], bool]) -> Iterator[Any]:
    """The nodes that produced ``tensors``, and their predecessors, while ``follow`` accepts their numbers."""
    nodes: list[Any] = [tensor.grad_fn for tensor in tensors or () if isinstance(tensor, torch.Tensor)]
    done: set[Any] = {None}
    while nodes:
        node = nodes.pop()
        if node in done or not hasattr(node, "_set_sequence_nr") or not follow(node._sequence_nr()):
            continue
        done.add(node)
        nodes += [following for following, _ in node.next_functions]
        yield node
