"""Images of Nemotron 3 Nano Omni: its release, its image processor, and what is refused."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo.config.checkpoint import Checkpoint
from octavo.config.images import image_settings
from octavo.config.section import Section
from octavo.errors import CheckpointError, UnsupportedModel
from octavo.multimodal.nemotron_images import NemotronImages
from tests.e2e.test_images import PROMPTS, bits, generate
from tests.fakes.checkpoints import edit_config
from tests.fakes.vision import image, make_vision_checkpoint


def as_released(path: Path) -> Path:
    """Change config and settings to those of the release, whose tensors have the names that transformers writes."""
    config = json.loads((path / "config.json").read_text())
    edit_config(
        path,
        ("text_config", "image_token_id", "vision_hidden_size"),
        architectures=["NemotronH_Nano_Omni_Reasoning_V3"],
        model_type="NemotronH_Nano_Omni_Reasoning_V3",
        llm_config=config["text_config"],
        img_context_token_id=config["image_token_id"],
        vit_hidden_size=config["vision_hidden_size"],
    )
    settings = json.loads((path / "preprocessor_config.json").read_text())
    del settings["image_processor_type"]
    settings |= {"norm_mean": [0.48145466, 0.4578275, 0.40821073], "norm_std": [0.26862954, 0.26130258, 0.27577711]}
    (path / "preprocessor_config.json").write_text(json.dumps(settings))
    return path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return make_vision_checkpoint("nemotron_omni", tmp_path)


def test_the_release_is_the_model_of_transformers_layout_without_factors_of_layers(path: Path) -> None:
    tensors = load_file(path / "model.safetensors")
    assert "vision_model.radio_model.model.blocks.0.attn.qkv.weight" in tensors
    factors = {name: torch.ones_like(each) for name, each in tensors.items() if name.endswith(".lambda1")}
    assert len(factors) == 4
    save_file(tensors | factors, path / "model.safetensors")
    expected = bits(generate(path, PROMPTS))
    others = {name: each for name, each in tensors.items() if name not in factors}
    others["vision_model.radio_model.input_conditioner.norm_mean"] = torch.zeros(3, 1, 1)
    others["sound_encoder.encoder.layers.0.norm_out.weight"] = torch.ones(3)
    save_file(others, path / "model.safetensors")
    assert bits(generate(as_released(path), PROMPTS)) == expected


def test_without_settings_of_images_the_text_model_is_served(path: Path) -> None:
    expected = bits(generate(path, PROMPTS[3:]))
    (path / "preprocessor_config.json").unlink()
    assert image_settings(Checkpoint.open(path)) is None
    seen, text = generate(path, [PROMPTS[0], PROMPTS[3]])
    assert seen.error is not None
    assert bits([text]) == expected


SIZES: list[tuple[tuple[int, int], tuple[int, int]]] = [
    ((16, 16), (32, 32)),
    ((512, 512), (32, 32)),
    ((1000, 600), (38, 64)),
    ((3840, 2160), (86, 154)),
    ((40, 4000), (294, 4)),
]
"""Widths and heights, and rows and columns of patches, as transformers computes them."""


@pytest.mark.parametrize(("size", "grid"), SIZES)
def test_grids_are_those_of_transformers(size: tuple[int, int], grid: tuple[int, int]) -> None:
    assert NemotronImages(Section({}, "a"), Section({}, "b"))._grid(*size) == grid


@pytest.mark.parametrize("size", [(70, 90), (300, 200), (20, 30), (84, 56)])
def test_pixels_are_scaled_as_floats(size: tuple[int, int]) -> None:
    config = Section({"vision_config": {"patch_size": 14}}, "b")
    settings = Section({"min_num_patches": 8, "max_num_patches": 40, "patch_size": 14}, "a")
    given = image(1, *size)
    made = NemotronImages(settings, config)([given], "np")
    rows, columns = made["image_grid_hw"][0].tolist()
    pixels = torch.from_numpy(np.array(given)).permute(2, 0, 1)[None].float()
    sides = rows * 14, columns * 14
    if pixels.shape[-2:] != sides:
        pixels = torch.nn.functional.interpolate(pixels, sides, mode="bicubic", antialias=True, align_corners=False)
    mean, std = torch.tensor([0.48145466, 0.4578275, 0.40821073]), torch.tensor([0.26862954, 0.26130258, 0.27577711])
    pixels = ((pixels[0] / 255 - mean[:, None, None]) / std[:, None, None]).view(3, rows, 14, columns, 14)
    wanted = pixels.permute(1, 3, 0, 2, 4).reshape(rows * columns, -1)
    torch.testing.assert_close(torch.from_numpy(made["pixel_values"]), wanted, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"patch_size": 16}, "patch_size is 16, expected patch_size of the encoder"),
        ({"downsample_ratio": 0.25}, "downsample_ratio is 0.25, expected 0.5"),
        ({"max_num_patches": 0, "max_model_len": 1 << 20}, "max_num_patches is 0, expected 1 to"),
        ({"resample": 2}, "resample is 2, expected 3"),
    ],
)
def test_settings_of_another_model_are_refused(path: Path, settings: dict[str, Any], said: str) -> None:
    file = path / "preprocessor_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))
    with pytest.raises((CheckpointError, UnsupportedModel), match=said):
        generate(path, ["w1"])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"vision_hidden_size": 16}, "vision_hidden_size is 16, expected hidden_size of vision_config, which is 32"),
        ({"downsample_ratio": -1}, "downsample_ratio is -1"),
    ],
)
def test_a_config_that_no_release_has_is_refused(path: Path, changes: dict[str, Any], said: str) -> None:
    edit_config(path, **changes)
    with pytest.raises((CheckpointError, UnsupportedModel), match=said):
        generate(path, ["w1"])


def test_a_large_image_is_scaled_down_without_arrays_of_its_size() -> None:
    from PIL import Image

    image_of_floats = 3 * 4 * 1200 * 1500
    settings = Section({"min_num_patches": 4, "max_num_patches": 64}, "preprocessor_config.json")
    processor = NemotronImages(settings, Section({"vision_config": {}}, "config.json"))
    large = Image.linear_gradient("L").resize((1500, 1200)).convert("RGB")
    tracemalloc.start()
    try:
        found = processor([large], return_tensors="np")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert found["pixel_values"].shape[0] <= 64
    assert peak < image_of_floats / 10
