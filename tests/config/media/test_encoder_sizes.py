"""Sizes that no encoder can have are refused by name."""

from __future__ import annotations

import re
from typing import Any

import pytest

from octavo.config.media.encoder_sizes import check_encoder
from octavo.config.section import Section
from octavo.errors import CheckpointError

GOOD: dict[str, Any] = {
    "hidden_size": 32,
    "num_heads": 2,
    "depth": 3,
    "patch_size": 14,
    "image_size": [56, 56],
    "spatial_merge_size": 2,
    "window_size": 28,
    "mlp_ratio": 4.0,
    # which configs of former versions of transformers have in every part
    "no_repeat_ngram_size": 0,
    "chunk_size_feed_forward": 0,
    "head_dim": None,
}

SHUFFLED = {"projector_input_dim": 8, "pixel_shuffle_ratio": 0.5, "intermediate_size": 128, "image_size": 56}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"layer_norm_eps": float("nan")}, "layer_norm_eps is NaN, expected a finite number"),
        ({"rms_norm_eps": -1}, "rms_norm_eps is -1, expected a number of at least 0"),
        ({"patch_size": 0}, "patch_size is 0, expected an integer of at least 1"),
        ({"depth": -1}, "depth is -1, expected an integer of at least 1"),
        ({"num_heads": "2"}, 'num_heads is "2", expected an integer'),
        ({"image_size": [56, 0]}, "image_size is [56, 0], expected integers from 1 to 65,536"),
        ({"image_size": [56]}, "image_size is [56], expected an integer, or a height and a width"),
        ({"hidden_dropout_prob": 7}, "hidden_dropout_prob is 7, expected a share, 0 to 1"),
        ({"rope_parameters": {"rope_theta": None}}, "rope_parameters.rope_theta is null, expected a number"),
        ({"mlp_ratio": 0.0}, "mlp_ratio is 0.0, expected a number above 0"),
        ({"hidden_size": 33}, "hidden_size is 33, expected a multiple of num_heads, which is 2"),
        ({"embed_dim": 31}, "embed_dim is 31, expected a multiple of num_heads, which is 2"),
        ({"projector_input_dim": 8, "projector_output_dim": 9}, "projector_output_dim is 9, expected the same as pro"),
        ({**SHUFFLED, "pixel_shuffle_ratio": 0.3}, "pixel_shuffle_ratio is 0.3, expected one over an integer"),
        ({**SHUFFLED, "intermediate_size": 64}, "intermediate_size is 64, expected hidden_size times 4, which is 128"),
        ({**SHUFFLED, "image_size": 42}, "image_size is 42, expected a multiple of 2 patches"),
        ({"image_size": 13}, "image_size is 13, expected at least patch_size, which is 14"),
        ({"window_size": 27}, "window_size is 27, expected at least patch_size times spatial_merge_size, which is 28"),
    ],
)
def test_a_size_that_no_encoder_can_have_is_refused_by_name(changes: dict[str, Any], said: str) -> None:
    check_encoder(Section({"vision_config": GOOD}, "file").section("vision_config"))
    section = Section({"vision_config": GOOD | changes}, "file").section("vision_config")
    with pytest.raises(CheckpointError, match=re.escape(f"file: vision_config.{said}")):
        check_encoder(section)
    section = Section({"vision_config": {"sam_config": GOOD | changes}}, "file").section("vision_config")
    with pytest.raises(CheckpointError, match=re.escape(f"file: vision_config.sam_config.{said}")):
        check_encoder(section)
    if "hidden_size" in changes:
        check_encoder(Section({**GOOD, **changes, "head_dim": 16}, "file"))
