"""Imports torch without a part that only its compiler needs, in processes that run nothing but an engine."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import Final

_PART: Final = "_meta_registrations"
_leaving_out = threading.RLock()
"""Held while a placeholder may stand for the part."""


@contextmanager
def without_meta_registrations() -> Iterator[None]:
    """Inside, `import torch` leaves out what operators written in Python do with tensors that have no data.

    That is a sixth of the import. An engine makes such tensors almost only where torch's own C++ does it. After the
    block the part can be imported as usual.
    """
    name = f"torch.{_PART}"
    with _leaving_out:
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


def import_meta_registrations() -> None:
    """Import the part. transformers, and torch's operators in Python, import it where it finds itself half imported.

    A thread that imports torch without it is waited for: its placeholder would be taken for the part.
    """
    with _leaving_out:
        import_module(f"torch.{_PART}")
