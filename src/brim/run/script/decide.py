"""Decisions for the models of a program: each is left as it is if it fits, else planned and fitted in place."""

from __future__ import annotations

import contextlib
import gc
import weakref
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import torch
from torch import nn

from brim.accelerator import CUDA
from brim.core import Hardware
from brim.core.hardware import RAM, VRAM
from brim.errors import BrimError, BudgetError, UnsupportedError, first_line
from brim.measure.capacity import memory_fraction, resident_bytes
from brim.memory import heap
from brim.model_inputs import map_tensors, tensors_in
from brim.planning.inference.example_shapes import as_shapes
from brim.planning.inference.forward_prediction import forward_need, search_forward, untouched_bytes
from brim.planning.inference.machine import (
    Device,
    budgets,
    machine,
    on,
    put_in_force,
)
from brim.planning.proof import ENDLESS_BYTES, Bytes, fits, sufficient
from brim.planning.strategy.case import TrainingStrategy
from brim.printable import write_note
from brim.random_numbers import default_generators, restored
from brim.run.fit import Search, enforce, tensor_bytes_of
from brim.run.script.copies import allow_copies, has_other_hooks
from brim.run.script.hooks import Call, living, parameter_bytes, roots
from brim.run.script.isolation import example_of, quiet, unseen
from brim.run.script.needs import (
    STAND_IN,
    held_bytes,
    living_optimizers,
    moves_itself,
    optimizers_of,
    plain,
    within_fraction,
)
from brim.run.script.outcome import FITTED, UNTOUCHED, Outcome
from brim.run.script.retry import repeat_no_more, repeat_when_out_of_memory
from brim.run.script.settings import Settings
from brim.techniques.base import HANDLE_ATTRIBUTE, refuse_special_tensors
from brim.techniques.streaming.weight_streaming import Weights
from brim.units import MIB, format_bytes

_LESS = 0.8  # share of the failed plan's promise that the next plan may use
_Fit = Callable[[], Any]  # enforces a plan
_Example = Mapping[str, Any] | Sequence[Any] | None


@dataclass(eq=False)
class _Case:
    """A model about to be called, and its planning inputs."""

    model: nn.Module
    name: str
    optimizers: list[torch.optim.Optimizer]
    example: _Example
    trains: bool
    share: Mapping[str, int] = field(default_factory=dict)
    share_of: Callable[[Mapping[str, int]], Mapping[str, int]] = dict  # budget for all models -> budget for this one
    notes: set[str] = field(default_factory=set)  # already written
    holder: nn.Module | None = None  # contains all models that the optimizer trains, if there are several
    has_hooks: bool = False  # hooks of the program

    @property
    def root(self) -> nn.Module:
        return self.holder or self.model


class Decisions:
    """``decide`` is called before the first call of each model. ``outcomes``: the decisions so far.

    ``give_up(name, reason)`` is called for a model that cannot be planned; it returns the fallback that will hold the
    model ("unified"), or None. Models in ``bounded`` fit; only an upper bound of their bytes is known.
    """

    def __init__(
        self, settings: Settings, give_up: Callable[[str, str], str | None], bounded: Sequence[Outcome] = ()
    ) -> None:
        self._settings, self._give_up = settings, give_up
        self.outcomes = list(bounded)
        self._bounded = list(bounded)
        self.hardware: Hardware | None = None
        self._budget: dict[str, int] = {}
        self._partners: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # planned as part of a holder

    @property
    def _device(self) -> Device:
        return self._settings.device  # type: ignore[return-value]  # Settings has checked it

    def decide(self, call: Call) -> Outcome | None:
        """Raises BudgetError for a model that neither fits nor can be planned."""
        model = plain(call.model)
        if model in self._partners:
            return None
        before = self._outcome_of(model)
        if before is not None:
            if not before.has_optimizer and before.task == "train" and not optimizers_of(model):
                return before
            if before.choice == FITTED:
                repeat_no_more(model)
                vars(model)[HANDLE_ATTRIBUTE].remove()
            self.outcomes.remove(before)
        with _on_its_device(self._device, model, call):
            return self._decide_on_device(model, call)

    def _decide_on_device(self, model: nn.Module, call: Call) -> Outcome:
        if self.hardware is None:
            self.hardware = machine(self._device)
            models = [model, *call.others, *(m for o in self._bounded if o.model is not None and (m := o.model()))]
            owners: list[nn.Module | torch.optim.Optimizer] = [*models, *living_optimizers(call)]
            self._budget = budgets(self.hardware, self._settings.vram, self._settings.ram, self._device, owners)
            if self.hardware.compute == VRAM:
                self._respect_the_program()
        if self.outcomes:
            gc.collect()  # a dropped fitted model is a reference cycle, which has its share until it is collected
        with restored(default_generators()):
            for bounded in self._bounded:
                self._predict(bounded)
            self._bounded.clear()
            outcome = self._decide(model, call)
        self.outcomes.append(outcome)
        return outcome

    def _respect_the_program(self) -> None:
        """Apply the program's own limit on PyTorch's allocator; note if the program has its own allocator."""
        total = self.hardware.tier(VRAM).capacity_bytes if self.hardware is not None else 0
        self._budget = within_fraction(self._budget, memory_fraction(), total)
        if torch.cuda.memory.get_allocator_backend() != "native":
            self._note("the program has its own allocator: bytes that it reserves beyond tensors are not predicted")

    def _outcome_of(self, model: nn.Module) -> Outcome | None:
        return next(
            (outcome for outcome in self.outcomes if outcome.model is not None and outcome.model() is model), None
        )

    # -- shares of the budget

    def _case(self, model: nn.Module, call: Call) -> _Case:
        alive = living_optimizers(call)
        optimizers = optimizers_of(model, alive)
        gradients = torch.is_grad_enabled() and any(p.requires_grad for p in model.parameters())
        case = _Case(
            model=model,
            name=type(model).__name__,
            optimizers=optimizers,
            example=self._example(model, call),
            trains=bool(optimizers) or gradients,
        )
        self._add_partners(case)
        case.share_of = self._share_of(case, [plain(other) for other in call.others], alive)
        case.share = case.share_of(self._budget)
        return case

    def _example(self, model: nn.Module, call: Call) -> _Example:
        if plain(call.called) is not model:
            return None
        try:
            return example_of(model, call)
        except UnsupportedError as error:
            self._note(f"cannot predict a step of {type(model).__name__}: {error.request} {error.reason}")
            return None

    def _add_partners(self, case: _Case) -> None:
        """Plan all models together if one optimizer trains parameters of several."""
        foreign = {id(p) for o in case.optimizers for g in o.param_groups for p in g["params"]}
        foreign -= {id(p) for p in case.model.parameters()}
        if not foreign:
            return
        partners = [m for m in map(plain, roots(living(nn.Module))) if m is not case.model]
        partners = [m for m in partners if any(id(p) in foreign for p in m.parameters())]
        case.holder = nn.ModuleList([case.model, *partners])
        case.example = None
        case.name = " and ".join(type(m).__name__ for m in case.holder)

    def _share_of(
        self, case: _Case, others: Sequence[nn.Module], alive: Sequence[torch.optim.Optimizer]
    ) -> Callable[[Mapping[str, int]], dict[str, int]]:
        """The function from a budget for all models to this model's share of it.

        Decided models keep their promises, undecided ones the bytes that they hold. If that leaves too little, the
        budget is divided in proportion to those bytes.
        """
        mine = {id(part) for part in (*case.root.modules(), *case.root.parameters())}
        decided = [
            outcome
            for outcome in self.outcomes  # models that were freed take nothing
            if outcome.model is not None and (model := outcome.model()) is not None and id(model) not in mine
        ]
        # A decided model may be waiting for a call that records gradients: its promise is already subtracted. A model
        # with only this model's parameters (from torch.fx or torch.export) takes nothing more.
        others = [other for other in others if id(other) not in mine and self._outcome_of(other) is None]
        others = [other for other in others if any(id(parameter) not in mine for parameter in other.parameters())]
        rest = sum(held_bytes(other, optimizers_of(other, alive)) for other in others)
        own = held_bytes(case.root, case.optimizers) if others else 0
        assert self.hardware is not None
        compute = self.hardware.compute

        def share_of(budget: Mapping[str, int]) -> dict[str, int]:
            taken = {
                tier: sum(self._taken(outcome, tier, count) for outcome in decided) for tier, count in budget.items()
            }
            left = {tier: max(0, count - taken[tier]) for tier, count in budget.items()}
            if own + rest <= left[compute]:
                return {**left, compute: left[compute] - rest}
            return {tier: count * own // (own + rest) for tier, count in left.items()} if others else left

        return share_of

    def _taken(self, outcome: Outcome, tier: str, budget_bytes: int) -> int:
        """Most bytes of ``tier`` that a decided model takes, given a budget of ``budget_bytes`` for all models."""
        promised, now = outcome.promised_bytes.get(tier, 0), self._budget[tier]
        if budget_bytes == now or outcome.choice != FITTED:
            return promised
        share = outcome.budget_bytes.get(tier, 0) * budget_bytes // max(1, now)
        return min(share, max(promised, outcome.untouched_bytes.get(tier, share)))

    # -- one model

    def _decide(self, model: nn.Module, call: Call) -> Outcome:
        case = self._case(model, call)
        outcome = Outcome(
            name=case.name,
            task="train" if case.trains else "forward",
            choice=UNTOUCHED,
            parameter_bytes=parameter_bytes(case.root),
            budget_bytes=case.share,
            untouched_bytes={},
            model=weakref.ref(model),
            has_optimizer=bool(case.optimizers),
        )
        self._partners.update([] if case.holder is None else case.holder.children())
        self._plan(case, outcome)
        return outcome

    def shrink(self, outcome: Outcome) -> bool:
        """Enforce a smaller plan after memory ran out under the plan of ``outcome``; False if there is none.

        Raises BudgetError if no smaller plan exists; the model is not fitted any more then.
        """
        model = None if outcome.model is None else outcome.model()
        if model is None or HANDLE_ATTRIBUTE not in vars(model):
            return False
        assert self.hardware is not None
        compute = self.hardware.compute
        share = {**outcome.budget_bytes, compute: int(outcome.promised_bytes[compute] * _LESS)}
        repeat_no_more(model)
        device = vars(model)[HANDLE_ATTRIBUTE].memory.device
        vars(model)[HANDLE_ATTRIBUTE].remove()
        case = self._again(model, outcome, share)
        outcome.choice, outcome.plan, outcome.timeline, outcome.pools = UNTOUCHED, None, None, ()
        with on(str(device)):
            self._plan(case, outcome)
        return outcome.choice == FITTED

    def _again(self, model: nn.Module, outcome: Outcome, share: Mapping[str, int]) -> _Case:
        """The case that led to ``outcome``, with tensors of the same shapes as its inputs."""
        return _Case(
            model=model,
            name=outcome.name,
            optimizers=optimizers_of(model),
            example=as_shapes(outcome.example, torch.zeros),
            trains=outcome.task == "train",
            share=share,
        )

    def _predict(self, outcome: Outcome) -> None:
        """Predict the bytes of a model that fits, so that the other models get the rest of the budget."""
        model = None if outcome.model is None else outcome.model()
        if model is not None:
            self._plan(self._again(model, outcome, dict.fromkeys(self._budget, ENDLESS_BYTES)), outcome)

    def _plan(self, case: _Case, outcome: Outcome) -> None:
        try:
            fit = self._planned(case, outcome)
            if fit is not None:
                self._fitted(case, outcome, fit())
        except BudgetError as error:
            self._cannot(case, outcome, " ".join(str(error).split("\n")), error)
        except UnsupportedError as error:
            self._cannot(case, outcome, " ".join((error.request, error.reason)), error)
        except Exception as error:  # the program's own classes may raise anything on tensors without values
            why = f"{type(error).__name__}: {first_line(error)}"
            self._cannot(case, outcome, why, UnsupportedError(f"Cannot plan {case.name}.", why))

    def _planned(self, case: _Case, outcome: Outcome) -> _Fit | None:
        """None where the model fits without a plan. Raises BudgetError and UnsupportedError."""
        self._refuse_unplannable(case)
        if case.optimizers:
            return self._training(case, outcome)
        return self._gradients(case, outcome) if case.trains else self._forward(case, outcome)

    def _refuse_unplannable(self, case: _Case) -> None:
        if moves_itself(case.model):
            raise UnsupportedError(f"{case.name} moves its model's weights itself.")
        if any(isinstance(part, torch.jit.ScriptModule) for part in case.root.modules()):
            raise UnsupportedError(f"{case.name} has parts in TorchScript, whose weights brim cannot move.")
        refuse_special_tensors(case.root)
        parameter_ids = {id(p) for p in case.root.parameters()}
        if any(id(p) not in parameter_ids for o in case.optimizers for g in o.param_groups for p in g["params"]):
            raise UnsupportedError("Its optimizer also trains tensors that belong to no module.")
        if len(_gpus(case.root.parameters())) > 1:
            raise UnsupportedError("Its parameters are on several GPUs.")
        if len(case.optimizers) > 1:
            raise UnsupportedError(f"{len(case.optimizers)} optimizers train it.")

    def _search(self, case: _Case, optimizer: torch.optim.Optimizer, *, states_leave: bool = True) -> Search:
        assert self.hardware is not None
        reserve = case.share[self.hardware.compute] // 8
        arguments = (case.root, optimizer, self.hardware, case.share, self._device)
        in_place = not case.has_hooks
        if case.example is not None:
            search = Search(*arguments, case.example, reserve, states_leave=states_leave, in_place=in_place)
            try:
                search.untouched()
                return search
            except Exception as error:  # the model's own code may raise anything for tensors without values
                case.example = None
                self._note_once(case, f"cannot predict a step of {case.name}: {first_line(error)}")
        return Search(*arguments, None, reserve, states_leave=states_leave)

    def _training(self, case: _Case, outcome: Outcome) -> _Fit | None:
        (optimizer,) = case.optimizers
        start_bytes = resident_bytes() - tensor_bytes_of(case.root, optimizer)
        case.has_hooks = has_other_hooks(case.root)
        with unseen(case.root):
            search = self._search(case, optimizer)
            outcome.untouched_bytes = search.untouched().peak_bytes
            if fits(outcome.untouched_bytes, case.share):
                return None
            search, strategy = self._searched(case, search)

        def fit() -> Any:
            with quiet():
                return enforce(search, strategy, start_bytes)

        return fit

    def _searched(self, case: _Case, search: Search) -> tuple[Search, TrainingStrategy]:
        try:
            return search, search.run()
        except UnsupportedError as error:
            self._note_once(case, f"the optimizer of {case.name} is not offloaded: {first_line(error)}")
            search = self._search(case, search.optimizer, states_leave=False)
            return search, search.run()

    def _gradients(self, case: _Case, outcome: Outcome) -> _Fit | None:
        """A model with gradients but no optimizer: predict with plain SGD, stream without optimizer states."""
        assert self.hardware is not None
        with unseen(case.root):
            plainest = torch.optim.SGD([p for p in case.root.parameters() if p.requires_grad], lr=0.0)
            vars(plainest)[STAND_IN] = True
            search = self._search(case, plainest)
            outcome.untouched_bytes = search.untouched().peak_bytes
            if fits(outcome.untouched_bytes, case.share):
                return None
            strategy = search.stream_weights()
            plan = search.plan_of(strategy)
        arguments = (case.root, strategy.partition, plan, self.hardware, Weights(), self._device)
        return lambda: put_in_force(*arguments, training=True)

    def _forward(self, case: _Case, outcome: Outcome) -> _Fit | None:
        assert self.hardware is not None
        model, compute = case.root, self.hardware.compute
        with unseen(model):
            try:
                # A forward pass may write to its module's attributes.
                hollow = map_tensors(model, torch.Tensor.detach)
                need = forward_need(hollow, case.share, self.hardware, case.example, None)
            except Exception as error:  # the model's own code may raise anything for tensors without values
                self._note_once(case, f"cannot predict a step of {case.name}: {first_line(error)}")
                need = forward_need(model, case.share, self.hardware, None, None)
            inputs = case.example if need.observation is not None else None
            needed_bytes = untouched_bytes(model, self.hardware, need.step_bytes, inputs, self._device)
            outcome.untouched_bytes = {compute: needed_bytes}
            if needed_bytes <= case.share[compute]:
                return None
            placed = search_forward(model, self.hardware, case.share, need, inputs, self._device)
        arguments = (model, placed.partition, placed.plan, self.hardware, Weights(), self._device)
        return lambda: put_in_force(*arguments)

    def _fitted(self, case: _Case, outcome: Outcome, handle: Any) -> None:
        memory = handle.memory
        outcome.choice, outcome.plan, outcome.timeline = FITTED, handle.plan, memory.recorder.timeline
        outcome.pools = (memory.compute,) if memory.host is None else (memory.compute, memory.host)
        assert self.hardware is not None
        if self.hardware.compute == RAM and outcome.task == "forward":
            heap.return_freed_memory()
            heap.trim()
        allow_copies(case.root)
        outcome.example = as_shapes(case.example, torch.empty, device="meta")
        repeat_when_out_of_memory(case.model, lambda: self.shrink(outcome), case.example)
        compute = self.hardware.compute
        takes, share = handle.plan.promise.peak_bytes[compute], outcome.untouched_bytes.get(compute)
        instead = "" if share is None else f" instead of {format_bytes(share)}"
        self._note(f"{case.name} fitted for {outcome.task}: {format_bytes(takes)} of {compute.upper()}{instead}")

    # -- models that cannot be planned

    def _cannot(self, case: _Case, outcome: Outcome, why: str, error: BrimError) -> None:
        assert self.hardware is not None
        compute = self.hardware.compute
        holds = outcome.untouched_bytes.get(compute) or held_bytes(case.root, case.optimizers)
        outcome.untouched_bytes = outcome.untouched_bytes or {compute: holds}
        outcome.why = why
        if holds <= case.share[compute] and not isinstance(error, BudgetError):
            self._note(f"{case.name} is left as it is: {why}")
            return
        instead = self._give_up(case.name, why)
        if instead is not None:
            outcome.choice = instead
            return
        self._refuse(case, outcome, holds, error)

    def _refuse(self, case: _Case, outcome: Outcome, holds: int, error: BrimError) -> NoReturn:
        assert self.hardware is not None
        compute = self.hardware.compute
        budget = self._sufficient(case, outcome, holds, error)
        flags = " ".join(f"--{tier} {count // MIB}MiB" for tier, count in budget.items())
        why = f"no plan was found: {error.request} {error.reason}"
        if isinstance(error, BudgetError) and budget != self._budget_for(case, {compute: holds}):
            why = "a plan was found for " + ", ".join(f"{format_bytes(n)} of {t.upper()}" for t, n in budget.items())
        raise BudgetError(
            f"Cannot run {case.name} in {format_bytes(case.share[compute])} of {compute.upper()}.",
            f"It takes {format_bytes(holds)} without a plan, and {why.rstrip('. ')}.",
            f"Give {flags} or more, or --mode off.",
            smallest_bytes=budget,
        ) from error

    def _sufficient(self, case: _Case, outcome: Outcome, holds: int, error: BrimError) -> dict[str, int]:
        """Budgets for the error to name, in whole MiB, each tried with the same steps as a run with it.

        A larger budget leads to other plans than the refused one: other blocks, other places for activations.
        Without a plan the model takes ``holds``, which is certainly sufficient.
        """
        assert self.hardware is not None
        most = self._budget_for(case, {self.hardware.compute: holds})
        if not isinstance(error, BudgetError) or not error.smallest_bytes:
            return most

        def share_of(need: Bytes) -> Bytes:
            return case.share_of({**self._budget, **self._budget_for(case, need)})

        def plan(need: Bytes) -> dict[str, int]:
            budget = self._budget_for(case, need)
            if any(count >= most.get(tier, count + 1) for tier, count in budget.items()):
                return most
            self._planned(replace(case, share=share_of(need)), replace(outcome))
            return budget

        def raised(need: Bytes, refusal: BudgetError) -> Bytes:
            share, least = share_of(need), refusal.smallest_bytes
            return {**need, **{t: max(count, share[t] + 1, need.get(t, 0)) for t, count in least.items()}}

        try:
            return sufficient(plan, {}, error.smallest_bytes, raised=raised)
        except BudgetError:
            return most

    def _budget_for(self, case: _Case, need: Mapping[str, int]) -> dict[str, int]:
        """The smallest budgets, in whole MiB, of which the model's share is at least ``need``."""
        budget = dict(self._budget)
        for tier, count in need.items():

            def lacks(mib: int, tier: str = tier, count: int = count) -> bool:
                return case.share_of({**budget, tier: mib * MIB})[tier] < count

            most = 1
            while lacks(most):
                most *= 2
            budget[tier] = MIB * bisect_left(range(most), 1, key=lambda mib: not lacks(mib))
        return {tier: budget[tier] for tier in need}

    def _note_once(self, case: _Case, text: str) -> None:
        if text not in case.notes:
            case.notes.add(text)
            self._note(text)

    def _note(self, text: str) -> None:
        """Write one line to stderr."""
        write_note(" ".join(text.split()))


def _on_its_device(device: Device, model: nn.Module, call: Call) -> AbstractContextManager[object]:
    """Make the GPU of the model, or else of its inputs, the current one while the context is open."""
    own = _gpus(model.parameters())
    indices = own or _gpus(tensors_in(call.args, call.kwargs))
    return (
        on(f"{CUDA}:{indices.pop()}") if device in ("auto", CUDA) and len(indices) == 1 else contextlib.nullcontext()
    )


def _gpus(tensors: Iterable[torch.Tensor]) -> set[int]:
    return {tensor.device.index for tensor in tensors if tensor.device.type == CUDA}
