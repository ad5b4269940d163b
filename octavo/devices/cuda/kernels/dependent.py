"""What programs of a dependent launch wait for (programmatic dependent launch, from compute capability 9.0 on)."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def wait_for_earlier(IS_DEPENDENT: tl.constexpr):
    """Wait until earlier launches have ended and all that they wrote can be read; the next launch may begin now.

    Every program calls it, before its first store and its first read of what a launch may write. IS_DEPENDENT: whether
    the launch may have begun while earlier ones run; others wait for nothing.
    """
    if IS_DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
