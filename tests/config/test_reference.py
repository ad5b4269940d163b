"""The generated pages."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo.config.args import EngineArgs
from octavo.config.fields import arguments
from octavo.config.reference import main, pages

FOLDER = Path(__file__).parents[2] / "docs" / "reference"


@pytest.mark.parametrize("name", sorted(pages()))
def test_reference_page_is_current(name: str) -> None:
    shown = (FOLDER / name).read_text(encoding="utf-8")
    assert shown == pages()[name], "run: python -m octavo.config.reference docs/reference"


def test_every_argument_has_its_line() -> None:
    page = pages()["engine-arguments.md"]
    assert all(f"| `{name}` |" in page for name in arguments(EngineArgs))


def test_pages_are_written_where_asked(tmp_path: Path) -> None:
    main(str(tmp_path / "new"))
    assert {path.name for path in (tmp_path / "new").iterdir()} == set(pages())


def test_flags_in_a_meaning_are_written_as_code() -> None:
    assert "By default what `--model` says." in pages()["engine-arguments.md"]
