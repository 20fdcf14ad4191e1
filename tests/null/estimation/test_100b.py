"""``docs/100b.md`` says what brim says, and what a person works out by hand."""

import re
from pathlib import Path

import pytest

from brim import catalog
from brim.estimation.ranks.estimate import estimate_ranks
from brim.estimation.ranks.split import Split
from brim.planning.meshes.search import megatron_state_bytes
from brim.units import GIB, format_bytes, format_seconds
from support import published_formulas

pytestmark = pytest.mark.thorough

TEXT = (Path(__file__).parents[3] / "docs" / "100b.md").read_text(encoding="utf-8")
GPT3 = {"layers": 96, "hidden": 12288, "vocabulary": 51200, "sequence": 2048}
SPLITS = [{"tp": 8, "pp": 8}, {"tp": 8, "pp": 16}, {"tp": 8, "pp": 16, "interleave": 3}, {"tp": 4, "pp": 16}]


def estimated(**settings):
    split = Split(gpus=512, zero=1, sequence_parallel=True, global_batch=1536, **settings)
    return estimate_ranks("gpt3-175b", split, engine="megatron", gpu="H100", checkpointing="selective")


@pytest.fixture(scope="module")
def estimates():
    return {tuple(settings.items()): estimated(**settings) for settings in SPLITS}


def table(first):
    """The cells of the table's row that begins so."""
    line = next(line for line in TEXT.splitlines() if line.startswith(f"| {first} |"))
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_what_is_worked_out_by_hand_is_what_the_closed_forms_say():
    parameters = published_formulas.gpt_parameters(**GPT3)
    assert parameters.arithmetic.removesuffix(" parameters") in TEXT
    states = megatron_state_bytes(parameters.value)
    assert f"{states:,} B = {format_bytes(states)}" in TEXT
    assert f"{-(-states // catalog.gpu('H100').capacity_bytes)} of them" in TEXT
    for stage, told in ((1, "654 GiB"), (3, "5.1 GiB")):
        zero = published_formulas.zero_states(parameters.value, gpus=512, stage=stage).value
        assert f"{zero / GIB:.{1 if stage == 3 else 0}f} GiB" == told
        assert told in TEXT


def test_activations_by_hand_are_those_of_the_paper():
    layer = published_formulas.activations_per_layer(
        sequence=2048, micro_batch=1, hidden=12288, heads=96, tensor_parallel=8, sequence_parallel=True,
        recompute="selective",
    )  # fmt: skip
    stage = published_formulas.activations_first_stage(
        layer, layers=96, sequence=2048, micro_batch=1, hidden=12288, vocabulary=51200, tensor_parallel=8,
        pipeline_parallel=16,
    )  # fmt: skip
    assert layer.arithmetic in TEXT
    assert stage.arithmetic in TEXT


def test_brims_column_is_what_brim_says(estimates):
    found = estimates[tuple(SPLITS[1].items())].worst
    assert found.rank == 0
    parts = found.breakdown
    states = parts["parameters"] + parts["gradients"] + parts["optimizer_state"]
    assert table("weights, gradients, optimizer states")[1:] == [f"{states:,} B"] * 2
    assert table("activations")[2] == f"{parts['activations']:,} B"
    rest = parts["workspaces"] + parts["temporary"]
    assert table("workspaces, and temporary gradients in the backward pass")[2] == f"{rest:,} B"
    assert table("rounding to blocks of 512 B")[2] == f"{parts['rounding']:,} B"
    assert table("allocated")[2] == f"{found.peak_bytes.allocated:,} B"


def test_by_hand_and_by_brim_agree(estimates):
    found = estimates[tuple(SPLITS[1].items())].worst
    by_hand = int(table("activations")[1].removesuffix(" B").replace(",", ""))
    assert found.breakdown["activations"] == pytest.approx(by_hand, rel=1e-3)
    assert found.peak_bytes.allocated == pytest.approx(int(re.sub(r"\D", "", table("allocated")[1])), rel=0.03)


@pytest.mark.parametrize("settings", SPLITS, ids=str)
def test_other_splits_take_what_the_table_says(estimates, settings):
    found = estimates[tuple(settings.items())]
    name = f"tp {settings['tp']} x pp {settings['pp']} x dp {found.split.dp}"
    name += ", 3 chunks a rank" if "interleave" in settings else ""
    assert table(name)[1:] == [format_bytes(found.worst.peak_bytes.allocated), format_seconds(found.step_s)]
