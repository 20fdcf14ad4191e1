"""What a memory cgroup allows, in both versions, as the kernel and container engines lay it out."""

from pathlib import Path

import psutil
import pytest
import torch

from brim.errors import UnsupportedError, UsageError
from brim.measure import capacity
from brim.measure.capacity import amount_bytes, check_room, free_bytes, ram_capacity_bytes, ram_room_bytes

GIB = 1 << 30
NO_LIMIT_V1 = "9223372036854771712"


def process_tree(root: Path, *, cgroup: str, mounts: str, files: dict[str, str]) -> Path:
    """A /proc with this process's cgroups, and the mounted controller's files."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(cgroup)
    (root / "proc/self/mountinfo").write_text(mounts.format(mount=root / "cg"))
    for name, content in files.items():
        path = root / "cg" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return root / "proc"


V2 = "30 23 0:26 / {mount} rw,relatime shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = (
    "34 31 0:30 / /elsewhere rw - cgroup cgroup rw,cpu\n"
    "35 31 0:32 {root} {{mount}} rw,relatime - cgroup cgroup rw,memory\n"
)


def test_version_2_the_lowest_limit_on_the_way_up_counts(tmp_path):
    proc = process_tree(
        tmp_path,
        cgroup="0::/user.slice/app\n",
        mounts=V2,
        files={
            "user.slice/memory.max": str(1 * GIB),
            "user.slice/memory.current": str(700 << 20),
            "user.slice/memory.stat": f"anon {500 << 20}\ninactive_file {150 << 20}\nactive_file {50 << 20}\n",
            "user.slice/app/memory.max": "max",
        },
    )
    assert ram_capacity_bytes(proc) == GIB
    assert free_bytes("ram", proc=proc) == GIB - (500 << 20)


def test_version_1_with_no_limit_leaves_the_machine_its_own(tmp_path):
    proc = process_tree(
        tmp_path,
        cgroup="4:memory:/app\n0::/\n",
        mounts=V1.format(root="/"),
        files={"memory.limit_in_bytes": NO_LIMIT_V1, "app/memory.limit_in_bytes": NO_LIMIT_V1},
    )
    assert ram_capacity_bytes(proc) == psutil.virtual_memory().total


def test_version_1_in_a_container_sees_its_own_folder_as_the_root(tmp_path):
    proc = process_tree(
        tmp_path,
        cgroup="5:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc\n",
        mounts=V1.format(root="/docker/abc"),
        files={
            "memory.limit_in_bytes": str(GIB),
            "memory.usage_in_bytes": str(GIB // 2),
            "memory.stat": f"inactive_file 1\ntotal_inactive_file {GIB // 8}\ntotal_active_file 0\n",
        },
    )
    assert ram_capacity_bytes(proc) == GIB
    assert free_bytes("ram", proc=proc) == GIB // 2 + GIB // 8


def test_a_path_that_the_container_does_not_see_falls_back_to_what_is_mounted(tmp_path):
    proc = process_tree(
        tmp_path,
        cgroup="4:memory:/kubepods/pod1/abc\n",
        mounts=V1.format(root="/docker/xyz"),
        files={"memory.limit_in_bytes": str(GIB), "memory.usage_in_bytes": str(2 * GIB)},
    )
    assert ram_capacity_bytes(proc) == GIB
    assert free_bytes("ram", proc=proc) == 0


def test_what_a_limit_above_leaves_is_the_room_of_a_nested_cgroup(tmp_path):
    proc = process_tree(
        tmp_path,
        cgroup="0::/pod/app\n",
        mounts=V2,
        files={
            "pod/memory.max": str(600 << 20),
            "pod/memory.current": str(250 << 20),
            "pod/memory.stat": f"inactive_file {50 << 20}\nactive_file 0\n",
            "pod/app/memory.max": str(500 << 20),
            "pod/app/memory.current": str(30 << 20),
        },
    )
    assert ram_capacity_bytes(proc) == 500 << 20
    assert ram_room_bytes(proc) == 400 << 20  # what others in the pod use counts


@pytest.mark.parametrize(("limit", "used"), [("RLIMIT_AS", 900), ("RLIMIT_DATA", 500), ("RLIMIT_RSS", 300)])
def test_a_ulimit_counts_like_a_container_s(tmp_path, monkeypatch, limit, used):
    resource = pytest.importorskip("resource")
    (tmp_path / "self").mkdir()
    (tmp_path / "self/status").write_text(
        f"Name:\tpython\nVmSize:\t{900 << 10} kB\nVmData:\t{500 << 10} kB\nVmRSS:\t{300 << 10} kB\n"
    )
    bounded = getattr(resource, limit)
    endless = (resource.RLIM_INFINITY,) * 2
    monkeypatch.setattr(resource, "getrlimit", lambda which: (GIB, GIB) if which == bounded else endless)
    assert ram_capacity_bytes(tmp_path) == GIB
    assert ram_room_bytes(tmp_path) == free_bytes("ram", proc=tmp_path) == GIB - (used << 20)


def test_a_budget_has_to_fit_beside_what_the_process_has(monkeypatch):
    monkeypatch.setattr(capacity, "_limits", lambda proc: iter([(600 << 20, 350 << 20)]))
    check_room(350 << 20)
    check_room(400 << 20, held_bytes=50 << 20)
    with pytest.raises(UsageError, match=r"(?s)590 MiB of RAM.*may use 600 MiB in all.*350 MiB of that are free"):
        check_room(590 << 20)


def test_a_system_without_cgroups_has_the_machine(tmp_path):
    assert ram_capacity_bytes(tmp_path) == psutil.virtual_memory().total
    assert 0 < free_bytes("ram", proc=tmp_path) <= psutil.virtual_memory().total


def test_this_machine_has_room():
    assert 0 < free_bytes("ram") <= ram_capacity_bytes() <= psutil.virtual_memory().total
    assert free_bytes("disk", directory=Path("/")) > 0


def test_an_unknown_tier_is_a_usage_error():
    with pytest.raises(UsageError, match="vram, ram and disk"):
        free_bytes("tape")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_vram_without_cuda_is_unsupported():
    with pytest.raises(UnsupportedError):
        free_bytes("vram")


def test_a_share_is_of_all_that_a_tier_has_and_of_what_a_disk_has_free(tmp_path):
    assert amount_bytes("50%", "ram") == ram_capacity_bytes() // 2
    assert amount_bytes("3GiB", "ram") == 3 * GIB
    assert 0 < amount_bytes("50%", "disk", directory=tmp_path) < free_bytes("disk", directory=tmp_path)


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks what a machine without CUDA says")
def test_without_cuda_a_share_of_vram_is_one_of_ram():
    assert amount_bytes("50%", "vram") == ram_capacity_bytes() // 2
