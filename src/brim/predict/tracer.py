"""Trace a step without computing it: fake tensors go through the user's code, and every storage's life is recorded.

``build`` and the ``step`` that it returns run for real, in Python; only tensors have no data. So the order of
allocations and frees is the one of a real run: it is decided by Python's and autograd's own references.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from brim.core import Category, Trace
from brim.core.leak import Leak, settled
from brim.errors import BrimError, UsageError
from brim.predict import failures, patches
from brim.predict.dispatch import RecordingMode
from brim.predict.lowering import rules_for
from brim.predict.modules import ModuleTracker
from brim.predict.pretend import PretendCuda, pretending
from brim.predict.recorder import Recorder
from brim.predict.torch_cuda import cuda_lists
from brim.predict.values.assumptions import Values
from brim.random_numbers import default_generators, restored

TARGETS = ("cuda", "cpu")
ROUTINGS = ("balanced", "crowded")


def trace(
    build: Callable[[], Callable[[], Any]],
    *,
    steps: int = 3,
    most_steps: int | None = None,
    target: str = "cuda",
    model: str = "",
    capability: tuple[int, int] = (8, 0),
    routing: str = "balanced",
    assume: float = 1.0,
    strict: bool = False,
) -> Trace:
    """Trace the steps of any program on tensors without data, as the program would run on a GPU.

    ``build`` and the step are executed in Python, but their tensors have no data, so a step of any size can be traced
    on any machine. Values that follow from the program are known: literals, files, whole numbers, random draws,
    tensors created on the CPU. Values that depend on weights are unknown: if the program reads one, the trace makes
    up a number and names the line in ``Trace.notes``.

    Args:
        build: A function without arguments that creates model, optimizer and inputs, and returns the step, another
            function without arguments. The result of the step is not used.
        steps: The number of steps to trace, at least 1. The first step creates the optimizer's state, so the peak is
            often in the second.
        most_steps: The largest number of steps to trace while memory grows with every step. None: ``steps``.
        target: ``"cuda"`` or ``"cpu"``. For CUDA only tensors on the GPU are recorded; a program that never mentions
            CUDA is traced as if all of it ran on the GPU.
        model: The trace's name. By default the model's class.
        capability: The GPU's compute capability, which decides between attention kernels: ``(8, 0)`` is an A100.
        routing: The routing of a mixture of experts: ``"balanced"`` spreads tokens evenly, ``"crowded"`` sends all to
            the same experts.
        assume: The assumed share of true values in a mask that depends on weights, above 0 and at most 1 (the worst
            case). Other whole numbers are assumed to be 1.
        strict: Raise UnsupportedError instead of making numbers up.

    Returns:
        The operations of the steps and the life of every storage, in order.

    Raises:
        UsageError: A value that is not allowed.
        OperationError: An operation of the program failed; the message has its line.
        UnsupportedError: An operation has no fake kernel, or the size of its result is not bounded; with ``strict``
            also if the step needs an unknown value. The message has the name or the line.
    """
    _check(steps, target, routing, assume)
    mode = _recording(target, capability, Values(routing, strict=strict, assume=assume))
    # A caller's inference mode is not the program's, and tensors of it keep no versions.
    drawn = restored(default_generators())  # a trace draws numbers like the program
    with torch.inference_mode(False), drawn, _watching(mode, target, capability):
        growth = _Growth(mode.recorder)
        held = _run_named(mode, build, steps, most_steps or steps, growth)
        made = _written(mode, target, model or _name(mode.modules, build), growth.leak())
        del held
    return made


class _Growth:
    """Compares memory in use from step to step, to find growth."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder, self._in_use_bytes = recorder, list[int]()  # at the end of each step

    def after_step(self) -> bool:
        self._in_use_bytes.append(self._recorder.in_use_bytes())
        ended = settled(self._in_use_bytes)
        return self.leak() is not None if ended is None else not ended

    def leak(self) -> Leak | None:
        return self._recorder.leak(self._in_use_bytes)


class _Streams:
    """The current stream's number, in the order in which programs use them. A trace of a GPU that is not there runs
    device-agnostic programs (FSDP2) on ``torch.cpu``'s streams, which have no effect but are distinguished all the
    same."""

    def __init__(self) -> None:
        self._numbers = {id(torch.cpu.current_stream()): 0}
        self._known: list[Any] = []  # kept alive: another stream is never given the same identity

    def __call__(self) -> int:
        stream = torch.cpu.current_stream()
        if id(stream) not in self._numbers:
            self._known.append(stream)
        return self._numbers.setdefault(id(stream), len(self._numbers))


def _recording(target: str, capability: tuple[int, int], values: Values) -> RecordingMode:
    recorder, modules = Recorder(), ModuleTracker()
    recorder.stream, recorder.line = _Streams(), failures.place
    values.optimizer_asks = modules.optimizer_asks
    mode = RecordingMode(recorder, modules, values, rules_for(target, capability))
    modules.on_cache = lambda cache: _mark_cache(mode, cache)
    mode.after_backward = lambda: _mark_gradients(mode)
    return mode


def _check(steps: int, target: str, routing: str, assume: float) -> None:
    if target not in TARGETS:
        raise UsageError(f"Unknown trace target {target!r}.", f"Known: {', '.join(TARGETS)}.")
    if steps < 1:
        raise UsageError(f"Cannot trace with steps={steps}.", "A trace has at least one step.")
    if routing not in ROUTINGS:
        raise UsageError(f"Unknown routing {routing!r}.", f"Known: {', '.join(ROUTINGS)}.")
    if not 0 < assume <= 1:
        raise UsageError(f"Cannot trace with assume={assume}.", "It must be above 0 and at most 1.")


@contextmanager
def _watching(mode: RecordingMode, target: str, capability: tuple[int, int]) -> Iterator[None]:
    """Fake tensors below, ``mode`` above them, and everything that is replaced while a trace runs."""
    with ExitStack() as stack:
        stack.enter_context(patches.silenced("torch._subclasses.fake_tensor"))
        stack.enter_context(mode.modules.watching())
        stack.enter_context(FakeTensorMode(allow_fallback_kernels=False, allow_non_fake_inputs=True))
        stack.enter_context(mode)
        functions = PretendCuda(mode, capability) if target == "cuda" else patches.ValueMode(mode)
        if isinstance(functions, PretendCuda):
            stack.enter_context(pretending(functions))
            stack.enter_context(cuda_lists(functions.autocast))
        stack.enter_context(patches.while_tracing(functions))
        yield


def _run_named(
    mode: RecordingMode, build: Callable[[], Callable[[], Any]], steps: int, most_steps: int, growth: _Growth
) -> Callable[[], Any]:
    """``_run``; an operation's error names the line of the program."""
    try:
        return _run(mode, build, steps, most_steps, growth)
    except BrimError:
        raise
    except Exception as error:
        refused = failures.of_operation(error)
        if refused is None:
            raise
        raise refused from error


def _run(
    mode: RecordingMode, build: Callable[[], Callable[[], Any]], steps: int, most_steps: int, growth: _Growth
) -> Callable[[], Any]:
    """Build and step; built objects live as long as the step that is returned."""
    step = build()
    if not callable(step):
        raise UsageError("build() must return the step to trace, a function.", f"It returned {type(step).__name__}.")
    _categorize(mode)
    for number in range(1, max(steps, most_steps) + 1):
        mode.recorder.begin_step()
        step()
        _categorize(mode)
        if not growth.after_step() and number >= steps:
            break
    return step


def _written(mode: RecordingMode, target: str, model: str, leak: Leak | None) -> Trace:
    recorder, paths = mode.recorder, mode.modules.paths()
    recorder.notes |= _notes(mode.values)
    return Trace(
        model=model,
        target=target,
        ops=recorder.ops(paths),
        storages=recorder.storages(paths, device_only=recorder.uses_device),
        step_starts=tuple(recorder.step_starts),
        not_modelled=tuple(sorted(recorder.not_modelled)),
        notes=recorder.notes,
        leak=leak,
    )


def _notes(values: Values) -> dict[str, str]:
    """Return the notes on unknown values that the program read, by subject."""
    questions, notes = values.questions, {}
    if questions.routing:
        notes["routing"] = _ROUTING_NOTES["crowded" if values.crowded else "balanced"]
    if questions.finite:
        notes["finite"] = "values are taken to be finite where the program asks"
    if questions.checks:
        notes["checks"] = "where the program checks that all of a tensor is true, it is taken to be"
    if questions.decided:
        notes["decided"] = f"decided by a value that was made up: {', '.join(questions.decided)}"
    if questions.read:
        notes["made up"] = f"read as numbers that were made up: {', '.join(questions.read)}"
    if questions.assumed:
        share = "all of a mask is true" if values.share == 1 else f"{values.share:.0%} of a mask are true"
        notes["assumed"] = f"assumed, as they depend on weights ({share}, other whole numbers are 1): " + ", ".join(
            questions.assumed
        )
    return notes


_ROUTING_NOTES = {
    "balanced": "balanced: each token's experts follow on the ones of the token before",
    "crowded": "crowded: all tokens choose the same experts",
}


def _name(modules: ModuleTracker, build: Callable[[], Any]) -> str:
    roots = [type(module).__name__ for module in modules.roots()]
    return roots[0] if roots else getattr(build, "__name__", "step")


def _mark_cache(mode: RecordingMode, cache: Any) -> None:
    """Yield the keys and values of a Hugging Face cache, layer by layer."""
    for part in ("self_attention_cache", "cross_attention_cache"):  # of an encoder-decoder
        if (inner := getattr(cache, part, None)) is not None:
            _mark_cache(mode, inner)
    for layer in getattr(cache, "layers", ()):
        for name in ("keys", "values"):
            mode.mark(getattr(layer, name, None), Category.KV_CACHE)


def _owners(mode: RecordingMode) -> dict[int, int]:
    """Return the first module with each parameter, by the parameter's identity."""
    found: dict[int, int] = {}
    for index, module in mode.modules.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                found.setdefault(id(parameter), index)
    return found


def _categorize(mode: RecordingMode) -> None:
    """Set the category of the living storages, by their owner."""
    owners = _owners(mode)
    for index, module in mode.modules.modules():
        for parameter in module._parameters.values():
            mode.mark(parameter, Category.PARAMETER, owners.get(id(parameter), -1))
        for buffer in module._buffers.values():
            mode.mark(buffer, Category.BUFFER, index)
    for optimizer in mode.modules.optimizers():
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                mode.mark(parameter, Category.PARAMETER)
        for owner, state in optimizer.state.items():
            for value in state.values():
                mode.mark(value, Category.OPTIMIZER_STATE, owners.get(id(owner), -1))
    _mark_gradients(mode)


def _mark_gradients(mode: RecordingMode) -> None:
    """Mark gradients as soon as a backward pass has created them: programs free them between steps."""
    owners = _owners(mode)
    for _, module in mode.modules.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                mode.mark(parameter.grad, Category.GRADIENT, owners[id(parameter)])
    for optimizer in mode.modules.optimizers():
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                mode.mark(parameter.grad, Category.GRADIENT)
