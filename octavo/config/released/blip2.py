"""BLIP-2 with OPT: its releases leave out what the text model's config has by default."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from octavo.config.section import Section

_OPT: Final[Mapping[str, Any]] = {
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "ffn_dim": 3072,
    "max_position_embeddings": 2048,
    "num_attention_heads": 12,
    "tie_word_embeddings": True,
    "vocab_size": 50_272,
    "bos_token_id": 2,
}


def blip2_layout(config: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Return the config with all sizes of OPT; one with another text model as it is. Raises CheckpointError."""
    text = Section(config, where).section("text_config")
    if text is None or text.values.get("model_type", "opt") != "opt":
        return config
    stated = {name: value for name, value in text.values.items() if value is not None}
    return {**config, "text_config": {**_OPT, **stated, "model_type": "opt"}}
