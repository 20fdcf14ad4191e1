"""Without PyTorch's CUDA build, kernels that may take more than is known are named, and common models have none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, cast

import pytest
import torch

import brim
from brim.device.kernels import KernelAnswers
from brim.errors import UnsupportedError

OF_TOKENS = (
    "gpt2", "bert-base", "t5-small", "bart-base", "opt-125m", "bloom-560m", "llama-3.2-1b", "gemma-2-2b",
    "whisper-tiny",
)  # fmt: skip
OF_IMAGES = ("vit-b-16", "swin-tiny")


def _factored() -> Callable[[], object]:
    matrix = torch.rand(64, 64, device="cuda")
    return lambda: torch.linalg.qr(matrix)


def test_a_kernel_that_may_take_more_is_named_and_the_answer_says_what_knows_it() -> None:
    estimate = brim.estimate(_factored)
    assert estimate.not_modelled == ("aten.linalg_qr: its temporaries",)
    assert [note for note in estimate.notes if "CUDA build answers" in note]
    plain = brim.estimate(lambda: lambda: torch.rand(64, 64, device="cuda") @ torch.rand(64, 64, device="cuda"))
    assert plain.not_modelled == ()
    assert not [note for note in plain.notes if "CUDA build answers" in note]


def test_a_build_that_cannot_answer_is_named_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KernelAnswers, "_begun", _without_a_compiler)
    answers = KernelAnswers(cast(Any, None), cast(Any, None), tmp_path / "answers.jsonl")
    for module in ("predict.lowering.cuda.build_answers", "estimation.estimate"):
        monkeypatch.setattr(f"brim.{module}.answers_for", lambda capability: answers)
    estimate = brim.estimate(_factored)
    assert estimate.not_modelled == ("aten.linalg_qr: its temporaries",)
    assert any("There is no C compiler" in note for note in estimate.notes)


def _without_a_compiler(answers: KernelAnswers) -> NoReturn:
    raise UnsupportedError("Cannot compile the rehearsal device.", "There is no C compiler.", "Install one.")


@pytest.mark.thorough
@pytest.mark.parametrize("model", OF_TOKENS + OF_IMAGES)
def test_the_families_of_the_catalog_are_known_as_a_whole(model: str) -> None:
    for gpu in ("RTX 4090", "H100"):
        estimate = brim.estimate(model, task="train", gpu=gpu, batch=1, seq=64 if model in OF_TOKENS else None)
        unknown = [name for name in estimate.not_modelled if "cuDNN" not in name]
        assert unknown == []
