"""Kernels that were compiled before: an archive of machine code for one kind of GPU, and the launches that it fits.

`sm_90.json` lists the variants of kernels in `sm_90.xz`, each with its hash. A variant fits a launch of the same
constants whose arguments Triton would compile in the same way: an integer of 1 is a constant, and integers and
addresses that 16 divides make other code. An archive is blocks of variants of one kernel, which are unpacked when one
of them is first launched: an engine launches few of them.
"""

from __future__ import annotations

import json
import logging
import lzma
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from ctypes import addressof, c_void_p, create_string_buffer
from functools import cache
from hashlib import sha256
from importlib import metadata, util
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from octavo.devices.cuda.driver import Driver, DriverError
from octavo.devices.cuda.runtime import OPTIONS, Launcher, launch_by_triton
from octavo.errors import ConfigError

_log = logging.getLogger(__name__)

FOLDER: Final = Path(__file__).parent / "cubins"
"""Where a wheel has archives. A checkout has none, unless `python -m tools.cubins` has made them."""
_RESERVED: Final = 1 << 10
"""Bytes of an SM's shared memory that programs cannot use."""
_LOWER: Final = {86: (80,), 89: (86, 80)}
"""Capabilities whose binaries a GPU runs besides those of its own, the nearest first: lower minor versions of the same
major one. GPUs on one chip with a processor (8.7) run none of others; from 9.0 on Triton's code is for one (sm_90a)."""
ALIGNED, ONE = "/16", "1"
"""The suffix of a type for multiples of 16, and the type of an integer that is 1, which becomes a constant."""
_INT, _LONG = ("i32", f"i32{ALIGNED}"), ("i64", f"i64{ALIGNED}")
"""The types of integers; index 1 is for multiples of 16."""
_POINTERS: Final = {
    dtype: (f"*{name}", f"*{name}{ALIGNED}")
    for dtype, name in (
        *((torch.bfloat16, "bf16"), (torch.float16, "fp16"), (torch.float32, "fp32"), (torch.float64, "fp64")),
        *((torch.int64, "i64"), (torch.int32, "i32"), (torch.int16, "i16"), (torch.int8, "i8"), (torch.uint8, "u8")),
        (torch.float8_e4m3fn, "fp8e4nv"),
    )
}
_LAYOUTS: Final = {"i32": "i", "i64": "q", "fp32": "f"}
"""Codes of `struct`, whose native alignment is that of a kernel's parameters. Addresses are Q."""


class Call(NamedTuple):
    """The key of a compiled variant of a kernel."""

    kernel: str
    types: tuple[str, ...]
    """Types of the arguments, such as "*bf16/16", "i32", "1"."""
    constants: frozenset[tuple[str, Any]]
    """Values of constants and options of compilation."""


def call_of(kernel: str, arguments: Iterable[Any], constants: Mapping[str, Any], unspecialized: frozenset[int]) -> Call:
    """Return the key of a variant. unspecialized: places of arguments whose values do not change the code."""
    types = list(_read(arguments)[1])
    for place in unspecialized:
        types[place] = "i32" if types[place] == ONE else types[place].removesuffix(ALIGNED)
    return Call(kernel, tuple(types), frozenset(constants.items()))


def layout_of(types: Iterable[str]) -> str:
    """Return the layout of parameters as a format of `struct`."""
    kinds = (each.removesuffix(ALIGNED) for each in types if each != ONE)
    return "".join("Q" if kind.startswith("*") else _LAYOUTS[kind] for kind in kinds)


def source_hash() -> str:
    """Return the hash of the sources of all kernels, and of the options of every compilation."""
    total = sha256(repr(sorted(OPTIONS.items())).encode())
    for path in sorted((Path(__file__).parent / "kernels").glob("*.py")):
        total.update(f"{path.name} {sha256(path.read_bytes()).hexdigest()}\n".encode())
    return total.hexdigest()


class _Variant:
    """Machine code for launches of one kind, loaded, and the memory in which the driver gets their parameters."""

    def __init__(self, call: Call, code: bytes, about: Mapping[str, Any], driver: Driver) -> None:
        """about: its line of the manifest. Raises DriverError."""
        self._driver = driver
        self._threads, self._shared_bytes = 32 * about["num_warps"], about["shared"]
        self._places = tuple(i for i, kind in enumerate(call.types) if kind != ONE)
        """Places of the arguments that are parameters."""
        self._function = driver.load(code, about["function"], about["shared"])
        layout = layout_of(call.types) + "Q" * about["num_scratch"]
        self._scratch = (0,) * about["num_scratch"]
        self._offsets = tuple(struct.calcsize(layout[:i] + "0" + kind) for i, kind in enumerate(layout))
        self._layout = struct.Struct(layout)
        self._free: list[tuple[Any, Any]] = []
        """Free memory for parameters, and the addresses of the parameters in it."""

    def launch(self, grid: tuple[int, ...], values: Sequence[Any]) -> None:
        """Launch the code. values: addresses and numbers of all arguments."""
        given = values if len(self._places) == len(values) else [values[place] for place in self._places]
        try:
            parameters = self._free.pop()
        except IndexError:  # other threads have them, or this is the first launch
            parameters = self._new_parameters()
        packed, addresses = parameters
        self._layout.pack_into(packed, 0, *given, *self._scratch)
        self._driver.launch(self._function, grid, self._threads, self._shared_bytes, addresses)
        self._free.append(parameters)  # the driver has read them

    def _new_parameters(self) -> tuple[Any, Any]:
        packed = create_string_buffer(self._layout.size)
        start = addressof(packed)
        return packed, (c_void_p * len(self._offsets))(*(start + offset for offset in self._offsets))


def _read(arguments: Iterable[Any]) -> tuple[list[Any], tuple[str, ...]]:
    """Return the addresses and numbers of arguments, and their types."""
    values: list[Any] = []
    types: list[str] = []
    for each in arguments:
        value = each
        if isinstance(each, Tensor):
            value = each.data_ptr()
            types.append(_POINTERS[each.dtype][value % 16 == 0])
        elif isinstance(each, float):
            types.append("fp32")
        elif each == 1:
            types.append(ONE)
        else:
            types.append((_INT if -(1 << 31) <= each < 1 << 31 else _LONG)[each % 16 == 0])
        values.append(value)
    return values, tuple(types)


class CubinLauncher:
    """A `Launcher` of the kernels of an archive. `otherwise` launches what no variant fits."""

    def __init__(self, driver: Driver, manifest: Mapping[str, Any], packed: bytes, otherwise: Launcher | None) -> None:
        """packed: the blocks. Raises DriverError where the driver does not load the first variant."""
        self._driver, self._packed, self._otherwise = driver, packed, otherwise
        self._ends: Sequence[int] = manifest["blocks"]
        self._block, self._variant = cache(self._unpacked), cache(self._loaded)
        self._unspecialized = {name: frozenset(each) for name, each in manifest["kernels"].items()}
        self.missing: set[Call] = set()
        """Launches that no variant fits, so far."""
        self._lines = {
            Call(each["kernel"], tuple(each["types"]), frozenset(map(tuple, each["constants"]))): each
            for each in manifest["variants"]
        }
        self._known: dict[tuple[Any, ...], _Variant] = {}
        """The variants by a key that takes less time to make than a `Call`."""
        for call in list(self._lines)[:1]:  # whether the driver takes them is known at start
            self._variant(call)

    def __call__(self, kernel: str, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        values, types = _read(arguments)
        key = kernel, types, *constants, *constants.values()
        found = self._known.get(key)
        if found is None:
            call = call_of(kernel, arguments, constants, self._unspecialized.get(kernel, frozenset()))
            if call not in self._lines:
                self._launch_otherwise(call, grid, arguments, constants)
                return
            found = self._known[key] = self._variant(call)
        found.launch(grid, values)

    def _loaded(self, call: Call) -> _Variant:
        line = self._lines[call]
        code = self._block(line["block"])[line["offset"] : line["offset"] + line["bytes"]]
        return _Variant(call, code, line, self._driver)

    def _unpacked(self, number: int) -> bytes:
        start = self._ends[number - 1] if number else 0
        return lzma.decompress(self._packed[start : self._ends[number]])

    def _launch_otherwise(
        self, call: Call, grid: tuple[int, ...], arguments: tuple[Any, ...], constants: dict[str, Any]
    ) -> None:
        what = f"{call.kernel} of {', '.join(call.types)} with {dict(sorted(call.constants))}"
        if self._otherwise is None:
            raise ConfigError(f"no binary fits {what}, and Triton is not installed: pip install 'octavo[cuda]'")
        if call not in self.missing:
            self.missing.add(call)
            _log.info("Triton compiles %s: no binary fits", what)
        self._otherwise(call.kernel, grid, *arguments, **constants)


def has_room(variant: Mapping[str, Any], shared_bytes: int) -> bool:
    """Return whether a variant can be loaded where an SM has this much shared memory."""
    return bool(variant["shared"] <= shared_bytes - _RESERVED)


def open_launcher(
    capability: int, shared_bytes: int, open_driver: Callable[[], Driver], *, is_invariant: bool, folder: Path = FOLDER
) -> Launcher:
    """Return a launcher of kernels: of the nearest archive that the GPU runs, and of Triton for what that lacks.

    shared_bytes: shared memory of an SM; variants that need more are left out. is_invariant: all code must be of one
    compiler and for one capability, because variants of a kernel have to agree in every bit. Raises ConfigError where
    neither can launch, and as `read_archive` does.
    """
    installed = triton_version()
    found = next(filter(None, (read_archive(folder, each) for each in (capability, *_LOWER.get(capability, ())))), None)
    reason = "no binaries of these kernels are installed"
    if found is not None:
        manifest, packed = found
        fitting = [each for each in manifest["variants"] if has_room(each, shared_bytes)]
        made = f"Triton {manifest['triton']} for compute capability {manifest['capability'] / 10}"
        own = f"Triton {installed} for compute capability {capability / 10}" if installed else made
        if is_invariant and own != made:
            reason = f"batch_invariant needs one compiler, here {own}, and binaries are of {made}"
        else:
            try:
                otherwise = launch_by_triton if installed else None
                launcher = CubinLauncher(open_driver(), {**manifest, "variants": fitting}, packed, otherwise)
                _log.info("kernels are launched from binaries of %s", made)
                return launcher
            except DriverError as error:
                reason = f"the driver does not load the binaries of {made}: {error}"
    if not installed:
        raise ConfigError(f"{reason} for compute capability {capability / 10}; pip install 'octavo[cuda]'")
    _log.log(logging.INFO if folder.is_dir() else logging.DEBUG, "kernels are compiled by Triton: %s", reason)
    return launch_by_triton


def triton_version() -> str | None:
    """Return the version of the Triton that is installed, which is not imported; None where there is none."""
    if util.find_spec("triton") is None:
        return None
    try:
        return metadata.version("triton")
    except metadata.PackageNotFoundError:  # builds of PyTorch before a release have it by another name
        return metadata.version("pytorch-triton")


def read_archive(folder: Path, capability: int) -> tuple[dict[str, Any], bytes] | None:
    """Return manifest and blocks for a capability, such as 90; None where the folder has none of these sources.

    Raises ConfigError for a manifest or an archive that is not what was written.
    """
    path = folder / f"sm_{capability}.json"
    if not path.exists():
        return None
    try:
        written = json.loads(path.read_bytes())
        manifest, expected = written["manifest"], written["sha256"]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is no manifest of binaries ({error}): install octavo again") from error
    _check(path, hash_of(manifest), expected)
    if manifest["sources"] != source_hash():
        _log.info("%s is not used: its kernels were compiled from other sources", path)
        return None
    archive = path.with_suffix(".xz")
    packed = archive.read_bytes() if archive.exists() else b""
    _check(archive, sha256(packed).hexdigest(), manifest["archive"])
    return manifest, packed


def hash_of(manifest: Mapping[str, Any]) -> str:
    """Return the hash of a manifest, which does not depend on white space."""
    return sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _check(path: Path, found: str, expected: object) -> None:
    if found != expected:
        raise ConfigError(f"{path} has the sha256 {found}, expected {expected}: install octavo again")
