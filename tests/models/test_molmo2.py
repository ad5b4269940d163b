"""Molmo 2 as released, what its configs may state, and what a prompt may have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo import LLM
from octavo.config.checkpoint import Checkpoint
from octavo.config.media.images import image_settings
from octavo.distributed.mesh import Mesh
from octavo.errors import CheckpointError, UnsupportedModel
from octavo.models.loader import LoadedModel
from octavo.multimodal.image_prompts import ImagePrompts
from tests.e2e.test_images import PARAMS, PROMPTS, assert_agrees, bits, generate
from tests.fakes.checkpoints import edit_config, edit_tensors
from tests.fakes.vision import image, load_vision_oracle, make_vision_checkpoint, write_random
from tests.fakes.vision_families import FAMILIES

pytestmark = pytest.mark.slow
ARCHITECTURE = "Molmo2ForConditionalGeneration"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = tmp_path / "molmo2"
    made.mkdir()
    return make_vision_checkpoint("molmo2", made)


def as_released(path: Path) -> None:
    """Give parts and keys of a config the names of the releases, and their sizes to both tables of embeddings."""
    config = json.loads((path / "config.json").read_text())
    text, vision, adapter = (config.pop(f"{each}_config") for each in ("text", "vision", "adapter"))
    rope = text.pop("rope_parameters")
    text |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope, "use_qk_norm": True}
    text["layer_norm_eps"], text["qkv_bias"] = text.pop("rms_norm_eps"), text.pop("attention_bias")
    others = {"image_size": "image_default_input_size", "patch_size": "image_patch_size"}
    others["num_position_embeddings"] = "image_num_pos"
    vision = {others.get(name, name): value for name, value in vision.items()}
    vision |= {"num_hidden_layers": 5, "model_type": "molmo2"}  # of which the weights have those that are read
    adapter["vit_layers"] = [each - 5 for each in adapter.pop("vision_feature_layer")]
    adapter["pooling_attention_mask"] = True
    parts = {"text_config": text, "vit_config": vision, "adapter_config": adapter}
    (path / "config.json").write_text(json.dumps({**config, **parts}))
    tensors = load_file(path / "model.safetensors")
    names = [f"model.transformer.wte.{each}embedding" for each in ("", "new_")]
    table = torch.cat([tensors[name] for name in names])
    tensors |= {name: each.contiguous() for name, each in zip(names, (table[:120], table[120:]), strict=True)}
    save_file(tensors, path / "model.safetensors")


@pytest.mark.long
def test_a_release_gives_the_bits_of_transformers_layout(path: Path) -> None:
    expected = bits(generate(path, PROMPTS))
    as_released(path)
    assert bits(generate(path, PROMPTS)) == expected


def test_a_prompt_has_the_rows_of_both_views_between_their_tokens(path: Path) -> None:
    (path / "processor_config.json").write_text(json.dumps({"use_single_crop_col_tokens": False}))
    checkpoint = Checkpoint.open(path)
    settings = image_settings(checkpoint)
    assert settings is not None
    found = ImagePrompts(checkpoint, settings, lambda text: {"<s>": [1]}.get(text, [9, 9]), {"image": 16})
    ids, media = found.expand([30, 4, 31], {"image": image(0, 90, 40)})
    # a square of 4 x 4 patches, and a canvas of 4 x 7: windows of 3 with a margin of 1
    assert ids == [1, 30, 10, *[4] * 4, 5, 6, *[*[4] * 4, 11] * 2, 5, 31]
    assert [(each.kind, each.spans, each.is_whole) for each in media] == [
        ("image", ((3, 4), (9, 4), (14, 4)), False),
        ("prompt", ((2, 18),), True),
    ]


@pytest.mark.long
def test_olmo_is_read_with_norms_behind_and_over_all_heads(tmp_path: Path) -> None:
    config, settings = FAMILIES["molmo2"][0]()
    text = config.text_config
    text.norm_after, text.qk_norm_type, text.attention_bias = True, "olmo", True
    path = write_random(tmp_path, config, settings, ARCHITECTURE)
    [found] = generate(path, PROMPTS[3:])
    ids = [*found.prompt_token_ids, *(drawn := list(found.outputs[0].token_ids))]
    with torch.inference_mode():
        logits = load_vision_oracle(path, ARCHITECTURE)(input_ids=torch.tensor([ids])).logits[0]
    assert_agrees(found, drawn, logits)


@pytest.mark.long
def test_the_text_alone_needs_no_encoder(path: Path) -> None:
    with_encoder, without = (
        generate(path, [PROMPTS[3] if limit else "<s> " + PROMPTS[3]], limit_mm_per_prompt={"image": limit})
        for limit in (16, 0)
    )
    assert bits(with_encoder) == bits(without)


@pytest.mark.long
def test_vectors_that_a_prompt_brings_stay_as_they_are(path: Path) -> None:
    """The embedding of a token is added to those of images alone."""
    table = torch.cat(
        [load_file(path / "model.safetensors")[f"model.transformer.wte.{n}embedding"] for n in ("", "new_")]
    )
    with LLM(str(path), dtype="float32", num_gpu_blocks_override=64, enable_prompt_embeds=True) as llm:
        [text] = llm.generate(["w1 w2 w3"], PARAMS)
        [given] = llm.generate([{"prompt_embeds": table[torch.tensor(text.prompt_token_ids)]}], PARAMS)
    assert bits([given]) == bits([text])


def test_more_than_one_image_and_videos_are_refused(path: Path) -> None:
    prompts: list[Any] = [
        {"prompt": "<|image|> <|image|>", "multi_modal_data": {"image": [image(0)] * 2}},
        {"prompt": "<video>", "multi_modal_data": {"video": [[image(0)] * 2]}},
    ]
    with LLM(str(path), dtype="float32", num_gpu_blocks_override=64) as llm:
        images, video = llm.generate(prompts, PARAMS)
    assert images.error is not None
    assert images.error.message.startswith("the prompt has 2 images, must have at most 1")
    assert video.error is not None
    assert "video" in video.error.message


@pytest.mark.long
@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"text_config": {"qk_norm_type": "gemma"}}, 'qk_norm_type is "gemma"'),
        ({"text_config": {"use_qk_norm": False}}, "use_qk_norm is false, expected true"),
        (
            {"text_config": {"rope_scaling_layers": [3]}},
            "rope_scaling_layers is .*, expected numbers of layers, 0 to 2",
        ),
        ({"text_config": {"additional_vocab_size": 9}}, "new_embedding"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings is true, expected false"),
        ({"image_patch_id": 128}, "image_patch_id is 128, expected a token below 128"),
        ({"adapter_config": {"pooling_attention_mask": False}}, "pooling_attention_mask is false, expected true"),
        ({"adapter_config": {"text_hidden_size": 48}}, "text_hidden_size is 48, expected the text model's hidden_size"),
        ({"adapter_config": {"vision_feature_layer": [3]}}, "vision_feature_layer"),
        ({"vision_config": {"image_size": [70, 70]}}, r"size is .*, expected the square image_size of vision_config"),
        ({"vision_config": {"num_position_embeddings": 15}}, "num_position_embeddings is 15, expected as many as"),
    ],
    ids=str,
)
def test_configs_of_other_models_are_refused_by_name(change: dict[str, Any], said: str, path: Path) -> None:
    config = json.loads((path / "config.json").read_text())
    edit_config(path, **{k: {**config[k], **v} if isinstance(v, dict) else v for k, v in change.items()})
    with pytest.raises((CheckpointError, UnsupportedModel), match=said):
        LLM(str(path), dtype="float32", num_gpu_blocks_override=64)


def test_a_table_of_embeddings_without_rows_is_named(path: Path) -> None:
    edit_tensors(path, **{"model.transformer.wte.embedding": torch.tensor(1.0)})
    with pytest.raises(CheckpointError, match=r"wte\.embedding has shape \[\]"):
        LoadedModel.open(Checkpoint.open(path), Mesh.single(), torch.float32).check_tensors()


@pytest.mark.long
@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"max_crops": 0}, "max_crops is 0"),
        ({"overlap_margins": [2, 2]}, "overlap_margins is .*, expected a sum below the 4 patches of a side"),
        ({"pooling_size": [2]}, "pooling_size is .*, expected two integers of at least 1"),
        ({"resample": 3}, "resample is 3, expected 2"),
    ],
    ids=str,
)
def test_settings_with_which_no_image_is_read_are_refused(change: dict[str, Any], said: str, path: Path) -> None:
    file = path / "preprocessor_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises((CheckpointError, UnsupportedModel), match=said):
        LLM(str(path), dtype="float32", num_gpu_blocks_override=64)


@pytest.mark.long
def test_layers_that_a_release_does_not_have_are_refused(path: Path) -> None:
    as_released(path)
    adapter = json.loads((path / "config.json").read_text())["adapter_config"]
    edit_config(path, adapter_config={**adapter, "vit_layers": [5]})
    with pytest.raises(CheckpointError, match="vit_layers is .*, expected numbers of the 5 layers of the encoder"):
        LoadedModel.open(Checkpoint.open(path), Mesh.single(), torch.float32)
