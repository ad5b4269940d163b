"""Checkpoints that are written with quantised weights: what they hold, and that nothing beside the weights is lost."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from octavo.config.checkpoint import Checkpoint
from octavo.errors import ConfigError
from octavo.models.save import save_quantized
from tests.fakes.checkpoints import make_checkpoint
from tests.models.test_stored import SIZES, error, load, logits, native


@pytest.mark.parametrize(("kind", "bound"), [("int8", 0.1), ("int4", 0.5)])
def test_what_is_written_is_read_again(kind: str, bound: float, tmp_path: Path) -> None:
    plain = make_checkpoint("qwen3_moe", tmp_path / "m", **SIZES, moe_intermediate_size=32, max_shard_size="400KB")
    (plain / "tokenizer.json").write_text("{}")
    (plain / "chat_template.jinja").write_text("{{ messages }}")
    saved = save_quantized(Checkpoint.open(plain), tmp_path / "out", kind, 64)
    assert {path.name for path in (tmp_path / "out").iterdir()} >= {
        *(
            "config.json",
            "tokenizer.json",
            "chat_template.jinja",
            "generation_config.json",
            "model.safetensors.index.json",
        )
    }
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert set(config["ignore"]) == set(saved.kept) > {"lm_head", "model.embed_tokens"}
    # experts of 32 inputs have no group of 64
    assert any("down_proj" in name for name in saved.kept) == (kind == "int4")
    wanted = logits(load(plain, native()))
    assert 0 < error(logits(load(tmp_path / "out", native())), wanted) < bound


def test_codes_are_the_nearest_and_no_scale_is_negative(tmp_path: Path) -> None:
    plain = make_checkpoint("llama", tmp_path / "m", dtype="bfloat16", **SIZES)
    save_quantized(Checkpoint.open(plain), tmp_path / "out", "int4", 128)
    name = "model.layers.0.mlp.up_proj"
    weight = load_file(plain / "model.safetensors")[f"{name}.weight"].float()
    made = load_file(tmp_path / "out" / "model.safetensors")
    scales = made[f"{name}.weight_scale"].float()
    assert (scales > 0).all()
    values = dict(load(tmp_path / "out").layers_by_path())["layers.0.mlp.gate_up_proj"].prepared.rows(
        torch.arange(256, 512)
    )  # type: ignore[union-attr]
    assert ((values - weight).abs() <= scales.repeat_interleave(128, 1) * 2.1).all()
    assert error(values, weight) < 0.12


@pytest.mark.parametrize(
    ("failure", "raised"),
    [(OSError(errno.ENOSPC, "No space left on device"), ConfigError), (KeyboardInterrupt(), KeyboardInterrupt)],
)
def test_what_cannot_be_written_whole_is_removed(
    failure: BaseException, raised: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = make_checkpoint("llama", tmp_path / "m", **SIZES)
    (plain / "README.md").touch()

    def fail(*_: object) -> None:
        assert (tmp_path / "out" / "model.safetensors").is_file()
        raise failure

    with monkeypatch.context() as patched:
        patched.setattr("shutil.copyfile", fail)
        with pytest.raises(raised) as caught:
            save_quantized(Checkpoint.open(plain), tmp_path / "out", "int8", 128)
    assert raised is KeyboardInterrupt or "out: No space left on device; what was written" in str(caught.value)
    save_quantized(Checkpoint.open(plain), tmp_path / "out", "int8", 128)


def test_a_folder_that_is_not_empty_is_left_alone(tmp_path: Path) -> None:
    plain = make_checkpoint("llama", tmp_path / "m", **SIZES)
    with pytest.raises(ConfigError, match=r"m is there already, expected an empty directory"):
        save_quantized(Checkpoint.open(plain), plain, "int8", 128)
    with pytest.raises(ConfigError, match="cannot be made: Not a directory; name another directory"):
        save_quantized(Checkpoint.open(plain), plain / "config.json" / "out", "int8", 128)
    save_quantized(Checkpoint.open(plain), tmp_path / "out", "int8", 128)
    with pytest.raises(ConfigError, match="is quantised already"):
        save_quantized(Checkpoint.open(tmp_path / "out"), tmp_path / "again", "int4", 128)
