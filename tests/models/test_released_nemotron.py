"""Images of Nemotron 3 Nano Omni: its release, its image processor, and what is refused."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from octavo.config.checkpoint import Checkpoint
from octavo.config.media.images import image_settings
from octavo.config.released import nemotron as released_nemotron
from octavo.config.section import Section
from octavo.errors import CheckpointError, UnsupportedModel
from octavo.multimodal.processors.nemotron_images import NemotronImages
from tests.e2e.test_images import PARAMS, PROMPTS, bits, generate
from tests.fakes.checkpoints import edit_config, make_checkpoint
from tests.fakes.rank_threads import llm_of_ranks
from tests.fakes.vision import image, load_vision_oracle, make_vision_checkpoint, write_random
from tests.fakes.vision_families import FAMILIES
from tests.fakes.vision_sizes import IMAGE
from tests.models.test_image_relatives import encoded


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


def make_second(path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Write a random model by the names of Nemotron Nano 2 VL, and return transformers' class with the same encoder."""
    monkeypatch.setitem(released_nemotron._RADIO_SIZES, "vit_small_patch16_224", (32, 2, 2))
    config, processor = FAMILIES["nemotron_omni"][0]()
    config.vision_config.mlp_ratio = 4.0
    write_random(path, config, processor, "NemotronH_Omni_Reasoning_V3")
    oracle = load_vision_oracle(path, "NemotronH_Omni_Reasoning_V3")
    teachers = [{"name": name} for name in ("clip", "siglip", "sam", "sam")]
    args = {"model": "vit_small_patch16_224", "teachers": teachers, "cls_token_per_teacher": True}
    args |= {"register_multiple": 10, "cpe_max_size": 112}
    stated = json.loads((path / "config.json").read_text())
    edit_config(
        path,
        ("text_config", "image_token_id", "vision_hidden_size", "video_temporal_patch_size"),
        architectures=["NemotronH_Nano_VL_V2"],
        model_type="NemotronH_Nano_VL_V2",
        llm_config=stated["text_config"],
        img_context_token_id=stated["image_token_id"],
        vit_hidden_size=32,
        vision_config={"args": args, "patch_size": 14},
        force_image_size=56,
        norm_mean=[0.4, 0.5, 0.6],
        norm_std=[0.2, 0.3, 0.4],
    )
    (path / "preprocessor_config.json").write_text(json.dumps({"max_num_tiles": 4, "norm_type": "radio"}))
    return oracle


def test_tiles_of_nemotron_nano_2_are_encoded_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    oracle = make_second(tmp_path, monkeypatch)
    found, arrays = encoded(tmp_path)
    given = torch.from_numpy(np.array(image(0))).permute(2, 0, 1)[None].float()
    tiles = [
        torch.nn.functional.interpolate(given, size, mode="bicubic", antialias=True) for size in ((56, 112), (56, 56))
    ]
    mean, std = (torch.tensor(each).view(1, 3, 1, 1) for each in ([0.4, 0.5, 0.6], [0.2, 0.3, 0.4]))
    pixels = torch.cat([*tiles[0].split(56, 3), tiles[1]])  # 84 x 56 pixels become two tiles and the whole image
    pixels = (pixels / 255 - mean) / std
    patches = pixels.view(3, 3, 4, 14, 4, 14).permute(0, 2, 4, 1, 3, 5).reshape(48, -1)
    torch.testing.assert_close(arrays["pixel_values"], patches, rtol=0, atol=1e-4)
    with torch.inference_mode():
        grids = torch.tensor([[4, 4]] * 3)
        read = oracle.model.get_image_features if hasattr(oracle, "model") else oracle.get_image_features
        expected = read(pixel_values=arrays["pixel_values"], image_grid_hw=grids).pooler_output
    expected = expected if isinstance(expected, torch.Tensor) else torch.cat(list(expected))
    torch.testing.assert_close(found, expected.reshape(found.shape), rtol=1e-4, atol=1e-4)
    whole = generate(tmp_path, PROMPTS)
    assert whole[0].prompt_token_ids is not None
    assert whole[0].prompt_token_ids.count(IMAGE) == len(found) == 12
    assert bits(generate(tmp_path, PROMPTS, max_num_batched_tokens=5)) == bits(whole)


@pytest.mark.long
def test_the_text_of_nemotron_nano_2_is_served_where_its_encoder_is_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_second(tmp_path, monkeypatch)
    expected = bits(generate(tmp_path, PROMPTS[3:]))
    vision = json.loads((tmp_path / "config.json").read_text())["vision_config"]
    edit_config(tmp_path, vision_config={**vision, "args": {**vision["args"], "min_num_patches": 8}})
    assert image_settings(Checkpoint.open(tmp_path)) is None
    assert bits(generate(tmp_path, PROMPTS[3:])) == expected


def make_nano(path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Write a random Llama Nemotron Nano VL by the names of its release, and return transformers' encoder of it."""
    oracle = make_second(path, monkeypatch)
    text = make_checkpoint("llama", path / "text", num_hidden_layers=1)
    config = json.loads((text / "config.json").read_text())
    hidden, generator = config["hidden_size"], torch.Generator().manual_seed(4)
    tensors = load_file(path / "model.safetensors")
    tensors = {name: each for name, each in tensors.items() if "vision_model." in name}
    tensors |= {f"language_model.{name}": each for name, each in load_file(text / "model.safetensors").items()}
    shapes: dict[str, tuple[int, ...]] = {"0.weight": (128,), "0.bias": (128,), "1.weight": (24, 128), "1.bias": (24,)}
    shapes |= {"3.weight": (hidden, 24), "3.bias": (hidden,)}
    tensors |= {f"mlp1.{name}": torch.randn(shape, generator=generator) * 0.3 for name, shape in shapes.items()}
    save_file(tensors, path / "model.safetensors")
    names = {"architectures": ["Llama_Nemotron_Nano_VL"], "model_type": "Llama_Nemotron_Nano_VL", "ps_version": "v2"}
    edit_config(path, ("norm_mean", "norm_std", "img_context_token_id"), **names, llm_config=config)
    (path / "preprocessor_config.json").write_text(json.dumps({"max_num_tiles": 4, "image_size": 56}))
    return oracle


@pytest.mark.long
def test_tiles_of_llama_nemotron_are_encoded_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    oracle = make_nano(tmp_path, monkeypatch)
    found, arrays = encoded(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    pixels = arrays["pixel_values"]  # of two tiles and the whole image
    mean, std = (
        torch.tensor(each).view(3, 1, 1) for each in (released_nemotron._RADIO_MEAN, released_nemotron._RADIO_STD)
    )
    whole = torch.from_numpy(np.array(image(0).resize((56, 56)))).permute(2, 0, 1) / 255
    torch.testing.assert_close(pixels[2], (whole - mean) / std, rtol=0, atol=1e-5)
    patches = pixels.view(3, 3, 4, 14, 4, 14).permute(0, 2, 4, 1, 3, 5).reshape(3, 16, -1)
    tower = getattr(oracle, "model", oracle).vision_model
    with torch.inference_mode():
        made = []
        for tile in patches:
            x = tower.embeddings(tile, torch.tensor([[4, 4]]))
            for layer in tower.encoder.layer:
                x = layer(x)
            seen = x[0, -16:].view(2, 2, 2, 2, 32).transpose(1, 2).reshape(4, 128)
            x = F.layer_norm(seen, (128,), tensors["mlp1.0.weight"], tensors["mlp1.0.bias"])
            x = F.gelu(F.linear(x, tensors["mlp1.1.weight"], tensors["mlp1.1.bias"]))
            made.append(F.linear(x, tensors["mlp1.3.weight"], tensors["mlp1.3.bias"]))
    torch.testing.assert_close(found, torch.cat(made), rtol=1e-4, atol=1e-4)
    outputs = generate(tmp_path, PROMPTS)
    assert outputs[0].prompt_token_ids is not None
    assert outputs[0].prompt_token_ids.count(IMAGE) == len(found) == 12
    assert bits(generate(tmp_path, PROMPTS * 2, max_num_batched_tokens=5)) == bits(outputs) * 2
    with llm_of_ranks(tmp_path, 2, dtype="float32", num_gpu_blocks_override=64, max_num_seqs=4) as llm:
        assert bits(llm.generate(PROMPTS * 2, PARAMS)) == bits(outputs) * 2


@pytest.mark.parametrize(
    ("config", "settings", "said"),
    [
        ({"ps_version": "v1"}, {}, 'ps_version is "v1", expected "v2"'),
        ({"downsample_ratio": 0.25}, {}, "downsample_ratio is 0.25, expected 0.5"),
        ({"force_image_size": 60}, {}, "force_image_size is 60, expected a multiple of two patches, 28 pixels"),
        ({"vit_hidden_size": 16}, {}, "vit_hidden_size is 16, expected hidden_size of vision_config, which is 32"),
        ({}, {"image_size": 512}, "image_size is 512, expected force_image_size of config.json, which is 56"),
        ({}, {"use_thumbnail": False}, "use_thumbnail is false, expected true"),
        ({}, {"max_num_tiles": 0}, "max_num_tiles is 0, expected an integer of at least 1"),
    ],
)
@pytest.mark.long
def test_values_that_llama_nemotron_does_not_have_are_refused(
    config: dict[str, Any], settings: dict[str, Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_nano(tmp_path, monkeypatch)
    edit_config(tmp_path, **config)
    file = tmp_path / "preprocessor_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **settings}))
    with pytest.raises((CheckpointError, UnsupportedModel), match=said):
        generate(tmp_path, ["w1"])
