"""Kernels from an archive, launched through a driver that keeps what it is told: no GPU has run them."""

from __future__ import annotations

import json
import logging
import lzma
import os
import struct
import subprocess
import sys
from ctypes import CFUNCTYPE, POINTER, c_char_p, c_int, c_uint, c_void_p, string_at
from hashlib import sha256
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="the kernels of the device cuda need Triton")

from triton._C.libtriton import native_specialize_impl
from triton.backends.compiler import BaseBackend

import tools.cubins
from octavo.attention.backend import Scores
from octavo.attention.metadata import AttentionMetadata
from octavo.devices.cuda import cubins, driver
from octavo.devices.cuda.attention import CudaBackend, RotatingCudaBackend
from octavo.devices.cuda.cubins import Call, CubinLauncher, call_of, open_launcher, read_archive, source_hash
from octavo.devices.cuda.driver import Driver, DriverError
from octavo.devices.cuda.runtime import CudaRuntime, Launcher
from octavo.errors import ConfigError
from octavo.ops.rotary import Rotation
from tools.cubins import write

KERNELS = ("rows.rms_norm", "rows.rotate_and_store")


class KeptDriver:
    """libcuda as callbacks of C: modules are their code, of which it reads where parameters are."""

    def __init__(self, sizes: dict[str, int]) -> None:
        """sizes: bytes of each cubin by its function."""
        self.loaded: list[str] = []
        self.attributes: list[tuple[int, int]] = []
        self.preferences: list[tuple[int, int]] = []
        self.launches: list[tuple[Any, ...]] = []
        self.codes: list[bytes] = []
        self.results = {"cuLaunchKernel": [0] * 99, "cuModuleLoadData": [0] * 99}
        self.contexts: list[int] = []
        self._sizes = sizes
        pointer = POINTER(c_void_p)
        self.library = SimpleNamespace(
            cuCtxGetCurrent=CFUNCTYPE(c_int, pointer)(self._current),
            cuCtxSetCurrent=CFUNCTYPE(c_int, c_void_p)(lambda context: self.contexts.append(context) or 0),
            cuModuleLoadData=CFUNCTYPE(c_int, pointer, c_void_p)(self._load),
            cuModuleGetFunction=CFUNCTYPE(c_int, pointer, c_void_p, c_char_p)(self._function),
            cuFuncSetAttribute=CFUNCTYPE(c_int, c_void_p, c_int, c_int)(
                lambda function, name, value: self.attributes.append((name, value)) or 0
            ),
            cuFuncSetCacheConfig=CFUNCTYPE(c_int, c_void_p, c_int)(
                lambda function, config: self.preferences.append((function, config)) or 0
            ),
            cuLaunchKernel=CFUNCTYPE(c_int, c_void_p, *[c_uint] * 7, c_void_p, pointer, c_void_p)(self._launch),
        )

    def _current(self, context: Any) -> int:
        context[0] = 77
        return 0

    def _load(self, module: Any, address: int) -> int:
        self._address = address
        module[0] = len(self.loaded) + 1
        return self.results["cuModuleLoadData"].pop()

    def _function(self, function: Any, module: int, name: bytes) -> int:
        self.loaded.append(name.decode())
        self.codes.append(string_at(self._address, self._sizes[name.decode()]))
        function[0] = len(self.loaded)
        return 0

    def _launch(self, function: int, *arguments: Any) -> int:
        *sizes, stream, parameters, _ = arguments
        result = self.results["cuLaunchKernel"].pop()
        if not result:
            values = [string_at(parameters[i], size) for i, size in enumerate(sizes_in(self.codes[function - 1]))]
            self.launches.append((self.loaded[function - 1], sizes, stream, values))
        return result


def sizes_in(code: bytes) -> list[int]:
    """Return the bytes of each parameter, from what the assembler wrote into a cubin (EIATTR_KPARAM_INFO)."""
    found, mark = {}, code.find(b"\x04\x17\x0c\x00")
    while mark >= 0:
        _, ordinal, _, flags = struct.unpack("<IHHI", code[mark + 4 : mark + 16])
        found[ordinal] = flags >> 18
        mark = code.find(b"\x04\x17\x0c\x00", mark + 1)
    return [found[each] for each in range(len(found))]


def build(path: Path) -> Path:
    """Build in a process of its own: here kernels are interpreted."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tools.cubins", "--out", str(path), "--capability", "90", "--most", "1"]
    command += ["--model", "Qwen3-0.6B", "--dtype", "bfloat16", "--kernel", *KERNELS]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert sorted(each.name for each in path.iterdir()) == ["sm_90.json", "sm_90.xz"]
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("cubins"))


def opened(folder: Path, otherwise: Any = None) -> tuple[KeptDriver, CubinLauncher]:
    found = read_archive(folder, 90)
    assert found is not None
    kept = KeptDriver({each["function"]: each["bytes"] for each in found[0]["variants"]})
    return kept, CubinLauncher(Driver(kept.library, lambda: 4321), *found, otherwise)


@pytest.mark.long
def test_two_builds_are_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    for each in build(tmp_path).iterdir():
        assert each.read_bytes() == (folder / each.name).read_bytes()


def test_a_launch_from_a_cubin_has_the_parameters_that_the_assembler_wrote(folder: Path) -> None:
    kept, launcher = opened(folder)
    backend, kind = RotatingCudaBackend(CudaRuntime(launch=launcher), torch.bfloat16), torch.bfloat16
    q, k, v = torch.zeros(3, 32, 128, dtype=kind).split([16, 8, 8], dim=1)
    positions, table, weight = torch.zeros(3, dtype=torch.int64), torch.zeros(9, 128), q.new_zeros(128)
    cache = torch.zeros(backend.cache_shape(4, 16, 8, 128), dtype=kind)
    metadata = AttentionMetadata.of_slots(torch.arange(3), 16)
    rotation = Rotation(positions, table, table, weight, weight, (1e-6, 0.5), interleaved=False)
    out = backend.rotate_and_store(q, k, v, cache, metadata, rotation)
    assert sorted(kept.loaded) == ["rms_norm", "rotate_and_store"]
    name, sizes, stream, values = kept.launches[0]
    assert (name, stream, sizes[:6]) == ("rotate_and_store", 4321, [3, 32, 1, 128, 1, 1])
    assert [len(each) for each in values] == [8] * 12 + [4] * 11 + [8] * 2
    tensors = (q, k, v, out, *cache, metadata.slot_mapping, positions, table, table, weight, weight)
    strides = [4096, 128] * 3 + [16_384, 2048, 128]
    expected = struct.pack("=12Q9i2f2Q", *(each.data_ptr() for each in tensors), *strides, 1e-6, 0.5, 0, 0)
    assert b"".join(values) == expected


def test_code_is_unpacked_when_its_kernel_is_first_launched(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unpacked: list[bytes] = []
    unpack = lzma.decompress
    monkeypatch.setattr(cubins.lzma, "decompress", lambda block: unpacked.append(block) or unpack(block))
    kept, launcher = opened(folder)
    assert (kept.loaded, len(unpacked)) == (["rms_norm"], 1)
    norm, weight = CudaRuntime(launch=launcher).bind().rms_norm, torch.zeros(1024, dtype=torch.bfloat16)
    for _ in range(2):
        norm(weight.new_zeros(2, 1024), weight, 1e-6)
    assert (kept.loaded, len(unpacked)) == (["rms_norm"], 1)


def test_a_block_has_one_kernel_and_is_no_longer_than_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tools.cubins, "BLOCK_BYTES", 10)
    made = [
        (name.encode() * size, {"kernel": name}) for name, size in (("b", 6), ("a", 3), ("b", 4), ("b", 1), ("a", 30))
    ]
    variants, blocks = tools.cubins.divided(made)
    assert blocks == [b"a" * 3, b"a" * 30, b"b" * 10, b"b"]
    places = [(each["kernel"], each["block"], each["offset"]) for each in variants]
    assert places == [("a", 0, 0), ("a", 1, 0), ("b", 2, 0), ("b", 2, 6), ("b", 3, 0)]


def test_what_fits_no_variant_goes_to_triton_once(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    launched: list[str] = []
    kept, launcher = opened(folder, lambda kernel, grid, *arguments, **constants: launched.append(kernel))
    norm, weight = CudaRuntime(launch=launcher).bind().rms_norm, torch.zeros(1024, dtype=torch.bfloat16)
    with caplog.at_level(logging.INFO, cubins.__name__):
        for _ in range(2):
            norm(weight.new_zeros(2, 1025)[:, :1024], weight, 1e-6)  # a stride that 16 does not divide
    assert launched == ["rows.rms_norm"] * 2
    assert (len(kept.launches), len(caplog.messages)) == (0, 1)
    norm(weight.new_zeros(2, 1024), weight, 1e-6)
    assert len(kept.launches) == 1
    _, launcher = opened(folder)
    with pytest.raises(ConfigError, match=r"no binary fits rows.rms_norm of \*bf16/16, .*Triton is not"):
        CudaRuntime(launch=launcher).bind().rms_norm(weight.new_zeros(2, 992), weight[:992], 1e-6)


def test_a_damaged_archive_or_manifest_is_refused_by_its_hash(folder: Path, tmp_path: Path) -> None:
    written = json.loads((folder / "sm_90.json").read_text())
    packed = (folder / "sm_90.xz").read_bytes()
    assert len(lzma.decompress(packed)) == sum(each["bytes"] for each in written["manifest"]["variants"])
    (tmp_path / "sm_90.json").write_text(json.dumps(written))
    (tmp_path / "sm_90.xz").write_bytes(packed[:-1] + bytes([packed[-1] ^ 1]))
    with pytest.raises(ConfigError, match=r"sm_90.xz has the sha256 \w{64}, expected"):
        read_archive(tmp_path, 90)
    written["manifest"]["variants"][0]["shared"] += 16
    (tmp_path / "sm_90.json").write_text(json.dumps(written))
    with pytest.raises(ConfigError, match=r"sm_90.json has the sha256 \w{64}, expected"):
        read_archive(tmp_path, 90)


def test_binaries_of_other_sources_are_not_used(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as other_options:
        other_options.setitem(cubins.OPTIONS, "enable_fp_fusion", False)
        assert read_archive(folder, 90) is None
    assert read_archive(folder, 90) is not None
    monkeypatch.setattr(cubins, "source_hash", lambda: "another")
    assert read_archive(folder, 90) is None
    assert read_archive(folder, 80) is None
    monkeypatch.setattr(cubins.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"no binaries of these kernels are installed for compute capability 9.0"):
        open_launcher(90, 228 << 10, lambda: pytest.fail("no driver"), is_invariant=False, folder=folder)


def test_the_triton_of_a_build_of_torch_before_a_release_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"pytorch-triton": "3.6.0+git1"}

    def version(name: str) -> str:
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(cubins.metadata, "version", version)
    assert cubins.triton_version() == "3.6.0+git1"
    monkeypatch.setattr(cubins.util, "find_spec", lambda name: None)
    assert cubins.triton_version() is None


def test_two_compilers_are_not_mixed_where_bits_agree(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cubins.metadata, "version", lambda name: "0.1")
    kept, _ = opened(folder)
    chosen = [
        open_launcher(90, 228 << 10, lambda: Driver(kept.library, lambda: 0), is_invariant=each, folder=folder)
        for each in (False, True)
    ]
    assert [isinstance(each, CubinLauncher) for each in chosen] == [True, False]


def attend(launch: Launcher, shared_bytes: int) -> None:
    """Launch the attention of a prompt over heads of 256, as a GPU with so much shared memory does."""
    backend = CudaBackend(CudaRuntime(launch=launch, shared_bytes=shared_bytes), torch.bfloat16)
    q = torch.zeros(20, 4, 256, dtype=torch.bfloat16)
    cache = q.new_zeros(backend.cache_shape(4, 16, 1, 256))
    metadata = AttentionMetadata.build([20], [20], [[1, 2]], 16)
    backend.run(q, q[:, :1], q[:, :1], cache, metadata, Scores(1.0))


def write_archive(folder: Path, capability: int, used_kib: int = 64) -> None:
    """Write an archive with the launches of `attend` on an A100, whose store is code of no shared memory."""
    calls: list[Call] = []
    attend(
        lambda kernel, grid, *each, **constants: calls.append(call_of(kernel, each, constants, frozenset())), 164 << 10
    )
    code = b"code"
    about = {"num_warps": 4, "num_scratch": 2, "block": 0, "offset": 0, "bytes": len(code)}
    variants = [
        {"kernel": call.kernel, "types": call.types, "constants": sorted(call.constants), **about}
        | {"function": f"{call.kernel} {capability}", "shared": used_kib << 10 if "attend" in call.kernel else 0}
        for call in calls
    ]
    packed = lzma.compress(code)
    manifest = {"capability": capability, "triton": cubins.metadata.version("triton"), "sources": source_hash()}
    manifest |= {"archive": sha256(packed).hexdigest(), "kernels": {}, "blocks": [len(packed)]}
    manifest |= {"variants": variants}
    assert len(list(write(folder, manifest, packed))) == 2


def launched(
    monkeypatch: pytest.MonkeyPatch, folder: Path, capability: int, shared_kib: int, *, is_invariant: bool = False
) -> list[str]:
    """Return what launches the store and the attention of `attend` on a GPU: a binary, or Triton."""
    found: list[str] = []
    kept = KeptDriver({f"attention.{name} {each}": 4 for name in ("store", "attend") for each in range(80, 110)})
    monkeypatch.setattr(cubins, "launch_by_triton", lambda kernel, *rest, **constants: found.append("Triton"))
    launcher = open_launcher(
        capability,
        shared_kib << 10,
        lambda: Driver(kept.library, lambda: 0),
        is_invariant=is_invariant,
        folder=folder,
    )
    attend(launcher, shared_kib << 10)
    return [name for name, *_ in kept.launches] + found


@pytest.mark.parametrize(
    ("capability", "archives", "taken"),
    [
        *((80, (80, 89), 80), (86, (80, 89), 80), (89, (80, 89), 89), (89, (80,), 80), (89, (80, 86), 86)),
        *((86, (89, 90), None), (90, (80, 89), None), (91, (90,), None), (103, (100,), None), (87, (80, 86), None)),
    ],
)
def test_a_gpu_runs_binaries_of_the_nearest_lower_minor_version(
    capability: int, archives: tuple[int, ...], taken: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for each in archives:
        write_archive(tmp_path, each)
    expected = [f"attention.{each} {taken}" for each in ("store", "attend")] if taken else ["Triton", "Triton"]
    assert launched(monkeypatch, tmp_path, capability, 164) == expected


@pytest.mark.parametrize(("used_kib", "is_taken"), [(163, True), (164, False)])
def test_a_binary_that_needs_more_shared_memory_than_the_gpu_has_is_not_loaded(
    used_kib: int, is_taken: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_archive(tmp_path, 80, used_kib)
    taken = launched(monkeypatch, tmp_path, 86, 164)
    assert taken == ["attention.store 80", "attention.attend 80" if is_taken else "Triton"]


def test_tiles_of_less_shared_memory_have_no_binary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_archive(tmp_path, 80)
    assert launched(monkeypatch, tmp_path, 86, 100) == ["attention.store 80", "Triton"]


def test_binaries_of_another_capability_are_not_mixed_with_compiled_code_where_bits_must_agree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_archive(tmp_path, 80)
    binaries = ["attention.store 80", "attention.attend 80"]
    assert launched(monkeypatch, tmp_path, 80, 164, is_invariant=True) == binaries
    assert launched(monkeypatch, tmp_path, 86, 164, is_invariant=True) == ["Triton", "Triton"]
    monkeypatch.setattr(cubins.util, "find_spec", lambda name: None)
    assert launched(monkeypatch, tmp_path, 86, 164, is_invariant=True) == binaries


def type_of(argument: Any, *, is_specialized: bool) -> str:
    (found,) = call_of("", [argument], {}, frozenset() if is_specialized else frozenset({0})).types
    return found


def test_arguments_of_every_type_of_torch_have_a_name() -> None:
    dtypes = (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64, torch.int32, torch.int16)
    for dtype in (*dtypes, torch.int8, torch.uint8):
        kind, _ = native_specialize_impl(BaseBackend, torch.zeros(1, dtype=dtype), False, False, True)
        assert type_of(torch.zeros(1, dtype=dtype), is_specialized=False) == kind, dtype


@pytest.mark.parametrize("is_specialized", [True, False])
def test_arguments_are_specialised_as_triton_does(is_specialized: bool) -> None:
    values = [1, 0, 16, 17, -16, 1 << 31, (1 << 40) + 1, 0.5, torch.zeros(3), torch.zeros(9, dtype=torch.int64)[1:]]
    for value in values:
        kind, attribute = native_specialize_impl(BaseBackend, value, False, is_specialized, True)
        expected = cubins.ONE if kind == "constexpr" else kind + cubins.ALIGNED * (attribute == "D")
        assert type_of(value, is_specialized=is_specialized) == expected, value


def test_the_driver_asks_for_shared_memory_and_names_what_failed() -> None:
    kept = KeptDriver({"f": 1})
    own = Driver(kept.library, lambda: 0)
    assert [own.load(b"x", "f", each) for each in (48 << 10, 100_000)] == [1, 2]
    assert (kept.attributes, kept.preferences) == ([(8, 100_000)], [(2, 1)])  # as Triton: shared memory first
    kept.results["cuLaunchKernel"] = [0, 201]  # another thread: its context is set, and the launch made again
    own.launch(1, (1,), 32, 0, None)
    assert (kept.contexts, len(kept.launches)) == ([77], 1)
    kept.results["cuLaunchKernel"] = [700]
    with pytest.raises(DriverError, match="cuLaunchKernel returned error 700"):
        own.launch(1, (1,), 32, 0, None)
    kept.results["cuModuleLoadData"] = [0, 201]  # and so where it is the first to launch a kernel
    assert (own.load(b"x", "f", 0), kept.contexts) == (3, [77, 77])
    kept.results["cuModuleLoadData"] = [209]
    with pytest.raises(DriverError, match="cuModuleLoadData returned error 209"):
        own.load(b"x", "f", 0)


@pytest.mark.parametrize(
    ("num_gpus", "version", "retained"), [(2, 12020, [8]), (1, 13000, []), (2, 12010, []), (0, 0, [])]
)
def test_the_context_of_a_gpu_is_made_ahead_and_what_fails_is_left_to_torch(
    num_gpus: int, version: int, retained: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []

    def tell(place: Any, value: int, result: int = 0) -> int:
        place._obj.value = value
        return result

    library = SimpleNamespace(
        cuDriverGetVersion=lambda number: tell(number, version),
        cuInit=lambda flags: flags,
        cuDeviceGet=lambda gpu, index: tell(gpu, 7 + index, 0 if index < num_gpus else 101),
        cuDevicePrimaryCtxRetain=lambda context, gpu: made.append(gpu.value) or 0,
    )

    def load(name: str) -> Any:
        if not version:
            raise OSError(f"{name}: cannot open shared object file")
        return library

    monkeypatch.setattr(driver, "CDLL", load)
    thread = driver.open_ahead(1)
    assert (thread is not None) == (version >= 12020)
    if thread is not None:
        thread.join()
    assert made == retained
