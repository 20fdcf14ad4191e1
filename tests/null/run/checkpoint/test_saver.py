"""Training checkpoints: what goes in comes out bit for bit, and others can read it as a model."""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from brim.errors import ModelError, UnsupportedError, UsageError
from brim.memory.checkpoint_files import DTYPES
from brim.models.opening import open_model
from brim.run.checkpoint.contents import adapter_files, adapter_tensors, model_files, model_tensors
from brim.run.checkpoint.reading import Checkpoint, latest, read, steps
from brim.run.checkpoint.record import RECORD_NAME
from brim.run.checkpoint.saver import Checkpointer, Ring, Tensors, pieces
from support.tiny_model import save_tokenizer


def of(values: dict[str, torch.Tensor], stem: str = "model", shard_bytes: int | None = None) -> Tensors:
    layout = [(name, value.dtype, tuple(value.shape)) for name, value in values.items()]
    return Tensors(stem=stem, layout=layout, values=values.items(), shard_bytes=shard_bytes)


def saved(folder: Path, *tensors: Tensors, step: int = 1, **options: object) -> Checkpoint:
    with Checkpointer(folder, **options) as keeper:  # type: ignore[arg-type]
        keeper.save(step, tensors, state={})
    return latest(folder)


def llama(tied: bool = False, layers: int = 2) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=300,
        tie_word_embeddings=tied,
    )
    return LlamaForCausalLM(config)


def same_state(found: torch.nn.Module, wanted: torch.nn.Module) -> None:
    ours, theirs = found.state_dict(), wanted.state_dict()
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert ours[name].dtype == value.dtype and torch.equal(ours[name], value), name


@pytest.mark.parametrize("staging_bytes", [4096, 1 << 20])
def test_every_dtype_and_form_comes_back_bit_for_bit(tmp_path: Path, staging_bytes: int) -> None:
    values = {
        str(dtype): torch.randint(0, 256, (3, 40), dtype=torch.uint8).view(dtype) for dtype in set(DTYPES.values())
    }
    values["torch.bool"] = torch.randint(0, 2, (7,), dtype=torch.uint8).bool()
    values |= {
        "a number": torch.tensor(2.5),
        "nothing": torch.empty(0, 4),
        "larger than the buffer": torch.randn(300, 1000),
        "turned": torch.randn(300, 100).t(),
        "every third": torch.randn(3000)[::3],
        "channels last": torch.randn(2, 3, 40, 50).to(memory_format=torch.channels_last),
        "wide rows, turned": torch.randn(3, 9, 4000).transpose(0, 1),
    }
    found = saved(tmp_path, of(values), staging_bytes=staging_bytes)
    assert {name: (dtype, shape) for name, dtype, shape in found.layout("model")} == {
        name: (value.dtype, tuple(value.shape)) for name, value in values.items()
    }
    for name, value in found.tensors("model"):
        assert (
            value.contiguous().view(-1).view(torch.uint8).equal(values[name].contiguous().view(-1).view(torch.uint8))
        ), name
    into = {name: torch.zeros_like(value) for name, value in values.items()}
    found.read_into("model", into)
    for name in ("turned", "channels last", "a number"):
        assert torch.equal(into[name], values[name])


def test_a_dtype_that_safetensors_lacks_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    values = {"odd": torch.zeros(2, dtype=torch.complex128)}
    with Checkpointer(tmp_path) as keeper, pytest.raises(UnsupportedError, match="complex128"):
        keeper.save(1, [of(values)], state={})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("shard_bytes", [None, 30_000])
def test_transformers_and_brim_open_the_folder_as_a_model(
    tmp_path: Path, tied: bool, shard_bytes: int | None
) -> None:
    model, tokenizer = llama(tied), tmp_path / "tokenizer"
    model.generation_config.max_new_tokens = 17
    tokenizer.mkdir()
    save_tokenizer(tokenizer)
    with Checkpointer(tmp_path / "out") as keeper:
        keeper.save(7, [model_tensors(model, shard_bytes=shard_bytes)], state={}, files=model_files(model, tokenizer))
    folder = latest(tmp_path / "out").folder
    assert folder == tmp_path / "out" / "step-000007"
    assert (len(list(folder.glob("model-*.safetensors"))) > 2) == (shard_bytes is not None)
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    same_state(loaded, model)
    assert loaded.generation_config.max_new_tokens == 17
    assert (
        AutoTokenizer.from_pretrained(folder)("hi").input_ids
        == AutoTokenizer.from_pretrained(tokenizer)("hi").input_ids
    )
    opened = open_model(folder)
    assert opened.unexpected == ()
    assert opened.checksums.keys() == opened.sources.keys()


def test_a_model_trained_in_another_dtype_is_opened_in_it(tmp_path: Path) -> None:
    model = llama().bfloat16()
    before = model.config.to_dict()
    with Checkpointer(tmp_path) as keeper:
        keeper.save(1, [model_tensors(model)], state={}, files=model_files(model))
    same_state(AutoModelForCausalLM.from_pretrained(latest(tmp_path).folder), model)
    assert model.config.to_dict() == before


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_peft_reads_an_adapter_and_training_goes_on_from_it(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    made = peft.get_peft_model(llama(), peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    for parameter in made.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter)
    with Checkpointer(tmp_path) as keeper:
        keeper.save(1, [adapter_tensors(made)], state={}, files=adapter_files(made, "a/base"))
    found = latest(tmp_path)
    ids = torch.arange(9)[None]
    again = peft.PeftModel.from_pretrained(llama(), str(found.folder))
    assert torch.equal(again(ids).logits, made(ids).logits)
    assert json.loads((found.folder / "adapter_config.json").read_text())["base_model_name_or_path"] == "a/base"
    fresh = peft.get_peft_model(llama(), peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    found.read_into("adapter_model", dict(adapter_tensors(fresh).values))
    assert torch.equal(fresh(ids).logits, made(ids).logits)


def test_values_can_come_from_elsewhere_one_at_a_time(tmp_path: Path) -> None:
    model = llama()
    with torch.device("meta"):
        hollow = LlamaForCausalLM(model.config)
    asked: list[str] = []

    def value(name: str) -> torch.Tensor:
        asked.append(name)
        return model.state_dict()[name]

    found = saved(tmp_path, model_tensors(hollow, value=value))
    assert asked == list(dict(model.named_parameters()))
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in found.tensors("model"))


def test_buffers_are_saved_where_state_dict_has_them(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    model.register_buffer("scratch", torch.ones(3), persistent=False)
    found = {name for name, _, _ in saved(tmp_path, model_tensors(model)).layout("model")}
    assert found == model.state_dict().keys()


def test_the_newest_are_kept_and_what_is_protected(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, keep=2, protected=[tmp_path / "step-000002"]) as keeper:
        for step in range(1, 6):
            keeper.save(step, [of({"a": torch.tensor([step])})], state={})
    assert steps(tmp_path) == [2, 4, 5]
    with Checkpointer(tmp_path, keep=1) as keeper:
        keeper.save(3, [of({"a": torch.tensor([33])})], state={})
    assert steps(tmp_path) == [3, 4, 5]  # newer ones are not this run's to delete
    assert read(tmp_path / "step-000003").step == 3
    assert steps(tmp_path / "nowhere") == []


def test_other_files_in_the_folder_are_left_alone(tmp_path: Path) -> None:
    for name in ("step-1", "step-000001.txt", "notes", ".step-x.partial", "step-abcdef"):
        (tmp_path / name).mkdir()
    saved(tmp_path, of({"a": torch.ones(1)}), keep=1, step=2)
    saved(tmp_path, of({"a": torch.ones(1)}), keep=1, step=3)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        ["step-1", "step-000001.txt", "notes", ".step-x.partial", "step-abcdef", "step-000003", RECORD_NAME]
    )


def test_the_state_is_as_it_was_when_saved(tmp_path: Path) -> None:
    state = {"losses": [1.5, float("inf"), 0.1 + 0.2], "by step": {3: "a"}, "plan": None}
    with Checkpointer(tmp_path) as keeper:
        keeper.save(1, [of({"a": torch.ones(1)})], state=state)
        state["losses"] = []
    assert latest(tmp_path).state == {
        "losses": [1.5, float("inf"), 0.1 + 0.2],
        "by step": {"3": "a"},
        "plan": None,
    }


def test_of_what_does_not_fit_into_the_buffer_no_more_than_that_is_on_its_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, given, seen = os.pwrite, [], []

    def slow(fd: int, data: memoryview, offset: int) -> int:
        if offset and not seen:  # the first tensor waits until no more of them come
            seen.append(0)
            while seen[-1] < len(given):
                seen.append(len(given))
                time.sleep(0.2)
        return real(fd, data, offset)

    def values() -> Iterator[tuple[str, torch.Tensor]]:
        for number in range(100):
            given.append(number)
            yield str(number), torch.full((1024,), number, dtype=torch.uint8)

    monkeypatch.setattr(os, "pwrite", slow)
    layout = [(str(number), torch.uint8, (1024,)) for number in range(100)]
    staging = torch.empty(16 << 10, dtype=torch.uint8)
    with Checkpointer(tmp_path, staging=staging) as keeper:
        keeper.save(1, [Tensors(stem="model", layout=layout, values=values())], state={})
    assert 1 < max(seen) <= 17  # 16 in the buffer, one that waits
    found = dict(latest(tmp_path).tensors("model"))
    assert all(torch.equal(found[str(n)], torch.full((1024,), n, dtype=torch.uint8)) for n in range(100))


def test_windows_of_the_ring_never_overlap_and_hold_what_was_put_in() -> None:
    ring, choose = Ring(torch.zeros(1000, dtype=torch.uint8)), random.Random(0)
    held = []
    for number in range(3000):
        want = choose.randint(1, ring.piece_bytes)
        while sum(one.cost_bytes for one, _ in held) + 2 * want + 16 > 1000 and held:
            first, value = held.pop(0)
            assert bool((first.tensor == value).all())
            ring.give(first)
        window = ring.take(want, lambda: False)
        assert window is not None
        window.tensor.fill_(number % 251)
        held.append((window, number % 251))
    assert all(bool((window.tensor == value).all()) for window, value in held)


def test_pieces_of_a_contiguous_tensor_are_views() -> None:
    whole = torch.arange(1000, dtype=torch.int32)
    parts = list(pieces(whole, 128))
    assert max(part.numel() for part in parts) == 128
    assert parts[1].data_ptr() == whole.data_ptr() + 128


def test_a_checkpoint_of_another_model_names_the_first_tensor_that_differs(tmp_path: Path) -> None:
    found = saved(tmp_path, of({"a": torch.ones(2, 3), "b": torch.ones(4)}))
    wrong = [
        ({"a": torch.ones(2, 3), "b": torch.ones(5)}, r"b is torch.float32 \[4\] there, not torch.float32 \[5\]"),
        ({"a": torch.ones(2, 3).half(), "b": torch.ones(4)}, "a is torch.float32"),
        ({"a": torch.ones(2, 3), "c": torch.ones(4)}, "c is not in it"),
        ({"b": torch.ones(4)}, "It has a, which this training does not have"),
    ]
    for targets, said in wrong:
        with pytest.raises(ModelError, match=said):
            found.read_into("model", targets)
        assert all(bool((value == 1).all()) for value in targets.values())
    with pytest.raises(ModelError, match="a is not in it; it holds 0 tensors"):
        found.read_into("optimizer", {"a": torch.ones(1)})


def test_impossible_requests_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="must be 1 or more"):
        Checkpointer(tmp_path, keep=0)
    with pytest.raises(UsageError, match="4096"):
        Checkpointer(tmp_path, staging_bytes=100)
    with Checkpointer(tmp_path) as keeper, pytest.raises(TypeError):
        keeper.save(1, [of({"a": torch.ones(1)})], state={"rng": torch.ones(1)})
    with pytest.raises(ModelError, match=r"no brim.checkpoint.json"):
        read(tmp_path)


def test_metadata_is_in_the_file_and_data_begins_on_a_page(tmp_path: Path) -> None:
    folder = saved(tmp_path, of({"a": torch.ones(3)})).folder
    with safe_open(folder / "model.safetensors", "pt") as file:  # type: ignore[no-untyped-call]
        assert file.metadata() == {"format": "pt"}
    assert (folder / "model.safetensors").stat().st_size == 4096 + 12


def test_a_checkpoint_in_use_is_not_deleted(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, keep=1) as keeper:
        for step in range(1, 4):
            keeper.save(step, [of({"a": torch.ones(1)})], state={})
            keeper.protect(tmp_path / "step-000001")
    assert steps(tmp_path) == [1, 3]


def test_writing_and_reading_take_no_more_memory_than_the_buffer(tmp_path: Path) -> None:
    count, size = 24, 1 << 20  # 24 tensors of 4 MiB
    layout = [(f"t{number}", torch.float32, (size,)) for number in range(count)]
    whole, process, seen = torch.randn(size), psutil.Process(), []

    def values() -> Iterator[tuple[str, torch.Tensor]]:
        for name, _, _ in layout:
            seen.append(process.memory_info().rss)
            yield name, whole

    saved(tmp_path / "warm", of({"a": torch.ones(1)}))
    begin = process.memory_info().rss
    found = saved(tmp_path / "out", Tensors(stem="model", layout=layout, values=values()), staging_bytes=2 << 20)
    for _, value in found.tensors("model"):
        seen.append(process.memory_info().rss - value.nbytes)
    assert max(seen) - begin < 12 << 20  # 2 MiB of buffer, 1 MiB to read, and what threads take; not 96 MiB
