"""ERNIE 4.5 VL as its release states it is transformers' model with other keys."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM
from octavo.config.checkpoint import Checkpoint
from octavo.config.media.images import image_settings
from octavo.errors import CheckpointError, OctavoError, UnsupportedModel
from tests.e2e.test_images import PARAMS, PROMPTS, bits, generate
from tests.e2e.test_videos import with_videos
from tests.fakes.checkpoints import edit_config
from tests.fakes.vision import image, make_vision_checkpoint

_OF_TEXT = ("hidden_size", "intermediate_size", "max_position_embeddings", "moe_intermediate_size", "moe_k")
_OF_TEXT += ("moe_num_shared_experts", "num_attention_heads", "num_hidden_layers", "num_key_value_heads", "vocab_size")
_OF_TEXT += ("rms_norm_eps", "head_dim")


def as_released(path: Path) -> Path:
    """Rewrite config and settings of a checkpoint as the release has them, whose tensors have the same names."""
    config = json.loads((path / "config.json").read_text())
    text, vision = config["text_config"], config["vision_config"]
    released = {name: text[name] for name in _OF_TEXT} | {"moe_num_experts": [text["moe_num_experts"]] * 2}
    released |= {"moe_layer_start_index": [1, 1], "moe_layer_end_index": [29, 28], "moe_layer_interval": 1}
    released |= {"architectures": config["architectures"], "model_type": "ernie4_5_moe_vl", "rope_3d": True}
    released |= {"im_patch_id": config["image_token_id"], "freq_allocation": 2, "rope_theta": 1e4}
    released |= {"tie_word_embeddings": False, "spatial_conv_size": 2, "temporal_conv_size": 2, "use_bias": False}
    released |= {name: value for name, value in config.items() if name.startswith(("image_", "video_"))}
    del released["image_token_id"]
    own = {
        name: vision[name] for name in ("depth", "hidden_size", "hidden_act", "num_heads", "in_channels", "patch_size")
    }
    own |= {"embed_dim": vision["hidden_size"], "mlp_ratio": 1.5, "spatial_merge_size": 2, "model_type": "DFNRope"}
    (path / "config.json").write_text(json.dumps({**released, "vision_config": own}))
    settings = json.loads((path / "preprocessor_config.json").read_text())
    size = settings.pop("size")
    settings |= {"min_pixels": size["shortest_edge"], "max_pixels": size["longest_edge"]}
    settings["image_processor_type"] = "Ernie4_5_VLImageProcessor"
    (path / "preprocessor_config.json").write_text(json.dumps(settings))
    return path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return make_vision_checkpoint("ernie4_5_vl", tmp_path)


def test_the_release_is_the_model_of_transformers_layout(path: Path) -> None:
    expected = bits(generate(path, PROMPTS))
    assert bits(generate(as_released(path), PROMPTS)) == expected
    assert bits(generate(path, PROMPTS[3:], limit_mm_per_prompt={"image": 0})) == expected[3:]


@pytest.mark.parametrize("kind", ["image", "video"])
@pytest.mark.parametrize("first", [0, 1])
def test_the_token_before_an_image_is_no_prefix_of_a_text_with_that_token(path: Path, first: int, kind: str) -> None:
    """Experts of images compute it: it is the last token of the first block."""
    with_videos("ernie4_5_vl", path)
    words, config = list(range(20, 35)), json.loads((path / "config.json").read_text())
    marker, begin = config[f"{kind}_token_id"], config[f"{kind}_start_token_id"]
    given = image(1) if kind == "image" else [image(1), image(2)]
    with_image = {"prompt_token_ids": [*words, marker, 40], "multi_modal_data": {kind: given}}
    prompts: list[Any] = [with_image, {"prompt_token_ids": [*words, begin, 40, 41]}]
    drawn = []
    for numbers in ([1 - first], [first, 1 - first]):
        with LLM(str(path), dtype="float32", num_gpu_blocks_override=64, max_num_seqs=4) as llm:
            drawn.append([llm.generate(prompts[number], PARAMS)[0] for number in numbers][-1])
    assert drawn[1].num_cached_tokens == 15
    assert bits(drawn[1:]) == bits(drawn[:1])


def test_experts_of_images_have_the_numbers_behind_those_of_text(path: Path) -> None:
    names = Checkpoint.open(path).tensors
    assert {f"model.layers.1.mlp.experts.{number}.up_proj.weight" for number in range(8)} <= names.keys()
    assert names["model.layers.1.mlp.moe_statics.e_score_correction_bias"].shape == (2, 4)


def test_settings_of_the_release_have_transformers_names(path: Path) -> None:
    settings = image_settings(Checkpoint.open(as_released(path)))
    assert settings is not None
    assert settings["image_processor_type"] == "Ernie4_5_VLMoeImageProcessor"
    assert settings["size"] == {"shortest_edge": 28 * 28 * 2, "longest_edge": 28 * 28 * 32}


def test_images_are_between_the_tokens_that_begin_and_end_one(path: Path) -> None:
    """Where a prompt has them already, they are not written again."""
    given: Any = PROMPTS[0]
    around = {**given, "prompt": "w1 <start> <image> <end> w2 w3"}
    first, again = generate(path, [given, around])
    assert first.prompt_token_ids == again.prompt_token_ids
    assert bits([first]) == bits([again])


@pytest.mark.parametrize(
    ("changes", "said", "kind"),
    [
        ({"moe_num_experts": [4, 6]}, "as many experts for text as for images", CheckpointError),
        ({"moe_num_experts": 4}, "moe_num_experts is 4, expected two integers", CheckpointError),
        ({"rope_3d": False}, "rope_3d is false, expected true", UnsupportedModel),
        ({"moe_intermediate_size": [24]}, "moe_intermediate_size is .*, expected two widths", CheckpointError),
        ({"moe_intermediate_size": [24, 10**19]}, "moe_intermediate_size is .*, expected two widths", CheckpointError),
        ({"freq_allocation": 3}, "mrope_section", CheckpointError),
        ({"hidden_size": None}, "hidden_size is .*, expected an integer", CheckpointError),
        ({"hidden_size": "32"}, 'hidden_size is "32", expected an integer', CheckpointError),
    ],
)
def test_sizes_that_no_release_has_are_refused(
    path: Path, changes: dict[str, Any], said: str, kind: type[OctavoError]
) -> None:
    edit_config(as_released(path), **changes)
    with pytest.raises(kind, match=said):
        generate(path, PROMPTS)
