"""The config of dots.ocr's encoder."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo.config.checkpoint import Checkpoint
from octavo.errors import UnsupportedModel
from octavo.models.dots_ocr import DotsOcrReader


def test_a_config_without_sizes_is_that_of_the_release(tmp_path: Path) -> None:
    config = DotsOcrReader.read_library(Checkpoint(tmp_path, {"hidden_size": 1536}))
    assert (config.hidden_size, config.num_attention_heads, config.num_hidden_layers) == (1536, 12, 42)
    assert set(config.mlp_layer_types) == {"dense"}


def test_patches_of_several_frames_are_refused(tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path, {"hidden_size": 64, "vision_config": {"temporal_patch_size": 2}})
    with pytest.raises(UnsupportedModel, match=r"vision_config.temporal_patch_size is 2, expected 1"):
        DotsOcrReader.read_library(checkpoint)
