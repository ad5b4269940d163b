"""The file of a vision encoder says what a config.json and a preprocessor_config.json say, or is refused by name."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
from torch import Tensor

from octavo.config.checkpoint import Checkpoint
from octavo.config.media.media_families import media_family
from octavo.distributed.mesh import Mesh
from octavo.errors import CheckpointError, OctavoError, UnsupportedModel
from octavo.gguf.architectures import ARCHITECTURES
from octavo.gguf.projectors import PROJECTORS
from octavo.models.loader import LoadedModel
from octavo.models.weight_files import checkpoint_tensors
from tests.fakes.mmproj_files import FAMILIES, TEXT_TOKENS, Array, as_converted, convert_both, make_released

Files = Callable[..., Checkpoint]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def checkpoint(family: str) -> Path:
        if family not in made:
            made[family] = make_released(family, tmp_path_factory.mktemp(family) / "m")
        return made[family]

    return checkpoint


@pytest.fixture
def files(checkpoints: Callable[[str], Path]) -> Files:
    def opened(family: str = "gemma3", **how: Any) -> Checkpoint:
        text, encoder = convert_both(checkpoints(family), family, **how)
        return Checkpoint.open(text, mmproj=encoder)

    return opened


def same(found: Any, wanted: Any) -> bool:
    """Whether values are equal, numbers in the float32 of a file."""
    if isinstance(found, list):
        return len(found) == len(wanted) and all(map(same, found, wanted))
    return bool(abs(found - wanted) <= 1e-7 * abs(wanted)) if isinstance(found, float) else bool(found == wanted)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_the_config_is_that_of_the_checkpoint(family: str, files: Files, checkpoints: Callable[[str], Path]) -> None:
    path, found = checkpoints(family), files(family)
    config = json.loads((path / "config.json").read_text())
    settings = json.loads((path / "preprocessor_config.json").read_text())
    assert found.architecture == config["architectures"][0]
    assert found.image_processor is not None
    config["vision_config"].pop("vision_use_head", None)  # files are without it
    if "llava" in family:  # and without the layers behind the one that is projected
        config["vision_feature_layer"] = -1
        config["vision_config"]["num_hidden_layers"] -= 1
    for ours, theirs in (
        ({**found.stored.values, "bos_token_id": None, "vision_config": None, "text_config": None}, config),
        ({**found.stored.values["vision_config"], "vision_use_head": None}, config["vision_config"]),
        (found.image_processor, settings),
    ):
        stated = {key: value for key, value in ours.items() if value is not None and key in theirs}
        assert {key: value for key, value in stated.items() if not same(value, theirs[key])} == {}
    assert set(found.image_processor) <= set(settings)


def test_every_kind_is_a_family_with_text_models_that_are_read() -> None:
    for kind in PROJECTORS.values():
        assert media_family(f"{kind.family}ForConditionalGeneration").images
        assert set(kind.texts) <= {name.partition(" ")[0] for name in ARCHITECTURES}


def test_tokens_of_a_gemma_4_image_attend_to_each_other_where_layers_have_no_inputs_of_their_own(files: Files) -> None:
    found = files("gemma4", tokenizer={"gemma4.embedding_length_per_layer_input": 0})
    assert found.stored.values["text_config"]["use_bidirectional_attention"] == "vision"
    assert "use_bidirectional_attention" not in files("gemma4").stored.values["text_config"]


def test_every_tensor_of_the_checkpoint_is_there(files: Files) -> None:
    for family in FAMILIES:
        LoadedModel.open(files(family), Mesh.single()).check_tensors()


def test_older_files_exchange_the_names_of_two_products(files: Files) -> None:
    def exchanged(name: str) -> str:
        return name.replace("ffn_up", "_").replace("ffn_down", "ffn_up").replace("_.", "ffn_down.")

    places = {name: each.shape for name, each in files().tensors.items()}
    assert {name: each.shape for name, each in files(rename=exchanged).tensors.items()} == places


def test_blocks_of_queries_keys_and_values_are_joined(files: Files) -> None:
    def store(name: str, tensor: Tensor) -> Array:
        if not name.endswith(("attn_q.weight", "attn_k.weight", "attn_v.weight")):
            return as_converted(name, tensor)
        return gguf.quants.quantize(tensor.numpy(), gguf.GGMLQuantizationType.Q8_0)

    checkpoint = files("qwen2_5_vl", store=store)
    [joined] = [each for each in checkpoint_tensors(checkpoint) if each.name == "visual.blocks.1.attn.qkv.gguf"]
    rows = [each for each in gguf.GGUFReader(checkpoint.mmproj).tensors if "v.blk.1.attn_" in each.name]
    stored = {each.name.split(".")[3]: each.data.tolist() for each in rows if each.name.endswith("weight")}
    assert joined.values(()).tolist() == stored["attn_q"] + stored["attn_k"] + stored["attn_v"]
    LoadedModel.open(checkpoint, Mesh.single()).check_tensors()


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another kind": ({"clip.projector_type": "ultravox"}, "clip.projector_type is 'ultravox', expected one of gemma3,"),
    "no kind": ({"clip.projector_type": None}, "clip.vision.projector_type is missing"),
    "another model's": (
        {"clip.projector_type": "idefics3"},
        "belongs to models of llama, but general.architecture of .*model.gguf is 'gemma3'; name the mmproj file",
    ),
    "another size": ({"clip.vision.projection_dim": 64}, "projection_dim is 64, but gemma3.embedding_length .* is 32;"),
    "no encoder": ({"general.architecture": "llama"}, "general.architecture is 'llama', expected clip"),
    "no patches": ({"clip.vision.patch_size": 0}, "clip.vision.patch_size is 0, expected an integer of at least 1"),
    "other patches": ({"clip.vision.patch_size": 16}, r"patch_size is 16, expected the last of \[32, 3, 14, 14\]"),
    "another image": ({"clip.vision.image_size": 896}, "image_size is 896, expected that of 16 patches"),
    "layers without end": ({"clip.vision.block_count": 2**31 - 1}, "block_count is 2147483647, expected at most the"),
    "odd heads": ({"clip.vision.attention.head_count": 3}, "head_count is 3, expected a divisor of embedding_length"),
    "no means": ({"clip.vision.image_mean": [0.5]}, "clip.vision.image_mean is .*, expected three numbers"),
    "whole numbers": (
        {"clip.vision.image_std": [1, 1, 1]},
        r"clip.vision.image_std is \[1, 1, 1\], expected three numbers",
    ),
    "too few patches": ({"clip.vision.projector.scale_factor": 9}, "scale_factor is 9, expected at most the 4 patches"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_does_not_fit_is_refused_with_file_and_key(what: str, files: Files) -> None:
    changes, said = REFUSED[what]
    with pytest.raises((CheckpointError, UnsupportedModel), match=f"mmproj-model.gguf: .*{said}"):
        files(changes=changes)


@pytest.mark.parametrize(("family", "tensor"), [("qwen2_5_vl", "mm.0.weight"), ("mistral3", "mm.patch_merger.weight")])
def test_merges_are_those_of_the_tensors(family: str, tensor: str, files: Files) -> None:
    said = rf"spatial_merge_size is 1048576, expected the root of the columns of {tensor} \[\d+, 128\] by .* is 32"
    with pytest.raises(CheckpointError, match=f"mmproj-model.gguf: .*{said}"):
        files(family, changes={"clip.vision.spatial_merge_size": 1 << 20})


def test_settings_of_images_that_none_survives_are_refused_with_the_file(files: Files) -> None:
    checkpoint = files("qwen3_vl", changes={"clip.vision.image_min_pixels": 2**31 - 1})
    with pytest.raises(CheckpointError, match="mmproj-model.gguf: size.shortest_edge is 2147483647, expected 1 to 33"):
        LoadedModel.open(checkpoint, Mesh.single())


@pytest.mark.parametrize(
    ("family", "key", "value", "said"),
    [
        ("llava", "feature_layer", [1, 2], r"feature_layer is .*expected the last one, \[2\]"),
        ("llava", "image_size", 99, "image_size is 99, expected that of 16 patches"),
        ("llava_next", "image_grid_pinpoints", [56], "image_grid_pinpoints is .*expected heights and widths"),
        ("llava_next", "image_grid_pinpoints", None, "image_grid_pinpoints is missing, expected heights and widths"),
    ],
)
def test_what_contradicts_itself_in_llava_is_refused(
    family: str, key: str, value: Any, said: str, files: Files
) -> None:
    with pytest.raises(CheckpointError, match=f"mmproj-model.gguf: clip.vision.{said}"):
        files(family, changes={f"clip.vision.{key}": value})


@pytest.mark.parametrize("other", ["mm.other", "\n", "v.blk.0.x.attn_q", "v.blk.9999999999.attn_q"])
def test_a_tensor_that_the_family_does_not_read_is_refused(other: str, files: Files) -> None:
    with pytest.raises(CheckpointError, match=f"holds {other}.weight, which Gemma3 does not read"):
        _ = files(rename=lambda name: name.replace("mm.input_projection", other)).tensors


def test_a_model_without_the_tokens_of_images_is_refused(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TEXT_TOKENS, "gemma3", {5: "<end_of_image>", 6: "<image_soft_token>"})
    with pytest.raises(CheckpointError, match="written with <start_of_image>, which is no token of .*model.gguf"):
        files()


def test_another_token_stands_for_vectors_where_there_is_none(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TEXT_TOKENS, "gemma3", {4: "<start_of_image>", 5: "<end_of_image>", 9: "<unused0>"})
    assert files().stored.values["image_token_index"] == 9


@pytest.mark.parametrize(
    "family", [each if each == "gemma3" else pytest.param(each, marks=pytest.mark.long) for each in sorted(FAMILIES)]
)
def test_random_metadata_are_read_or_refused(family: str, files: Files) -> None:
    draw, refused = random.Random(family), 0
    keys = [key for key in gguf.GGUFReader(files(family).mmproj).fields if key.startswith("clip.")]
    for key in keys:
        for value in draw.sample([0, 1, 7, 2**31 - 1, 1e30, "x", [1, 2], True, None], 3):
            try:
                LoadedModel.open(files(family, changes={key: value}), Mesh.single()).check_tensors()
            except OctavoError:
                refused += 1
    assert refused > len(keys)
