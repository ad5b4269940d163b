"""Configs of releases whose code stands beside their weights, in the layout of transformers' classes for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from octavo.config.media.media_families import family_of_release
from octavo.config.pooling.task_adapters import JINA5, jina5_layout
from octavo.config.released.names import with_todays_names
from octavo.config.released.retrieval import RETRIEVERS, retrieval_layout
from octavo.config.section import Section

_INTERN_S2: Final = "InternS2PreviewForConditionalGeneration"
"""An architecture that is Qwen3.5 with an encoder of time series, which octavo does not read."""
_LABELS: Final = "ForSequenceClassification"


def in_todays_layout(config: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Return a config as transformers' class has it. `where` is the file for messages.

    Raises CheckpointError, and UnsupportedModel for values that no release has.
    """
    config = with_todays_names(config, where)
    names = config.get("architectures")
    first = str(names[0]) if isinstance(names, list) and names else ""
    if config.get("model_type") == "bert" and config.get("position_embedding_type") == "alibi":
        return {**config, "model_type": "jina_bert", "position_embedding_type": None}
    if config.get("model_type") == "xlm-roberta" and config.get("position_embedding_type") == "rotary":
        own = {"architectures": [first.replace("XLMRoberta", "JinaEmbeddingsV3")]} if first else {}
        return {**config, **own, "model_type": "jina_embeddings_v3", "position_embedding_type": None}
    if first.endswith(_LABELS) and config.get("classifier_from_token") is not None:
        ending = "ForConditionalGeneration" if "vision_config" in config else "ForCausalLM"
        return in_todays_layout({**config, "architectures": [first.removesuffix(_LABELS) + ending]}, where)
    if first in RETRIEVERS:
        return retrieval_layout(config, where)
    if first == JINA5:
        return jina5_layout(config)
    if first == _INTERN_S2:
        text = Section(config, where).part("text_config").values
        names = {"architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "qwen3_5_moe"}
        return {**config, **names, "text_config": {**text, "model_type": "qwen3_5_moe_text"}}
    return family_of_release(first or str(config.get("model_type"))).layout(config, where)
