"""Keys of MiniMax-M3 as its release has them, in the layout of transformers, and its image processor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from octavo.config.section import Section

_NAMES: Final = {
    "index_n_heads": "sparse_num_index_heads",
    "index_head_dim": "sparse_index_dim",
    "index_block_size": "sparse_block_size",
    "index_topk_blocks": "sparse_topk_blocks",
    "index_local_blocks": "sparse_local_block",
    **{name: name for name in ("sparse_init_block", "sparse_score_type", "use_sparse_attention")},
}
"""Today's names of keys, and those of `sparse_attention_config` in the release."""


def minimax_layout(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of today that follow from those of the release; what is malformed stays as it is."""
    sparse = values.get("sparse_attention_config")
    stated = sparse if isinstance(sparse, Mapping) else {}
    made = {ours: stated[name] for ours, name in _NAMES.items() if stated.get(name) is not None}
    for name, numbers, kinds in (
        ("layer_types", stated.get("sparse_attention_freq"), ("full_attention", "minimax_m3_sparse")),
        ("mlp_layer_types", values.get("moe_layer_freq"), ("dense", "sparse")),
    ):
        if values.get(name) is None and isinstance(numbers, list):
            made[name] = [kinds[bool(each)] for each in numbers]
    return made


def minimax_settings(settings: Section) -> dict[str, Any]:
    """Return the settings of an image processor under the name of Qwen2-VL's, which does the same from 3,136 to 451,584
    pixels; the size that the release states is not used, and not meant.
    """
    size = settings.values.get("size")
    made = {**settings.values, "image_processor_type": "Qwen2VLImageProcessor"}
    if size is None or size == [672, 672]:
        made["size"] = {"shortest_edge": 4 * 28 * 28, "longest_edge": 451_584}
    return made
