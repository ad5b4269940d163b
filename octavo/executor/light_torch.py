"""Imports torch sooner: its library beside other imports, and, in processes that run nothing but an engine, without a
part that only its compiler needs."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Final

_PART: Final = "_meta_registrations"


def load_library() -> None:
    """Load torch's largest library, which takes a fifth of its import, without Python's lock: for a thread.

    A call while another one loads it waits for that. Nothing happens where torch is not installed or has other files.
    """
    torch = find_spec("torch")
    if torch is None or torch.origin is None:
        return
    library = Path(torch.origin).parent / "lib" / "libtorch_cpu.so"
    if library.exists():
        ctypes.CDLL(None).dlopen(os.fsencode(library), os.RTLD_NOW)


@contextmanager
def without_meta_registrations() -> Iterator[None]:
    """Inside, `import torch` leaves out what operators written in Python do with tensors that have no data.

    That is a sixth of the import. An engine makes such tensors almost only where torch's own C++ does it. After the
    block the part can be imported as usual.
    """
    name = f"torch.{_PART}"
    if "torch" in sys.modules:
        yield
        return
    placeholder = ModuleType(name)
    sys.modules[name] = placeholder
    try:
        yield
    finally:
        if sys.modules.get(name) is placeholder:
            del sys.modules[name]
        torch = sys.modules.get("torch")
        if torch is not None and vars(torch).get(_PART) is placeholder:
            delattr(torch, _PART)
