"""A fitted module is the module it was: every cell of the matrix against an unfitted twin, bit for bit."""

from __future__ import annotations

import gc
import io
import re
import warnings
from collections.abc import Callable
from typing import Any

import peft
import pytest
import safetensors.torch
import torch
from torch import nn

from brim.errors import UnsupportedError

Same = Callable[..., None]


def lora(model: nn.Module) -> peft.PeftModel:
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["up", "down"], init_lora_weights=False)
    torch.manual_seed(7)  # both twins get the same adapter
    return peft.get_peft_model(model, config)  # type: ignore[arg-type]


def equal_states(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return list(one) == list(other) and all(
        torch.equal(one[key], other[key]) and one[key].dtype == other[key].dtype for key in one
    )


def prepare(model: nn.Module, adapter: str, tools: Any) -> nn.Module:
    """``model`` fitted, with an adapter that was there ``before`` or came ``after``."""
    if adapter == "before":
        model = lora(model)
    tools.fit(model)
    return lora(model) if adapter == "after" else model


# -- tied x LoRA x compile x state


@pytest.mark.thorough
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("adapter", ["none", "before", "after"])
@pytest.mark.parametrize("tied", [False, True], ids=["plain", "tied"])
@pytest.mark.parametrize("state", ["read", "loaded"])
def test_the_matrix(tools: Any, same: Same, tied: bool, adapter: str, compiled: bool, state: str) -> None:
    twin = tools.make(tied=tied) if adapter == "none" else lora(tools.make(tied=tied))
    fitted = prepare(tools.make(tied=tied), adapter, tools)
    run = torch.compile(fitted, backend="eager") if compiled else fitted
    same(run, twin)
    if state == "read":
        assert equal_states(fitted.state_dict(), twin.state_dict())
    else:
        other = tools.make(tied=tied, seed=1) if adapter == "none" else lora(tools.make(tied=tied, seed=1))
        for module in (twin, fitted):
            assert str(module.load_state_dict(other.state_dict())) == "<All keys matched successfully>"
    same(run, twin)
    assert equal_states(fitted.state_dict(), twin.state_dict())
    fitted.brim.remove()
    same(run, twin)
    assert equal_states(fitted.state_dict(), twin.state_dict())
    torch.compiler.reset()


def test_compiled_before_it_is_fitted(tools: Any, same: Same) -> None:
    twin, model = tools.make(), tools.make()
    compiled = torch.compile(model, backend="eager")
    same(compiled, twin)
    handle = tools.fit(compiled)
    assert handle is model.brim
    same(compiled, twin)
    handle.remove()
    same(compiled, twin)
    torch.compiler.reset()


@pytest.mark.thorough
def test_inductor_gives_what_it_gives_unfitted(tools: Any, ids: torch.Tensor) -> None:
    twin, model = tools.make(layers=3), tools.make(layers=3)
    tools.fit(model, example=[ids], **({} if tools.device == "cpu" else {"ram": "1MiB"}))
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # inductor's own
        wanted = torch.compile(twin)(ids)
        compiled = torch.compile(model)
        for _ in range(2):
            torch.testing.assert_close(compiled(ids), wanted)
    torch.compiler.reset()


# -- state


def test_a_state_that_is_saved_has_the_size_of_the_weights(tools: Any) -> None:
    twin, model = tools.make(), tools.make()
    tools.fit(model)
    files = []
    for module in (twin, model):
        file = io.BytesIO()
        torch.save(module.state_dict(), file)
        files.append(file)
    assert len(files[1].getvalue()) < 1.05 * len(files[0].getvalue()) + 50_000
    files[1].seek(0)
    assert equal_states(torch.load(files[1], weights_only=True), twin.state_dict())
    assert safetensors.torch.load(safetensors.torch.save(model.state_dict())).keys() == twin.state_dict().keys()


def test_a_state_taken_before_remove_stays_good(tools: Any) -> None:
    twin, model = tools.make(), tools.make()
    handle = tools.fit(model)
    state = model.state_dict()
    handle.remove()
    gc.collect()
    assert equal_states(state, twin.state_dict())


def test_parts_give_and_take_their_own_state(tools: Any, same: Same) -> None:
    twin, model, other = tools.make(), tools.make(), tools.make(seed=1)
    tools.fit(model)
    same(model, twin)
    for path in ("layers", "layers.2", "layers.3.up"):
        assert equal_states(model.get_submodule(path).state_dict(), twin.get_submodule(path).state_dict())
        for module in (twin, model):
            module.get_submodule(path).load_state_dict(other.get_submodule(path).state_dict())
        same(model, twin)


def test_a_state_of_which_half_is_missing_loads_the_other_half(tools: Any, same: Same) -> None:
    twin, model = tools.make(), tools.make()
    half = {key: value for key, value in tools.make(seed=1).state_dict().items() if "up" in key}
    tools.fit(model)
    for module in (twin, model):
        module.load_state_dict(half, strict=False)
    same(model, twin)


def test_loading_by_assignment_is_refused(tools: Any) -> None:
    model = tools.make()
    tools.fit(model)
    with pytest.raises(UnsupportedError, match=re.escape("assign=True")):
        model.load_state_dict(tools.make(seed=1).state_dict(), assign=True)


# -- values that change


def test_running_statistics_change_and_stay_after_remove(tools: Any, same: Same, ids: torch.Tensor) -> None:
    twin, model = tools.make().train(), tools.make().train()
    handle = tools.fit(model)
    with torch.no_grad():
        for _ in range(3):
            for module in (twin, model):
                torch.manual_seed(3)
                module(ids)
    for done in (lambda: None, handle.remove):
        done()
        assert int(model.batch_norm.num_batches_tracked) == 3
        for (name, wanted), (_, found) in zip(twin.named_buffers(), model.named_buffers(), strict=True):
            assert torch.equal(found, wanted), name
    same(model.eval(), twin.eval())


def test_dropout_with_a_seed_drops_the_same(tools: Any, ids: torch.Tensor) -> None:
    twin, model = tools.make().train(), tools.make().train()
    tools.fit(model)
    with torch.no_grad():
        for seed in range(3):
            results = []
            for module in (twin, model):
                torch.manual_seed(seed)
                results.append(module(ids))
            assert torch.equal(*results)
            assert torch.equal(torch.rand(3), torch.rand(3)) is False  # the generator went on


def changed_in_place(parameter: nn.Parameter) -> None:
    with torch.no_grad():
        parameter.add_(0.25)


def changed_in_inference_mode(parameter: nn.Parameter) -> None:
    with torch.inference_mode():
        parameter.add_(0.25)


def changed_through_data(parameter: nn.Parameter) -> None:
    parameter.data.add_(0.25)


def added_to_data(parameter: nn.Parameter) -> None:
    parameter.data += 0.25


def given_other_data(parameter: nn.Parameter) -> None:
    parameter.data = parameter.data.detach() + 0.25


CHANGES = [changed_in_place, changed_in_inference_mode, changed_through_data, added_to_data, given_other_data]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("steps_before", [0, 2])
def test_a_change_by_the_user_takes_effect_and_stays(
    tools: Any, same: Same, change: Callable[[nn.Parameter], None], steps_before: int
) -> None:
    twin, model = tools.make(), tools.make()
    handle = tools.fit(model)
    same(model, twin, steps=steps_before)
    for index in range(len(model.layers)):
        for module in (twin, model):
            change(module.layers[index].up.weight)
            change(module.layers[index].norm.bias)
        same(model, twin, steps=2)
        assert equal_states(model.state_dict(), twin.state_dict())
    handle.remove()
    same(model, twin)
    assert equal_states(model.state_dict(), twin.state_dict())


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_just_before_remove_is_kept(tools: Any, same: Same, change: Callable[[nn.Parameter], None]) -> None:
    twin, model = tools.make(tied=True), tools.make(tied=True)
    handle = tools.fit(model)
    same(model, twin)
    for parameter in [*twin.parameters(), *model.parameters()]:
        change(parameter)
    handle.remove()
    same(model, twin)


def test_a_change_during_a_step_is_kept(tools: Any, same: Same) -> None:
    def grow(module: nn.Module, args: object, output: object) -> None:
        with torch.no_grad():
            module.up.weight.mul_(1.01)

    twin, model = tools.make(), tools.make()
    handle = tools.fit(model)
    for module in (twin, model):
        module.layers[3].register_forward_hook(grow)
        module.layers[0].register_forward_hook(grow)
    same(model, twin, steps=4)
    handle.remove()
    assert equal_states(model.state_dict(), twin.state_dict())


def test_changes_to_blocks_that_one_call_needs_together(tools: Any, same: Same) -> None:
    twin, model = tools.make(), tools.make()
    for module in (twin, model):
        module.layers[1].up.weight = module.layers[4].up.weight
    tools.fit(model)
    same(model, twin)
    for module in (twin, model):
        with torch.no_grad():
            module.layers[1].up.weight.add_(1)
            module.layers[1].down.weight.add_(1)
            module.layers[4].down.weight.add_(1)
    same(model, twin)


def test_values_of_another_dtype_are_refused_and_can_be_taken_back(tools: Any, same: Same, ids: torch.Tensor) -> None:
    twin, model = tools.make(), tools.make()
    tools.fit(model)
    weight = next(s for s in model.brim._streamed_blocks if "layers" in s.block.name).parameters[0]
    kept = weight.data.clone()
    weight.data = kept.double()
    with torch.no_grad(), pytest.raises(UnsupportedError, match="float64"):
        model(ids)
    weight.data = kept
    same(model, twin)


def test_an_adapter_is_merged_and_taken_apart_again(tools: Any, same: Same) -> None:
    twin, model = lora(tools.make()), lora(tools.make())
    handle = tools.fit(model)
    same(model, twin)
    for action in ("merge_adapter", "unmerge_adapter"):
        for module in (twin, model):
            getattr(module, action)()
        same(model, twin)
    merged_twin, merged = twin.merge_and_unload(), model.merge_and_unload()
    same(merged, merged_twin)
    handle.remove()
    same(merged, merged_twin)
    assert equal_states(merged.state_dict(), merged_twin.state_dict())


# -- order


def test_a_block_called_twice_in_a_step(tools: Any, same: Same) -> None:
    twin, model = tools.make(), tools.make()
    handle = tools.fit(model)
    for order in ([0, 1, 1, 2, 3, 4, 5], [0, 1, 2, 1, 2, 3, 4, 5, 0], [5, 5, 5]):
        twin.order = model.order = order
        same(model, twin, steps=3)
    assert handle.misses < 20


def test_blocks_skipped_at_random(tools: Any, same: Same) -> None:
    twin, model = tools.make(), tools.make()
    tools.fit(model)
    generator = torch.Generator().manual_seed(0)
    for _ in range(30):
        keep = torch.rand(6, generator=generator) > 0.4
        twin.order = model.order = [index for index in range(6) if keep[index]]
        same(model, twin, steps=1)


def test_an_order_that_changes_between_steps(tools: Any, same: Same) -> None:
    twin, model = tools.make(), tools.make()
    handle = tools.fit(model)
    for seed in range(15):
        order = torch.randperm(6, generator=torch.Generator().manual_seed(seed)).tolist()
        twin.order = model.order = order
        same(model, twin, steps=1)
    before = handle.misses
    same(model, twin, steps=3)
    assert handle.misses - before <= 6  # the new order is learned in one pass


def test_a_part_called_alone(tools: Any) -> None:
    twin, model = tools.make(), tools.make()
    tools.fit(model)
    x = torch.randn(2, 5, 48)
    with torch.no_grad():
        for index in (4, 0, 3):
            assert torch.equal(model.layers[index](x), twin.layers[index](x))


def test_a_layer_whose_weight_is_tied_to_two_others(tools: Any, same: Same) -> None:
    twin, model = tools.make(), tools.make()
    for module in (twin, model):
        module.layers[2].up.weight = module.layers[0].up.weight
        module.layers[2].down.weight = module.layers[5].down.weight
    tools.fit(model)
    same(model, twin)


def test_a_layer_that_calls_another(tools: Any, same: Same) -> None:
    twin, model = tools.make(), tools.make()
    for module in (twin, model):
        inner = module.layers[4]
        module.layers[1].drop.register_forward_hook(
            lambda _, args, output, inner=inner: output + inner(output[..., :48]).repeat(1, 1, 2)
        )
    tools.fit(model)
    same(model, twin)
