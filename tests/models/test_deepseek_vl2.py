"""DeepSeek-VL2: SigLIP by tiles beside a text model of DeepSeek."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image, ImageOps
from safetensors.torch import load_file, save_file

from octavo.config.checkpoint import Checkpoint
from octavo.config.media.images import image_settings
from octavo.config.section import Section
from octavo.errors import CheckpointError, UnsupportedModel
from octavo.multimodal.processors.deepseek_vl2_images import DeepseekVl2Images
from tests.e2e.test_images import PROMPTS, bits, generate
from tests.fakes.checkpoints import make_checkpoint
from tests.fakes.vision import image, write_tokenizer
from tests.fakes.vision_sizes import IMAGE
from tests.models.test_image_relatives import encoded

pytestmark = pytest.mark.slow

SIDE, PATCH, WIDTH = 44, 14, 32  # three patches on a side, of which a fourth is added, and two pixels that are not read
RESOLUTIONS = [[SIDE, SIDE], [SIDE, 2 * SIDE], [2 * SIDE, SIDE], [2 * SIDE, 2 * SIDE]]
VISION = {"heads": 2, "image_size": SIDE, "layers": 2, "mlp_ratio": 1.5, "patch_size": PATCH, "width": WIDTH}
NAMES = {"norm1": "layer_norm1", "norm2": "layer_norm2", "mlp.fc1": "mlp.fc1", "mlp.fc2": "mlp.fc2"}


def make_deepseek_vl2(path: Path) -> Path:
    """Write a random model with the text model of DeepSeek V2, by the names of the releases."""
    text = make_checkpoint("deepseek_v2", path / "text", num_hidden_layers=1)
    config = json.loads((text / "config.json").read_text())
    hidden, generator = config["hidden_size"], torch.Generator().manual_seed(0)
    shapes = {"vision.patch_embed.proj.weight": (WIDTH, 3, PATCH, PATCH), "vision.patch_embed.proj.bias": (WIDTH,)}
    shapes |= {"vision.pos_embed": (1, 9, WIDTH), "vision.attn_pool.latent": (1, 1, WIDTH)}
    sizes = {"attn.qkv": (96, 32), "attn.proj": (32, 32), "mlp.fc1": (48, 32), "mlp.fc2": (32, 48)}
    layers = {f"vision.blocks.{layer}.{name}": size for layer in range(2) for name, size in sizes.items()}
    layers |= {"projector.layers.0": (hidden, 4 * WIDTH), "projector.layers.2": (hidden, hidden)}
    norms = ["vision.norm", *(f"vision.blocks.{layer}.norm{each}" for layer in range(2) for each in (1, 2))]
    for name, size in [*layers.items(), *((each, (WIDTH,)) for each in norms)]:
        shapes |= {f"{name}.weight": size, f"{name}.bias": size[:1]}
    shapes |= {"image_newline": (hidden,), "view_seperator": (hidden,)}
    made = {name: torch.randn(shape, generator=generator) * 0.2 for name, shape in shapes.items()}
    made |= {f"language.{name}": each for name, each in load_file(text / "model.safetensors").items()}
    save_file(made, path / "model.safetensors")
    own = {"model_type": "deepseek_vl_v2", "tile_tag": "2D", "global_view_pos": "head", "vision_config": VISION}
    projector = {"model_type": "mlp_projector", "input_dim": WIDTH, "n_embed": hidden}
    written = {**own, "projector_config": projector, "language_config": config}
    (path / "config.json").write_text(json.dumps({**written, "candidate_resolutions": RESOLUTIONS}))
    (path / "processor_config.json").write_text(
        json.dumps({"candidate_resolutions": RESOLUTIONS, "patch_size": PATCH, "downsample_ratio": 2})
    )
    write_tokenizer(path)
    return path


def seen_by_siglip(tensors: dict[str, torch.Tensor], pixels: torch.Tensor) -> torch.Tensor:
    """Return [tiles, 3, 3, width] of SigLIP in plain torch."""

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.linear(x, tensors[f"{name}.weight"], tensors[f"{name}.bias"])

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.layer_norm(x, (WIDTH,), tensors[f"{name}.weight"], tensors[f"{name}.bias"], 1e-6)

    start = "vision.patch_embed.proj"
    x = F.conv2d(pixels, tensors[f"{start}.weight"], tensors[f"{start}.bias"], stride=PATCH)
    x = x.flatten(2).transpose(1, 2) + tensors["vision.pos_embed"]
    for layer in ("vision.blocks.0", "vision.blocks.1"):
        parts = linear(norm(x, f"{layer}.norm1"), f"{layer}.attn.qkv").view(len(x), 9, 3, 2, 16).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*parts).transpose(1, 2).reshape(len(x), 9, WIDTH)
        x = x + linear(mixed, f"{layer}.attn.proj")
        inner = F.gelu(linear(norm(x, f"{layer}.norm2"), f"{layer}.mlp.fc1"), approximate="tanh")
        x = x + linear(inner, f"{layer}.mlp.fc2")
    return norm(x, "vision.norm").view(len(x), 3, 3, WIDTH)


def test_neighbours_of_siglip_are_joined_and_rows_end_with_a_vector(tmp_path: Path) -> None:
    path = make_deepseek_vl2(tmp_path)
    found, arrays = encoded(path)
    tensors = load_file(path / "model.safetensors")
    pixels = arrays["pixel_values"]
    assert arrays["grids"].tolist() == [[2, 2]]  # of 84 x 56 pixels
    with torch.inference_mode():
        whole = F.pad(seen_by_siglip(tensors, pixels), (0, 0, 0, 1, 0, 1))
        made = []
        for tiles in (((0,),), ((1, 2), (3, 4))):
            for row in tiles:
                for line in (0, 2):
                    for tile, place in ((tile, place) for tile in row for place in (0, 2)):
                        block = whole[tile, line : line + 2, place : place + 2]
                        x = block.permute(2, 0, 1).reshape(-1)  # a number of all four, and then the next
                        for name in ("0", "2"):
                            x = F.gelu(x) if name == "2" else x
                            x = F.linear(x, *(tensors[f"projector.layers.{name}.{e}"] for e in ("weight", "bias")))
                        made.append(x)
                    made.append(tensors["image_newline"])
            made.append(tensors["view_seperator"])
    torch.testing.assert_close(found, torch.stack(made[:-1]), atol=1e-5, rtol=1e-5)
    outputs = generate(path, PROMPTS)
    assert bits(generate(path, PROMPTS, max_num_batched_tokens=5)) == bits(outputs)
    assert outputs[0].prompt_token_ids is not None
    assert outputs[0].prompt_token_ids.count(IMAGE) == len(found) == 6 + 1 + 4 * 5


def test_more_than_two_images_of_a_prompt_are_not_cut(tmp_path: Path) -> None:
    path = make_deepseek_vl2(tmp_path)
    counts = []
    for num in (2, 3):
        given = {"prompt": "<image> " * num, "multi_modal_data": {"image": [image(0)] * num}}
        [output] = generate(path, [given])
        assert output.prompt_token_ids is not None
        counts.append(output.prompt_token_ids.count(IMAGE))
    assert counts == [2 * 27, 3 * (6 + 1 + 6)]


@pytest.mark.parametrize("size", [(84, 56), (30, 90), (300, 20), (10, 10)])
def test_pixels_are_those_of_the_release(size: tuple[int, int]) -> None:
    settings = Section({"candidate_resolutions": RESOLUTIONS}, "settings")
    given = image(0, *size)
    found = DeepseekVl2Images(settings, Section({"vision_config": {"image_size": SIDE}}, "config.json"))([given], "np")
    best, most, least = (0, 0), 0, 0
    for width, height in RESOLUTIONS:
        scale = min(width / size[0], height / size[1])
        kept = min(int(size[0] * scale) * int(size[1] * scale), size[0] * size[1])
        wasted = width * height - kept
        if kept > most or (kept == most and wasted < least):
            best, most, least = (width, height), kept, wasted
    assert found["grids"].tolist() == [[best[1] // SIDE, best[0] // SIDE]]
    gray, cubic = (127, 127, 127), Image.Resampling.BICUBIC
    whole, cut = (ImageOps.pad(given, each, method=cubic, color=gray) for each in ((SIDE, SIDE), best))
    corners = [(left, top) for top in range(0, best[1], SIDE) for left in range(0, best[0], SIDE)]
    tiles = [whole, *(cut.crop((left, top, left + SIDE, top + SIDE)) for left, top in corners)]
    expected = (torch.from_numpy(np.stack([np.asarray(each) for each in tiles])).permute(0, 3, 1, 2) / 255 - 0.5) / 0.5
    assert torch.equal(torch.from_numpy(found["pixel_values"]), expected)


LANGUAGE = {"hidden_size": 32, "num_hidden_layers": 2, "first_k_dense_replace": 1}


def released(language: Any = {}, **changes: Any) -> Checkpoint:  # noqa: B006
    projector = {"input_dim": WIDTH, "n_embed": 32}
    parts = {"language_config": {**LANGUAGE, **language}, "vision_config": VISION, "projector_config": projector}
    return Checkpoint(Path("released"), {"model_type": "deepseek_vl_v2", **parts, **changes})


@pytest.mark.parametrize(
    ("language", "family"),
    [({"use_mla": False}, "deepseek"), ({}, "deepseek_v2"), ({"topk_method": "noaux_tc"}, "deepseek_v3")],
)
def test_text_models_of_the_three_sizes(language: dict[str, Any], family: str) -> None:
    found = released(language)
    assert (found.architecture, found.text_model_type) == ("DeepseekVLV2ForCausalLM", family)
    assert found.values["mlp_layer_types"] == ["dense", "sparse"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tile_tag": "1D"}, "tile_tag is .1D., expected .2D."),
        ({"global_view_pos": "tail"}, "global_view_pos is .tail., expected .head."),
        ({"projector_config": {"input_dim": WIDTH, "n_embed": 64}}, "n_embed is 64, expected 32"),
        ({"vision_config": {**VISION, "class_token": True}}, "class_token is true, expected false"),
        ({"candidate_resolutions": [[SIDE, 50]]}, "candidate_resolutions is .*, expected widths and heights"),
    ],
)
def test_values_that_no_release_has_are_refused_by_name(changes: dict[str, Any], said: str) -> None:
    with pytest.raises((CheckpointError, UnsupportedModel), match=said):
        image_settings(released(**changes))
