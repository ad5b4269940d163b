"""The compiled module: present wherever octavo was installed, and dispensable."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


def test_compiled_module_tells_how_it_was_built() -> None:
    from octavo import _native

    assert set(_native.build_info()) == {"compiler", "cxx_standard", "build_type"}


@pytest.mark.skipif(not Path("/proc/cpuinfo").is_file(), reason="compares with /proc/cpuinfo, which is not there")
def test_compiled_module_sees_what_the_operating_system_sees() -> None:
    from octavo import _native

    listed = set(Path("/proc/cpuinfo").read_text().split())
    assert {name for name in _native.cpu_features() if not name.startswith("amx")} <= listed


def test_octavo_works_without_the_compiled_module() -> None:
    """The import is blocked, as if a source tree were used that was never built."""
    code = (
        "import sys; sys.modules['octavo._native'] = None\n"
        "from octavo.platform import Platform; from octavo.config.explain import platform_facts\n"
        "print(dict(platform_facts(Platform.detect()))['compiled module'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("absent: every operator runs in plain torch")
