"""GGUF files that state fewer layers than they have, or rotations that are not computed, are refused, not cut short."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from octavo.errors import CheckpointError
from octavo.layers.rope import LinearScaling
from tests.fakes.checkpoints import make_checkpoint
from tests.fakes.gguf_files import convert
from tests.fakes.sizes import BLOCKS
from tests.models.paged_run import load


@pytest.mark.parametrize("architecture", ["llama", "deci"])
@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("block_count", 1, "block_count is 1, expected more than [13], the number of the last layer"),
        ("rope.dimension_count", 2, "rope.dimension_count is 2, expected 8, the size of a head"),
        ("rope.scaling.type", "ntk", 'rope.scaling.type is "ntk", expected "none" or "linear"'),
    ],
)
def test_layers_and_rotations_that_would_be_left_out_are_refused(
    architecture: str, key: str, value: Any, said: str, tmp_path: Path
) -> None:
    deci = ("nemotron-nas", {"num_hidden_layers": 4, "block_configs": BLOCKS[:4]})
    family, overrides = {"llama": ("llama", {}), "deci": deci}[architecture]
    path = make_checkpoint(family, tmp_path / "m", **overrides)
    with pytest.raises(CheckpointError, match=said):
        load(convert(path, architecture, {f"{architecture}.{key}": value}))


@pytest.mark.parametrize("key", ["rope.scaling.factor", "rope.scale_linear"])
def test_a_factor_of_positions_without_a_kind_stretches_them_evenly(key: str, tmp_path: Path) -> None:
    path = make_checkpoint("llama", tmp_path / "m")
    rope = load(convert(path, "llama", {f"llama.{key}": 4.0})).config.rope
    assert rope is not None
    assert rope.scaling == LinearScaling(4.0)
    rope = load(convert(path, "llama", {f"llama.{key}": 4.0, "llama.rope.scaling.type": "none"})).config.rope
    assert rope is not None
    assert rope.scaling is None
