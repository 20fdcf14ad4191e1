"""The probe measures once, remembers, and survives what can be wrong with a cache folder."""

import dataclasses
import json
import os
from pathlib import Path

import pytest
import torch

import brim
from brim.core import Hardware
from brim.errors import UnsupportedError, UsageError
from brim.measure import probe as probing
from brim.measure.probe import probe
from brim.measure.user_cache import cache_folder
from brim.planning.seconds.measurement_cache import Remembered


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """(cache base, what was measured into it)"""
    base = tmp_path_factory.mktemp("cache")
    threads, random_state = torch.get_num_threads(), torch.get_rng_state()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(base))
        hardware = probe(device="cpu")
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), random_state), "a program's random numbers are its own"
    return base, hardware


def rates(hardware: Hardware) -> tuple[object, ...]:
    """All but the capacities, which are today's."""
    return hardware.links, hardware.flops_per_s, tuple(tier.bytes_per_s for tier in hardware.tiers)


def test_a_cpu_machine_has_two_tiers_their_links_and_matrix_rates(measured):
    _, hardware = measured
    assert hardware.compute == "ram"
    assert [tier.name for tier in hardware.tiers] == ["ram", "disk"]
    assert all(tier.capacity_bytes > 0 and tier.bytes_per_s > 1e6 for tier in hardware.tiers)
    assert {(link.source, link.target) for link in hardware.links} == {
        ("disk", "ram"),
        ("ram", "disk"),
        ("ram", "ram"),
    }
    assert all(link.bytes_per_s > 1e6 and link.single_bytes_per_s > 1e6 for link in hardware.links)
    assert set(hardware.flops_per_s) == {"float32", "bfloat16"}
    assert all(rate > 1e7 for rate in hardware.flops_per_s.values())


def test_the_disk_link_says_which_requests_reach_its_rate(measured):
    link = measured[1].link("disk", "ram")
    assert link.concurrency in (1, 2, 4)
    assert link.chunk_bytes in (1 << 20, 4 << 20, 16 << 20)
    assert 0 < link.latency_s < 1


def test_it_leaves_its_result_and_nothing_else(measured):
    base, hardware = measured
    (file,) = [path for path in base.rglob("*") if path.is_file()]
    assert Hardware.read(file) == hardware


def test_the_second_time_nothing_is_measured(measured, monkeypatch):
    base, hardware = measured
    monkeypatch.setenv("XDG_CACHE_HOME", str(base))
    assert rates(brim.probe(device="cpu")) == rates(hardware)


def test_capacities_are_read_afresh(measured, tmp_path, monkeypatch):
    base, hardware = measured
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (file,) = base.rglob("*.json")
    stale = dataclasses.replace(
        hardware, tiers=tuple(dataclasses.replace(tier, capacity_bytes=1) for tier in hardware.tiers)
    )
    kept = tmp_path / file.relative_to(base)
    kept.parent.mkdir(parents=True)
    kept.write_text(json.dumps(stale.to_json()))
    now = probe(device="cpu")
    assert rates(now) == rates(hardware)
    assert now.tier("ram") == hardware.tier("ram")
    assert now.tier("disk").capacity_bytes > 1


@pytest.mark.thorough
def test_a_damaged_cache_is_measured_again_with_a_warning(measured, tmp_path, monkeypatch):
    base, _ = measured
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (file,) = base.rglob("*.json")
    kept = tmp_path / file.relative_to(base)
    kept.parent.mkdir(parents=True)
    kept.write_text(file.read_text()[:200])
    with pytest.warns(UserWarning, match="is damaged, so this machine is measured again"):
        hardware = probe(device="cpu")
    assert Hardware.read(kept) == hardware


@pytest.mark.parametrize("change", ["zero", "negative"])
def test_rates_that_no_machine_has_are_a_damaged_cache(tmp_path, known_machine, change):
    document = known_machine.to_json()
    for part in (*document["tiers"], *document["links"]):
        part["bytes_per_s"] = 0.0 if change == "zero" else -1.0
    (tmp_path / "hardware.json").write_text(json.dumps(document))
    with pytest.warns(UserWarning, match="is damaged, so this machine is measured again"):
        assert probing._load(tmp_path / "hardware.json") is None


class _Full:
    total, used, free = 1 << 40, 1 << 40, 0


@pytest.mark.thorough
def test_refresh_measures_again(measured, monkeypatch):
    base, before = measured
    monkeypatch.setenv("XDG_CACHE_HOME", str(base))
    again = probe(device="cpu", refresh=True)
    assert rates(again) != rates(before)
    assert rates(probe(device="cpu")) == rates(again)


@pytest.mark.thorough
def test_without_a_cache_it_measures_once_per_process_and_says_so_once(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.warns(UserWarning, match="could not save its cache in") as told:
        hardware = probe(device="cpu")
        Remembered("figures", ()).keep({"one": [1.0]})
    assert len(told) == 1
    assert hardware.link("disk", "ram").bytes_per_s > 0
    assert "torch" in hardware.source.partition("disk of ")[2]  # a disk's speed is that of files that are there
    monkeypatch.setattr("brim.measure.disk._rates", pytest.fail)
    assert rates(probe(device="cpu")) == rates(hardware)
    assert Remembered("figures", ()).get("one", count=1) == [1.0]
    assert [path.name for path in tmp_path.rglob("*")] == ["file"]


@pytest.mark.thorough
def test_on_a_full_disk_it_reads_what_is_there(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("shutil.disk_usage", lambda path: _Full)
    hardware = probe(device="cpu")
    assert hardware.link("disk", "ram").bytes_per_s > 0
    assert {(link.source, link.target) for link in hardware.links} == {("disk", "ram"), ("ram", "ram")}


@pytest.mark.parametrize("home", [os.devnull, "/proc/1/nothing"])
def test_any_home_names_a_folder(monkeypatch, home):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", home)
    assert cache_folder() == Path(home) / ".cache" / "brim"


def test_a_user_without_a_home_has_a_folder_that_cannot_be_made(monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    with pytest.raises(OSError):
        cache_folder().mkdir(parents=True)


def test_a_directory_that_is_none_is_a_usage_error(tmp_path):
    with pytest.raises(UsageError, match="no such directory"):
        probe(device="cpu", directory=tmp_path / "missing")


def test_an_unknown_device_is_a_usage_error():
    with pytest.raises(UsageError, match="auto, cuda, xpu, npu, mps and cpu"):
        probe(device="tpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_cuda_where_there_is_none_is_unsupported():
    with pytest.raises(UnsupportedError, match="device auto or cpu"):
        probe(device="cuda")


@pytest.mark.parametrize("base", ["", "relative/place"])
def test_a_cache_base_that_is_no_absolute_path_is_ignored(monkeypatch, base):
    monkeypatch.setenv("XDG_CACHE_HOME", base)
    monkeypatch.setenv("HOME", "/home/someone")
    assert cache_folder() == Path("/home/someone/.cache/brim")
