"""Keys of DeepSeek-V4 as its releases have them, in the layout of transformers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from octavo.config.section import MOST_LAYERS

KINDS: Final = {
    0: "sliding_attention",
    4: "compressed_sparse_attention",
    128: "heavily_compressed_attention",
}
"""Kinds of layers by how many tokens leave one vector (`compress_ratios`)."""


def deepseek_v4_layout(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of today that follow from those of a release; the family's class refuses what is malformed."""
    made: dict[str, Any] = {}
    layers = values.get("num_hidden_layers")
    ratios, hashed = values.get("compress_ratios"), values.get("num_hash_layers")
    if not isinstance(layers, int):
        return made
    if values.get("layer_types") is None and isinstance(ratios, list):  # layers that predict further tokens follow
        made["layer_types"] = [KINDS.get(each, each) if isinstance(each, int) else each for each in ratios[:layers]]
    if values.get("mlp_layer_types") is None and isinstance(hashed, int) and layers <= MOST_LAYERS:
        made["mlp_layer_types"] = ["hash_moe" if layer < hashed else "moe" for layer in range(layers)]
    rates = values.get("compress_rates")
    if rates is None:
        made["compress_rates"] = {
            KINDS[4]: values.get("compress_rate_csa", 4),
            KINDS[128]: values.get("compress_rate_hca", 128),
        }
    rope = values.get("rope_parameters") or values.get("rope_scaling") or {}
    if isinstance(rope, Mapping) and not isinstance(rope.get("main"), Mapping):
        share, turned, dim = (values.get(name) for name in ("partial_rotary_factor", "qk_rope_head_dim", "head_dim"))
        if share is None and isinstance(turned, int) and isinstance(dim, int) and 0 < turned <= dim:
            share = turned / dim
        common = {"partial_rotary_factor": share}
        main = {"rope_type": "default", "rope_theta": values.get("rope_theta", 10_000.0), **common}
        compressed = {"rope_type": rope.get("type", "default"), **rope}
        compressed |= {"rope_theta": values.get("compress_rope_theta", 160_000.0), **common}
        if compressed["rope_type"] == "yarn":  # whose factor of scores is not that of the formula
            compressed.setdefault("attention_factor", 1.0)
        made["rope_parameters"] = {"main": main, "compress": compressed}
    return made
