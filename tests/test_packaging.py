"""What pyproject.toml promises to those who build, rebuild and release."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS: dict[str, list[str]] = PROJECT["project"]["optional-dependencies"]


def packages(requirements: list[str]) -> set[str]:
    return {re.split(r"[<>=\[ ]", requirement)[0] for requirement in requirements}


def test_dev_brings_what_a_build_without_isolation_needs() -> None:
    assert packages(PROJECT["build-system"]["requires"]) | {"cmake", "ninja"} <= packages(EXTRAS["dev"])
    assert set(PROJECT["build-system"]["requires"]) <= set(EXTRAS["dev"])


def test_an_extra_is_asked_for_by_code() -> None:
    source = "".join(file.read_text() for file in (ROOT / "octavo").rglob("*.py"))
    assert [extra for extra in EXTRAS if extra not in ("test", "dev") and f"octavo[{extra}]" not in source] == []


def test_every_extra_has_its_line_in_the_page_on_dependencies() -> None:
    page = (ROOT / "docs/design/dependencies.md").read_text()
    assert set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)) == set(EXTRAS)


def test_wheels_are_made_for_every_python_that_is_promised() -> None:
    classifiers = re.findall(r"Python :: (3)\.(\d+)", "\n".join(PROJECT["project"]["classifiers"]))
    built = [build.partition("-")[0] for build in PROJECT["tool"]["cibuildwheel"]["build"]]
    assert built == [f"cp{major}{minor}" for major, minor in classifiers]
