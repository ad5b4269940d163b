"""The pages lead to each other, and to files that exist."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from octavo.cli.main import build_app, main
from octavo.config.server_args import ServerArgs
from octavo.config.speculative_args import METHODS
from octavo.engine.output.metrics import Metrics
from octavo.scheduler.policies import POLICIES
from octavo.server.decode import refused_fields
from octavo.server.endpoints import ENDPOINTS
from octavo.server.errors import STATUS_OF_REFUSALS
from octavo.server.key_file import read_callers
from octavo.server.keys import ALL_RIGHTS, key_digest
from octavo.simulate.device import DataSheet, read_device

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md")])
LINK = re.compile(r"\]\(([^)#\s]+)[^)]*\)")
NAMED_FILE = re.compile(r"`((?:octavo|tests|benchmarks|examples|docs|csrc)/[\w./]*)`")


def test_every_link_leads_to_a_file() -> None:
    links = [(page, link) for page in PAGES for link in LINK.findall(page.read_text()) if "://" not in link]
    assert [(page.name, link) for page, link in links if not (page.parent / link).exists()] == []


def test_each_row_of_a_table_has_the_cells_of_its_head() -> None:
    tables = [(page.name, table) for page in PAGES for table in re.findall(r"(?:^\|.*\n)+", page.read_text(), re.M)]
    cells = [(page, {len(re.findall(r"(?<!\\)\|", row)) for row in table.splitlines()}) for page, table in tables]
    assert [page for page, counts in cells if len(counts) > 1] == []


def test_the_changelog_says_nothing_twice() -> None:
    begun = re.findall(r"(?m)^(?:## .*|- .{1,66})", (ROOT / "CHANGELOG.md").read_text())
    newest = begun[: next(place for place, line in enumerate(begun[1:], 1) if line.startswith("## "))]
    assert [line for line, count in Counter(newest).items() if count > 1] == []


def test_every_file_that_a_page_names_is_there() -> None:
    examples = ("octavo/foo/bar.py", "tests/foo/test_bar.py")
    named = [(page.name, name) for page in PAGES for name in NAMED_FILE.findall(page.read_text())]
    assert [each for each in named if each[1] not in examples and not (ROOT / each[1]).exists()] == []


def test_names_that_contributing_places_in_a_file_are_defined_there() -> None:
    text = " ".join((ROOT / "CONTRIBUTING.md").read_text().split())
    places = re.findall(r"(?<!A )`(\w+)`(?: of| in|, in) `((?:octavo|tests|tools|csrc)/[\w./]*\.py)`", text)
    assert len(places) > 30
    defined = r"(?m)^[ \t]*(?:class |def |type )?{}\b(?![,)])"
    assert [each for each in places if not re.search(defined.format(each[0]), (ROOT / each[1]).read_text())] == []


def test_every_page_is_linked_from_the_first_one_and_in_the_navigation() -> None:
    def targets(entry: Any) -> list[str]:
        if isinstance(entry, str):
            return [entry]
        values = entry.values() if isinstance(entry, dict) else entry
        return [target for value in values for target in targets(value)]

    pages = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}
    linked = LINK.findall((DOCS / "index.md").read_text())
    navigation = targets(tomllib.loads((ROOT / "zensical.toml").read_text())["project"]["nav"])
    assert set(linked) == pages - {"index.md"}
    assert sorted(navigation) == sorted(pages)


def test_the_changelog_links_to_no_file_for_the_site_shows_it_too() -> None:
    assert (DOCS / "changelog.md").read_text() == (ROOT / "CHANGELOG.md").read_text()
    assert [link for link in LINK.findall((ROOT / "CHANGELOG.md").read_text()) if "://" not in link] == []


def test_a_page_that_uses_the_openai_client_says_where_it_comes_from() -> None:
    using = {page.name: page.read_text() for page in PAGES if "from openai import" in page.read_text()}
    assert [name for name, text in using.items() if "pip install openai" not in text] == []


def test_everything_in_the_folder_of_the_site_may_be_published() -> None:
    kinds = {path.suffix for path in DOCS.rglob("*") if path.is_file()}
    assert kinds <= {".md", ".svg", ".webp", ".css"}, "the site publishes whatever lies in docs/"


def test_the_site_has_a_dark_palette_and_asks_no_other_host() -> None:
    project = tomllib.loads((ROOT / "zensical.toml").read_text())["project"]
    assert all((DOCS / sheet).is_file() for sheet in project["extra_css"])
    theme = project["theme"]
    assert {palette.get("scheme") for palette in theme["palette"]} == {None, "default", "slate"}
    assert theme["font"] is False


def test_the_page_on_kernels_tells_what_is_compiled_for_which_level() -> None:
    built = re.findall(r"^ *add_kernels\((\w+) ?([^)]*)\)$", (ROOT / "CMakeLists.txt").read_text(), re.MULTILINE)
    page = (DOCS / "design/kernels.md").read_text()
    table = page.partition("| subject | compiled for |")[2].partition("\n\n")[0]
    told = re.findall(r"^\| `(\w+)` \| ([^|]*)\|", table, re.MULTILINE)
    assert built
    assert dict(built) == {subject: levels.strip().replace(",", "") for subject, levels in told}


@pytest.mark.parametrize(("page", "names"), [("scheduler", list(POLICIES)), ("speculation", METHODS)])
def test_pages_have_a_row_for_every_policy_and_every_method_of_guesses(page: str, names: Sequence[str]) -> None:
    rows = re.findall(r"^\| (`.*?`) \|", (DOCS / f"design/{page}.md").read_text(), re.MULTILINE)
    told = {name for row in rows for name in re.findall(r"`([^`]+)`", row)}
    assert set(names) <= told, f"docs/design/{page}.md needs a row for each"


def test_the_page_on_the_server_names_every_endpoint_field_and_code() -> None:
    page = (DOCS / "reference/server.md").read_text()
    named = set(re.findall(r"`([^`\n]+)`", page))
    paths = {f"{endpoint.method} {endpoint.path}".replace("model_id", "id") for endpoint in ENDPOINTS}
    assert paths <= named, "docs/reference/server.md needs a row for each path"
    kinds = [endpoint.request for endpoint in ENDPOINTS if endpoint.request is not None]
    fields = {name for kind in kinds for name in kind.__struct_fields__ if name not in refused_fields(kind)}
    assert fields <= named, "docs/reference/server.md has to name each field"
    sources = [
        ROOT / "octavo/errors.py",
        *(ROOT / "octavo/server").rglob("*.py"),
        ROOT / "octavo/scheduler/admission_control.py",
    ]
    codes = {code for source in sources for code in re.findall(r'\bcode ?= ?"(\w+)"', source.read_text())}
    assert "too_many_prompts" in codes
    assert codes | set(STATUS_OF_REFUSALS) <= named, "docs/reference/server.md has to name each code"


def test_the_page_on_the_server_tells_the_key_that_each_endpoint_needs() -> None:
    page = (DOCS / "reference/server.md").read_text()
    rows = re.findall(r"^\| (`(?:GET|POST) /.*`) \|.*\| ([^|]*) \|$", page, re.MULTILINE)
    told = {endpoint: key for endpoints, key in rows for endpoint in re.findall(r"`([^`]+)`", endpoints)}
    for endpoint in ENDPOINTS:
        key = "none" if endpoint.is_open else f"right `{endpoint.right}`" if endpoint.right else "any"
        if "right observe)" in endpoint.summary:
            key += "; others' requests: right `observe`"
        name = f"{endpoint.method} {endpoint.path}".replace("model_id", "id")
        assert told.get(name) == key, f"docs/reference/server.md needs a row of {name} that ends with the key: {key}"


def test_the_key_file_of_the_recipe_is_one(tmp_path: Path) -> None:
    (example,) = re.findall(r"```yaml\n# keys.yaml\n(.*?)```", (DOCS / "recipes/serve.md").read_text(), re.DOTALL)
    (tmp_path / "keys.yaml").write_text(example)
    callers = read_callers(ServerArgs(api_key_file=str(tmp_path / "keys.yaml")))
    bob, carol = (callers[key_digest(key)] for key in (b"BOBS_KEY", b"CAROLS_KEY"))
    assert bob.cache_namespace == carol.cache_namespace
    assert callers[key_digest(b"OPERATORS_KEY")].rights == ALL_RIGHTS


def test_the_page_on_the_server_names_every_metric() -> None:
    page = (DOCS / "reference/server.md").read_text()
    told = page.partition("## Metrics")[2].partition("\n## ")[0]
    named = {f"octavo:{name}" for name in re.findall(r"`([a-z0-9_]+)`", told)}
    made = {family.name for family in Metrics("m").registry.collect()}
    assert made - named == set()


def test_octavo_takes_every_command_in_the_blocks_of_the_pages() -> None:
    fenced = [block for page in PAGES for block in re.findall(r"(?ms)^```(\w*)\n(.*?)^```$", page.read_text())]
    lines = [
        line for kind, text in fenced if kind in ("", "sh", "bash") for line in text.replace("\\\n", "").splitlines()
    ]
    commands = [found[1] for line in lines if (found := re.search(r"(?:^|&& )(octavo [^|…>]*)(?:[|>]|$)", line))]
    assert len(commands) > 50
    app = build_app()
    for command in commands:
        app.parse_args(shlex.split(command, comments=True)[1:], exit_on_error=False, print_error=False)


def test_the_commands_of_the_sizing_recipe_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = {"hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8}
    config |= {"intermediate_size": 12288, "vocab_size": 151936, "head_dim": 128, "tie_word_embeddings": False}
    (tmp_path / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr("octavo.simulate.model_facts.locate", lambda *names, **options: tmp_path)
    blocks = re.findall(r"```sh\n(.*?)```", (DOCS / "recipes/sizing.md").read_text(), re.DOTALL)
    lines = [shlex.split(line) for block in blocks for line in block.replace("\\\n", "").splitlines()]
    assert [line[:2] for line in lines] == [["octavo", "simulate"]] * 4
    fewer = [["30" if word == "300" else word for word in line] for line in lines]
    assert [main(line[1:]) for line in fewer] == [0] * 4


def test_the_page_on_simulation_describes_a_device_with_every_field(tmp_path: Path) -> None:
    (described,) = re.findall(r"```json\n(.*?)```", (DOCS / "design/simulation.md").read_text(), re.DOTALL)
    assert list(json.loads(described)) == list(DataSheet.__struct_fields__)
    (tmp_path / "mine.json").write_text(described)
    assert read_device(str(tmp_path / "mine.json")).name == "my accelerator"
