"""The settings of image processors are those that the processors of the releases use."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo.config.checkpoint import Checkpoint
from octavo.config.images import image_settings
from octavo.errors import CheckpointError
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
