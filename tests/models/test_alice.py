"""Alice AI in plain torch, with the attention of transformers' Qwen3-Next and Kimi Linear."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import silu

from octavo.config.checkpoint import Checkpoint
from octavo.errors import OctavoError, UnsupportedModel
from octavo.models.prediction_layer import prediction_layer
from tests.fakes.checkpoints import edit_config, edit_tensors, load_oracle, make_checkpoint
from tests.models.loading import read_config
from tests.models.paged_run import load, logits_of

TOKENS = [3 + 7 * each % 120 for each in range(24)]
KINDS = ["linear_attention", "full_attention", "linear_attention"]
EPS, EXPERTS, CHOSEN, PART = 1e-6, 4, 2, 2
DELTA = {
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 4),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 8),
}
OWN = {
    "architectures": ["AliceAIForCausalLM"],
    "model_type": "alice_ai",
    "layer_types": KINDS,
    "block_attn_res_block_size": PART,
    "kda_allow_negative_eigenvalues": False,
    "router_score_function": "sigmoid",
    "router_bias_correction": True,
    **DELTA,
}


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + EPS) * weight


class Formula:
    """Alice AI with the attention of two oracles."""

    def __init__(self, tensors: dict[str, Tensor], qwen: Any, kimi: Any) -> None:
        self.tensors, self.qwen, self.kimi = tensors, qwen, kimi

    def weight(self, name: str) -> Tensor:
        return self.tensors[f"model.{name}"]

    def attended(self, parts: list[Tensor], normed: str, query: str) -> Tensor:
        stacked = torch.stack(parts, 1)
        scores = norm(stacked, self.weight(normed)) @ self.weight(query)[0]
        return (torch.softmax(scores, 1)[:, :, None] * stacked).sum(1)

    def attention(self, layer: int, x: Tensor) -> Tensor:
        if KINDS[layer] == "linear_attention":
            out: Tensor = self.kimi.model.layers[layer].self_attn(x[None])[0]
            return out
        positions = self.qwen.model.rotary_emb(x[None], torch.arange(len(x))[None])
        mask = torch.full((1, 1, len(x), len(x)), float("-inf")).triu(1)
        found: Tensor = self.qwen.model.layers[layer].self_attn(x[None], positions, mask)[0][0]
        return found

    def gated(self, x: Tensor, start: str) -> Tensor:
        gate, up, down = (self.weight(f"{start}.{name}_proj.weight") for name in ("gate", "up", "down"))
        return (silu(x @ gate.t()) * (x @ up.t())) @ down.t()

    def mlp(self, layer: int, x: Tensor) -> Tensor:
        start = f"layers.{layer}.mlp"
        scores = (x @ self.weight(f"{start}.gate.weight").t()).sigmoid()
        chosen = (scores + self.weight(f"{start}.gate.e_score_correction_bias")).topk(CHOSEN).indices
        weights = scores.gather(1, chosen)
        weights = weights / weights.sum(1, keepdim=True)
        dense = torch.zeros_like(scores).scatter(1, chosen, weights)
        routed = sum(dense[:, each, None] * self.gated(x, f"{start}.experts.{each}") for each in range(EXPERTS))
        gate = (x @ self.weight(f"{start}.shared_expert_gate.weight").t()).sigmoid()
        return routed + gate * self.gated(x, f"{start}.shared_expert")

    def logits(self, tokens: list[int]) -> Tensor:
        parts = [self.weight("embed_tokens.weight")[torch.tensor(tokens)]]
        for layer in range(len(KINDS)):
            start, x = f"layers.{layer}", parts[0]
            if layer:
                x = self.attended(parts, f"{start}.attn_res_norm_weight", f"{start}.attn_res_proj.weight")
            out = self.attention(layer, norm(x, 1 + self.weight(f"{start}.input_layernorm.weight")))
            parts = [*parts, out] if layer % PART == 0 else [*parts[:-1], parts[-1] + out]
            x = self.attended(parts, f"{start}.mlp_res_norm_weight", f"{start}.mlp_res_proj.weight")
            out = self.mlp(layer, norm(x, 1 + self.weight(f"{start}.post_attention_layernorm.weight")))
            parts[-1] = parts[-1] + out
        x = self.attended(parts, "attnres_final.res_norm_weight", "attnres_final.res_proj.weight")
        return norm(x, 1 + self.weight("norm.weight")) @ self.tensors["lm_head.weight"].t()


def alice(folder: Path) -> tuple[Path, Tensor]:
    """Return a checkpoint, and the logits of TOKENS by the formula."""
    both = {"num_hidden_layers": 3, "rms_norm_eps": EPS}
    path = make_checkpoint(
        *("qwen3_next", folder), **both, layer_types=["full_attention"] * 3, mlp_only_layers=[], norm_topk_prob=True
    )
    (folder / "kimi").mkdir()
    other = make_checkpoint("kimi_linear", folder / "kimi", **both, layer_types=KINDS)
    qwen, kimi, delta = load_oracle(path), load_oracle(other), load_file(other / "model.safetensors")
    tensors, generator = load_file(path / "model.safetensors"), torch.Generator().manual_seed(1)

    def add(start: str, place: str) -> None:
        tensors[f"{start}{place}_norm_weight"] = 1 + 0.3 * torch.randn(32, generator=generator)
        tensors[f"{start}{place}_proj.weight"] = torch.randn(1, 32, generator=generator) / 32**0.5

    for layer, kind in enumerate(KINDS):
        start = f"model.layers.{layer}."
        tensors[f"{start}mlp.gate.e_score_correction_bias"] = torch.randn(EXPERTS, generator=generator)
        for place in ("attn_res", "mlp_res") if layer else ("mlp_res",):
            add(start, place)
        if kind == "linear_attention":
            for name in [each for each in tensors if each.startswith(f"{start}self_attn.")]:
                del tensors[name]
            for name in [each for each in delta if each.startswith(f"{start}self_attn.")]:
                own = name.replace(".self_attn.", ".linear_attn.").replace("A_log", "a_log_bias")
                tensors[own] = delta[name].flatten() if name.endswith("A_log") else delta[name]
    add("model.attnres_final.", "res")
    tensors["mtp.layers.0.input_layernorm.weight"] = torch.ones(32)
    exact = {name: each.double() for name, each in tensors.items()}
    with torch.inference_mode():
        expected = Formula(exact, qwen.double(), kimi.double()).logits(TOKENS).float()
    edit_tensors(path, remove=tuple(load_file(path / "model.safetensors")), **tensors)
    edit_config(path, remove=("intermediate_size",), **OWN)
    return path, expected


def test_it_computes_the_formula(tmp_path: Path) -> None:
    path, expected = alice(tmp_path)
    torch.testing.assert_close(logits_of(load(path), TOKENS), expected, atol=1e-5 * float(expected.abs().max()), rtol=0)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"kda_allow_negative_eigenvalues": True}, "kda_allow_negative_eigenvalues is true, expected false"),
        ({"router_score_function": "softmax"}, 'router_score_function is "softmax", expected "sigmoid"'),
        ({"router_bias_correction": False}, "router_bias_correction is false, expected true"),
        ({"linear_num_key_heads": 2}, "linear_num_key_heads is 2, expected linear_num_value_heads, which is 4"),
        ({"linear_key_head_dim": 4}, "linear_key_head_dim is 4, expected linear_value_head_dim, which is 8"),
        ({"block_attn_res_block_size": 0}, "block_attn_res_block_size is 0, expected an integer"),
    ],
)
def test_other_values_are_refused_by_name(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    path = make_checkpoint("qwen3_next", tmp_path, mlp_only_layers=[])
    edit_config(path, **{**OWN, **changes})
    with pytest.raises(OctavoError, match=said):
        read_config(path)


def test_its_prediction_layers_are_not_read(tmp_path: Path) -> None:
    path = make_checkpoint("qwen3_next", tmp_path, mlp_only_layers=[])
    edit_config(path, **OWN, mtp_num_hidden_layers=1)
    checkpoint = Checkpoint.open(path)
    with pytest.raises(UnsupportedModel, match="prediction layers of a model with a residual in parts are not read"):
        prediction_layer(checkpoint)
