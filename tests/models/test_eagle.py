"""Eagle 2.5: Qwen2 around what SigLIP makes of tiles."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo.config.checkpoint import Checkpoint
from octavo.config.media.images import image_settings
from octavo.distributed.mesh import Mesh
from octavo.errors import CheckpointError, UnsupportedModel
from octavo.models.loader import LoadedModel
from octavo.multimodal.image_prompts import ImagePrompts
from tests.e2e.test_images import assert_agrees, bits, generate
from tests.fakes.checkpoints import edit_config, make_checkpoint
from tests.fakes.vision import image, write_tokenizer
from tests.fakes.vision_sizes import IMAGE, SIDE, TOWER, tf
from tests.models.test_nemotron_pages import with_tiles

PROMPTS: list[Any] = [
    {"prompt": "w1 <image-1> w2", "multi_modal_data": {"image": image(0)}},
    {"prompt": "<image-1> w5 <image-2>", "multi_modal_data": {"image": [image(2, 40, 40), image(1, 30, 200)]}},
    "w1 w2 w3",
]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A random model by the names of the release."""
    text, generator = make_checkpoint("qwen2", tmp_path / "text"), torch.Generator().manual_seed(0)
    config = json.loads((text / "config.json").read_text())
    width = config["hidden_size"]
    shapes = {"mlp1.0.weight": (128,), "mlp1.0.bias": (128,), "mlp1.1.weight": (width, 128), "mlp1.1.bias": (width,)}
    shapes |= {"mlp1.3.weight": (width, width), "mlp1.3.bias": (width,)}
    tower = tf.SiglipVisionModel(tf.SiglipVisionConfig(**TOWER))  # with the head that the release has
    shapes |= {f"vision_model.vision_model.{name}": each.shape for name, each in tower.state_dict().items()}
    made = {name: torch.randn(shape, generator=generator) * 0.2 for name, shape in shapes.items()}
    stored = load_file(text / "model.safetensors")
    made |= {f"language_model.{name}": each for name, each in stored.items()}
    save_file(made, tmp_path / "model.safetensors")
    own: dict[str, Any] = {"architectures": ["Eagle2_5_VLForConditionalGeneration"], "model_type": "eagle_2_5_vl"}
    own |= {"image_token_index": IMAGE, "select_layer": -1, "use_pixel_shuffle": True, "downsample_ratio": 0.5}
    vision = {**TOWER, "model_type": "siglip_vision_model"}
    (tmp_path / "config.json").write_text(json.dumps({**own, "text_config": config, "vision_config": vision}))
    settings = {"image_processor_type": "Eagle2_5_VLImageProcessorFast", "size": SIDE, "max_dynamic_tiles": 4}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    write_tokenizer(tmp_path)
    return tmp_path


def logits_of(path: Path, ids: list[int], pixels: torch.Tensor | None) -> torch.Tensor:
    """What transformers' classes make of a prompt and its tiles, [tokens, vocabulary]."""
    found = load_file(path / "model.safetensors")
    model = tf.Qwen2ForCausalLM.from_pretrained(path / "text", attn_implementation="eager").eval()
    x = model.get_input_embeddings()(torch.tensor(ids))
    if pixels is not None:
        x = with_tiles(x, ids, found, pixels)
    logits: torch.Tensor = model(inputs_embeds=x[None]).logits[0]
    return logits


@pytest.mark.long
@pytest.mark.slow
def test_text_around_images_is_what_transformers_classes_make(path: Path) -> None:
    checkpoint = Checkpoint.open(path)
    settings = image_settings(checkpoint)
    assert settings is not None
    written = ImagePrompts(checkpoint, settings, lambda _: [40], {"image": 4})
    outputs = generate(path, PROMPTS)
    for output, prompt in zip(outputs, PROMPTS, strict=True):
        given = prompt["multi_modal_data"]["image"] if isinstance(prompt, dict) else []
        given = given if isinstance(given, list) else [given]
        pixels = torch.from_numpy(written.arrays(*given)["pixel_values"]) if given else None
        assert output.prompt_token_ids.count(IMAGE) == (0 if pixels is None else 4 * len(pixels))
        drawn = list(output.outputs[0].token_ids)
        drawn = drawn[: drawn.index(IMAGE) if IMAGE in drawn else None]
        with torch.inference_mode():
            assert_agrees(output, drawn, logits_of(path, [*output.prompt_token_ids, *drawn], pixels))
    assert bits(generate(path, PROMPTS * 2, max_num_batched_tokens=5)) == bits(outputs) * 2


def test_an_image_has_its_number_before_its_tiles(path: Path) -> None:
    checkpoint = Checkpoint.open(path)
    settings = image_settings(checkpoint)
    assert settings is not None
    texts: list[str] = []
    written = ImagePrompts(checkpoint, settings, lambda text: texts.append(text) or [40, 41], {"image": 4})
    ids, _ = written.expand([7, IMAGE, IMAGE], {"image": [image(0, 40, 40)] * 2})
    assert ids == [7, *([40, 41] * 2 + [IMAGE] * 4 + [40, 41]) * 2]
    assert texts[-6:] == ["<image 1>", "<img>", "</img>", "<image 2>", "<img>", "</img>"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"select_layer": -4}, "select_layer is -4, expected -1"),
        ({"use_pixel_shuffle": False}, "use_pixel_shuffle is false, expected true"),
        ({"downsample_ratio": 1.0}, "downsample_ratio is 1.0, expected 0.5"),
        ({"pad2square": True}, "pad2square is true, expected false"),
        ({"force_image_size": 28}, "force_image_size is 28, expected image_size of vision_config"),
        ({"vision_config": {**TOWER, "model_type": "radio"}}, 'model_type is "radio", expected "siglip_vision_model"'),
    ],
    ids=str,
)
def test_values_that_no_release_has_are_refused_by_name(change: dict[str, Any], said: str, path: Path) -> None:
    edit_config(path, **change)
    with pytest.raises((CheckpointError, UnsupportedModel), match=said):
        LoadedModel.open(Checkpoint.open(path), Mesh.single(), torch.float32)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"size": {"height": 112, "width": 112}}, "size is .*, expected the image_size of vision_config, 56 x 56"),
        ({"use_thumbnail": False}, "use_thumbnail is false, expected true"),
        ({"pad_during_tiling": True}, "pad_during_tiling is true, expected false"),
    ],
    ids=str,
)
def test_other_ways_to_cut_images_are_refused_by_name(change: dict[str, Any], said: str, path: Path) -> None:
    file = path / "preprocessor_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises((CheckpointError, UnsupportedModel), match=said):
        image_settings(Checkpoint.open(path))
