"""Families whose releases bring code of their own compute what their relatives do, from what the releases store."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from octavo.devices.cpu.runtime import CpuRuntime
from octavo.distributed.mesh import Mesh
from octavo.errors import UnsupportedModel
from tests.conformance.runtimes import LEVELS
from tests.distributed.threads import run_ranks
from tests.fakes.checkpoints import edit_config, edit_tensors, make_checkpoint
from tests.models.paged_run import load, logits_of
from tests.models.test_tensor_parallel import Rank

TOKENS = [5, 9, 77, 30, 11]
THETA = {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}


def logits(path: Path) -> Tensor:
    return logits_of(load(path), TOKENS)


def released(path: Path, architecture: str, model_type: str, keys: Mapping[str, str] = {}, **own: Any) -> None:
    """Give a config another architecture, and other names of keys."""
    config = json.loads((path / "config.json").read_text())
    renamed = {new: config[old] for old, new in keys.items()}
    edit_config(path, remove=("rope_parameters", "head_dim", *keys))
    edit_config(path, architectures=[architecture], model_type=model_type, **renamed, **own)


def restored(path: Path, *names: tuple[str, str], joined: Mapping[str, tuple[str, ...]] = {}) -> None:
    """Store tensors under names with other parts, and some of each layer one behind the other."""
    tensors, found = load_file(path / "model.safetensors"), {}
    for layer in range(2):
        for target, parts in joined.items():
            start = f"model.layers.{layer}."
            for suffix in ("weight", "bias"):
                if f"{start}{parts[0]}.{suffix}" in tensors:
                    found[f"{start}{target}.{suffix}"] = torch.cat(
                        [tensors[f"{start}{each}.{suffix}"] for each in parts]
                    )
    gone = {part for parts in joined.values() for part in parts}
    found |= {name: each for name, each in tensors.items() if not any(f".{part}." in name for part in gone)}
    stored = {}
    for name, tensor in found.items():
        for old, new in names:
            name = name.replace(old, new)
        stored[name] = tensor
    edit_tensors(path, remove=tuple(tensors), **stored)


QKV = tuple(f"self_attn.{each}_proj" for each in "qkv")
GATE_UP = ("mlp.gate_proj", "mlp.up_proj")
BAICHUAN = {"model_max_length": 256}
NARROW = {"hidden_size": 16, "intermediate_size": 16}


def assert_ranks_agree(path: Path) -> None:
    """Two ranks that share all layers compute the bits of one."""

    def work(mesh: Mesh) -> Tensor:
        return logits_of(Rank(path, mesh, CpuRuntime.open(1, LEVELS[-1]).bind()), TOKENS, dtype=torch.float32)

    expected = work(Mesh.single()) if LEVELS else None
    for found in run_ranks(2, work) if LEVELS else ():
        assert torch.equal(found, expected)


@pytest.mark.parametrize("architecture", ["BaichuanForCausalLM", "BaiChuanForCausalLM"])
def test_baichuan_is_llama_with_one_tensor_of_queries_keys_and_values(architecture: str, tmp_path: Path) -> None:
    path = make_checkpoint("llama", tmp_path, num_key_value_heads=4)
    expected = logits(path)
    released(path, architecture, "baichuan", **BAICHUAN)
    restored(path, joined={"self_attn.W_pack": QKV})
    assert torch.equal(logits(path), expected)


def test_baichuan_of_13b_has_slopes_of_scores_in_the_place_of_rotations(tmp_path: Path) -> None:
    """With distances of nothing, one token computes what Llama computes; with more, scores fall."""
    path = make_checkpoint("llama", tmp_path, num_key_value_heads=4)
    expected = logits(path)
    released(path, "BaichuanForCausalLM", "baichuan", {"max_position_embeddings": "model_max_length"})
    restored(path, joined={"self_attn.W_pack": QKV})
    found, model = logits(path), load(path)
    assert model.config.rope is None
    assert model.config.slopes == (2**-2.0, 2**-4.0, 2**-6.0, 2**-8.0)
    assert torch.equal(found[0], expected[0])
    assert not torch.allclose(found[1], expected[1])
    assert model.config.max_positions == 256


def test_the_head_of_baichuan_2_has_rows_of_length_one(tmp_path: Path) -> None:
    path = make_checkpoint("llama", tmp_path, num_key_value_heads=4, vocab_size=125_696, **NARROW)
    head = load_file(path / "model.safetensors")["lm_head.weight"]
    edit_tensors(path, **{"lm_head.weight": torch.nn.functional.normalize(head)})
    expected = logits(path)
    edit_tensors(path, **{"lm_head.weight": head})
    assert not torch.equal(logits(path), expected)
    released(path, "BaichuanForCausalLM", "baichuan", **BAICHUAN)
    restored(path, joined={"self_attn.W_pack": QKV})
    assert torch.equal(logits(path), expected)
    assert_ranks_agree(path)


CHATGLM_KEYS = {
    "num_hidden_layers": "num_layers",
    "intermediate_size": "ffn_hidden_size",
    "vocab_size": "padded_vocab_size",
    "max_position_embeddings": "seq_length",
    "rms_norm_eps": "layernorm_epsilon",
    "num_key_value_heads": "multi_query_group_num",
}


@pytest.mark.parametrize("architecture", ["ChatGLMModel", "ChatGLMForConditionalGeneration"])
def test_glm_4_in_its_first_layout(architecture: str, tmp_path: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5}
    path = make_checkpoint("glm", tmp_path, rope_parameters=rope)
    expected = logits(path)
    switches = {"multi_query_attention": True, "add_qkv_bias": True, "original_rope": True, "kv_channels": 16}
    released(path, architecture, "chatglm", CHATGLM_KEYS, rope_ratio=500, **switches)
    restored(
        path,
        *(("model.layers.", "transformer.encoder.layers."), ("self_attn.", "self_attention."), ("o_proj", "dense")),
        *(("mlp.gate_up_proj", "mlp.dense_h_to_4h"), ("mlp.down_proj", "mlp.dense_4h_to_h")),
        ("model.embed_tokens.", "transformer.embedding.word_embeddings."),
        *(("model.norm.", "transformer.encoder.final_layernorm."), ("lm_head.", "transformer.output_layer.")),
        joined={"self_attn.query_key_value": QKV},
    )
    edit_tensors(path, **{"transformer.rotary_pos_emb.inv_freq": torch.ones(4)})
    assert torch.equal(logits(path), expected)


@pytest.mark.parametrize(
    ("key", "value"), [("position_encoding_2d", True), ("vision_config", {"hidden_size": 8}), ("rmsnorm", False)]
)
def test_other_kinds_of_chatglm_are_refused(key: str, value: object, tmp_path: Path) -> None:
    path = make_checkpoint("glm", tmp_path)
    released(path, "ChatGLMModel", "chatglm", CHATGLM_KEYS, **{key: value})
    with pytest.raises(UnsupportedModel, match=key):
        load(path)


def test_qwen_1(tmp_path: Path) -> None:
    path = make_checkpoint("qwen2", tmp_path, num_key_value_heads=4, rms_norm_eps=1e-3, **THETA)
    expected = logits(path)
    keys = {"max_position_embeddings": "seq_length", "rms_norm_eps": "layer_norm_epsilon"}
    own = {"kv_channels": 8, "rotary_emb_base": 5e5, "no_bias": True, "use_logn_attn": True, "use_dynamic_ntk": True}
    released(path, "QWenLMHeadModel", "qwen", keys, **own, intermediate_size=112, max_position_embeddings=1024)
    restored(
        path,
        *(("model.layers.", "transformer.h."), ("model.embed_tokens.", "transformer.wte."), ("self_attn.", "attn.")),
        *(("model.norm.", "transformer.ln_f."), ("input_layernorm", "ln_1"), ("post_attention_layernorm", "ln_2")),
        *(("o_proj", "c_proj"), ("gate_proj", "w2"), ("up_proj", "w1"), ("down_proj", "c_proj")),
        joined={"self_attn.c_attn": QKV},
    )
    assert torch.equal(logits(path), expected)
    assert load(path).config.max_positions == 256  # behind the training it would stretch its rotations


def test_internlm_1_and_pangu_embedded_have_biases_around_attention(tmp_path: Path) -> None:
    path = make_checkpoint("llama", tmp_path, attention_bias=True, **THETA)
    expected = logits(path)
    rotary = {"base": 5e5, "type": "dynamic"}
    released(path, "InternLMForCausalLM", "internlm", {"attention_bias": "bias"}, rotary=rotary)
    assert torch.equal(logits(path), expected)
    released(path, "PanguEmbeddedForCausalLM", "PanguEmbedded", rotary=None, rope_theta=5e5)
    assert torch.equal(logits(path), expected)
    edit_config(path, param_sink_number=128)
    with pytest.raises(UnsupportedModel, match="param_sink_number"):
        load(path)


def test_telechat_stores_keys_and_values_head_by_head(tmp_path: Path) -> None:
    """Biases of zeros that it does not store are what its relative has in their place."""
    path = make_checkpoint("llama", tmp_path, attention_bias=True, mlp_bias=True)
    tensors = load_file(path / "model.safetensors")
    without = [name for name in tensors if name.endswith((*(f"{each}.bias" for each in (*QKV, *GATE_UP)),))]
    edit_tensors(path, **{name: torch.zeros_like(tensors[name]) for name in without})
    expected = logits(path)
    for layer in (0, 1):
        k, v = (tensors[f"model.layers.{layer}.self_attn.{each}_proj.weight"].view(2, 1, 8, 32) for each in "kv")
        stored = {f"model.layers.{layer}.self_attn.key_value.weight": torch.cat((k, v), 1).reshape(32, 32)}
        edit_tensors(path, remove=tuple(f"model.layers.{layer}.{each}.weight" for each in QKV[1:]), **stored)
    edit_tensors(path, remove=tuple(without))
    keys = {"num_hidden_layers": "n_layer", "num_attention_heads": "n_head", "intermediate_size": "ffn_hidden_size"}
    keys |= {"rms_norm_eps": "layer_norm_epsilon", "max_position_embeddings": "training_seqlen"}
    released(path, "TeleChat2ForCausalLM", "telechat", keys, base_seqlen=256)
    restored(
        path,
        *(("model.layers.", "transformer.h."), ("model.embed_tokens.", "transformer.word_embeddings.")),
        *(("model.norm.", "transformer.ln_f."), ("self_attn.", "self_attention."), ("o_proj", "dense")),
        ("q_proj", "query"),
    )
    assert torch.equal(logits(path), expected)
    assert_ranks_agree(path)
    edit_config(path, base_seqlen=128)
    with pytest.raises(UnsupportedModel, match="base_seqlen is 128, expected 256"):
        load(path)


def test_tele_flm_has_factors_of_embeddings_and_logits(tmp_path: Path) -> None:
    granite = {"embedding_multiplier": 3.0, "logits_scaling": 4.0, "attention_multiplier": 8**-0.5}
    path = make_checkpoint("granite", tmp_path, **granite, residual_multiplier=1.0, rms_norm_eps=1e-3)
    expected = logits(path)
    released(path, "TeleFLMForCausalLM", "teleflm", use_mup=True, input_mult=3.0, output_mult=2.0, mup_scale_factor=8.0)
    assert torch.equal(logits(path), expected)


def test_rnj_1_is_gemma_3_without_windows(tmp_path: Path) -> None:
    rope = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 64}
    by_kind, kinds = {"full_attention": rope, "sliding_attention": rope}, ["full_attention"] * 2
    path = make_checkpoint("gemma3", tmp_path, num_hidden_layers=2, layer_types=kinds, rope_parameters=by_kind)
    expected = logits(path)
    edit_config(path, architectures=["Rnj1ForCausalLM"], rope_parameters=rope)
    assert torch.equal(logits(path), expected)
    edit_config(path, layer_types=["chunked_attention"] * 2)
    with pytest.raises(UnsupportedModel, match="chunks of Rnj-1 are not implemented"):
        load(path)


def test_stable_lm_of_the_first_code(tmp_path: Path) -> None:
    path = make_checkpoint("stablelm", tmp_path, partial_rotary_factor=0.25, layer_norm_eps=1e-3)
    expected = logits(path)
    keys = {"layer_norm_eps": "norm_eps"}
    edit_config(path, remove=("partial_rotary_factor",))
    released(path, "StableLMEpochForCausalLM", "stablelm_epoch", keys, rope_pct=0.25)
    assert torch.equal(logits(path), expected)


@pytest.mark.parametrize(
    ("model_type", "overrides", "own"),
    [
        ("RefinedWebModel", {}, {"multi_query": True, "parallel_attn": True}),
        ("RefinedWeb", {"new_decoder_architecture": True, "num_kv_heads": 2}, {"n_head_kv": 2, "parallel_attn": True}),
        ("RefinedWeb", {"alibi": True, "parallel_attn": False, "multi_query": False}, {"alibi": True}),
    ],
)
def test_falcon_of_the_first_code(
    model_type: str, overrides: dict[str, Any], own: dict[str, Any], tmp_path: Path
) -> None:
    path = make_checkpoint("falcon", tmp_path, **overrides)
    expected = logits(path)
    keys = {"num_hidden_layers": "n_layer", "num_attention_heads": "n_head"}
    left_out = ("new_decoder_architecture", "num_kv_heads", "alibi", "parallel_attn", "multi_query")
    edit_config(path, remove=(*left_out, "num_ln_in_parallel_attn"))
    released(path, "RWForCausalLM", model_type, keys, **own)
    assert torch.equal(logits(path), expected)


@pytest.mark.parametrize(
    ("architecture", "names"),
    [
        (
            "OuroForCausalLM",
            (
                *(("post_attention_layernorm", "third"), ("post_self_attn_layernorm", "input_layernorm_2")),
                *(("third", "post_attention_layernorm"), ("post_mlp_layernorm", "post_attention_layernorm_2")),
            ),
        ),
        (
            "PanguEmbeddedForCausalLM",
            (
                ("post_attention_layernorm", "pre_mlp_layernorm"),
                ("post_self_attn_layernorm", "post_attention_layernorm"),
            ),
        ),
    ],
)
def test_norms_before_and_behind_are_those_of_glm_4(
    architecture: str, names: tuple[tuple[str, str], ...], tmp_path: Path
) -> None:
    """GLM-4 turns neighbouring pairs of elements; in another order of these they are halves."""
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 1.0}
    path = make_checkpoint("glm4", tmp_path, rope_parameters=rope, attention_bias=False, num_key_value_heads=4)
    expected = logits(path)
    tensors, changes = load_file(path / "model.safetensors"), {}
    for layer in (0, 1):
        for each in ("q", "k"):
            name = f"model.layers.{layer}.self_attn.{each}_proj.weight"
            changes[name] = tensors[name].view(4, 8, 2, 32).transpose(1, 2).reshape(64, 32)
        gate, up = tensors[f"model.layers.{layer}.mlp.gate_up_proj.weight"].chunk(2)
        changes |= {f"model.layers.{layer}.mlp.{key}_proj.weight": part for key, part in (("gate", gate), ("up", up))}
    fused = tuple(name for name in tensors if "gate_up" in name)
    edit_tensors(path, remove=fused, **{"model.early_exit_gate.weight": torch.ones(1, 32)} | changes)
    if architecture != "OuroForCausalLM":
        edit_tensors(path, remove=("model.early_exit_gate.weight",))
    released(path, architecture, "of its own", total_ut_steps=1, sandwich_norm=True)
    edit_config(path, head_dim=16, bias=False)
    restored(path, *names)
    assert torch.allclose(logits(path), expected, rtol=1e-4, atol=1e-4)


def jais_logits(tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> Tensor:
    """The formula of JAIS in plain torch, for all of `TOKENS`."""
    functional, heads = torch.nn.functional, config["n_head"]
    count, dim = len(TOKENS), config["n_embd"] // heads
    x = tensors["transformer.wte.weight"][TOKENS]
    if config["position_embedding_type"] == "learned":
        x = x + tensors["transformer.wpe.weight"][:count]
    x = x * config["mup_embeddings_scale"]
    distance = torch.arange(count)[:, None] - torch.arange(count)
    slopes = torch.tensor([2.0 ** (-8 * (head + 1) / heads) for head in range(heads)])
    bias = -slopes[:, None, None] * distance if config["position_embedding_type"] == "alibi" else 0.0

    def norm(name: str, x: Tensor) -> Tensor:
        return functional.layer_norm(x, x.shape[-1:], *(tensors[f"{name}.{each}"] for each in ("weight", "bias")), 1e-5)

    def linear(name: str, x: Tensor) -> Tensor:
        return x @ tensors[f"{name}.weight"] + tensors[f"{name}.bias"]

    for layer in (0, 1):
        start = f"transformer.h.{layer}."
        qkv = linear(f"{start}attn.c_attn", norm(f"{start}ln_1", x)).view(count, 3, heads, dim)
        q, k, v = qkv.permute(1, 2, 0, 3)
        scores = (q @ k.mT / dim + bias).masked_fill(distance < 0, -torch.inf)
        x = x + linear(f"{start}attn.c_proj", (scores.softmax(-1) @ v).transpose(0, 1).flatten(1))
        y = norm(f"{start}ln_2", x)
        gated = linear(f"{start}mlp.c_fc", y) * functional.silu(linear(f"{start}mlp.c_fc2", y))
        x = x + linear(f"{start}mlp.c_proj", gated)
    return norm("transformer.ln_f", x) @ tensors["transformer.wte.weight"].T * 0.5 * 0.25


@pytest.mark.parametrize("position_embedding_type", ["alibi", "learned"])
def test_jais_computes_its_formula(position_embedding_type: str, tmp_path: Path) -> None:
    path = make_checkpoint("gpt2", tmp_path)
    tensors = load_file(path / "model.safetensors")
    again = {name.replace("c_fc", "c_fc2"): tensor.flip(0) * 0.7 for name, tensor in tensors.items() if "c_fc" in name}
    own = {"activation_function": "swiglu", "mup_scale_qk_dot_by_d": True, "mup_embeddings_scale": 3.0}
    own |= {"mup_output_alpha": 0.5, "mup_width_scale": 0.25, "position_embedding_type": position_embedding_type}
    released(path, "JAISLMHeadModel", "jais", **own)
    is_learned = position_embedding_type == "learned"
    edit_tensors(path, remove=() if is_learned else ("transformer.wpe.weight",), **again)
    expected = jais_logits(load_file(path / "model.safetensors"), json.loads((path / "config.json").read_text()))
    assert torch.allclose(logits(path), expected, rtol=1e-4, atol=1e-4)
    assert_ranks_agree(path)
    edit_config(path, alibi_scaling={"type": "linear"})
    with pytest.raises(UnsupportedModel, match="alibi_scaling"):
        load(path)
