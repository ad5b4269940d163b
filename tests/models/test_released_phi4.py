"""Phi-4-multimodal as it is released: names and config of its own, and an adapter for prompts with images."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from octavo.config.checkpoint import Checkpoint
from octavo.config.media.images import image_settings
from octavo.config.own_adapters import OwnAdapter, own_adapter
from octavo.errors import CheckpointError, UnsupportedModel
from octavo.models.save import save_quantized
from tests.e2e.test_images import PROMPTS, bits, generate
from tests.fakes.checkpoints import edit_config
from tests.fakes.phi4 import as_released
from tests.fakes.vision import make_vision_checkpoint


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return make_vision_checkpoint("phi4_multimodal", tmp_path)


def test_the_release_is_the_model_of_transformers_layout(path: Path) -> None:
    expected = bits(generate(path, PROMPTS))
    assert bits(generate(as_released(path), PROMPTS)) == expected


def test_its_config_has_an_encoder_and_a_token_for_images() -> None:
    part = {"crop_size": 448, "embedding_cls": "tune_image", "use_hd_transform": True}
    released: dict[str, Any] = {"architectures": ["Phi4MMForCausalLM"], "model_type": "phi4mm"}
    released |= {"embd_layer": {"image_embd_layer": part}, "auto_map": {}, "img_processor": None}
    found = Checkpoint(Path("phi"), released).stored.values
    assert found["vision_config"] == {"crop_size": 448, "image_size": 448}
    assert found["image_token_id"] == 200_010
    assert not found.keys() & {"auto_map", "embd_layer", "img_processor"}
    assert "audio_config" not in found
    processor: dict[str, Any] = {
        "name": "cascades",
        "config": {"attention_dim": 64, "linear_units": 96, "causal": True},
    }
    released["audio_processor"] = processor
    found = Checkpoint(Path("phi"), released).stored.values
    assert (found["audio_config"], found["audio_token_id"]) == ({"hidden_size": 64, "intermediate_size": 96}, 200_011)
    processor["config"]["input_layer"] = "linear"
    with pytest.raises(UnsupportedModel, match=r"input_layer is \"linear\", expected \"nemo_conv\""):
        Checkpoint(Path("phi"), released)
    del released["audio_processor"]
    part["hd_transform_order"] = "glb_sub"
    with pytest.raises(UnsupportedModel, match=r"hd_transform_order is \"glb_sub\", expected \"sub_glb\""):
        Checkpoint(Path("phi"), released)


def test_its_settings_are_those_of_the_processor(path: Path) -> None:
    settings = image_settings(Checkpoint.open(as_released(path)))
    assert settings is not None
    assert (settings["image_processor_type"], settings["max_patches"]) == ("Phi4MultimodalImageProcessor", 4)


def test_prompts_with_images_alone_have_the_adapter(path: Path) -> None:
    assert own_adapter(Checkpoint.open(path), "image") == OwnAdapter(path / "vision-lora", 4)
    assert own_adapter(Checkpoint.open(path), "audio") == OwnAdapter(path / "speech-lora", 4)
    with_adapter = bits(generate(path, PROMPTS))
    edit_config(path, vision_lora=None)
    assert own_adapter(Checkpoint.open(path), "image") is None
    plain = bits(generate(path, PROMPTS))
    assert [one == other for one, other in zip(plain, with_adapter, strict=True)] == [False, False, False, True]


def test_an_adapter_that_is_not_there_is_refused(path: Path) -> None:
    (path / "vision-lora" / "adapter_config.json").unlink()
    said = r"vision_lora is missing, expected null where vision-lora/adapter_config\.json is not in the folder"
    with pytest.raises(CheckpointError, match=said):
        generate(path, PROMPTS)
    assert bits(generate(path, PROMPTS[3:], limit_mm_per_prompt={"image": 0}))
    (path / "preprocessor_config.json").unlink()
    assert bits(generate(path, PROMPTS[3:]))


@pytest.mark.parametrize("damage", ["cut", "other model", "absent"])
def test_a_damaged_adapter_is_refused_when_the_model_is_loaded(path: Path, damage: str) -> None:
    file = path / "vision-lora" / "adapter_model.safetensors"
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:-8])
    elif damage == "absent":
        file.unlink()
    else:
        tensors = load_file(file)
        name = next(each for each in tensors if ".lora_A." in each)
        save_file({**tensors, name: tensors[name][:, 1:].contiguous()}, file)
    said = {"cut": "truncated or damaged", "other model": r"has shape \[4, \d+\]", "absent": "cannot be read"}
    with pytest.raises(CheckpointError, match=said[damage]):
        generate(path, PROMPTS[3:])
    assert bits(generate(path, PROMPTS[3:], limit_mm_per_prompt={"image": 0}))


def test_a_quantised_copy_has_the_adapter(path: Path, tmp_path: Path) -> None:
    save_quantized(Checkpoint.open(path), tmp_path / "made", "int8", 64)
    names = [each.name for each in (path / "vision-lora").iterdir()]
    assert len(names) == 2
    for name in names:
        assert (tmp_path / "made" / "vision-lora" / name).read_bytes() == (path / "vision-lora" / name).read_bytes()
    assert bits(generate(tmp_path / "made", PROMPTS)) != bits(generate(path, PROMPTS))


def test_a_layer_that_the_encoder_lacks_is_refused(path: Path) -> None:
    config = json.loads((path / "config.json").read_text())
    edit_config(path, vision_config={**config["vision_config"], "feature_layer": -5})
    with pytest.raises(CheckpointError, match=r"feature_layer is -5, expected a layer of the encoder, which has 3"):
        generate(path, PROMPTS)
