"""NVIDIA's models of pages: Llama that sees both sides, around what SigLIP makes of tiles."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from octavo import LLM
from octavo.config.checkpoint import Checkpoint
from octavo.config.media.images import image_settings
from octavo.config.section import Section
from octavo.errors import CheckpointError, UnsupportedModel
from octavo.multimodal.image_prompts import ImagePrompts
from octavo.multimodal.processors.nemotron_tiles import NemotronTiles
from tests.fakes.checkpoints import edit_config, make_checkpoint
from tests.fakes.vision import image, write_tokenizer
from tests.fakes.vision_sizes import IMAGE, SIDE, TOWER, tf

TEXT: dict[str, Any] = {"num_hidden_layers": 2, "tie_word_embeddings": True}
ARGS: dict[str, Any] = {"dtype": "float32", "num_gpu_blocks_override": 64}
PAGES: list[Any] = [
    {"prompt": "w1 <image> w2", "multi_modal_data": {"image": image(0)}},
    {"prompt": "<image> w5", "multi_modal_data": {"image": image(2, 40, 40)}},
    "w1 w2 w3",
]


def make_pages(path: Path, architecture: str = "LlamaNemotronVLModel", begin: str = "") -> Path:
    """Write a random model by the names of the releases. begin: what stands before all names but that of the head."""
    text = make_checkpoint("llama", path / "text", **TEXT)
    config = json.loads((text / "config.json").read_text())
    width, generator = config["hidden_size"], torch.Generator().manual_seed(0)
    shapes = {"mlp1.0.weight": (128,), "mlp1.0.bias": (128,), "mlp1.1.weight": (width, 128), "mlp1.1.bias": (width,)}
    shapes |= {"mlp1.3.weight": (width, width), "mlp1.3.bias": (width,)}
    tower = tf.SiglipVisionModel(tf.SiglipVisionConfig(**TOWER))  # with the head that releases have
    shapes |= {f"vision_model.vision_model.{name}": each.shape for name, each in tower.state_dict().items()}
    made = {name: torch.randn(shape, generator=generator) * 0.2 for name, shape in shapes.items()}
    stored = load_file(text / "model.safetensors")
    made |= {n.replace("model.", "language_model."): t for n, t in stored.items() if n != "lm_head.weight"}
    made = {begin + name: each for name, each in made.items()}
    own: dict[str, Any] = {"architectures": [architecture], "model_type": "llama_nemotron_vl", "pooling": "avg"}
    own |= {"img_context_token_id": IMAGE, "force_image_size": 56, "select_layer": -1, "ps_version": "v2"}
    inner = {**config, "architectures": ["LlamaBidirectionalModel"], "model_type": "llama_bidirec"}
    if architecture.endswith("Classification"):
        made["score.weight"] = torch.randn(1, width, generator=generator)
        inner |= {"id2label": {"0": "LABEL_0"}, "temperature": 1.0}
    save_file(made, path / "model.safetensors")
    vision = {**TOWER, "model_type": "siglip_vision_model"}
    (path / "config.json").write_text(json.dumps({**own, "llm_config": inner, "vision_config": vision}))
    (path / "processor_config.json").write_text(json.dumps({"max_input_tiles": 4, "image_size": 56}))
    write_tokenizer(path)
    return path


def with_tiles(x: torch.Tensor, ids: list[int], found: dict[str, torch.Tensor], pixels: torch.Tensor) -> torch.Tensor:
    """Return embeddings [tokens, hidden] with what SigLIP and the projector make of tiles at the tokens of images."""
    tower = tf.SiglipVisionModel(tf.SiglipVisionConfig(**TOWER)).eval()
    tower.load_state_dict({n[26:]: t for n, t in found.items() if n.startswith("vision_model.")})
    seen = tower(pixels).last_hidden_state.view(-1, 4, 4, 32)
    blocks = [
        tile[row : row + 2, column : column + 2].reshape(-1) for tile in seen for row in (0, 2) for column in (0, 2)
    ]
    norm, first, second = ([found[f"mlp1.{number}.{each}"] for each in ("weight", "bias")] for number in (0, 1, 3))
    made = F.linear(F.gelu(F.linear(F.layer_norm(torch.stack(blocks), (128,), *norm), *first)), *second)
    return x.index_copy(0, torch.tensor([place for place, each in enumerate(ids) if each == IMAGE]), made)


def states(path: Path, ids: list[int], pixels: torch.Tensor | None) -> torch.Tensor:
    """What transformers' Llama without a causal mask makes of a prompt, [tokens, hidden], and of tiles by the names of
    the release."""
    found = {name.removeprefix("model."): each for name, each in load_file(path / "model.safetensors").items()}
    config = {**json.loads((path / "config.json").read_text())["llm_config"], "model_type": "llama"}
    model = tf.LlamaModel(tf.LlamaConfig(**config, attn_implementation="eager")).eval()
    model.load_state_dict({n.removeprefix("language_model."): t for n, t in found.items() if "language_model" in n})
    x = model.embed_tokens(torch.tensor(ids))
    if pixels is not None:
        x = with_tiles(x, ids, found, pixels)
    mask = torch.zeros(1, 1, len(ids), len(ids))
    hidden: torch.Tensor = model(inputs_embeds=x[None], attention_mask=mask).last_hidden_state[0]
    return hidden


def pixels_of(path: Path, page: Any) -> torch.Tensor | None:
    if isinstance(page, str):
        return None
    checkpoint = Checkpoint.open(path)
    settings = image_settings(checkpoint)
    assert settings is not None
    prompts = ImagePrompts(checkpoint, settings, lambda _: [40], {"image": 1})
    return torch.from_numpy(prompts.arrays(page["multi_modal_data"]["image"])["pixel_values"])


def test_vectors_of_pages_are_means_of_what_llama_makes_of_tiles(tmp_path: Path) -> None:
    path = make_pages(tmp_path)
    with LLM(str(path), **ARGS) as llm:
        together = llm.embed(PAGES)
        for output, page in zip(together, PAGES, strict=True):
            pixels = pixels_of(path, page)
            assert output.prompt_token_ids is not None
            assert output.prompt_token_ids.count(IMAGE) == (0 if pixels is None else 4 * len(pixels))
            with torch.inference_mode():
                want = F.normalize(states(path, output.prompt_token_ids, pixels).mean(0), dim=-1)
            np.testing.assert_allclose(output.outputs.embedding, want.numpy(), rtol=1e-4, atol=1e-5)
        for output, page in zip(together, PAGES, strict=True):
            assert llm.embed([page])[0].outputs.embedding == output.outputs.embedding


@pytest.mark.long
def test_scores_of_pages_are_those_of_their_mean(tmp_path: Path) -> None:
    path = make_pages(tmp_path, "LlamaNemotronVLForSequenceClassification", "model.")
    head = load_file(path / "model.safetensors")["score.weight"]
    with LLM(str(path), **ARGS) as llm:
        for output, page in zip(llm.classify(PAGES), PAGES, strict=True):
            assert output.prompt_token_ids is not None
            with torch.inference_mode():
                mean = states(path, output.prompt_token_ids, pixels_of(path, page)).mean(0)
            assert output.outputs.probs == pytest.approx(torch.sigmoid(head @ mean).tolist(), rel=1e-4)
    config = json.loads((path / "config.json").read_text())
    edit_config(path, llm_config={**config["llm_config"], "temperature": 0.5})
    with pytest.raises(CheckpointError, match=r"temperature is 0.5, expected 1"):
        LLM(str(path))


@pytest.mark.parametrize(
    ("size", "grid"),
    [((84, 56), (2, 1)), ((40, 40), (1, 1)), ((300, 20), (4, 1)), ((112, 112), (2, 2)), ((56, 130), (1, 2))],
)
def test_images_become_a_grid_with_their_ratio_and_enough_pixels(size: tuple[int, int], grid: tuple[int, int]) -> None:
    made = NemotronTiles(Section({"max_patches": 4, "size": SIDE}, "settings"), Section({}, "config.json"))
    given, (columns, rows) = image(0, *size), grid
    found = made([given], "np")["pixel_values"]
    scaled = np.asarray(given.resize((56 * columns, 56 * rows))).transpose(2, 0, 1)
    tiles = [
        scaled[:, 56 * row : 56 * row + 56, 56 * column : 56 * column + 56]
        for row in range(rows)
        for column in range(columns)
    ]
    if len(tiles) > 1:
        tiles.append(np.asarray(given.resize((56, 56))).transpose(2, 0, 1))
    np.testing.assert_allclose(found, np.stack(tiles) / 127.5 - 1, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"ps_version": "v1"}, UnsupportedModel, 'ps_version is "v1", expected "v2"'),
        ({"force_image_size": 28}, CheckpointError, "force_image_size is 28, expected image_size of vision_config"),
        ({"pooling": "colbert"}, UnsupportedModel, 'pooling is "colbert", expected "avg" or "cls" or "last"'),
        ({"llm_config": None}, CheckpointError, "llm_config is null, expected the sizes"),
        ({"vision_config": {"model_type": "radio"}}, UnsupportedModel, "model_type is .radio., expected"),
    ],
)
def test_values_that_no_release_has_are_refused_by_name(
    changes: dict[str, Any], error: type[Exception], said: str, tmp_path: Path
) -> None:
    config = {"architectures": ["LlamaNemotronVLModel"], "llm_config": {"model_type": "llama_bidirec"}}
    vision = {"model_type": "siglip_vision_model", **TOWER}
    with pytest.raises(error, match=said):
        Checkpoint(tmp_path, {**config, "vision_config": vision, **changes})
