"""A pipeline stage in a traced step: its turns as torch.distributed.pipelining takes them, without other ranks."""

from __future__ import annotations

from typing import Any

import torch

from brim.estimation.models import transformers_config
from brim.estimation.ranks.job import ParallelJob
from brim.estimation.ranks.schedule import Turn
from brim.techniques.parallel import pipeline, sharding


class TracedChunk:
    """A stage's received tensors, kept for its backward passes, and these passes. ``dtype``: of hidden states."""

    def __init__(self, model: pipeline.Stage, handle: sharding.Sharded, job: ParallelJob, dtype: torch.dtype) -> None:
        part = model.part
        self.model, self.handle, self._part = model, handle, part
        many = job.split.micro_batches  # pipelining makes room for all of them (stage.py, _RecvInfo)
        self._tokens = torch.zeros(job.split.micro_batch, job.sequence, dtype=torch.long)
        self._received = None if part.embeds else torch.zeros(many, *_hidden(job), dtype=dtype)
        self._returned = None if part.has_head else torch.zeros(many, *_hidden(job), dtype=dtype)
        self._flying: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._halved: dict[int, tuple[torch.Tensor, pipeline.InputHalf]] = {}
        self._given: list[torch.Tensor] = []  # of halved passes: their gradients stay until the next step begins
        # The tensors last sent forward and backward: 1F1B's loop holds them until the next send (schedules.py,
        # fwd_sends and bwd_sends).
        self.last_sent: dict[str, torch.Tensor] = {}

    def begin(self) -> None:
        """Begin a step (stage.py, clear_runtime_states)."""
        self._given.clear()

    def take(self, turn: Turn, sent: list[torch.Tensor] | None, *, last: bool) -> None:
        """Take a turn. ``sent`` collects the sent tensors if these are kept. ``last``: the last turn of its kind."""
        if turn.forward:
            self._forward(turn.micro_batch, sent)
        elif turn.half == "input":
            self._backward_input(turn.micro_batch, sent)
        elif turn.half == "weight":
            self._backward_weight(turn.micro_batch, last=last)
        else:
            self._backward(turn.micro_batch, sent, last=last)

    def finish(self) -> None:
        """End a step, after its last turn."""
        self.last_sent.clear()
        self.handle.settle()

    def _forward(self, number: int, sent: list[torch.Tensor] | None) -> None:
        received = self._received
        input = self._tokens if received is None else received[number].detach().requires_grad_()
        with self.handle.losses():
            output = self.model(input, self._tokens.clone() if self._part.has_head else None)
        self._flying[number] = (input, output)
        if not self._part.has_head:
            self.last_sent["forward"] = output.detach()
            if sent is not None:
                sent.append(output.detach())

    def _backward(self, number: int, sent: list[torch.Tensor] | None, *, last: bool) -> None:
        input, output = self._flying.pop(number)
        self.handle.set_last_backward(last=last)
        with self.handle.losses():
            output.backward(None if self._returned is None else self._returned[number])
        self._send(input, sent)

    def _backward_input(self, number: int, sent: list[torch.Tensor] | None) -> None:
        input, output = self._flying.pop(number)
        self.handle.set_half_backward()
        gradient = None if self._returned is None else self._returned[number]
        with self.handle.losses():
            self._halved[number] = (input, pipeline.InputHalf(self.model, input, output, gradient))
        if not self._part.embeds:
            self._given.append(input)
        self._send(input, sent)

    def _backward_weight(self, number: int, *, last: bool) -> None:
        _, half = self._halved.pop(number)
        self.handle.set_half_backward()
        with self.handle.losses():
            half.finish()
        if last:
            self.handle.reduce()

    def _send(self, given: torch.Tensor, sent: list[torch.Tensor] | None) -> None:
        if given.grad is not None:
            self.last_sent["backward"] = given.grad
            if sent is not None:
                sent.append(given.grad)


def _hidden(job: ParallelJob) -> tuple[int, int, int]:
    split = job.split
    config: Any = transformers_config(job.source)
    return split.micro_batch, split.between(job.sequence), int(config.hidden_size)
