"""Values of configs that say which layers images are added to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from octavo.config.checkpoint import Checkpoint
from octavo.distributed.mesh import Mesh
from octavo.errors import CheckpointError, UnsupportedModel
from octavo.models.loader import LoadedModel
from octavo.models.vision_levels import levels_of
from tests.fakes.vision import make_vision_checkpoint


def test_of_several_levels_for_one_layer_the_last_counts(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(make_vision_checkpoint("granite4_vision", tmp_path), {"spatial_target_layers": [2, 3]})
    opened = LoadedModel.open(checkpoint, Mesh.single())
    assert levels_of(opened.model.config.library) == (-1, 1, 2)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"deepstack_layer_map": [[-1, 4]]}, "deepstack_layer_map is .*, expected pairs of .* one of 4 layers"),
        ({"deepstack_layer_map": [[5, 0]]}, "deepstack_layer_map is .*, expected pairs of .*, which has 3"),
        ({"deepstack_layer_map": None}, "deepstack_layer_map is null, expected pairs"),
        ({"spatial_target_layers": [4]}, "spatial_target_layers is .*, expected at most 4 of 4 layers"),
        ({"spatial_target_layers": ["x"]}, "spatial_target_layers is .*, expected at most 4 of 4 layers"),
        ({"qformer_config": {"num_hidden_layers": 10**9}}, "qformer_config.num_hidden_layers is .*, expected .* 1024"),
        ({"spatial_vision_layer": 9}, "spatial_vision_layer is 9, expected a layer of the encoder, which has 3"),
        ({"downsample_rate": "1/4"}, 'downsample_rate is "1/4", expected one half'),
        ({"downsample_rate": "3/6"}, "downsample_rate is .*, expected windows that the patches"),
    ],
)
def test_layers_that_there_are_not_are_refused_by_name(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    make_vision_checkpoint("granite4_vision", tmp_path)
    with pytest.raises(CheckpointError, match=said):
        LoadedModel.open(Checkpoint.open(tmp_path, changes), Mesh.single())


@pytest.mark.parametrize(
    ("family", "changes", "said"),
    [
        (
            "llava",
            {"vision_feature_layer": 9},
            "vision_feature_layer is 9, expected a layer of the encoder, which has 3",
        ),
        ("llava", {"vision_feature_layer": 0}, "vision_feature_layer is 0, expected a layer of the encoder, which has"),
        ("vipllava", {"vision_feature_layer": [1, -5]}, "vision_feature_layer is .*, expected a layer of the encoder"),
        ("aya_vision", {"vision_feature_select_strategy": "default"}, 'strategy is "default", expected "full"'),
        ("aya_vision", {"downsample_factor": 3}, "downsample_factor is 3, expected a divisor of 4 patches"),
        ("llava_onevision", {"vision_aspect_ratio": "square"}, 'is "square", expected the most tiles of an image'),
        ("llava_onevision", {"vision_aspect_ratio": "anyres_max_0"}, "vision_aspect_ratio is .*, expected the most t"),
        ("blip_2", {"num_query_tokens": 0}, "num_query_tokens is 0, expected 1 to 1,024"),
        ("blip_2", {"num_query_tokens": 10**9}, "num_query_tokens is 1000000000, expected 1 to 1,024"),
        ("blip_2", {"qformer_config": {"use_qformer_text_input": True}}, "use_qformer_text_input is true, expected f"),
        ("blip_2", {"text_config": {"model_type": "t5"}}, 'no model family Blip2 .*text_config.model_type "t5"'),
        (
            "ovis2",
            {"vision_config": {"tokenize_function": "gumbel_argmax"}},
            'is "gumbel_argmax", expected "softmax"',
        ),
        (
            "ovis2",
            {"vision_config": {"hidden_stride": 10**9}},
            r"vision_config.hidden_stride is 1000000000\b.*: transformers .* cannot make",
        ),
        ("llama4", {"text_config": {"num_hidden_layers": 10**9}}, "text_config.num_hidden_layers is .* at most 1024"),
        (
            "paddleocr_vl",
            {"text_config": {"rope_parameters": {"mrope_section": ["x", 1, 1]}}},
            "mrope_section is .*three",
        ),
        ("paddleocr_vl", {"vision_config": {"hidden_act": "x"}}, 'config.json: vision_config.hidden_act is "x": trans'),
        ("minicpmv4_6", {"merge_kernel_size": [2]}, r"merge_kernel_size is \[2\], expected \[1, 1\], \[2, 2\] or"),
        ("minicpmv4_6", {"vision_config": {"window_kernel_size": []}}, r"window_kernel_size is \[\], expected"),
        ("minicpmv4_6", {"merger_times": 10**9}, "merger_times is 1000000000, expected at most 8"),
        (
            "lighton_ocr",
            {"vision_config": {"num_attention_heads": 4}},
            "head_dim is 16, expected hidden_size over",
        ),
        ("aya_vision", {"downsample_factor": 0}, "downsample_factor is 0, expected an integer of at least 1"),
        ("aya_vision", {"vision_config": {"patch_size": [14]}}, r"patch_size is \[14\], expected an integer"),
        ("cohere2_vision", {"downsample_factor": 3}, "downsample_factor is 3, expected a divisor of 4 patches"),
    ],
)
def test_impossible_features_are_refused_by_name(
    family: str, changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    make_vision_checkpoint(family, tmp_path)
    with pytest.raises((CheckpointError, UnsupportedModel), match=said):
        LoadedModel.open(Checkpoint.open(tmp_path, changes), Mesh.single())


def test_what_a_release_of_blip_2_leaves_out_is_what_opt_has_by_default() -> None:
    text = {
        "model_type": "opt",
        "hidden_size": 2560,
        "ffn_dim": 10_240,
        "num_attention_heads": 32,
        "vocab_size": 50_304,
    }
    config = {"architectures": ["Blip2ForConditionalGeneration"], "model_type": "blip-2", "num_query_tokens": 32}
    config |= {"qformer_config": {}, "vision_config": {"image_size": 224}, "tie_word_embeddings": False}
    checkpoint = Checkpoint(Path("blip"), {**config, "text_config": text})
    made = LoadedModel.open(checkpoint, Mesh.single()).model.config
    assert (made.vocab_size, made.num_layers, checkpoint.max_model_len(), made.tied) == (50_304, 12, 2048, True)
    stated = Checkpoint(Path("blip"), {**config, "text_config": {**text, "tie_word_embeddings": False}})
    assert not LoadedModel.open(stated, Mesh.single()).model.config.tied
