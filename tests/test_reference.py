"""The generated pages."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from octavo.config.args import EngineArgs
from octavo.config.fields import arguments, describe_default
from octavo.config.server_args import ServerArgs
from octavo.devices import DEVICES
from octavo.ops.registry import Implementation
from tools import devices, families
from tools.reference import main, pages

FOLDER = Path(__file__).parents[1] / "docs" / "reference"


def test_reference_pages_are_current() -> None:
    for name, page in pages().items():
        shown = (FOLDER / name).read_text(encoding="utf-8")
        assert shown == page, f"{name}: run: python -m tools.reference docs/reference"


def test_the_table_of_families_is_current() -> None:
    assert families.FILE.read_text(encoding="utf-8") == families.text(), "run: python -m tools.reference docs/reference"


def test_every_argument_has_its_line() -> None:
    page = pages()["engine-arguments.md"]
    assert all(f"| `{name}` |" in page for name in arguments(EngineArgs))


def test_pages_are_written_where_asked(tmp_path: Path) -> None:
    main(str(tmp_path / "new"))
    assert {path.name for path in (tmp_path / "new").iterdir()} == set(pages())


def test_flags_in_a_meaning_are_written_as_code() -> None:
    assert "By default what `--model` says." in pages()["engine-arguments.md"]


@pytest.mark.parametrize(
    ("name", "default"), [("max_header_size", "64KiB"), ("max_body_size", "32MiB"), ("packed_cache_size", "20GiB")]
)
def test_a_default_in_bytes_is_shown_in_the_largest_unit_that_it_is_a_whole_number_of(name: str, default: str) -> None:
    assert describe_default({**arguments(EngineArgs), **arguments(ServerArgs)}[name]) == default


def test_a_default_of_several_texts_is_shown_as_a_list() -> None:
    assert describe_default(arguments(ServerArgs)["allowed_methods"]) == "GET, POST"


def test_each_page_names_the_file_that_it_is_made_of() -> None:
    for page in pages().values():
        (source,) = re.findall(r"edit the (?:fields|families|devices) in (\S+) instead", page)
        assert (FOLDER.parents[1] / source).exists()


def test_kernels_of_a_device_are_shown_by_the_names_of_their_implementations(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [
        Implementation("add", "native", lambda runtime: None),
        Implementation("silu_and_mul", "sleek", lambda runtime: None),
    ]
    monkeypatch.setattr(devices, "implementations", lambda package: found)
    monkeypatch.setattr(devices, "DEVICES", {"reference": DEVICES["reference"]})
    page = devices.page()
    assert "| `add` | compiled |" in page
    assert "| `silu_and_mul` | sleek |" in page
