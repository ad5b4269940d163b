"""What errors say of folders and configs of models that octavo does not have."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from octavo.config.args import EngineArgs
from octavo.config.resolve import configure
from octavo.errors import CheckpointError


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("adapter_config.json", {}, "this is an adapter: serve its base model with --enable-lora"),
        ("model_index.json", {}, "a pipeline of diffusers"),
        ("config.json", {"architectures": ["UltravoxModel"]}, "UltravoxModel, is not among those that octavo models"),
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
