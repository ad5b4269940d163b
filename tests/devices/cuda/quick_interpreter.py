"""Triton's language with the functions of its interpreter, patched once in a process.

The interpreter looks through the whole language for each call of a function of a kernel, and undoes at the end of a
launch what it has found: that took half of the time of these tests.
"""

from __future__ import annotations

from typing import Any

import triton.runtime.interpreter as interpreter


def install() -> None:
    """Let the interpreter patch the language for a function that it has not met before, and leave it so."""
    module: Any = interpreter
    plain, known = module._patch_lang, set()

    def patch_once(function: Any) -> Any:
        if function not in known:
            known.add(function)
            plain(function)
        return module._LangPatchScope()

    module._patch_lang = patch_once
