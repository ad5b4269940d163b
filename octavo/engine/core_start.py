"""The process of an engine core: `python -m octavo.engine.core_start FD`, started by `core_spawn`.

torch's library is loaded in a thread, without Python's lock, while the modules that need no torch are imported.
"""

from __future__ import annotations

import gc
import threading
from importlib import import_module
from typing import Final, NoReturn

from octavo.executor.light_torch import load_library

WITH_LIBRARIES: Final = (
    "array", "binascii", "decimal", "hashlib", "json", "mmap", "msgspec", "numpy", "queue", "subprocess", "tempfile",
    "uuid",
)  # fmt: skip
"""What a core imports that has shared libraries: each would wait for torch's in the loader, with Python's lock held."""


def import_beside_library() -> None:
    """Import the engine core, and let torch's library be loaded meanwhile."""
    for name in WITH_LIBRARIES:
        import_module(name)
    threading.Thread(target=load_library, name="octavo-library").start()
    import_module("octavo.engine.engine_core")


def main() -> NoReturn:
    gc.disable()  # a start makes no garbage, and the search for it takes a tenth of a second
    import_beside_library()
    from octavo.engine.core_process import run

    run()


if __name__ == "__main__":
    main()
