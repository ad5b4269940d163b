"""What the machine says about itself, and what a control group takes away."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import pytest

from octavo.platform import Memory, Platform, has_nvidia_gpu, usable_cores, usable_memory

GIB = 1 << 30


def machine(root: Path, cgroup: str, files: dict[str, str]) -> Path:
    """A root directory with 8 GiB of memory, 6 GiB of it free, and the given control group files."""
    everything = {
        "proc/meminfo": f"MemTotal: {8 * GIB // 1024} kB\nMemFree: 1 kB\nMemAvailable: {6 * GIB // 1024} kB\n",
        "proc/self/cgroup": cgroup,
    } | files
    for name, text in everything.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ("files", "version", "has_gpu"),
    [
        (["dev/nvidiactl"], "2.11.0+cu130", True),
        (["dev/nvidiactl"], "2.13.0", True),
        (["dev/dxg"], "2.13.0", True),
        (["dev/nvidiactl"], "2.13.0+cpu", False),
        (["dev/nvidiactl"], None, False),
        ([], "2.13.0", False),
    ],
)
def test_a_gpu_is_expected_where_there_is_its_driver_and_pytorch_may_be_built_for_it(
    files: list[str], version: str | None, has_gpu: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def installed(name: str) -> str:
        if version is None:
            raise metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(metadata, "version", installed)
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert has_nvidia_gpu(tmp_path) == has_gpu


def test_without_a_limit_memory_is_the_machines(tmp_path: Path) -> None:
    root = machine(
        tmp_path, "0::/a\n", {"sys/fs/cgroup/a/memory.max": "max\n", "sys/fs/cgroup/a/memory.current": "5\n"}
    )
    assert usable_memory(root) == Memory(total=8 * GIB, available=6 * GIB, source="machine")


def test_cgroup_v2_limits_memory_and_its_page_cache_is_free_to_take(tmp_path: Path) -> None:
    files = {
        "sys/fs/cgroup/a/b/memory.max": f"{4 * GIB}\n",
        "sys/fs/cgroup/a/b/memory.current": f"{3 * GIB}\n",
        "sys/fs/cgroup/a/b/memory.stat": f"anon 5\ninactive_file {GIB}\n",
    }
    root = machine(tmp_path, "0::/a/b\n", files)
    assert usable_memory(root) == Memory(total=4 * GIB, available=2 * GIB, source="cgroup")


def test_an_outer_group_counts_when_it_is_tighter(tmp_path: Path) -> None:
    files = {
        "sys/fs/cgroup/a/b/memory.max": f"{4 * GIB}\n",
        "sys/fs/cgroup/a/b/memory.current": "0\n",
        "sys/fs/cgroup/a/memory.max": f"{2 * GIB}\n",
        "sys/fs/cgroup/a/memory.current": f"{GIB}\n",
    }
    assert usable_memory(machine(tmp_path, "0::/a/b\n", files)) == Memory(2 * GIB, GIB, "cgroup")


def test_cgroup_v1_limits_memory(tmp_path: Path) -> None:
    files = {
        "sys/fs/cgroup/memory/docker/x/memory.limit_in_bytes": f"{GIB}\n",
        "sys/fs/cgroup/memory/docker/x/memory.usage_in_bytes": "0\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
    }
    root = machine(tmp_path, "4:memory:/docker/x\n0::/\n", files)
    assert usable_memory(root) == Memory(GIB, GIB, "cgroup")


def test_a_container_sees_its_group_at_the_mount_itself(tmp_path: Path) -> None:
    files = {"sys/fs/cgroup/memory.max": f"{GIB}\n", "sys/fs/cgroup/memory.current": "0\n"}
    assert usable_memory(machine(tmp_path, "0::/outside/of/here\n", files)).total == GIB


def test_quota_limits_cores_rounded_up(tmp_path: Path) -> None:
    assert usable_cores(machine(tmp_path, "0::/a\n", {"sys/fs/cgroup/a/cpu.max": "50000 100000\n"})) == 1


def test_cgroup_v1_quota_limits_cores(tmp_path: Path) -> None:
    files = {"sys/fs/cgroup/cpu/a/cpu.cfs_quota_us": "100000\n", "sys/fs/cgroup/cpu/a/cpu.cfs_period_us": "100000\n"}
    assert usable_cores(machine(tmp_path, "1:cpu,cpuacct:/a\n", files)) == 1


def test_this_machine_has_a_core_and_some_memory() -> None:
    platform = Platform.detect()
    assert platform.cores >= 1
    assert 0 < platform.memory.available <= platform.memory.total
    assert platform.cpu_model
