"""``brim probe``: JSON alone on stdout, a table for people, nothing left behind by Ctrl-C."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from brim.cli import main
from brim.core import Hardware


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """A user's cache folder in which this machine has been measured from the command line."""
    folder = tmp_path_factory.mktemp("cache")
    command = [sys.executable, "-m", "brim", "probe", "--json", "--device", "cpu"]
    environment = os.environ | {"XDG_CACHE_HOME": str(folder)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return folder, done.stdout


def test_json_is_one_hardware_and_nothing_else(cache):
    hardware = Hardware.from_json(json.loads(cache[1]))
    assert hardware.compute == "ram"
    assert hardware.link("disk", "ram").bytes_per_s > 0


def test_a_table_tells_every_tier_link_and_dtype(cache, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache[0]))
    assert main(["probe", "--device", "cpu"]) == 0
    output = capsys.readouterr()
    hardware = Hardware.from_json(json.loads(cache[1]))
    for word in (hardware.name, "ram", "disk", "disk -> ram", *hardware.flops_per_s):
        assert word in output.out
    assert output.err == ""


@pytest.mark.skipif(sys.platform != "linux", reason="looks at the open files of a process in /proc")
def test_ctrl_c_while_measuring_leaves_no_file(tmp_path):
    command = [sys.executable, "-m", "brim", "probe", "--device", "cpu", "--directory", str(tmp_path)]
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        _wait_for_scratch_file(process)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert (process.returncode, out) == (130, "")
    assert "Interrupted." in err
    assert "Traceback" not in err
    assert list(tmp_path.rglob("*")) == []


def _wait_for_scratch_file(process: subprocess.Popen[str]) -> None:
    stop_s = time.monotonic() + 120
    while time.monotonic() < stop_s and process.poll() is None:
        for link in Path(f"/proc/{process.pid}/fd").iterdir():
            try:
                if ".brim-probe-" in str(link.readlink()):
                    return
            except FileNotFoundError:
                continue
        time.sleep(0.01)
    raise AssertionError("The scratch file was never opened.")
