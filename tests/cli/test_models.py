"""`octavo pull | list | rm`, with a hub on a local port."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import huggingface_hub.constants
import pytest

from octavo.cli.main import EXIT_ERROR, main
from octavo.cli.models import families
from octavo.config.media.media_families import FAMILIES
from octavo.models.registry import known_architectures
from tests.cli.conftest import Command
from tests.fakes.hub import FakeHub, serve_hub

TEXT = {"config.json": b'{"model_type": "qwen3"}', "tokenizer.json": b"{}"}
WEIGHTS = bytes(range(256)) * 4096


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeHub]:
    models = {
        "Qwen/Qwen3-0.6B": {**TEXT, "model.safetensors": WEIGHTS},
        "me/mine": {**TEXT, "model.safetensors": b"mine"},
    }
    monkeypatch.setenv("OCTAVO_DOWNLOAD_DIR", str(tmp_path / "hub"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    with serve_hub(FakeHub(models)) as served:
        # what HF_ENDPOINT sets at import
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", served.address)
        template = served.address + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        yield served


def test_a_model_is_pulled_by_its_short_name_listed_and_removed(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: Command
) -> None:
    path = Path(command("pull", "qwen3:0.6b").out.strip())
    assert (path / "model.safetensors").read_bytes() == WEIGHTS
    assert main(["pull", "Qwen/Qwen3-0.6B"]) == 0
    assert hub.downloads.count("model.safetensors") == 1
    capsys.readouterr()
    line = command("list").out.splitlines()[1]
    assert line.split()[:4] == ["Qwen/Qwen3-0.6B", "qwen3:0.6b", "1.00", "MiB"]
    assert "without weights" not in line
    monkeypatch.setenv("OCTAVO_MODEL", "qwen3:0.6b")
    assert main(["rm"]) == EXIT_ERROR
    assert path.exists()
    assert main(["rm", "Qwen3:0.6B"]) == 0
    assert not path.exists()
    assert "Qwen/Qwen3-0.6B: removed" in capsys.readouterr().err
    assert "is not in the hub's cache" in command("rm", "qwen3:0.6b", code=EXIT_ERROR).err


def test_a_model_to_pull_or_remove_must_be_named(command: Command) -> None:
    for verb in ("pull", "rm"):
        assert f"{verb} needs a model" in command(verb, code=EXIT_ERROR).err
        assert "[default: octavo-tiny]" not in command(verb, "--help").out


def test_a_cut_download_goes_on_where_it_was(hub: FakeHub, monkeypatch: pytest.MonkeyPatch, command: Command) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "DOWNLOAD_CHUNK_SIZE", 4096)
    hub.cut = "model.safetensors"
    assert (Path(command("pull", "qwen3:0.6b").out.strip()) / "model.safetensors").read_bytes() == WEIGHTS
    assert hub.downloads.count("model.safetensors") == 2


def test_users_add_short_names(hub: FakeHub, tmp_path: Path, command: Command) -> None:
    table = tmp_path / "config/octavo/models.txt"
    table.parent.mkdir(parents=True)
    table.write_text("mine:7b me/mine  # at home\n")
    assert main(["pull", "mine:7b"]) == 0
    assert "model.safetensors" in hub.downloads
    table.write_text("mine me/mine\n")
    assert "models.txt, line 1: 'mine me/mine', expected" in command("pull", "mine:7b", code=EXIT_ERROR).err


def test_an_unknown_short_name_says_which_sizes_there_are(hub: FakeHub, command: Command) -> None:
    assert (
        "llama3.2:7b: no short name of a model; there are llama3.2:1b, llama3.2:3b;"
        in command("pull", "llama3.2:7b", code=EXIT_ERROR).err
    )
    message = command("pull", "qwn3:0.6b", code=EXIT_ERROR).err
    assert "qwn3:0.6b: no short name of a model; give the name on the hub (owner/model), or add" in message
    assert message.endswith("; did you mean qwen3:0.6b?\n")
    assert hub.downloads == []


def test_without_a_cache_the_list_has_the_shipped_model(hub: FakeHub, command: Command) -> None:
    assert command("list").out.splitlines()[1:] == [
        "octavo-tiny                          ships with octavo",
    ]
    assert main(["rm", "octavo-tiny"]) == EXIT_ERROR


def test_every_architecture_of_a_family_is_listed_with_what_is_supported(capsys: pytest.CaptureFixture[str]) -> None:
    families()
    lines = capsys.readouterr().out.splitlines()
    listed = {name.strip() for line in lines[1:] for name in line.split("  ")[-1].split(",")}
    missing = set(known_architectures()) - listed
    assert not missing, "enter the family into tests/fakes/families.py; then: python -m tools.reference docs/reference"
    qwen3 = next(line for line in lines if line.startswith("qwen3 "))
    assert all(words in qwen3 for words in ("full, window", "int8", "tensor, pipeline"))


def test_what_prompts_may_bring_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    families()
    table = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()[1:]}
    assert "text, images, video" in table["qwen3_vl"]
    assert "text, images " in table["gemma3"]
    assert "sound" in table["whisper"]
    read = {name for family in FAMILIES if family.images for name in family.architectures}
    assert {name.strip(",") for line in table.values() for name in line.split()} >= read
