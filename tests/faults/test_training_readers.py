"""What a training leaves behind is read by others: transformers, peft, TensorBoard."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import brim
from brim.run.checkpoint import contents as checkpoint_contents
from brim.run.checkpoint.reading import latest
from brim.run.train.loop import train
from support.tiny_model import held
from support.trainings import course, request

IDS = torch.arange(2, 26).view(2, 12)


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "output"


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.eval()(IDS).logits
    return found


@pytest.mark.thorough
@pytest.mark.parametrize("shard_bytes", [None, 8_000], ids=["one file", "shards"])
@pytest.mark.parametrize("places", [{}, {"offload_optimizer": "disk"}], ids=["in memory", "states on disk"])
def test_transformers_and_brim_compute_with_a_checkpoint_what_they_do_with_the_model(
    shard_bytes: int | None, places: dict[str, Any], tiny: Path, text: Path, output: Path, scratch: Path,
    quick_trainings: None, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    if shard_bytes is not None:
        defaults = checkpoint_contents.model_tensors.__kwdefaults__
        monkeypatch.setitem(defaults, "shard_bytes", shard_bytes)
    train(request(tiny, text, output, steps=2, save_every=1, **places))
    checkpoint = latest(output)
    assert checkpoint.step == 2
    assert (len(list(checkpoint.folder.glob("model-*.safetensors"))) > 2) == (shard_bytes is not None)
    wanted = logits(AutoModelForCausalLM.from_pretrained(output))
    assert not torch.equal(wanted, logits(AutoModelForCausalLM.from_pretrained(tiny)))
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(checkpoint.folder)), wanted)
    assert torch.equal(logits(brim.load(checkpoint.folder, device="cpu")), wanted)
    for folder in (output, checkpoint.folder):
        assert AutoTokenizer.from_pretrained(folder)("hi").input_ids == [73, 74]
    resumed = train(request(tiny, text, output, steps=3, save_every=1, resume=True, **places))
    assert len(resumed.losses) == 1


@pytest.mark.filterwarnings("ignore::FutureWarning")  # peft's own, of transformers
def test_peft_computes_with_a_checkpoint_what_it_does_with_the_adapter(
    tiny: Path, text: Path, output: Path, scratch: Path, quick_trainings: None
) -> None:
    from peft import PeftModel

    train(request(tiny, text, output, steps=2, save_every=1, method="lora", lr=0.05))

    def tuned(folder: Path) -> torch.Tensor:
        return logits(PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny), str(folder)))

    assert torch.equal(tuned(output), tuned(latest(output).folder))
    assert not torch.equal(tuned(output), logits(AutoModelForCausalLM.from_pretrained(tiny)))
    config = json.loads((latest(output).folder / "adapter_config.json").read_text())
    assert Path(config["base_model_name_or_path"]) == tiny


@pytest.mark.thorough
def test_tensorboard_shows_each_step_once_also_after_resuming(
    tiny: Path, text: Path, output: Path, scratch: Path, quick_trainings: None
) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    before = held()

    class Interrupted(Exception):
        pass

    def on_step(report: Any) -> None:
        if report.step == 3:
            raise Interrupted

    with pytest.raises(Interrupted):
        train(request(tiny, text, output, steps=4, save_every=2), on_step=on_step)
    time.sleep(1.1)  # files are read in the order of their seconds, which two processes would not share
    train(request(tiny, text, output, steps=4, save_every=2, resume=True))
    assert held() == before
    events = accumulator.EventAccumulator(str(output / "tensorboard"), purge_orphaned_data=True)
    events.Reload()
    shown = [(event.step, event.value) for event in events.Scalars("loss")]
    assert shown == [(step, pytest.approx(loss)) for step, loss in course(output)]
    assert {"lr", "step_s", "tokens_per_s", "peak_bytes/ram"} <= set(events.Tags()["scalars"])


@pytest.mark.thorough
def test_tensorboard_shows_a_training_that_began_anew_once(
    tiny: Path, text: Path, output: Path, scratch: Path, quick_trainings: None
) -> None:
    """What was logged before an interruption without a checkpoint is void as a whole."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    train(request(tiny, text, output, steps=3))
    time.sleep(1.1)
    train(request(tiny, text, output, steps=2, overwrite=True))
    events = accumulator.EventAccumulator(str(output / "tensorboard"), purge_orphaned_data=True)
    events.Reload()
    assert [event.step for event in events.Scalars("loss")] == [step for step, _ in course(output)] == [1, 2]


def test_without_tensorboard_training_goes_on_and_logs_to_its_own_file(
    tiny: Path, text: Path, output: Path, scratch: Path, quick_trainings: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)  # as if it were not installed
    train(request(tiny, text, output, steps=2))
    assert not (output / "tensorboard").exists()
    assert [step for step, _ in course(output)] == [1, 2]
