"""Kimi-VL as its release states it is Kimi K2.5 with other names, and with its own rounding of pixels."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from octavo import LLM, SamplingParams
from octavo.config.checkpoint import Checkpoint
from octavo.config.media.images import image_settings
from octavo.distributed.mesh import Mesh
from octavo.errors import CheckpointError, OctavoError, UnsupportedModel
from octavo.models.loader import LoadedModel
from octavo.multimodal.image_prompts import ImagePrompts
from tests.fakes.checkpoints import edit_tensors
from tests.fakes.vision import image, make_vision_checkpoint

PARAMS = SamplingParams(temperature=0.0, max_tokens=5, logprobs=2, ignore_eos=True)
SETTINGS = {"in_token_limit": 24, "patch_size": 14, "num_pooled_tokens": 1024, "pad_input": True}
SETTINGS |= {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
NAMES = (
    ("mm_projector.proj.0.", "multi_modal_projector.linear_1."),
    ("mm_projector.proj.2.", "multi_modal_projector.linear_2."),
    ("model.mm_projector.pre_norm.", "multi_modal_projector.pre_norm."),
    ("vision_tower.encoder.patch_embed.", "vision_tower.patch_embed."),
)


def as_released(path: Path, **settings: Any) -> Path:
    """Rewrite a checkpoint of Kimi K2.5 as one of Kimi-VL."""
    values = json.loads((path / "config.json").read_text())
    vision = {name.replace("pos_emb", "init_pos_emb"): each for name, each in values["vision_config"].items()}
    vision = {name: each for name, each in vision.items() if "time" not in name} | {"model_type": "moonvit"}
    released = {"architectures": ["KimiVLForConditionalGeneration"], "model_type": "kimi_vl"}
    released |= {"media_placeholder_token_id": values["image_token_id"], "ignore_index": -100, "vision_config": vision}
    (path / "config.json").write_text(json.dumps({**released, "text_config": values["text_config"]}))
    (path / "preprocessor_config.json").write_text(json.dumps({**SETTINGS, **settings}))
    changes = {}
    for name, tensor in load_file(path / "model.safetensors").items():
        for old, new in NAMES:
            if name.startswith(old):
                changes[name] = new + name.removeprefix(old), tensor
    assert len(changes) == 8
    edit_tensors(path, remove=tuple(changes), **dict(changes.values()))
    return path


def test_the_release_gives_the_bits_of_kimi_k2_5(tmp_path: Path) -> None:
    """Of dark colors both round pixels alike."""
    pixels = np.random.RandomState(0).randint(0, 10, (50, 70, 3), dtype=np.uint8)
    prompt: Any = {"prompt": "w1 <image> w2", "multi_modal_data": {"image": Image.fromarray(pixels)}}
    path, found = make_vision_checkpoint("kimi_k25", tmp_path), []
    for each in (path, None):
        with LLM(str(each or as_released(path)), dtype="float32", num_gpu_blocks_override=64) as llm:
            [output] = llm.generate([prompt], PARAMS)
            found.append([(each.token_ids, each.logprobs) for each in output.outputs])
    assert found[0] == found[1]
    opened = LoadedModel.open(Checkpoint.open(path), Mesh.single(), torch.float32)
    opened.check_tensors()


@pytest.mark.parametrize("size", [(84, 56), (30, 40), (300, 200), (11, 300)])
def test_pixels_are_those_of_the_release(size: tuple[int, int], tmp_path: Path) -> None:
    path = as_released(make_vision_checkpoint("kimi_k25", tmp_path))
    checkpoint = Checkpoint.open(path)
    settings = image_settings(checkpoint)
    assert settings is not None
    found = ImagePrompts(checkpoint, settings, lambda _: [], {"image": 4}).arrays(given := image(0, *size))
    width, height = size
    if (count := (width // 14) * (height // 14)) > 24:
        scale = (24 / count) ** 0.5
        given = given.resize((int(width * scale), int(height * scale)), Image.Resampling.BICUBIC)
    filled = Image.new("RGB", tuple(-(-side // 28) * 28 for side in given.size))  # type: ignore[arg-type]
    filled.paste(given)
    pixels = torch.from_numpy(np.asarray(filled).copy()).permute(2, 0, 1).float().div(255).sub(0.5).div(0.5)
    _, rows, columns = (side // 14 for side in pixels.shape)
    patches = pixels.view(3, rows, 14, columns, 14).permute(1, 3, 0, 2, 4).reshape(-1, 3, 14, 14)
    assert np.array_equal(found["pixel_values"], patches.numpy())
    assert found["image_grid_thw"].tolist() == [[1, rows, columns]]


@pytest.mark.parametrize(
    ("settings", "error", "said"),
    [
        ({"pad_input": False}, UnsupportedModel, "pad_input is false, expected true"),
        ({"image_mean": None}, CheckpointError, "image_mean is null, expected three numbers"),
        ({"merge_kernel_size": [4, 4]}, UnsupportedModel, r"merge_kernel_size is \[4, 4\], expected \[2, 2\]"),
        ({"in_token_limit": 0}, CheckpointError, "in_token_limit is 0, expected an integer of at least 1"),
    ],
)
def test_other_settings_of_images_are_refused(
    settings: dict[str, Any], error: type[OctavoError], said: str, tmp_path: Path
) -> None:
    path = as_released(make_vision_checkpoint("kimi_k25", tmp_path), **settings)
    with pytest.raises(error, match=said):
        image_settings(Checkpoint.open(path))
