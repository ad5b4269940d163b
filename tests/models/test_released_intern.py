"""InternVL as its releases have it computes what it computes in transformers' layout."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from octavo import LLM, SamplingParams
from octavo.config.checkpoint import Checkpoint
from octavo.config.section import Section
from octavo.distributed.mesh import Mesh
from octavo.errors import CheckpointError, UnsupportedModel
from octavo.models.loader import LoadedModel
from octavo.multimodal.image_writer import Context
from octavo.multimodal.tiled_prompts import nvlm_prompt
from tests.e2e.test_images import PARAMS as LIKE
from tests.e2e.test_images import PROMPTS, bits, generate
from tests.fakes.rank_threads import llm_of_ranks
from tests.fakes.vision import image, make_vision_checkpoint
from tests.models.test_image_relatives import encoded

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


def make_nvlm(path: Path) -> Path:
    """Write a random NVLM-D by the names of its release to `path`, whose attention has 7 heads more."""
    own = make_vision_checkpoint("internvl", path / "todays")
    as_released(own, path := path / "released", architectures=["NVLM_D"], model_type="NVLM_D", ps_version="v2")
    config = json.loads((path / "config.json").read_text())
    text = {**config["llm_config"], "model_type": "llama", "attention_bias": True, "mlp_bias": False}
    vision = {**config["vision_config"], "qk_normalization": True, "norm_type": "rms_norm"}
    (path / "config.json").write_text(json.dumps({**config, "llm_config": text, "vision_config": vision}))
    (path / "tokenizer.json").write_text((path / "tokenizer.json").read_text().replace("IMG_CONTEXT", "|vision_pad|"))
    tensors = load_file(path / "model.safetensors")
    shapes: dict[str, tuple[int, ...]] = {"mlp1.1.weight": (48, 128), "mlp1.3.weight": (32, 48)}
    layers = [f"vision_model.encoder.layers.{layer}" for layer in range(3)]
    for layer in layers:
        heads = {
            "qkv.weight": (3 * 144, 32),
            "proj.weight": (32, 144),
            "q_norm.weight": (144,),
            "k_norm.weight": (144,),
        }
        shapes |= {f"{layer}.attn.{name}": shape for name, shape in heads.items()}
    for name in [f"mlp1.{each}.bias" for each in (1, 3)] + [f"{each}.norm{n}.bias" for each in layers for n in (1, 2)]:
        del tensors[name]
    generator = torch.Generator().manual_seed(1)
    for name, shape in shapes.items():
        tensors[name] = torch.randn(shape, generator=generator) * 0.2 + (len(shape) == 1)
    save_file(tensors, path / "model.safetensors")
    return path


def seen_by_nvlm(t: dict[str, torch.Tensor], pixels: torch.Tensor) -> torch.Tensor:
    """Return [tiles, 16, 32] of the encoder in plain torch."""
    start = "vision_model.embeddings"
    x = F.conv2d(pixels, t[f"{start}.patch_embedding.weight"], t[f"{start}.patch_embedding.bias"], stride=14)
    x = torch.cat([t[f"{start}.class_embedding"].expand(len(x), 1, 32), x.flatten(2).transpose(1, 2)], 1)
    x = x + t[f"{start}.position_embedding"]
    for layer in (f"vision_model.encoder.layers.{each}" for each in range(3)):
        q, k, v = F.linear(F.rms_norm(x, (32,), t[f"{layer}.norm1.weight"], 1e-6), t[f"{layer}.attn.qkv.weight"]).chunk(
            3, -1
        )
        scales = [each[..., :32].pow(2).mean(-1, keepdim=True).add(1e-6).rsqrt() for each in (q, k)]
        q, k = (
            each * scale * t[f"{layer}.attn.{name}_norm.weight"]
            for each, scale, name in zip((q, k), scales, "qk", strict=True)
        )
        q, k, v = (each.view(*each.shape[:2], 9, 16).transpose(1, 2) for each in (q, k, v))
        mixed = ((q @ k.transpose(2, 3)) / 4).softmax(-1) @ v
        made = F.linear(mixed.transpose(1, 2).flatten(2), t[f"{layer}.attn.proj.weight"], t[f"{layer}.attn.proj.bias"])
        x = x + t[f"{layer}.ls1"] * made
        inner = F.rms_norm(x, (32,), t[f"{layer}.norm2.weight"], 1e-6)
        inner = F.gelu(F.linear(inner, t[f"{layer}.mlp.fc1.weight"], t[f"{layer}.mlp.fc1.bias"]))
        x = x + t[f"{layer}.ls2"] * F.linear(inner, t[f"{layer}.mlp.fc2.weight"], t[f"{layer}.mlp.fc2.bias"])
    return x[:, 1:]


@pytest.mark.slow
@pytest.mark.long
def test_nvlm_d_has_more_heads_than_its_config_and_a_wide_projection(tmp_path: Path) -> None:
    found, arrays = encoded(path := make_nvlm(tmp_path))
    tensors = load_file(path / "model.safetensors")
    with torch.inference_mode():
        seen = seen_by_nvlm(tensors, arrays["pixel_values"])
        joined = seen.view(3, 2, 2, 2, 2, 32).transpose(2, 3).reshape(12, 128)
        x = F.layer_norm(joined, (128,), tensors["mlp1.0.weight"], tensors["mlp1.0.bias"])
        expected = F.linear(F.gelu(F.linear(x, tensors["mlp1.1.weight"])), tensors["mlp1.3.weight"])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    whole = generate(path, PROMPTS)
    assert bits(generate(path, PROMPTS * 2, max_num_batched_tokens=5)) == bits(whole) * 2
    with llm_of_ranks(path, 2, dtype="float32", num_gpu_blocks_override=64, max_num_seqs=4) as llm:
        assert bits(llm.generate(PROMPTS * 2, LIKE)) == bits(whole) * 2


def test_tiles_of_nvlm_d_have_numbers(tmp_path: Path) -> None:
    words: list[str] = []

    def encode(text: str) -> list[int]:
        words.append(text)
        return [100 + len(words)]

    section = Section({"image_seq_length": 2}, "config.json")
    for tiles, said in (
        (1, ["<Image><tile_global_thumbnail>", "</Image>"]),
        (3, ["<Image><tile_1>", "<tile_2>", "<tile_global_thumbnail>", "</Image>"]),
    ):
        words.clear()
        made = nvlm_prompt(Context(section, {}, encode), 7, {"pixel_values": np.zeros((tiles, 3, 4, 4))})
        assert words == said
        assert made == [*(each for tile in range(tiles) for each in (101 + tile, 7, 7)), 101 + tiles]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"ps_version": "v1"}, 'ps_version is "v1", expected "v2"'),
        ({"use_thumbnail": False}, "use_thumbnail is false, expected true"),
        ({"llm_config": {"architectures": ["LlamaForCausalLM"]}}, "architectures is .*, expected .*Qwen2ForCausalLM"),
        ({"llm_config": {"mlp_bias": True}}, "mlp_bias is true, expected false"),
    ],
)
def test_values_that_nvlm_d_does_not_have_are_refused_by_name(changes: dict[str, Any], said: str) -> None:
    config = {"architectures": ["NVLM_D"], "llm_config": {"model_type": "llama"}, "vision_config": VISION}
    with pytest.raises(UnsupportedModel, match=said):
        Checkpoint(Path("nvlm"), {**config, **changes})


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
