"""Models that make vectors of pages of documents: a model that reads images, and a layer behind its last states.

Source: https://arxiv.org/abs/2407.01449 (ColPali).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from octavo.config.section import Section, shown
from octavo.errors import UnsupportedModel

RETRIEVAL: Final = "retrieval_architecture"
"""The key under which a config in the layout of the model around has the architecture that it was stored with."""
_INNER: Final = "vlm_config"
_OF_TYPE: Final[Mapping[str, str]] = {
    "paligemma": "PaliGemmaForConditionalGeneration",
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
    "qwen2_vl": "Qwen2VLForConditionalGeneration",
    "qwen3_5": "Qwen3_5ForConditionalGeneration",
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
}
"""Architectures of the models within, by their `model_type`."""
RETRIEVERS: Final[Mapping[str, str]] = {
    "ColPaliForRetrieval": "paligemma",
    "ColQwen2ForRetrieval": "qwen2_vl",
    "ColQwen3": "qwen3_vl",
    "ColQwen3_5": "qwen3_5",
    "OpsColQwen3Model": "qwen3_vl",
    "Qwen3VLNemotronEmbedModel": "qwen3_vl",
}
"""By the architecture of the whole: the `model_type` of the model within, where the config does not have it."""
_CONTRACT: Final = "retrieval_attention_contract"
_MODES: Final = ("causal", "bidirectional")


def retrieval_layout(config: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Return the config of such a model as that of the model that reads images. Raises CheckpointError, or
    UnsupportedModel for a model that is none of those known."""
    section = Section(config, where)
    architecture = str(config["architectures"][0])
    inner = section.section(_INNER)
    kind = RETRIEVERS[architecture] if inner is None else inner.str("model_type")
    if kind not in _OF_TYPE:
        raise UnsupportedModel(
            f"{where}: {_INNER}.model_type is {shown(kind)}, expected one of {', '.join(_OF_TYPE)}: others are not "
            "implemented within a model for retrieval"
        )
    around = {name: value for name, value in config.items() if name not in (_INNER, "auto_map")}
    made = {**around, **({} if inner is None else inner.values)}
    if architecture == "ColQwen3_5":
        stated = {part.values.get(_CONTRACT) for part in (section, section.part("text_config"))} - {None}
        if len(stated) != 1 or not stated <= {*_MODES}:
            raise section.error(_CONTRACT, " or ".join(_MODES))
        made["is_causal"] = stated == {"causal"}
    return {**made, "architectures": [_OF_TYPE[kind]], "model_type": kind, RETRIEVAL: architecture}
