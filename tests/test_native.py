"""The compiled module: present wherever octavo was installed, and dispensable."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.conftest import pytest_configure

needs_compiler = pytest.mark.skipif("config.getoption('--without-compiler')", reason="--without-compiler is given")


@needs_compiler
def test_compiled_module_tells_how_it_was_built() -> None:
    from octavo import _native

    assert set(_native.build_info()) == {"compiler", "cxx_standard", "build_type"}


@needs_compiler
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


def test_the_suite_fails_without_the_compiled_module_unless_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests of kernels skip themselves where there are none: nobody would see that the build failed."""
    monkeypatch.setattr("octavo.platform._native", lambda: (None, ()))
    said: Any = SimpleNamespace(getoption={"--without-compiler": True}.get)
    pytest_configure(said)
    unsaid: Any = SimpleNamespace(getoption={"--without-compiler": False}.get)
    with pytest.raises(pytest.UsageError, match="the compiled kernels are absent"):
        pytest_configure(unsaid)
