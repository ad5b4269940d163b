"""The calls of CUDA's driver that load and launch machine code, by ctypes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import CDLL, byref, c_char_p, c_int, c_uint, c_void_p
from functools import partial
from threading import Thread
from typing import Any, Final

_LIBRARY: Final = "libcuda.so.1"
_MAX_DYNAMIC_SHARED_SIZE: Final = 8
"""CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES."""
_PREFER_SHARED: Final = 1
"""CU_FUNC_CACHE_PREFER_SHARED: more of an SM's first cache is shared memory, so that more programs fit it."""
_INVALID_CONTEXT: Final = 201
SHARED_BYTES: Final = 48 << 10
"""Bytes of shared memory that a kernel may use without setting the attribute."""
_LOADS_LATE: Final = (12, 2)
"""From this version on kernels are loaded when they are first launched, without CUDA_MODULE_LOADING."""
_SIGNATURES: Final = {
    "cuCtxGetCurrent": (c_void_p,),
    "cuCtxSetCurrent": (c_void_p,),
    "cuModuleLoadData": (c_void_p, c_char_p),
    "cuModuleGetFunction": (c_void_p, c_void_p, c_char_p),
    "cuFuncSetAttribute": (c_void_p, c_int, c_int),
    "cuFuncSetCacheConfig": (c_void_p, c_int),
    "cuLaunchKernel": (c_void_p, *[c_uint] * 7, c_void_p, c_void_p, c_void_p),
}


def _library() -> Any:
    """Return libcuda; None where there is none."""
    try:
        return CDLL(_LIBRARY)
    except OSError:
        return None


def newest_cuda() -> tuple[int, int] | None:
    """Return the newest version of CUDA that the installed driver runs, such as (12, 8); None where there is none."""
    library = _library()
    return None if library is None else _version(library)


def _version(library: Any) -> tuple[int, int]:
    number = c_int()
    library.cuDriverGetVersion(byref(number))
    return number.value // 1000, number.value % 1000 // 10


def open_ahead(index: int) -> Thread | None:
    """Begin to initialise the driver and to make the context of a GPU, which PyTorch then shares, in a thread.

    index: among the GPUs that the process sees. What fails here fails again in PyTorch, which says why. Returns the
    thread; None where there is no driver, or one that PyTorch has to tell first to load kernels when they are needed.
    """
    library = _library()
    if library is None or _version(library) < _LOADS_LATE:
        return None

    def open_context() -> None:
        gpu, context = c_int(), c_void_p()
        if not library.cuInit(0) and not library.cuDeviceGet(byref(gpu), index):
            library.cuDevicePrimaryCtxRetain(byref(context), gpu)

    thread = Thread(target=open_context, name="octavo-context", daemon=True)
    thread.start()
    return thread


class DriverError(RuntimeError):
    """A call of the driver has failed."""


class Driver:
    """libcuda, in the context of the thread that made it. Modules stay loaded until the process ends."""

    def __init__(self, library: Any, current_stream: Callable[[], int]) -> None:
        """current_stream: returns the handle of the stream that a launch goes to, the captured one under capture."""
        self._calls = {name: getattr(library, name) for name in _SIGNATURES}
        for name, call in self._calls.items():
            call.argtypes, call.restype = _SIGNATURES[name], c_int
        self._current_stream = current_stream
        self._context = c_void_p()
        self._call("cuCtxGetCurrent", byref(self._context))

    @staticmethod
    def open() -> Driver:
        """Return the driver of this process's GPU, whose context torch makes."""
        import torch

        torch.cuda.synchronize()
        # as torch.cuda.current_stream().cuda_stream, in a tenth of its time
        return Driver(CDLL(_LIBRARY), partial(torch._C._cuda_getCurrentRawStream, torch.cuda.current_device()))

    def load(self, code: bytes, function: str, shared_bytes: int) -> int:
        """Return the handle of a function of a cubin, with the settings that Triton gives it. Raises DriverError."""
        module, handle = c_void_p(), c_void_p()
        self._call("cuModuleLoadData", byref(module), code)
        self._call("cuModuleGetFunction", byref(handle), module, function.encode())
        if shared_bytes > SHARED_BYTES:
            self._call("cuFuncSetCacheConfig", handle, _PREFER_SHARED)
            self._call("cuFuncSetAttribute", handle, _MAX_DYNAMIC_SHARED_SIZE, shared_bytes)
        return handle.value or 0

    def launch(self, function: int, grid: Sequence[int], threads: int, shared_bytes: int, arguments: Any) -> None:
        """Launch a function; arguments: an array of the addresses of its parameters. Raises DriverError."""
        x, y, z = (*grid, 1, 1)[:3]
        if not x * y * z:
            return
        stream = self._current_stream()
        self._call("cuLaunchKernel", function, x, y, z, threads, 1, 1, shared_bytes, stream, arguments, None)

    def _call(self, name: str, *arguments: Any) -> None:
        call = self._calls[name]
        code = call(*arguments)
        if code == _INVALID_CONTEXT:  # a thread that has not yet used the GPU
            self._calls["cuCtxSetCurrent"](self._context)
            code = call(*arguments)
        if code:
            raise DriverError(f"{name} returned error {code} of CUDA")
