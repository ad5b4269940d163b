"""Mistral's own layout is read as that of Hugging Face."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo.config.checkpoint import Checkpoint
from octavo.config.media.images import image_settings
from octavo.config.released.mistral import native_layout
from octavo.core.outputs import RequestOutput
from octavo.errors import CheckpointError, UnsupportedModel
from tests.e2e.test_images import PROMPTS, generate
from tests.fakes.checkpoints import edit_config, make_checkpoint
from tests.fakes.vision import make_vision_checkpoint
from tests.models.paged_run import load, logits_of

pytestmark = pytest.mark.slow

TOKENS = [3 + 7 * each % 120 for each in range(40)]
SIZES = {"dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "head_dim": 8, "vocab_size": 128}
PARAMS: dict[str, Any] = {**SIZES, "norm_eps": 1e-6, "rope_theta": 10_000.0, "tied_embeddings": True}
VISION: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2}
VISION |= {"patch_size": 14, "image_size": 112, "num_channels": 3, "rope_theta": 10_000.0, "image_token_id": 4}
MERGED = {"mm_projector_id": "patch_merge", "spatial_merge_size": 2, "add_pre_mm_projector_layer_norm": True}
NAMES = (
    (r"^(?:model\.)?language_model\.(?:model\.)?", ""),
    (r"^model\.", ""),
    (r"^(?:language_model\.)?lm_head\.", "output."),
    (r"^embed_tokens\.", "tok_embeddings."),
    (r"^vision_tower\.", "vision_encoder."),
    (r"^multi_modal_projector\.linear_1\.", "vision_language_adapter.w_in."),
    (r"^multi_modal_projector\.linear_2\.", "vision_language_adapter.w_out."),
    (r"^multi_modal_projector\.norm\.", "pre_mm_projector_norm."),
    (r"^multi_modal_projector\.patch_merger\.", "patch_merger."),
    (r"\.(?:self_attn|attention)\.([qkvo])_proj\.", r".attention.w\1."),
    (r"\.(?:mlp|feed_forward)\.gate_proj\.", ".feed_forward.w1."),
    (r"\.(?:mlp|feed_forward)\.down_proj\.", ".feed_forward.w2."),
    (r"\.(?:mlp|feed_forward)\.up_proj\.", ".feed_forward.w3."),
    (r"\.input_layernorm\.", ".attention_norm."),
    (r"\.post_attention_layernorm\.", ".ffn_norm."),
)


def as_native(path: Path, **vision: Any) -> Path:
    """Rewrite a checkpoint of Pixtral, or of Mistral Small 3.1, as Mistral releases one."""
    config = json.loads((path / "config.json").read_text())
    found = {}
    for name, tensor in load_file(path / "model.safetensors").items():
        for old, own in NAMES:
            name = re.sub(old, own, name)
        if name.endswith((".wq.weight", ".wk.weight")):  # halves of heads become neighbouring pairs
            size = 16 if "vision" in name else 8
            tensor = tensor.view(-1, 2, size // 2, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape).contiguous()
        found[name] = tensor
    save_file(found, path / "consolidated.safetensors")
    for name in ("config.json", "generation_config.json", "model.safetensors", "preprocessor_config.json"):
        (path / name).unlink(missing_ok=True)
    params = {**PARAMS, "tied_embeddings": "output.weight" not in found}
    params |= {"norm_eps": config["text_config"]["rms_norm_eps"]}
    own = {**VISION, "adapter_bias": config["multimodal_projector_bias"], **vision}
    (path / "params.json").write_text(json.dumps({**params, "vision_encoder": own}))
    return path


def numbers(outputs: list[RequestOutput]) -> list[float]:
    rows = [row for output in outputs for row in output.outputs[0].logprobs or []]
    return [each.logprob for row in rows for each in row.values()]


@pytest.mark.parametrize(
    ("family", "vision"), [pytest.param("pixtral", {}, marks=pytest.mark.long), ("mistral3", MERGED)]
)
def test_it_computes_what_the_other_layout_computes(family: str, vision: dict[str, Any], tmp_path: Path) -> None:
    path = make_vision_checkpoint(family, tmp_path)
    encoder = json.loads((path / "config.json").read_text())["vision_config"]
    edit_config(path, vision_config={**encoder, "hidden_act": "silu"})  # as releases have it
    expected = generate(path, PROMPTS)
    settings = image_settings(Checkpoint.open(path))
    found = generate(as_native(path, **vision), PROMPTS)
    assert [each.prompt_token_ids for each in found] == [each.prompt_token_ids for each in expected]
    assert [each.outputs[0].token_ids for each in found] == [each.outputs[0].token_ids for each in expected]
    assert numbers(found) == pytest.approx(numbers(expected), abs=1e-4)
    own = image_settings(Checkpoint.open(path))
    assert settings is not None
    assert own is not None
    assert own == {name: settings[name] for name in own}


LATENTS: dict[str, Any] = {"kv_lora_rank": 24, "q_lora_rank": 20, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8}
LATENTS |= {"v_head_dim": 10, "n_kv_heads": 4, "tied_embeddings": False, "vocab_size": 130, "head_dim": 20}
LATENTS |= {"hidden_dim": 56, "n_layers": 3, "llama_4_scaling": {"beta": 0.3, "original_max_position_embeddings": 16}}
YARN: dict[str, Any] = {"factor": 4, "original_max_position_embeddings": 16, "beta": 32, "alpha": 1}
MOE = {"num_experts": 8, "num_experts_per_tok": 3, "expert_hidden_dim": 24, "num_shared_experts": 1}
MOE |= {"num_expert_groups": 4, "num_expert_groups_per_tok": 2, "first_k_dense_replace": 1, "routed_scale": 1.7}
MOE |= {"route_every_n": 1, "expert_parallel": 1}
OF_LATENTS = (
    (r"\.attention\.q_([ab])_proj\.|\.self_attn\.q_([ab])_proj\.", r".attention.wq_\1\2."),
    (r"\.self_attn\.q_a_layernorm\.", ".attention.q_a_norm."),
    (r"\.self_attn\.kv_a_layernorm\.", ".attention.kv_a_norm."),
    (r"\.self_attn\.kv_a_proj_with_mqa\.", ".attention.wkv_a_with_mqa."),
    (r"\.self_attn\.kv_b_proj\.", ".attention.wkv_b."),
    (r"\.mlp\.(gate|experts|shared_experts)\.", r".\1."),
    (r"\.gate_proj\.", ".w1."),
    (r"\.down_proj\.", ".w2."),
    (r"\.up_proj\.", ".w3."),
)


@pytest.mark.parametrize(
    ("is_scaled", "is_quantized"),
    [
        (True, False),
        pytest.param(False, False, marks=pytest.mark.long),
        pytest.param(True, True, marks=pytest.mark.long),
    ],
)
def test_latents_and_experts_are_those_of_the_other_layout(is_scaled: bool, is_quantized: bool, tmp_path: Path) -> None:
    path = make_checkpoint("mistral4", tmp_path)
    config, tensors = json.loads((path / "config.json").read_text()), load_file(path / "model.safetensors")
    for name in [each for each in tensors if each.endswith(".experts.gate_up_proj")]:
        start, gates = name.removesuffix("gate_up_proj"), tensors.pop(name)
        for expert, (both, down) in enumerate(zip(gates, tensors.pop(f"{start}down_proj"), strict=True)):
            parts = {"gate": both[: len(both) // 2], "up": both[len(both) // 2 :], "down": down}
            tensors |= {f"{start}{expert}.{part}_proj.weight": each.contiguous() for part, each in parts.items()}
    rope = {name: value for name, value in config["rope_parameters"].items() if name != "partial_rotary_factor"}
    if not is_scaled:
        rope = {name: value for name, value in rope.items() if "mscale" not in name} | {"attention_factor": 1.0}
    edit_config(path, rope_parameters=rope)
    scales = {}
    if is_quantized:  # to what FP8 has of the weights of experts
        for name in [each for each in tensors if ".experts." in each]:
            scales[name] = tensors[name].abs().amax() / 448
            tensors[name] = (tensors[name] / scales[name]).to(torch.float8_e4m3fn)
        save_file(
            {name: each.float() * scales[name] if name in scales else each for name, each in tensors.items()},
            path / "model.safetensors",
        )
    expected, found = logits_of(load(path), TOKENS), {}
    for stored, tensor in tensors.items():
        name = stored
        for old, own in (*NAMES, *OF_LATENTS):
            name = re.sub(old, own, name)
        found[name] = tensor
        if stored in scales:
            found[name.replace(".weight", ".qscale_weight")] = scales[stored]
            found[name.replace(".weight", ".qscale_act")] = torch.ones(())
    assert {"layers.1.experts.7.w2.weight", "layers.0.feed_forward.w1.weight"} <= found.keys()
    save_file(found, path / "consolidated.safetensors")
    params = {**PARAMS, **LATENTS, "moe": MOE, "yarn": {**YARN, "apply_scale": is_scaled}}
    params |= {"quantization": {"qformat_weight": "fp8_e4m3", "qscheme_act": "TENSOR"}} if is_quantized else {}
    (path / "params.json").write_text(json.dumps({**params, "norm_eps": config["rms_norm_eps"]}))
    (path / "config.json").unlink()
    (path / "model.safetensors").unlink()
    assert torch.equal(logits_of(load(path), TOKENS), expected)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"moe": {**MOE, "capacity": 2}, **LATENTS}, "moe.capacity is set"),
        ({"moe": {**MOE, "route_every_n": 2}, **LATENTS}, "route_every_n is 2, expected 1"),
        ({"moe": MOE, **LATENTS, "yarn": {**YARN, "original_max_position_embeddings": 8}}, "llama_4_scaling.*is 16"),
        ({"quantization": {"qformat_weight": "nvfp4"}}, "qformat_weight is .*nvfp4"),
        ({"moe": {"num_experts": 8}}, "moe is set, which is not read in Mistral's own layout"),
        ({"yarn": {"factor": 4}}, "yarn is set"),
        ({"quantization": {"config_groups": {"a": 1}}}, "quantization.config_groups is set"),
        ({"activation": "gelu"}, 'activation is "gelu", expected "silu"'),
        ({"vision_encoder": {**VISION, "vision_layers": 1}}, "vision_encoder.vision_layers is set"),
        ({"vision_encoder": {**VISION, "spatial_merge_size": 2}}, "mm_projector_id is missing, expected patch_merge"),
        ({"dim": 0}, "dim is 0"),
        ({"head_dim": None}, "head_dim is null"),
    ],
)
def test_what_it_does_not_read_is_refused_by_name(changes: dict[str, Any], said: str) -> None:
    with pytest.raises((CheckpointError, UnsupportedModel), match=said):
        native_layout({**PARAMS, **changes}, "params.json")


def test_a_folder_with_both_layouts_is_read_by_its_config(tmp_path: Path) -> None:
    (tmp_path / "params.json").write_text(json.dumps(PARAMS))
    assert Checkpoint.open(tmp_path).where.endswith("params.json")
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    assert Checkpoint.open(tmp_path).architecture == "LlamaForCausalLM"
