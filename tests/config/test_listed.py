"""What errors say of folders and configs of models that octavo does not have."""

from __future__ import annotations

import dataclasses
import json
import sys
from functools import partial
from pathlib import Path

import pytest

from octavo.config import hub
from octavo.config.args import EngineArgs
from octavo.config.checkpoint import Checkpoint
from octavo.config.listed import refuse_unlisted
from octavo.config.media.media_families import BY_ARCHITECTURE
from octavo.config.resolve import configure
from octavo.errors import CheckpointError, UnsupportedModel
from octavo.models import registry
from tests.fakes.hub import FakeHub, serve_hub


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("adapter_config.json", {}, "this is an adapter: serve its base model with --enable-lora"),
        ("model_index.json", {}, "a pipeline of diffusers"),
        ("config.json", {"architectures": ["SoundModel"]}, "SoundModel, is not among those that octavo models"),
    ],
)
def test_the_error_says_what_the_folder_is(tmp_path: Path, name: str, content: object, said: str) -> None:
    (tmp_path / name).write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=said):
        configure(EngineArgs(model=str(tmp_path)))


def test_a_family_that_is_there_lacks_a_key_alone(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["BertModel"]}')
    with pytest.raises(CheckpointError, match="is missing") as caught:
        configure(EngineArgs(model=str(tmp_path)))
    assert "octavo models" not in str(caught.value)


def model_of(architecture: str, **keys: object) -> Checkpoint:
    """Return a checkpoint of which nothing else is known, in the layout of today."""
    made = Checkpoint(Path("somewhere"), {})
    made.values = {"architectures": [architecture], **keys}
    return made


def test_weights_of_an_unknown_architecture_are_not_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = b'{"architectures": ["UnheardOfForCausalLM"], "model_type": "unheard_of"}'
    with serve_hub(FakeHub({"someone/new": {"config.json": config, "model.safetensors": b"weights"}})) as served:
        monkeypatch.setattr(hub, "locate", partial(hub.locate, endpoint=served.address))
        args = EngineArgs(model="someone/new", download_dir=str(tmp_path))
        with pytest.raises(UnsupportedModel, match="architecture is UnheardOfForCausalLM.*not downloaded"):
            hub.locate_model(args)
        assert served.downloads == ["config.json"]
        overrides = {"architectures": ["LlamaForCausalLM"]}
        path = hub.locate_model(dataclasses.replace(args, hf_overrides=overrides))
        assert (path / "model.safetensors").read_bytes() == b"weights"


def test_every_file_that_is_read_is_downloaded() -> None:
    for architecture in {*registry._FILE_OF, *BY_ARCHITECTURE}:
        refuse_unlisted(model_of(architecture))
    for model_type in registry._FAMILY_OF_TYPE:
        refuse_unlisted(model_of("SomethingElse", model_type=model_type))
    refuse_unlisted(model_of("SomethingElse", speculators_config={}))


def test_what_transformers_reads_is_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = tmp_path / "transformers" / "models" / "auto" / "modeling_auto.py"
    table.parent.mkdir(parents=True)
    (tmp_path / "transformers" / "__init__.py").touch()
    table.write_text('("unheard_of", "UnheardOfForCausalLM"),')
    monkeypatch.delitem(sys.modules, "transformers", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    refuse_unlisted(model_of("UnheardOfForCausalLM"))
    with pytest.raises(UnsupportedModel):
        refuse_unlisted(model_of("UnheardOf2ForCausalLM"))
