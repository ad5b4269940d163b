"""What this machine is: processor, cores and memory that this process may really use, accelerators.

Memory and cores are those of the control group or the affinity mask that confines the process, where there is one.
"""

from __future__ import annotations

import hashlib
import os
import platform as python_platform
from importlib import metadata
from itertools import pairwise
from pathlib import Path

import msgspec

_NO_LIMIT = 1 << 60
"""cgroup v1 writes a number near 2**63 where there is no limit."""


class Memory(msgspec.Struct, frozen=True):
    """Bytes: what there is, what is free to take now, and who says so ("machine" or "cgroup")."""

    total: int
    available: int
    source: str


class Platform(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about the machine; made once by `Platform.detect()` and passed down."""

    system: str
    machine: str
    cpu_model: str
    cores: int
    """Processors that this process may run on, at most what its cgroup's quota allows."""
    memory: Memory
    instruction_sets: tuple[str, ...]
    native_module: str | None
    """The compiler of octavo._native; None where it is absent and plain torch does all the work."""
    has_gpu: bool = False
    """Whether a GPU of NVIDIA is to be expected. Whether it can be used is known when PyTorch is imported."""

    @classmethod
    def detect(cls) -> Platform:
        native, instruction_sets = _native()
        return cls(
            system=f"{python_platform.system()} {python_platform.release()}",
            machine=python_platform.machine(),
            cpu_model=_cpu_model(),
            cores=usable_cores(),
            memory=usable_memory(),
            instruction_sets=instruction_sets or _instruction_sets_from_proc(),
            native_module=native,
            has_gpu=has_nvidia_gpu(),
        )

    def with_available(self, num_bytes: int) -> Platform:
        """Return the same machine with `num_bytes` more memory available, which this process has taken already."""
        memory = msgspec.structs.replace(self.memory, available=self.memory.available + num_bytes)
        return msgspec.structs.replace(self, memory=memory)


def has_nvidia_gpu(root: Path = Path("/")) -> bool:
    """Return whether there are the files of a driver of NVIDIA, and a PyTorch that may be built for it."""
    if not any((root / "dev" / name).exists() for name in ("nvidiactl", "dxg")):
        return False
    try:
        return not metadata.version("torch").endswith("+cpu")
    except metadata.PackageNotFoundError:
        return False


def usable_cores(root: Path = Path("/")) -> int:
    """Return the number of processors in the affinity mask, at most what the cgroup's quota pays for (rounded up)."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = [_quota(directory) for directory in _cgroup_directories(root, "cpu")]
    return max(1, min([affinity, *(quota for quota in quotas if quota is not None)]))


def usable_memory(root: Path = Path("/")) -> Memory:
    """Return the machine's memory, or that of the tightest cgroup around this process."""
    total, available = _machine_memory(root)
    source = "machine"
    for directory in _cgroup_directories(root, "memory"):
        limits = _cgroup_memory(directory)
        if limits is None:
            continue
        limit, used = limits
        if limit < total:
            total, source = limit, "cgroup"
        available = min(available, max(0, limit - used))
    return Memory(total=total, available=available, source=source)


def native_build() -> tuple[str, list[str]]:
    """Return 16 hexadecimal digits of SHA-256 of the compiled module, and its instruction sets here, best first."""
    try:
        from octavo import _native
    except ImportError:
        return "absent", []
    return hashlib.sha256(Path(_native.__file__).read_bytes()).hexdigest()[:16], _native.instruction_sets()


def core_shares(count: int) -> list[list[int]]:
    """Return the processors that each of `count` processes gets, out of those that this process may run on.

    Shares are neighbours: hardware threads of one core, then cores of one NUMA node. A processor is in several shares
    only where there are fewer processors than shares.
    """
    processors = sorted(os.sched_getaffinity(0), key=_place) if hasattr(os, "sched_getaffinity") else [0]
    if len(processors) < count:
        return [[processors[index % len(processors)]] for index in range(count)]
    bounds = [len(processors) * index // count for index in range(count + 1)]
    return [processors[start:stop] for start, stop in pairwise(bounds)]


def _place(processor: int) -> tuple[int, int, int, int]:
    """Return socket, NUMA node, core and number of a processor."""
    directory = Path(f"/sys/devices/system/cpu/cpu{processor}")
    node = next((int(each.name.removeprefix("node")) for each in directory.glob("node[0-9]*")), 0)
    socket, core = (_read_int(directory / "topology" / name) or 0 for name in ("physical_package_id", "core_id"))
    return socket, node, core, processor


def _native() -> tuple[str | None, tuple[str, ...]]:
    try:
        from octavo import _native
    except ImportError:
        return None, ()
    info = _native.build_info()
    return f"{info['compiler']}, {info['build_type']}", tuple(_native.cpu_features())


def _cpuinfo() -> dict[str, str]:
    """Return the first processor's lines of /proc/cpuinfo; empty on systems without it."""
    path = Path("/proc/cpuinfo")
    if not path.is_file():
        return {}
    first = path.read_text(errors="replace").split("\n\n", 1)[0]
    pairs = (line.split(":", 1) for line in first.splitlines() if ":" in line)
    return {key.strip(): value.strip() for key, value in pairs}


def _cpu_model() -> str:
    return _cpuinfo().get("model name") or python_platform.processor() or python_platform.machine()


def _instruction_sets_from_proc() -> tuple[str, ...]:
    info = _cpuinfo()
    names = (info.get("flags") or info.get("Features") or "").split()
    return tuple(name for name in names if name.startswith(("avx", "amx", "fma", "f16c", "asimd", "sve")))


def _machine_memory(root: Path) -> tuple[int, int]:
    path = root / "proc/meminfo"
    if not path.is_file():
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return total, total
    pairs = (line.split(":", 1) for line in path.read_text().splitlines() if ":" in line)
    kilobytes = {key: int(value.split()[0]) for key, value in pairs}
    total = kilobytes["MemTotal"] * 1024
    return total, kilobytes.get("MemAvailable", kilobytes["MemFree"]) * 1024


def _cgroup_directories(root: Path, controller: str) -> list[Path]:
    """Return the directories of the cgroups around this process, v2 and v1, innermost first.

    Inside a container the path in /proc/self/cgroup may not exist below the mount; then the mount itself is the group.
    """
    listing = root / "proc/self/cgroup"
    if not listing.is_file():
        return []
    found: list[Path] = []
    for line in listing.read_text().splitlines():
        hierarchy, controllers, path = line.split(":", 2)
        if hierarchy == "0" and not controllers:
            mount = root / "sys/fs/cgroup"
        elif controller in controllers.split(","):
            mount = root / "sys/fs/cgroup" / controller
        else:
            continue
        group = mount / path.lstrip("/")
        while group != mount and mount in group.parents:
            found.append(group)
            group = group.parent
        found.append(mount)
    return [directory for directory in found if directory.is_dir()]


def _cgroup_memory(directory: Path) -> tuple[int, int] | None:
    """Return (limit, used) of a memory cgroup; None where it has no limit. Reclaimable page cache does not count."""
    for limit_file, used_file, cache_key in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        limit, used = _read_int(directory / limit_file), _read_int(directory / used_file)
        if limit is None or limit >= _NO_LIMIT:
            continue
        return limit, max(0, (used or 0) - _stat(directory / "memory.stat", cache_key))
    return None


def _stat(path: Path, key: str) -> int:
    if not path.is_file():
        return 0
    for line in path.read_text().splitlines():
        name, _, value = line.partition(" ")
        if name == key:
            return int(value)
    return 0


def _quota(directory: Path) -> int | None:
    """Return the whole processors that a cpu cgroup pays for; None where it sets no quota."""
    both = directory / "cpu.max"
    if both.is_file():
        quota_text, period_text = both.read_text().split()
        return None if quota_text == "max" else -(-int(quota_text) // int(period_text))
    quota, period = _read_int(directory / "cpu.cfs_quota_us"), _read_int(directory / "cpu.cfs_period_us")
    if quota is None or period is None or quota <= 0 or period <= 0:
        return None
    return -(-quota // period)


def _read_int(path: Path) -> int | None:
    """Return the number in a file; None where there is no file or it says "max"."""
    if not path.is_file():
        return None
    text = path.read_text().strip()
    return None if text == "max" else int(text)
