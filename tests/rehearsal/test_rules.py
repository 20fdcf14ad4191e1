"""The rules for machines without a CUDA build of PyTorch say what the CUDA build answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

import brim
from brim.device.kernels import KernelAnswers, Script, answers_for
from brim.errors import BrimError
from brim.estimation.estimate import Estimate
from brim.predict.lowering.cuda import build_answers
from brim.predict.lowering.cuda import kernels as cuda_kernels
from brim.predict.lowering.cuda.build_answers import described
from brim.predict.lowering.kernel import Kernel, Rule
from brim.predict.side_effects import by_brim
from support.benches import load

if TYPE_CHECKING:
    from conftest import OnDevice

H100 = (9, 0)
_aten = torch.ops.aten
# Rules of what the device has no answer to: libraries, copies to and from the host, indices that values decide on.
_NOT_ANSWERED = frozenset(cuda_kernels.NOT_ASKED)
FAMILIES = (
    "llama-3.2-1b", "gpt2", "bart-base", "bert-base", "bloom-560m", "clip-vit-b-32", "convnext-tiny",
    "deepseek-v2-lite", "deepseek-v3", "dit-xl-2", "electra-base", "falcon-7b", "gemma-2-2b", "gemma-3-1b",
    "glm-4.5-air", "gpt-j-6b", "gpt-neo-125m", "gpt-neox-20b", "gpt-oss-20b", "mixtral-8x7b", "opt-125m", "phi-2",
    "phi-3-mini", "qwen3-0.6b", "qwen3-30b-a3b", "resnet18", "roberta-base", "sd-unet", "sd-vae", "swin-tiny",
    "t5-small", "vit-b-16", "whisper-tiny",
)  # fmt: skip
Events = list[tuple[str, int]]


class Comparison:
    """Both scripts of every kernel that has a rule, by its call."""

    def __init__(self, answers: KernelAnswers) -> None:
        self.different: dict[str, tuple[Events, Events]] = {}
        self.equal = 0
        self._answers, self._compared = answers, set[str]()

    def rules(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def rules(capability: tuple[int, int]) -> Callable[[torch._ops.OpOverload], Rule | None]:
            rule_for = real(capability)
            return lambda func: self._comparing(func, rule_for(func))

        return rules

    def _comparing(self, func: torch._ops.OpOverload, rule: Rule | None) -> Rule | None:
        if rule is None or func in _NOT_ANSWERED:
            return rule

        def compare(kernel: Kernel) -> None:
            rule(kernel)  # first: of the workspaces that both keep, the trace has its own
            call = described(kernel.func, kernel.args, kernel.kwargs)
            if call is not None and str(call) not in self._compared:
                self._compared.add(str(call))
                with by_brim():  # the process that answers may begin here
                    answer = self._answers.script(call)
                self._compare(kernel, rule, str(call), answer)

        return compare

    def _compare(self, kernel: Kernel, rule: Rule, call: str, answer: Script | None) -> None:
        offline = replace(kernel, script=[], libraries=[], reductions={}, unknown="", _emitted=set())
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(build_answers, "answers_for", lambda capability: None)
            rule(offline)
        if offline.unknown or answer is None:  # named, or refused by PyTorch
            return
        offline.emit()
        sizes = [output.untyped_storage().nbytes() for output in kernel.outputs]
        script = [
            (what, number, sizes[number] if what == "out" and bytes < 0 else bytes)
            for what, number, bytes in offline.script
        ]
        said, answered = _events(script), _events(answer)
        if said == answered:
            self.equal += 1
        else:
            self.different[call] = said, answered


def _events(script: Any) -> Events:
    """Allocations and frees but for those of nothing, of libraries' workspaces, and at the end."""
    sizes: dict[int, int] = {}
    events: Events = []
    for what, number, bytes in script:
        if what == "alloc":
            sizes[number] = bytes
        if what in ("alloc", "out") and bytes:
            events.append(("+", bytes))
        elif what == "free" and sizes.get(number):
            events.append(("-", sizes[number]))
    while events and events[-1][0] == "-":
        events.pop()
    return events


@pytest.fixture
def comparison(on_device: OnDevice, monkeypatch: pytest.MonkeyPatch) -> Comparison:
    answers = answers_for(H100)
    assert answers is not None
    comparison = Comparison(answers)
    monkeypatch.setattr(cuda_kernels, "rules", comparison.rules(cuda_kernels.rules))
    return comparison


@pytest.fixture(scope="module")
def workers() -> Any:
    return load("_operators_worker")


def samples(workers: Any, layout: str, times: int) -> Iterator[Callable[[], Callable[[], Any]]]:
    for _, build in workers.samples([], 1, layout, False, times):
        yield build


@pytest.mark.parametrize(
    ("layout", "times"),
    [("plain", 1), ("plain", 100), ("transposed", 1), pytest.param("channels-last", 1, marks=pytest.mark.slow)],
)
@pytest.mark.filterwarnings("ignore")
def test_rules_say_what_pytorch_answers(comparison: Comparison, workers: Any, layout: str, times: int) -> None:
    for build in samples(workers, layout, times):
        try:
            brim.trace(build, steps=1, target="cuda", capability=H100)
        except BrimError:  # ``bench/operators.py`` counts refusals
            continue
    assert comparison.different == {}
    assert comparison.equal > 300


def _places(most: int, count: int) -> torch.Tensor:
    return torch.randint(0, most, (count,), device="cuda")


ADDED_UP: dict[str, tuple[tuple[int, ...], Callable[[torch.Tensor], torch.Tensor]]] = {
    "rows": ((300, 40), lambda x: x[_places(300, 5000)]),
    "columns": ((40, 300), lambda x: x[:, _places(300, 5000)]),
    "the last of three": ((4, 30, 30), lambda x: x[:, :, _places(30, 5000)]),
    "two side by side": ((40, 30, 30), lambda x: x[:, _places(30, 50), _places(30, 50)]),
    "two apart": ((30, 30, 30), lambda x: x[_places(30, 50), :, _places(30, 50)]),
    "two that are broadcast": ((4, 30, 8), lambda x: x[_places(4, 5000)[:, None], _places(30, 3)]),
    "of what is transposed": ((40, 30), lambda x: x.T[_places(30, 5000)]),
}  # fmt: skip


@pytest.mark.parametrize("name", ADDED_UP)
def test_gradients_of_indices_take_as_much_without_the_build(
    on_device: OnDevice, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape, index = ADDED_UP[name]

    def build() -> Callable[[], None]:
        source = torch.randn(shape, device="cuda", requires_grad=True)
        return lambda: index(source).sum().backward()

    def peak_bytes() -> int:
        made = brim.trace(build, steps=1, target="cuda", capability=H100)
        assert made.not_modelled == ()
        return brim.simulate(made, "H100").peak_bytes.allocated

    answered = peak_bytes()
    monkeypatch.setattr(build_answers, "answers_for", lambda capability: None)
    assert peak_bytes() == answered


def _bf16(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device="cuda")


def _grouped(groups: int, rows: int, width: int) -> torch.Tensor:
    ends = torch.empty(groups, dtype=torch.int32, device="cuda")
    return torch._grouped_mm(_bf16(rows, width), _bf16(groups, width, 2 * width), ends)


def _larger(channels: int, layout: torch.memory_format, *, rows: slice = slice(None)) -> torch.Tensor:
    source = torch.empty(2, channels, 32, 32, device="cuda", requires_grad=True)
    image = source.contiguous(memory_format=layout)[:, :, rows]
    larger = torch.nn.functional.interpolate(image, scale_factor=2.0, mode="nearest")
    larger.backward(torch.empty_like(larger))
    return larger


CALLS: dict[str, Callable[[], Any]] = {
    "sum of 4 GiB": lambda: _bf16(1 << 31).sum(),
    "sums of 8 GiB": lambda: _bf16(1 << 16, 1 << 16).sum(0),
    "sums of rows of 8 GiB": lambda: _bf16(1 << 16, 1 << 16).float().sum(1, keepdim=True),
    "means of a middle dimension": lambda: _bf16(64, 4096, 8192).mean(1),
    "maxima of a middle dimension": lambda: _bf16(64, 4096, 8192).max(1),
    "maximum of 4 GiB": lambda: _bf16(1 << 31).amax(),
    "position of the maximum of 4 GiB": lambda: _bf16(1 << 31).argmax(),
    "few sums far from each other": lambda: _bf16(64, 4096, 4097)[:, :, -1:].sum(1, keepdim=True),
    "few maxima far from each other": lambda: _bf16(64, 4096, 4097)[:, :, -1:].max(1, keepdim=True),
    "the best of 256": lambda: _bf16(4096, 256).topk(8),
    "the best of 512": lambda: _bf16(4096, 512).topk(10),
    "the best of columns": lambda: _bf16(512, 8192).t().topk(10),
    "the best of many rows": lambda: torch.empty(300_000, 512, device="cuda").topk(10),
    "the best of a vocabulary": lambda: torch.empty(4, 50_000, dtype=torch.float64, device="cuda").topk(50),
    "the best of many numbers": lambda: torch.empty(10_000_000, device="cuda").topk(5),
    "larger images": lambda: _larger(8, torch.contiguous_format),
    "larger images with channels last": lambda: _larger(8, torch.channels_last),
    "larger images of every other row": lambda: _larger(8, torch.channels_last, rows=slice(None, None, 2)),
    "larger images with three channels last": lambda: _larger(3, torch.channels_last),
    "logarithms of sigmoids": lambda: torch.nn.functional.logsigmoid(torch.empty(1000, 1000, device="cuda")),
    "products of groups": lambda: _grouped(32, 16384, 2880),
    "products of many groups": lambda: _grouped(512, 40960, 512),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_rules_say_what_pytorch_answers_for_one_call(comparison: Comparison, name: str) -> None:
    brim.trace(lambda: CALLS[name], steps=1, target="cuda", capability=H100)
    assert comparison.different == {}
    assert comparison.equal > 0


@pytest.mark.slow
@pytest.mark.parametrize("task", ["train", "lora", "generate"])
@pytest.mark.parametrize("model", FAMILIES)
def test_rules_say_what_pytorch_answers_for_the_models_of_the_catalog(
    comparison: Comparison, model: str, task: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And estimates without the build are equal to the byte."""

    def estimate() -> Estimate:
        if task == "lora":
            return brim.estimate(model, task="train", method="lora", gpu="H100")
        return brim.estimate(model, task=task, gpu="H100")

    if (task, model) == ("lora", "mixtral-8x7b"):
        pytest.skip("PEFT does not know which of its modules to adapt")
    answered = estimate()
    assert comparison.different == {}
    assert comparison.equal > 0
    monkeypatch.setattr(build_answers, "answers_for", lambda capability: None)
    without = estimate()
    assert without.not_modelled == answered.not_modelled
    assert without.peak_bytes == answered.peak_bytes
    assert without.upper_bound_bytes == answered.upper_bound_bytes
