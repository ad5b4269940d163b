"""Configs of releases in the layout of transformers' classes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.config.checkpoint import Checkpoint
from octavo.config.images import image_settings
from octavo.distributed.mesh import Mesh
from octavo.errors import UnsupportedModel
from octavo.models.loader import LoadedModel

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


def released(path: Path, **values: Any) -> Checkpoint:
    around = {"architectures": ["DeepseekOCR2ForCausalLM"], "model_type": "deepseek_vl_v2", "torch_dtype": "bfloat16"}
    return Checkpoint(path, {**around, **TEXT, "language_config": TEXT, "vision_config": {"width": {}}, **values})


def test_deepseek_ocr_2_has_the_encoders_of_its_release(tmp_path: Path) -> None:
    checkpoint = released(tmp_path)
    assert image_settings(checkpoint) == {"image_processor_type": "DeepseekOcr2ImageProcessor"}
    model = LoadedModel.open(checkpoint, Mesh.single(), torch.bfloat16).model
    assert model.config.sparse == (False, *[True] * 11)
    found = {slot.name: slot.shape for path, layer in model.layers_by_path() for slot in layer.tensor_slots(path)}
    assert found["multi_modal_projector.weight"] == (1280, 896)
    assert found["vision_tower.vision_encoder.layers.23.self_attn.k_proj.weight"] == (128, 896)
    assert found["vision_tower.sam_encoder.proj.conv2.weight"] == (896, 512, 3, 3)


def test_a_release_with_attention_over_latents_is_another_model(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="use_mla is true, expected false"):
        released(tmp_path, use_mla=True)
