"""Configs of releases in the layout of transformers' classes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.config.checkpoint import Checkpoint
from octavo.config.media.images import image_settings
from octavo.distributed.mesh import Mesh
from octavo.errors import CheckpointError, UnsupportedModel
from octavo.models.loader import LoadedModel
from tests.fakes.hearing import make_hearing_checkpoint
from tests.fakes.vision import make_vision_checkpoint

TEXT: dict[str, Any] = {
    "first_k_dense_replace": 1,
    "hidden_size": 1280,
    "intermediate_size": 6848,
    "max_position_embeddings": 8192,
    "moe_intermediate_size": 896,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_attention_heads": 10,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 12,
    "num_key_value_heads": 10,
    "topk_group": 1,
    "topk_method": "greedy",
    "use_mla": False,
    "vocab_size": 129280,
}


CLIP = {"heads": 16, "image_size": 224, "layers": 24, "patch_size": 14, "width": 1024}
SAM = {
    "downsample_channels": [512, 1024],
    "global_attn_indexes": [2, 5, 8, 11],
    "heads": 12,
    "layers": 12,
    "width": 768,
}
VISION = {"image_size": 1024, "mlp_ratio": 3.7362, "width": {"clip-l-14-224": CLIP, "sam_vit_b": SAM}}


def released(path: Path, name: str = "DeepseekOCR2", **values: Any) -> Checkpoint:
    around = {"architectures": [f"{name}ForCausalLM"], "model_type": "deepseek_vl_v2", "torch_dtype": "bfloat16"}
    return Checkpoint(path, {**around, **TEXT, "language_config": TEXT, "vision_config": {"width": {}}, **values})


def test_deepseek_ocr_2_has_the_encoders_of_its_release(tmp_path: Path) -> None:
    checkpoint = released(tmp_path)
    assert image_settings(checkpoint) == {"image_processor_type": "DeepseekOcr2ImageProcessor"}
    found = shapes(checkpoint)
    assert found["multi_modal_projector.weight"] == (1280, 896)
    assert found["vision_tower.vision_encoder.layers.23.self_attn.k_proj.weight"] == (128, 896)
    assert found["vision_tower.sam_encoder.proj.conv2.weight"] == (896, 512, 3, 3)


def test_deepseek_ocr_has_the_encoders_of_its_release(tmp_path: Path) -> None:
    checkpoint = released(tmp_path, "DeepseekOCR", vision_config=VISION)
    assert image_settings(checkpoint) == {"image_processor_type": "DeepseekOcrImageProcessor"}
    found = shapes(checkpoint)
    assert found["multi_modal_projector.weight"] == (1280, 2048)
    assert found["image_newline"] == (1280,)
    encoder, sam = "vision_tower.vision_encoder", "vision_tower.sam_encoder"
    assert found[f"{encoder}.encoder.layers.23.self_attn.qkv_proj.weight"] == (3072, 1024)
    assert found[f"{encoder}.embeddings.position_embedding.weight"] == (257, 1024)
    assert found[f"{sam}.layers.2.attn.rel_pos_h"] == (127, 64)
    assert found[f"{sam}.layers.0.mlp.lin1.weight"] == (3072, 768)


def shapes(checkpoint: Checkpoint) -> dict[str, tuple[int, ...]]:
    model = LoadedModel.open(checkpoint, Mesh.single(), torch.bfloat16).model
    assert model.config.sparse == (False, *[True] * 11)
    return {slot.name: slot.shape for path, layer in model.layers_by_path() for slot in layer.tensor_slots(path)}


def test_a_release_without_sizes_of_its_encoders_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="vision_config is .*, expected the sizes of sam_vit_b in its width"):
        released(tmp_path, "DeepseekOCR")


def test_a_release_with_attention_over_latents_is_another_model(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="use_mla is true, expected false"):
        released(tmp_path, use_mla=True)


def test_lighton_ocr_is_read_under_the_name_of_its_release(tmp_path: Path) -> None:
    file = make_vision_checkpoint("lighton_ocr", tmp_path) / "config.json"
    own = {"architectures": ["LightOnOCRForConditionalGeneration"], "model_type": "mistral3"}
    file.write_text(json.dumps({**json.loads(file.read_text()), **own}))
    checkpoint = Checkpoint.open(tmp_path)
    assert image_settings(checkpoint)
    opened = LoadedModel.open(checkpoint, Mesh.single())
    assert any(path.startswith("vision_encoder.") for path, _ in opened.model.layers_by_path())


def test_hyperclovax_is_read_under_the_name_of_its_release(tmp_path: Path) -> None:
    file = make_vision_checkpoint("hyperclovax_vision", tmp_path) / "config.json"
    values = json.loads(file.read_text())
    vision = {**values["vision_config"], "model_type": "qwen2_5_vl"}
    own = {"architectures": ["HCXVisionV2ForCausalLM"], "model_type": "vlm", "vision_config": vision}
    file.write_text(json.dumps({**values, **own}))
    opened = LoadedModel.open(Checkpoint.open(tmp_path), Mesh.single())
    assert any(path.startswith("vision_model.") for path, _ in opened.model.layers_by_path())


def test_sections_of_dbrx_are_merged_with_the_other_keys(tmp_path: Path) -> None:
    attention, mixture = {"kv_n_heads": 8, "rope_theta": 500_000.0}, {"ffn_hidden_size": 10752, "moe_top_k": 4}
    own = {"model_type": "dbrx", "d_model": 6144, "attn_config": attention, "ffn_config": mixture}
    values = Checkpoint(tmp_path, own).values
    found = {name: values[name] for name in ("hidden_size", "intermediate_size", "num_key_value_heads", "moe_top_k")}
    assert found == {"hidden_size": 6144, "intermediate_size": 10752, "num_key_value_heads": 8, "moe_top_k": 4}
    assert values["rope_theta"] == 500_000.0


def test_kimi_in_the_layout_of_its_release_is_the_same_model(tmp_path: Path) -> None:
    path = make_vision_checkpoint("kimi_k25", tmp_path)
    values = json.loads((path / "config.json").read_text())
    vision, text = values["vision_config"], {**values["text_config"], "model_type": "kimi_k2"}
    tower = {f"vt_{name}": value for name, value in vision.items() if name.endswith(("_size", "_heads", "_layers"))}
    tower |= {f"init_{name}": value for name, value in vision.items() if name.startswith("pos_emb")}
    own = {"architectures": ["KimiK25ForConditionalGeneration"], "media_placeholder_token_id": 4, "text_config": text}
    own |= {"vision_config": {**tower, "patch_size": 14, "merge_type": "sd2_tpool"}}
    (path / "config.json").write_text(json.dumps({**own, "model_type": "kimi_k25", "tie_word_embeddings": False}))
    images = {"in_patch_limit": 24, "patch_limit_on_one_side": 8, "patch_size": 14, "merge_kernel_size": 2}
    (path / "preprocessor_config.json").write_text(json.dumps({"media_proc_cfg": images}))
    checkpoint = Checkpoint.open(path)
    settings = image_settings(checkpoint)
    assert settings is not None
    assert (settings["size"], settings["max_patches"]) == ({"max_height": 8, "max_width": 8}, 24)
    opened = LoadedModel.open(checkpoint, Mesh.single(), torch.float32)
    opened.check_tensors()
    made = opened.model.config.library.vision_config.to_dict()
    assert {name: made[name] for name in vision if "size" in name or "emb" in name} == {
        name: value for name, value in vision.items() if "size" in name or "emb" in name
    }
    for name, value, error in (("merge_type", "sd2", UnsupportedModel), ("init_pos_emb_width", 9, CheckpointError)):
        with pytest.raises(error, match=name.removeprefix("init_")):
            LoadedModel.open(Checkpoint.open(path, {"vision_config": {name: value}}), Mesh.single(), torch.float32)
    (path / "preprocessor_config.json").write_text(json.dumps({"media_proc_cfg": {"fixed_output_tokens": 64}}))
    with pytest.raises(UnsupportedModel, match="fixed_output_tokens is 64"):
        image_settings(checkpoint)


@pytest.mark.parametrize(
    ("family", "key"),
    [("mpt", "d_model"), ("mpt", "max_seq_len"), ("bloom", "n_head"), ("falcon", "n_layer"), ("dbrx", "kv_n_heads")],
)
@pytest.mark.parametrize("value", [0, "8", [8]], ids=str)
def test_a_size_that_is_none_is_refused_by_the_name_in_the_file(
    family: str, key: str, value: Any, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family, key: value}))
    with pytest.raises(CheckpointError, match=rf"config\.json: {key} is .*, expected an integer"):
        Checkpoint.open(tmp_path)


def test_vllms_name_of_the_realtime_model_is_the_same_model(tmp_path: Path) -> None:
    path = make_hearing_checkpoint("qwen3_asr", tmp_path)
    overridden = Checkpoint.open(path, {"architectures": ["Qwen3ASRRealtimeGeneration"]})
    assert overridden.architecture == Checkpoint.open(path).architecture
