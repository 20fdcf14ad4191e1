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


@pytest.mark.thorough
def test_json_is_one_hardware_and_people_get_tables(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    command = [sys.executable, "-m", "brim", "probe", "--json", "--device", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    hardware = Hardware.from_json(json.loads(done.stdout))
    assert hardware.compute == "ram"

    assert main(["probe", "--device", "cpu"]) == 0  # not measured again
    output = capsys.readouterr()
    for word in (hardware.name, "ram", "disk", "disk -> ram", *hardware.flops_per_s):
        assert word in output.out
    assert output.err == ""


@pytest.mark.thorough
@pytest.mark.skipif(sys.platform != "linux", reason="looks at the open files of a process in /proc")
def test_ctrl_c_while_measuring_leaves_no_file(tmp_path):
    command = [sys.executable, "-m", "brim", "probe", "--device", "cpu", "--directory", str(tmp_path)]
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        _wait_for_scratch_file(process, tmp_path)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=250)
    finally:
        process.kill()
    assert (process.returncode, out) == (130, "")
    assert "Interrupted." in err
    assert "Traceback" not in err
    assert list(tmp_path.rglob("*")) == []


def _wait_for_scratch_file(process: subprocess.Popen[str], folder: Path) -> None:
    stop_s = time.monotonic() + 120
    while time.monotonic() < stop_s and process.poll() is None:
        for link in Path(f"/proc/{process.pid}/fd").iterdir():
            try:
                opened = str(link.readlink())
                if opened.startswith(str(folder)) and opened.endswith(" (deleted)"):  # it has no name
                    return
            except FileNotFoundError:
                continue
        time.sleep(0.01)
    raise AssertionError("The scratch file was never opened.")
