"""The settings of image processors are those that the processors of the releases use."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from octavo.config.checkpoint import Checkpoint
from octavo.config.media.images import image_settings
from octavo.distributed.mesh import Mesh
from octavo.errors import CheckpointError
from octavo.models.loader import LoadedModel
from octavo.multimodal.image_prompts import ImagePrompts
from tests.fakes.vision import image, make_vision_checkpoint


def released(path: Path, **processor: Any) -> Checkpoint:
    """Mistral 3 with the files of its releases, whose image processor has the size of one patch."""
    make_vision_checkpoint("mistral3", path)
    settings = json.loads((path / "preprocessor_config.json").read_text())
    own = {**settings, "patch_size": {"height": 14, "width": 14}}
    (path / "preprocessor_config.json").write_text(json.dumps(own))
    (path / "processor_config.json").write_text(json.dumps({"processor_class": "PixtralProcessor", **processor}))
    return Checkpoint.open(path)


def test_images_of_mistral_3_are_cut_as_its_processor_cuts_them(tmp_path: Path) -> None:
    import transformers

    checkpoint = released(tmp_path, patch_size=14, spatial_merge_size=2)
    settings = image_settings(checkpoint)
    assert settings is not None
    found = ImagePrompts(checkpoint, settings, lambda _: [8], {"image": 1}).arrays(image(0, 98, 70))
    # what PixtralProcessor does with an image, which needs torchvision
    processor = transformers.PixtralImageProcessorPil.from_pretrained(tmp_path)
    wanted = processor(images=[image(0, 98, 70)], patch_size=14 * 2, return_tensors="np")
    assert np.array_equal(found["pixel_values"], wanted["pixel_values"])
    assert found["image_sizes"].tolist() == [[84, 112]]


def test_a_processor_without_patches_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match="processor_config.json: patch_size is 0, expected an integer of at least"
    ):
        image_settings(released(tmp_path, patch_size=0))


BAD: list[tuple[str, dict[str, Any], str]] = [
    ("llava", {"image_std": [0.0, 1.0, 1.0]}, r"image_std is \[0.0, 1.0, 1.0\], expected 3 numbers above 0"),
    ("llava", {"image_mean": [float("nan")] * 3}, r"image_mean is \[NaN, NaN, NaN\], expected 3 finite numbers"),
    (
        "qwen2_vl",
        {"patch_size": 28},
        "patch_size is 28, expected patch_size of the encoder .*, which is 14",
    ),
    ("qwen2_vl", {"merge_size": "x"}, 'merge_size is "x", expected an integer'),
    ("qwen2_vl", {"size": {"shortest_edge": 56 * 56}}, "size is .*, expected shortest_edge and longest_edge"),
    (
        "granite4_vision",
        {"crop_size": {"height": 56, "width": 57}},
        "crop_size is .*, expected the image_size of vision",
    ),
    ("granite4_vision", {"image_grid_pinpoints": [[56]]}, "image_grid_pinpoints is .*, expected pairs of a height"),
    ("llava", {"image_mean": [0.5]}, r"image_mean is \[0.5\], expected 3 finite numbers"),
    ("deepseek_ocr2", {"background_color": [0, 0, 256]}, "background_color is .*, expected 3 numbers from 0 to 255"),
    ("llava", {"rescale_factor": "x"}, 'rescale_factor is "x", expected a number'),
    ("llava", {"resample": 9}, "resample is 9, expected one of Pillow's filters, 0 to 5"),
    ("llava", {"do_resize": "x"}, 'do_resize is "x", expected true or false'),
    ("llava", {"size": {"shortest_edge": "x"}}, 'size.shortest_edge is "x", expected a number'),
    ("paddleocr_vl", {"size": {"shortest_edge": [1], "longest_edge": 9}}, r"size.shortest_edge is \[1\], expected a n"),
    ("qianfan_ocr", {"max_patches": {"a": 1}}, 'max_patches is {"a": 1}, expected an integer'),
    ("internvl", {"max_patches": 2.5}, "max_patches is 2.5, expected an integer"),
    ("llava", {"size": {"shortest_edge": 1 << 20}}, "size.shortest_edge is 1048576, expected 1 to 8,192"),
    ("lfm2_vl", {"tile_size": 0}, "tile_size is 0, expected 1 to 8,192"),
    ("qwen2_vl", {"size": {"shortest_edge": 1 << 26, "longest_edge": 1 << 27}}, "67108864, expected 1 to 33,554,432"),
    ("qwen2_vl", {"size": {"shortest_edge": 9, "longest_edge": 8}}, "is 9, expected at most size.longest_edge, which"),
    ("qwen2_vl", {"min_pixels": 9, "max_pixels": 8}, "min_pixels is 9, expected at most max_pixels, which is 8"),
    ("internvl", {"max_patches": 1 << 30}, "max_patches is 1073741824, expected 1 to 256"),
    ("lfm2_vl", {"max_tiles": 1 << 30}, "max_tiles is 1073741824, expected 1 to 256"),
    ("lfm2_vl", {"tile_size": 1 << 20}, "tile_size is 1048576, expected 1 to 8,192"),
    ("lfm2_vl", {"min_image_tokens": 3}, "min_image_tokens is 3, expected at most max_image_tokens, which is 2"),
    ("got_ocr2", {"size": {"height": 56, "width": 84}}, r"size is .*, expected the image_size of vision_config, 56 x"),
    *(
        (family, {"size": {"height": 896, "width": 896}}, "size is .*, expected the image_size of vision_config, 56 x")
        for family in ("blip_2", "gemma3", "internvl", "qianfan_ocr")
    ),
    ("internvl", {"size": 896}, "size is 896, expected the image_size of vision_config, 56 x 56"),
    ("smolvlm", {"max_image_size": {"longest_edge": 364}}, "max_image_size is .*, expected the image_size of vision"),
    ("minicpmv4_6", {"max_slice_nums": 1 << 30}, "max_slice_nums is 1073741824, expected 1 to 256"),
    (
        "lighton_ocr",
        {"patch_size": {"height": 0, "width": 14}},
        "patch_size.height is 0, expected an integer of at least",
    ),
    (
        "lighton_ocr",
        {"patch_size": {"height": 14, "width": 1 << 20}},
        "patch_size.width is 1048576, expected 1 to 8,192",
    ),
    ("qwen2_vl", {"image_processor_type": None}, "image_processor_type is null, expected a string"),
    ("internvl", {"min_patches": 5}, "min_patches is 5, expected at most max_patches, which is 4"),
]


@pytest.mark.parametrize(("family", "changes", "said"), BAD)
def test_settings_no_image_survives_are_refused(
    family: str, changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    file = make_vision_checkpoint(family, tmp_path) / "preprocessor_config.json"
    checkpoint = Checkpoint.open(tmp_path)
    assert image_settings(checkpoint)
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    with pytest.raises(CheckpointError, match=f"preprocessor_config.json: .*{said}"):
        image_settings(checkpoint)


@pytest.mark.parametrize("family", ["glm5_next", "hy_v4_vl"])
def test_the_sizes_that_a_processor_has_by_itself_are_taken(family: str, tmp_path: Path) -> None:
    import transformers

    file = make_vision_checkpoint(family, tmp_path) / "preprocessor_config.json"
    stated = json.loads(file.read_text())
    own = getattr(transformers, f"{stated['image_processor_type']}Pil")(patch_size=stated["patch_size"]).to_dict()
    written = {**own, "image_processor_type": stated["image_processor_type"]}
    file.write_text(json.dumps(written))
    found = image_settings(Checkpoint.open(tmp_path))
    assert found is not None
    assert found["size"] == written["size"]


def test_other_pieces_of_images_than_the_processor_cuts_are_refused(tmp_path: Path) -> None:
    make_vision_checkpoint("llava_next", tmp_path)
    changes = {"image_grid_pinpoints": [[56, 112]]}
    with pytest.raises(CheckpointError, match="image_grid_pinpoints is .*, expected those of .*preprocessor_conf"):
        image_settings(Checkpoint.open(tmp_path, changes))


@pytest.mark.parametrize(("family", "name"), [("aya_vision", "size"), ("smolvlm", "max_image_size")])
def test_a_size_that_is_left_out_is_the_encoder_s(family: str, name: str, tmp_path: Path) -> None:
    file = make_vision_checkpoint(family, tmp_path) / "preprocessor_config.json"
    stated = image_settings(Checkpoint.open(tmp_path))
    file.write_text(json.dumps({**json.loads(file.read_text()), name: None}))
    assert image_settings(Checkpoint.open(tmp_path)) == stated


@pytest.mark.parametrize(
    ("family", "changes", "said"),
    [
        ("gemma3", {"mm_tokens_per_image": 15}, "mm_tokens_per_image is 15, expected "),
        ("internvl", {"image_seq_length": 5}, "image_seq_length is 5, expected 4, as many vectors as"),
        ("smolvlm", {"scale_factor": 3}, "scale_factor is 3, expected a divisor of 4 patches"),
    ],
)
def test_counts_of_vectors_that_no_encoder_makes_are_refused(
    family: str, changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    checkpoint = Checkpoint.open(make_vision_checkpoint(family, tmp_path), changes)
    with pytest.raises(CheckpointError, match=said):
        LoadedModel.open(checkpoint, Mesh.single(), torch.float32)


def test_a_null_is_no_setting(tmp_path: Path) -> None:
    file = make_vision_checkpoint("qwen2_vl", tmp_path) / "preprocessor_config.json"
    nulls = {"image_mean": None, "rescale_factor": None, "resample": None, "temporal_patch_size": None}
    file.write_text(json.dumps({**json.loads(file.read_text()), **nulls}))
    settings = image_settings(Checkpoint.open(tmp_path))
    assert settings is not None
    assert not nulls.keys() & settings.keys()


def test_a_class_beside_the_weights_is_transformers_own(tmp_path: Path) -> None:
    file = make_vision_checkpoint("paddleocr_vl", tmp_path) / "preprocessor_config.json"
    released = {"image_processor_type": "SiglipImageProcessor", "min_pixels": 1568, "max_pixels": 25088}
    file.write_text(json.dumps({**released, "size": {"min_pixels": 1568, "max_pixels": 25088}}))
    checkpoint = Checkpoint.open(tmp_path)
    settings = image_settings(checkpoint)
    assert settings is not None
    found = ImagePrompts(checkpoint, settings, lambda _: [8], {"image": 1}).arrays(image(0, 980, 70))
    assert found["image_grid_thw"].tolist() == [[1, 2, 42]]


def test_an_upper_limit_without_end_scales_nothing_up(tmp_path: Path) -> None:
    file = make_vision_checkpoint("qwen2_vl", tmp_path) / "preprocessor_config.json"
    sizes = {"size": {"shortest_edge": 56 * 56, "longest_edge": 10**9}}
    file.write_text(json.dumps({**json.loads(file.read_text()), **sizes}))
    settings = image_settings(Checkpoint.open(tmp_path))
    assert settings is not None
    assert settings["size"] == sizes["size"]


def test_sizes_of_the_encoder_are_checked_by_name(tmp_path: Path) -> None:
    make_vision_checkpoint("qwen2_5_vl", tmp_path)
    with pytest.raises(CheckpointError, match=r"^--hf-overrides .*: vision_config.depth is 0, expected an integer"):
        LoadedModel.open(Checkpoint.open(tmp_path, {"vision_config": {"depth": 0}}), Mesh.single())


def test_windows_without_end_are_refused(tmp_path: Path) -> None:
    make_vision_checkpoint("qwen2_5_vl", tmp_path)
    with pytest.raises(CheckpointError, match="vision_config.window_size is 1000000000, expected at most 65,536"):
        image_settings(Checkpoint.open(tmp_path, {"vision_config": {"window_size": 10**9}}))


def test_an_encoder_that_no_memory_holds_is_refused(tmp_path: Path) -> None:
    make_vision_checkpoint("ovis2", tmp_path)
    with pytest.raises(CheckpointError, match="vision_config.hidden_size is 1000000000, expected at most 4,194,304"):
        LoadedModel.open(Checkpoint.open(tmp_path, {"vision_config": {"hidden_size": 10**9}}), Mesh.single())
