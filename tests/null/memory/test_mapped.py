"""Pages of a mapped checkpoint leave the resident set when nobody needs them there, and nothing else does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from brim.memory.mapped import MappedFile

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the resident set is read from /proc")

_LOOK = textwrap.dedent("""
    import sys, torch
    from brim.memory.mapped import MappedFile, forget
    MIB = 1 << 20
    def resident(): return int(open("/proc/self/statm").read().split()[1]) * 4096
    file = MappedFile.open(sys.argv[1])
    whole = file.map(0, 64 * MIB).view(0, torch.float32, (16 * MIB,))
    read, changed = whole[: 8 * MIB], whole[8 * MIB + 3 :]
    made = torch.ones(4 * MIB)
    sums = read.double().sum().item()
    changed.add_(1)
    kept = changed.clone()
    before = resident()
    forget([read, changed, made, torch.empty(0), whole[::2]])
    print((before - resident()) // MIB, end=";")
    assert read.double().sum().item() == sums
    assert torch.equal(changed, kept)
    assert made.sum().item() == made.numel()
""")


@pytest.mark.thorough
def test_pages_that_were_only_read_go_and_come_back_with_the_same_values(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"".join(number.to_bytes(4, "little") * 1024 for number in range(16 * 1024)))
    done = subprocess.run([sys.executable, "-c", _LOOK, str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert 30 <= int(done.stdout.split(";")[0]) <= 33  # what was read: 32 MiB


_COUNT = textwrap.dedent("""
    import sys, torch
    from brim.memory.mapped import MappedFile, present_bytes
    MIB = 1 << 20
    file = MappedFile.open(sys.argv[1])
    whole = file.map(0, 64 * MIB).view(0, torch.float32, (16 * MIB,))
    made, same = torch.ones(4 * MIB), torch.ones(MIB)
    told = [present_bytes([whole])]
    whole[:: 1024].sum()  # each page is read
    told += [present_bytes([whole]), present_bytes([made]), present_bytes([same, same[1:], same.view(2, -1)])]
    told += [present_bytes([]), present_bytes([torch.empty(0), torch.empty(4, device="meta")])]
    print([count / MIB for count in told])
""")


def test_all_of_a_file_is_read_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux begins to read 128 KiB at a request, or a little more, whatever its length."""
    path = tmp_path / "file"
    path.write_bytes(bytes(1_000_000))
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda fd, begin, count, advice: asked.append((begin, count)))
    MappedFile.open(str(path)).read_ahead()
    assert {count for _, count in asked} == {128 << 10}
    assert [begin for begin, _ in asked] == list(range(0, 1_000_000, 128 << 10))


@pytest.mark.thorough
def test_only_what_was_touched_is_counted_and_shared_storages_once(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with path.open("wb") as file:
        file.truncate(64 << 20)
    done = subprocess.run([sys.executable, "-c", _COUNT, str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    before, after, made, same, nothing, elsewhere = json.loads(done.stdout)
    assert before == 0
    assert 32 <= after <= 64  # the kernel may have taken some of them back
    assert (made, same, nothing, elsewhere) == (16, 4, 0, 0)
