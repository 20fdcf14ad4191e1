"""Predictions against runs on real GPUs, as bench/gpu_truth.py recorded them."""

from __future__ import annotations

from dataclasses import asdict
from functools import cache
from statistics import median
from typing import Any

import pytest
import torch

from support.accuracy.table import quantile
from support.gpu import records as gpu_records
from support.gpu.runs import Weights, measure
from support.gpu.zoo import CASES

RECORDS = gpu_records.read(gpu_records.RECORDS)
recorded = pytest.mark.skipif(not RECORDS, reason="no run of a real GPU is recorded in measurements/gpu_truth.jsonl")

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers and peft, about their own future


@cache
def errors() -> dict[str, list[tuple[str, float]]]:
    """Predicting all records takes minutes: one of each family here, every one in the benchmark."""
    first = {record["case"]["family"]: record for record in reversed(RECORDS) if not record.get("error")}
    return gpu_records.errors(list(first.values()), gpu_records.predictions_of(list(first.values())))


@pytest.mark.thorough
@recorded
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("quantity", "middle", "most"),
    [("allocated", 0.005, 0.02), ("reserved", 0.015, 0.05), ("process", 0.02, 0.05)],
)
def test_predictions_are_what_was_measured(quantity: str, middle: float, most: float) -> None:
    sizes = [abs(error) for _, error in errors()[quantity]]
    assert median(sizes) <= middle
    assert quantile(sizes, 0.95) <= most


@recorded
@pytest.mark.thorough
def test_steps_that_a_scaler_did_not_apply_took_no_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of these runs the first three steps gave infinite gradients: predicted without a step, they are as measured.

    To the byte with the versions of PyTorch and transformers that they had; others differ a little.
    """
    monkeypatch.setattr(torch.amp.GradScaler, "_maybe_opt_step", lambda *args, **kwargs: None)
    skipped = [one for one in RECORDS if one["case"]["name"] in ("bert-amp-fp16", "gpt2-amp-fp16")]
    found = gpu_records.errors(skipped, gpu_records.predictions_of(skipped))
    assert len(found["allocated"]) == 2
    assert all(abs(error) <= 2e-4 for _, error in (*found["allocated"], *found["reserved"]))


@recorded
def test_runs_capped_at_the_upper_bound_succeed() -> None:
    told = gpu_records.capped(RECORDS)
    assert told["failed"] <= 0.01 * told["runs"]
    assert told["median_slack"] <= 0.05


def test_there_are_sixty_cases_of_every_kind() -> None:
    cases = CASES.values()
    assert len(cases) >= 60
    assert {case.family for case in cases} == {"cnn", "vit", "encoder", "decoder", "moe", "diffusion"}
    assert {"fp32", "amp-fp16", "amp-bf16", "bf16"} <= {case.precision for case in cases}
    assert {"sgd", "adamw", "adafactor", "adamw8bit"} <= {case.optimizer for case in cases}
    assert {"train", "infer", "generate"} == {case.task for case in cases}
    assert any(case.lora for case in cases)
    assert any(case.checkpointing for case in cases)


def test_a_case_whose_process_crashed_is_left_out_of_the_comparison() -> None:
    crashed = {"case": asdict(CASES["llama-lora"].tiny()), "error": "the worker ended with -9"}
    assert gpu_records.predictions_of([crashed]) == {}
    assert not any(gpu_records.errors([crashed], {}).values())
    gpu_records.show([crashed], {})  # names it in the table


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["mobilenet-adagrad", "unet-bf16", "llama-lora", "t5-generate"])
def test_a_case_is_run_and_predicted_from_its_record(name: str) -> None:
    """What the benchmark does on a GPU, in small on the CPU."""
    case = CASES[name].tiny()
    record: dict[str, Any] = measure(case, "cpu", 0, {}, Weights())
    assert "error" not in record, record["error"]
    assert record["measured"]["step_s"] > 0
    record["device"] = "NVIDIA H100 PCIe"  # predicted as for a card of the catalog: only these have seconds
    again = gpu_records.predictions_of([record])[name]
    assert "error" not in again, again["error"]
    predicted = again["predicted"]
    assert predicted["step_s"] > 0
    assert predicted["allocated"] <= predicted["reserved"] < predicted["process"] <= predicted["upper_bound"]
