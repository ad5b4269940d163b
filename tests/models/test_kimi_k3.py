"""Kimi K3 computes what Kimi Linear does with its blocks changed, in plain torch; what it does not have is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from octavo import LLM
from octavo.config.checkpoint import Checkpoint
from octavo.errors import OctavoError, UnsupportedModel
from octavo.models.prediction_layer import prediction_layer
from tests.conformance.runtimes import LEVELS
from tests.distributed.threads import memory_meshes, thread_meshes
from tests.e2e.test_pipeline import COMMON, SMALL, VOCABULARY, answers
from tests.fakes.byte_tokenizer import write_byte_tokenizer
from tests.fakes.checkpoints import edit_config, edit_tensors, load_oracle, make_checkpoint
from tests.fakes.rank_threads import llm_of_ranks
from tests.models.loading import read_config

TOKENS = [3 + 7 * each % 120 for each in range(24)]
KINDS = ["linear_attention", "full_attention", "linear_attention"]
BETA, LINEAR_BETA, BOUND, WIDTH, PART = 1.5, 2.5, -5.0, 20, 2
"""Soft caps of activations, the bound of decays, the width of experts' inputs, and the layers of a part."""


def make(folder: Path, **sizes: int) -> tuple[Path, Any]:
    """Write Kimi Linear with the tensors that Kimi K3 has beside them; return transformers' Kimi Linear, too."""
    path = make_checkpoint("kimi_linear", folder, q_lora_rank=12, layer_types=KINDS, num_hidden_layers=3, **sizes)
    oracle, generator, own = load_oracle(path), torch.Generator().manual_seed(1), {}

    def add(name: str, *shape: int) -> None:
        noise = torch.randn(shape, generator=generator)
        own[f"{name}.weight"] = 1.0 + 0.3 * noise if len(shape) == 1 else noise / shape[-1] ** 0.5

    for layer, kind in enumerate(KINDS):
        start = f"model.layers.{layer}."
        add(f"{start}self_attn.g_proj", 32 if kind == "linear_attention" else 40, 32)
        for name in ("self_attention_res", "mlp_res"):
            add(f"{start}{name}_norm", 32)
            add(f"{start}{name}_proj", 1, 32)
        if layer:
            add(f"{start}block_sparse_moe.routed_expert_down_proj", WIDTH, 32)
            add(f"{start}block_sparse_moe.routed_expert_norm", WIDTH)
            add(f"{start}block_sparse_moe.routed_expert_up_proj", 32, WIDTH)
            for expert in range(8):
                for name, shape in (("w1", (24, WIDTH)), ("w3", (24, WIDTH)), ("w2", (WIDTH, 24))):
                    add(f"{start}block_sparse_moe.experts.{expert}.{name}", *shape)
    add("model.output_attn_res_norm", 32)
    add("model.output_attn_res_proj", 1, 32)
    edit_tensors(path, **own)
    return path, oracle


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-5) * weight


def activated(gate: Tensor, up: Tensor) -> Tensor:
    return BETA * torch.tanh(gate / BETA) * torch.sigmoid(gate) * LINEAR_BETA * torch.tanh(up / LINEAR_BETA)


class Formula:
    """Kimi K3 in plain torch, with the attention and the routers of transformers' Kimi Linear."""

    def __init__(self, path: Path, oracle: Any) -> None:
        self.tensors, self.oracle = load_file(path / "model.safetensors"), oracle

    def weight(self, name: str) -> Tensor:
        return self.tensors[f"model.{name}.weight"]

    def attended(self, parts: list[Tensor], name: str) -> Tensor:
        stacked = torch.stack(parts, 1)
        scores = norm(stacked, self.weight(f"{name}_norm")) @ self.weight(f"{name}_proj")[0]
        return (torch.softmax(scores, 1)[:, :, None] * stacked).sum(1)

    def attention(self, layer: int, x: Tensor) -> Tensor:
        block, gates = (
            self.oracle.model.layers[layer].self_attn,
            x @ self.weight(f"layers.{layer}.self_attn.g_proj").t(),
        )
        if KINDS[layer] == "linear_attention":
            decay = block.forget_gate

            def bounded(inputs: Tensor) -> Tensor:
                steps = decay.f_b_proj(decay.f_a_proj(inputs)) + decay.dt_bias
                return BOUND * torch.sigmoid(decay.A_log.exp() * steps.view(1, len(x), 4, 8))

            decay.forward = bounded
            block.g_a_proj.forward, block.g_b_proj.forward = torch.nn.Identity(), lambda _: gates[None]
            return block(x[None])[0]
        block.q_a_layernorm.variance_epsilon = block.kv_a_layernorm.variance_epsilon = 1e-5
        handle = block.o_proj.register_forward_pre_hook(lambda _, given: (given[0] * gates.sigmoid(),))
        mask = torch.full((1, 1, len(x), len(x)), float("-inf")).triu(1)
        out: Tensor = block(x[None], mask)[0][0]
        handle.remove()
        return out

    def gated(self, x: Tensor, start: str, names: tuple[str, str, str]) -> Tensor:
        gate, up, down = (self.weight(f"{start}.{name}") for name in names)
        return activated(x @ gate.t(), x @ up.t()) @ down.t()

    def mlp(self, layer: int, x: Tensor) -> Tensor:
        start, names = f"layers.{layer}.block_sparse_moe", ("gate_proj", "up_proj", "down_proj")
        if not layer:
            return self.gated(x, start, names)
        _, weights, chosen = self.oracle.model.layers[layer].mlp.gate(x)
        inner, total = x @ self.weight(f"{start}.routed_expert_down_proj").t(), torch.zeros(len(x), WIDTH)
        for token in range(len(x)):
            for factor, expert in zip(weights[token], chosen[token].tolist(), strict=True):
                out = self.gated(inner[token], f"{start}.experts.{expert}", ("w1", "w3", "w2"))
                total[token] += factor * out
        routed = norm(total, self.weight(f"{start}.routed_expert_norm"))
        routed = routed @ self.weight(f"{start}.routed_expert_up_proj").t()
        return routed + self.gated(x, f"{start}.shared_experts", names)

    def logits(self, tokens: list[int]) -> Tensor:
        parts = [self.weight("embed_tokens")[torch.tensor(tokens)]]
        for layer in range(len(KINDS)):
            start = f"layers.{layer}"
            x = norm(self.attended(parts, f"{start}.self_attention_res"), self.weight(f"{start}.input_layernorm"))
            out = self.attention(layer, x)
            parts = [*parts, out] if layer % PART == 0 else [*parts[:-1], parts[-1] + out]
            x = norm(self.attended(parts, f"{start}.mlp_res"), self.weight(f"{start}.post_attention_layernorm"))
            parts[-1] = parts[-1] + self.mlp(layer, x)
        x = norm(self.attended(parts, "output_attn_res"), self.weight("norm"))
        return x @ self.tensors["lm_head.weight"].t()


def to_release(path: Path) -> None:
    """Rewrite the checkpoint by the names of the release: the text within, beside a vision tower."""
    tensors, config = load_file(path / "model.safetensors"), json.loads((path / "config.json").read_text())
    own: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        dropped = any(f".self_attn.g_{each}_proj." in name for each in "ab")
        if not dropped:
            own[f"language_model.{name.replace('layers.0.block_sparse_moe.', 'layers.0.mlp.')}"] = tensor
    own["vision_tower.patch_embed.proj.weight"] = torch.zeros(2, 3, 2, 2)
    attention = {
        "full_attn_layers": [2],
        "kda_layers": [1, 3],
        "num_heads": 4,
        "head_dim": 8,
        "short_conv_kernel_size": 4,
        "use_full_rank_gate": True,
        "gate_lower_bound": BOUND,
    }
    left_out = ("architectures", "layer_types", "mlp_layer_types", "linear_num_heads", "linear_head_dim")
    text = {name: value for name, value in config.items() if name not in left_out}
    text |= {"linear_attn_config": attention, "first_k_dense_replace": 1, "hidden_act": "situ", "mla_use_nope": True}
    text |= {"activation_situ_beta": BETA, "activation_situ_linear_beta": LINEAR_BETA, "mla_use_output_gate": True}
    text |= {"routed_expert_hidden_size": WIDTH, "latent_moe_use_norm": True, "attn_res_block_size": PART}
    whole = {"architectures": ["KimiK3ForConditionalGeneration"], "model_type": "kimi_k3", "text_config": text}
    edit_tensors(path, remove=tuple(tensors), **own)
    (path / "config.json").write_text(json.dumps({**whole, "vision_config": {"vt_hidden_size": 8}}))


def kimi_k3(folder: Path) -> tuple[Path, Tensor]:
    """Return a checkpoint as released, and the logits of TOKENS by the formula."""
    path, oracle = make(folder)
    with torch.inference_mode():
        expected = Formula(path, oracle).logits(TOKENS)
    to_release(path)
    return path, expected


@pytest.mark.parametrize(
    ("changes", "within", "said"),
    [
        ({"attn_res_block_size": None}, {}, "attn_res_block_size is missing, expected an integer"),
        ({"hidden_act": "gelu"}, {}, 'hidden_act is "gelu", expected "silu" or "situ"'),
        ({"activation_situ_beta": 0.0}, {}, "activation_situ_beta is 0.0, expected a number above 0"),
        ({"mla_use_nope": False}, {}, "mla_use_nope is false, expected true"),
        ({"moe_router_activation_func": "softmax"}, {}, 'moe_router_activation_func is "softmax", expected "sigmoid"'),
        ({}, {"gate_lower_bound": 0.5}, "gate_lower_bound is 0.5, expected a number below 0"),
        ({}, {"kda_layers": [1, 2, 3]}, r"kda_layers is \[1, 2, 3\], expected the layers that full_attn_layers leaves"),
    ],
)
def test_other_values_are_refused_by_name(changes: Any, within: Any, said: str, tmp_path: Path) -> None:
    path = make_checkpoint("kimi_linear", tmp_path)
    to_release(path)
    text = json.loads((path / "config.json").read_text())["text_config"]
    attention = text["linear_attn_config"] | within
    edit_config(path, text_config=text | changes | {"linear_attn_config": attention})
    with pytest.raises(OctavoError, match=said):
        read_config(path)


def test_kimi_linear_with_keys_of_kimi_k3_is_refused(tmp_path: Path) -> None:
    path = make_checkpoint("kimi_linear", tmp_path)
    edit_config(path, attn_res_block_size=2)
    with pytest.raises(UnsupportedModel, match="attn_res_block_size is 2; models of the architecture KimiK3"):
        read_config(path)


def test_prediction_layers_are_refused(tmp_path: Path) -> None:
    path = make_checkpoint("kimi_linear", tmp_path)
    to_release(path)
    text = json.loads((path / "config.json").read_text())["text_config"]
    edit_config(path, text_config=text | {"num_nextn_predict_layers": 1})
    with pytest.raises(UnsupportedModel, match="prediction layers of a model with a residual in parts are not read"):
        prediction_layer(Checkpoint.open(path))


@pytest.mark.long
@pytest.mark.skipif(not LEVELS, reason="exact by construction are the compiled kernels, absent here")
@pytest.mark.parametrize(("tensor", "pipeline"), [(1, 3), (2, 2)])
def test_stages_give_the_bits_of_one_rank(tensor: int, pipeline: int, tmp_path: Path) -> None:
    path, _ = make(tmp_path, vocab_size=VOCABULARY)
    to_release(path)
    write_byte_tokenizer(path)
    with LLM(str(path), **COMMON, num_gpu_blocks_override=64, threads=1) as llm:
        expected = answers(llm)
    meshes = memory_meshes if tensor > 1 else thread_meshes
    with llm_of_ranks(path, tensor, pipeline, meshes, **COMMON, **SMALL) as llm:
        assert answers(llm) == expected
