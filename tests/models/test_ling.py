"""Ling 2.5 computes what DeepSeek V3 does, with linear attention in plain torch in a part of the layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from octavo.layers.distance import alibi_slopes
from tests.fakes.checkpoints import load_oracle, make_checkpoint
from tests.models.paged_run import PagedRun, load
from tests.models.test_against_transformers import assert_same_as_oracle, make_streams


class PlainAttention(nn.Module):
    """Σ of earlier tokens j of (q · k_j) exp(-slope · distance) v_j, for four heads of 8 elements."""

    def __init__(self, weights: dict[str, Tensor], strength: float) -> None:
        super().__init__()
        self.weights, self.slopes = weights, strength * torch.tensor(alibi_slopes(4))

    def forward(self, hidden_states: Tensor, **others: Any) -> tuple[Tensor, None]:
        x, w = hidden_states[0], self.weights
        count = len(x)
        q, k, v = (each.view(count, 4, 8) for each in (x @ w["query_key_value"].T).chunk(3, 1))
        angles = torch.arange(count)[:, None] * 10_000.0 ** (-torch.arange(0, 8, 2) / 8)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]

        def turned(heads: Tensor, norm: str) -> Tensor:
            first, second = F.rms_norm(heads, (8,), w[norm], 1e-6).chunk(2, -1)
            return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

        q, k = turned(q, "query_layernorm") * 8**-0.5, turned(k, "key_layernorm")
        distance = (torch.arange(count)[:, None] - torch.arange(count)).tril()
        decay = torch.exp(-self.slopes[:, None, None] * distance).tril()
        sums = torch.einsum("hij,jhd->ihd", torch.einsum("ihd,jhd->hij", q, k) * decay, v)
        normed = F.rms_norm(sums, (8,), None, 1e-6).flatten(1) * w["g_norm"]  # four groups
        return (normed * torch.sigmoid(x @ w["g_proj"].T) @ w["dense"].T)[None], None


def test_prompts_and_greedy_text_agree_with_plain_torch(tmp_path: Path) -> None:
    path = make_checkpoint("bailing_moe_v2_5", tmp_path / "ling")
    run, streams = PagedRun(load(path)), make_streams()
    run.step([(stream, len(stream.token_ids)) for stream in streams])
    run.decode(streams, 5)
    oracle = load_oracle(make_checkpoint("deepseek_v3", tmp_path / "deepseek"))
    begin, tensors = "model.layers.0.attention.", load_file(path / "model.safetensors")
    own = {name[len(begin) : -len(".weight")]: each for name, each in tensors.items() if name.startswith(begin)}
    oracle.model.layers[0].self_attn = PlainAttention(own, 1 + 1e-5)
    for stream in streams:
        assert_same_as_oracle(oracle, stream)
