"""Which calls of which models are seen, and that no hook stays when there is nothing more to see."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules import module as global_hooks

from brim.run.script.hooks import Call, Watcher, living

KIB = 1 << 10


def make(width: int = 64) -> nn.Module:
    return nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))


class Keyed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = make()

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        return self.part(x) * scale

    def other_way(self, x: torch.Tensor) -> torch.Tensor:
        return self.part(x)


@pytest.fixture
def calls() -> list[Call]:
    return []


@pytest.fixture
def watcher(calls: list[Call]) -> Iterator[Watcher]:
    made = Watcher(calls.append, large_bytes=8 * KIB)
    made._known.update(m for m in _all_modules())  # what other tests have left
    made.begin()
    yield made
    made.end()
    assert not global_hooks._global_forward_pre_hooks
    assert not global_hooks._global_parameter_registration_hooks


def _all_modules() -> Iterator[nn.Module]:
    from brim.run.script.hooks import living, roots

    return iter(roots(living(nn.Module)))


def hooks_of(module: nn.Module) -> int:
    return sum(len(part._forward_pre_hooks) + len(part._forward_pre_hooks_with_kwargs) for part in module.modules())


def test_the_first_call_of_a_model_is_seen_once_with_its_arguments(watcher: Watcher, calls: list[Call]) -> None:
    model, x = Keyed(), torch.randn(2, 64)
    for _ in range(3):
        model(x, scale=3.0)
    (call,) = calls
    assert call.model is call.called is model
    assert call.args[0] is x and call.kwargs == {"scale": 3.0}
    assert not watcher._hooks
    assert hooks_of(model) == 0


def test_every_model_is_seen_and_knows_of_the_others(watcher: Watcher, calls: list[Call]) -> None:
    first, second = make(), make()
    x = torch.randn(2, 64)
    first(x)
    assert calls[0].others == (second,)
    assert hooks_of(first) == 0 and hooks_of(second) > 0
    first(x)
    second(x)
    second(x)
    assert [call.model for call in calls] == [first, second]
    assert hooks_of(second) == 0


def test_a_model_made_later_is_seen_too(watcher: Watcher, calls: list[Call]) -> None:
    first = make()
    first(torch.randn(2, 64))
    assert not watcher._hooks
    second = make()
    assert watcher._hooks
    second(torch.randn(2, 64))
    assert [call.model for call in calls] == [first, second]
    assert not watcher._hooks


def test_small_models_are_seen_when_a_look_costs_little(
    watcher: Watcher, calls: list[Call], monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = iter([1.0, 2.0, 3.0, *[1000.0] * 4])
    monkeypatch.setattr("brim.run.script.hooks.time.perf_counter", lambda: next(seconds))
    first, x = nn.Linear(4, 4), torch.randn(1, 4)
    first(x)  # a look from the second second to the third
    second = nn.Linear(4, 4)
    watcher._next_s, later_s = 2000.0, watcher._next_s
    second(x)
    assert watcher._hooks
    assert later_s == 23.0
    watcher._next_s = later_s
    second(x)
    assert [call.model for call in calls] == [first, second]
    assert not watcher._hooks


def test_modules_without_parameters_are_nothing(watcher: Watcher, calls: list[Call]) -> None:
    nn.ReLU()(torch.randn(1, 4))
    assert calls == []


def test_a_part_that_is_called_by_itself_belongs_to_its_model(watcher: Watcher, calls: list[Call]) -> None:
    model, x = Keyed(), torch.randn(2, 64)
    model.other_way(x)
    (call,) = calls
    assert call.model is model and call.called is model.part


def test_a_call_within_another_s_is_not_the_time(watcher: Watcher, calls: list[Call]) -> None:
    hidden = make()

    class Outer(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return hidden(x)

    outer, x = Outer(), torch.randn(2, 64)
    outer(x)
    assert calls == []
    hidden(x)
    assert [call.model for call in calls] == [hidden]


def test_hooks_that_are_added_while_deciding_are_run_for_this_very_call(watcher: Watcher, calls: list[Call]) -> None:
    model, x = Keyed(), torch.randn(2, 64)
    seen: list[Any] = []

    def decide(call: Call) -> None:
        call.model.register_forward_pre_hook(lambda m, a: seen.append("plain") or (a[0] + 1,))
        call.model.register_forward_pre_hook(
            lambda m, a, k: seen.append("keyed") or (a, {"scale": 2.0}), with_kwargs=True
        )

    watcher._decide = decide
    with torch.no_grad():
        assert torch.equal(model(x, scale=7.0), model.part(x + 1) * 2.0)
        assert seen == ["plain", "keyed"]
        model(x)
    assert len(seen) == 4


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_what_a_hook_of_this_very_call_has_begun_is_ended_whatever_interrupts(
    error: type[BaseException], watcher: Watcher
) -> None:
    model, seen = make(), []

    def decide(call: Call) -> None:
        def interrupted(module: nn.Module, args: Any) -> None:
            seen.append("begun")
            raise error

        call.model.register_forward_pre_hook(interrupted)
        call.model.register_forward_hook(lambda *_: seen.append("ended"), always_call=True)
        call.model.register_forward_hook(lambda *_: seen.append("not always"))

    watcher._decide = decide
    model.register_forward_hook(lambda *_: seen.append("the program's"), always_call=False)
    with pytest.raises(error):
        model(torch.ones(1, 64))
    assert seen == ["begun", "ended"]


def test_a_copy_made_before_its_first_call_is_a_model_of_its_own(watcher: Watcher, calls: list[Call]) -> None:
    first, second = make(), make()
    x = torch.randn(2, 64)
    first(x)
    twin = copy.deepcopy(second)  # with what waits for a first call on it
    assert torch.equal(twin(x), second(x))
    assert [call.model for call in calls] == [first, second]


def test_an_error_while_deciding_is_the_call_s(watcher: Watcher) -> None:
    def refuse(call: Call) -> None:
        raise RuntimeError("no")

    watcher._decide = refuse
    model = make()
    with pytest.raises(RuntimeError, match="no"):
        model(torch.randn(2, 64))
    assert hooks_of(model) == 0
    model(torch.randn(2, 64))


def test_lazy_parameters_are_waited_for(watcher: Watcher, calls: list[Call]) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.LazyLinear(64))
    x = torch.randn(2, 64)
    model(x)
    assert calls == []
    model(x)
    assert [call.model for call in calls] == [model]


def test_end_takes_every_hook_off(watcher: Watcher, calls: list[Call]) -> None:
    first, second = make(), make()
    first(torch.randn(2, 64))
    watcher.end()
    assert hooks_of(first) == hooks_of(second) == 0
    second(torch.randn(2, 64))
    assert len(calls) == 1


def test_calls_with_what_stands_in_for_parameters_are_not_for_the_model_to_be_known_by(
    watcher: Watcher, calls: list[Call]
) -> None:
    model = make()
    values = {name: value.detach() * 2 for name, value in model.named_parameters()}
    torch.func.functional_call(model, values, (torch.ones(2, 64),))
    torch.func.vmap(model)(torch.ones(3, 2, 64))
    assert calls == []
    model(torch.ones(2, 64))
    assert [call.model for call in calls] == [model]


def test_what_the_program_has_frozen_is_found_and_stays_frozen() -> None:
    frozen = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    gc.freeze()
    free = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    before, collects = gc.get_freeze_count(), gc.isenabled()
    found = {id(one) for one in living(torch.optim.Optimizer)}
    assert {id(frozen), id(free)} <= found
    # Frozen objects of other threads may die in the meantime; none is frozen anew.
    assert before - 1000 < gc.get_freeze_count() <= before and gc.isenabled() == collects
    looked_at = {id(one) for one in gc.get_objects()}
    assert id(free) in looked_at and id(frozen) not in looked_at


def test_what_was_never_frozen_is_collected_after_a_look() -> None:
    gc.freeze()
    kept = nn.Linear(2, 2)
    kept.itself = [kept]
    gone = weakref.ref(kept)
    assert any(one is kept for one in living(nn.Module))
    del kept
    gc.collect()
    assert gone() is None


def test_a_class_that_is_no_key_is_no_hindrance() -> None:
    """Its metaclass has an ``__eq__`` and no ``__hash__``."""

    class Meta(type):
        def __eq__(cls, other: object) -> bool:
            return cls is other

        __hash__ = None  # type: ignore[assignment]

    class Odd(metaclass=Meta):
        def __init__(self) -> None:
            self.me = [self]  # the collector knows it

    odd, model = Odd(), nn.Linear(2, 2)
    assert odd.me and any(one is model for one in living(nn.Module))
