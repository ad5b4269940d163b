"""InternVL as its releases have it computes what it computes in transformers' layout."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo import LLM, SamplingParams
from octavo.config.checkpoint import Checkpoint
from octavo.distributed.mesh import Mesh
from octavo.errors import CheckpointError, UnsupportedModel
from octavo.models.loader import LoadedModel
from tests.fakes.vision import image, make_vision_checkpoint

PARAMS = SamplingParams(temperature=0.0, max_tokens=5, logprobs=2, ignore_eos=True)
VISION = {"hidden_size": 32, "num_attention_heads": 2, "image_size": 56, "patch_size": 14}
NAMES = (
    (r"^model\.language_model\.", "language_model.model."),
    (r"^lm_head\.", "language_model.lm_head."),
    (r"^(?:model\.)?multi_modal_projector\.layer_norm\.", "mlp1.0."),
    (r"^(?:model\.)?multi_modal_projector\.linear_1\.", "mlp1.1."),
    (r"^(?:model\.)?multi_modal_projector\.linear_2\.", "mlp1.3."),
    (r"^(?:model\.)?vision_tower\.", "vision_model."),
    (r"encoder\.layer\.", "encoder.layers."),
    (r"\.attention\.projection_layer\.", ".attn.proj."),
    (r"\.layernorm_before\.", ".norm1."),
    (r"\.layernorm_after\.", ".norm2."),
    (r"\.lambda_", ".ls"),
    ("cls_token", "class_embedding"),
    ("position_embeddings", "position_embedding"),
    (r"patch_embeddings\.projection", "patch_embedding"),
)


def as_released(path: Path, own: Path, **values: Any) -> Path:
    """Write the checkpoint at `path`, in transformers' layout, as a release has it to `own`."""
    own.mkdir()
    tensors = load_file(path / "model.safetensors")
    found: dict[str, torch.Tensor] = {}
    for name in sorted(tensors):
        if (layer := re.fullmatch(r"(.*vision_tower.*\.attention\.)q_proj\.(weight|bias)", name)) is not None:
            parts = [tensors[f"{layer[1]}{each}_proj.{layer[2]}"] for each in "qkv"]
            found[f"{layer[1].replace('attention', 'attn')}qkv.{layer[2]}"] = torch.cat(parts)
        elif not re.search(r"vision_tower.*\.attention\.[kv]_proj", name):
            found[name] = tensors[name]
    for old, new in NAMES:
        found = {re.sub(old, new, name): tensor for name, tensor in found.items()}
    save_file(found, own / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    vision = {**config["vision_config"], "image_size": 56, "patch_size": 14}
    vision |= {"qkv_bias": vision["attention_bias"], "qk_normalization": vision["use_qk_norm"]}
    around = {"architectures": ["InternVLChatModel"], "model_type": "internvl_chat", "max_dynamic_patch": 4}
    text = {**config["text_config"], "architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": True}
    written = {**around, "llm_config": text, "vision_config": vision, "force_image_size": 56, **values}
    (own / "config.json").write_text(json.dumps(written))
    tokenizer = (path / "tokenizer.json").read_text().replace('"<image>"', '"<IMG_CONTEXT>"')
    (own / "tokenizer.json").write_text(tokenizer)
    (own / "tokenizer_config.json").write_text((path / "tokenizer_config.json").read_text())
    return own


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["InternVLChatModel", pytest.param("H2OVLChatModel", marks=pytest.mark.long)])
def test_a_release_computes_the_same_bits_as_in_transformers_layout(architecture: str, tmp_path: Path) -> None:
    path = make_vision_checkpoint("internvl", tmp_path / "todays")
    settings = json.loads((path / "preprocessor_config.json").read_text())
    mean = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}
    (path / "preprocessor_config.json").write_text(json.dumps({**settings, **mean}))
    prompt: Any = {"prompt": "w1 <image> w2", "multi_modal_data": {"image": image(0)}}
    found = []
    for each in (path, as_released(path, tmp_path / "released", architectures=[architecture])):
        with LLM(str(each), dtype="float32", num_gpu_blocks_override=64) as llm:
            (output,) = llm.generate([prompt], PARAMS)
        rows = [[each.logprob for each in row.values()] for row in output.outputs[0].logprobs or []]
        found.append((output.prompt_token_ids, output.outputs[0].token_ids, rows))
    assert found[0] == found[1]


def test_a_text_model_of_internlm_2_has_the_names_of_its_release(tmp_path: Path) -> None:
    text = {"model_type": "internlm2", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128, "max_position_embeddings": 64}
    config = {"architectures": ["InternVLChatModel"], "llm_config": text, "vision_config": VISION}
    opened = LoadedModel.open(Checkpoint(tmp_path, config), Mesh.single())
    names = {slot.name for path, layer in opened.model.layers_by_path() for slot in layer.tensor_slots(path)}
    assert {"vision_tower.encoder.layer.0.attention.qkv.weight", "multi_modal_projector.linear_1.bias"} <= names
    read = opened.model.config.qkv_reads
    assert read == ("wqkv",)


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"ps_version": "v1"}, UnsupportedModel, 'ps_version is "v1", expected "v2"'),
        ({"use_msac": True}, UnsupportedModel, "use_msac is true, expected false"),
        ({"select_layer": -4}, UnsupportedModel, "select_layer is -4, expected -1"),
        ({"force_image_size": 57}, CheckpointError, "force_image_size is 57, expected a multiple of two patches, 28"),
        ({"llm_config": None}, CheckpointError, "llm_config is null, expected the sizes"),
    ],
)
def test_values_that_no_release_has_are_refused_by_name(
    changes: dict[str, Any], error: type[Exception], said: str, tmp_path: Path
) -> None:
    config = {"architectures": ["InternVLChatModel"], "llm_config": {"model_type": "qwen2"}, "vision_config": VISION}
    with pytest.raises(error, match=said):
        Checkpoint(tmp_path, {**config, **changes})
