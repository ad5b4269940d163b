"""What a config.json would say of the metadata of llama.cpp's architectures that make vectors and scores.

A function returns what an architecture's config has beyond the common keys `base`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from octavo.errors import CheckpointError, UnsupportedModel
from octavo.gguf import configs
from octavo.gguf.metadata import Metadata
from octavo.gguf.reader import GGUFFile

_MODES: Final = {1: "mean", 2: "cls", 3: "lasttoken"}
_RANK: Final = 4
_APART_FROM: Final = 4096
"""Width from which Qwen3's rerankers have a head of their own."""
_HEADS: Final = ("cls.weight", "cls.output.weight")
JUDGE: Final = ("cls.output.weight",)
"""The rows of a head for tokens that stand for yes and no, in files of rerankers."""
DENSE: Final = ("dense_2.weight", "dense_3.weight")
"""Linear layers behind the pooling of EmbeddingGemma."""


def pooling(meta: Metadata) -> dict[str, Any]:
    """Return how vectors are made of hidden states, as far as a file says it. Raises CheckpointError."""
    kind = meta.optional_int("pooling_type") or 0
    if kind not in (0, *_MODES, _RANK):
        raise meta.error("pooling_type", "0 (none), 1 (mean), 2 (first token), 3 (last token) or 4 (scores)")
    own: dict[str, Any] = {"pooling_mode": _MODES[kind]} if kind in _MODES else {}
    if kind == _RANK and meta.architecture.startswith("qwen3"):
        _check_judge(meta)
    own |= {"is_ranking": True} if kind == _RANK else {}
    return own if meta.bool("attention.causal", True) else {**own, "is_causal": False}


def _check_judge(meta: Metadata) -> None:
    """Refuse a reranker whose head is not its table of embeddings, of which files have two rows alone."""
    if "output.weight" not in meta.types and meta.positive("embedding_length") >= _APART_FROM:
        raise UnsupportedModel(
            f"{meta.where}: output.weight is missing: of rerankers of this size the converter keeps only the rows of "
            "the head for yes and no; read the checkpoint in Hugging Face layout"
        )


def bert(meta: Metadata, base: dict[str, Any]) -> Mapping[str, Any]:
    """The table of positions begins with that of the first token, whatever the original had before it."""
    has = [name in meta.types for name in _HEADS]
    if any(has) and not all(has):
        lacking = _HEADS[has.index(False)]
        raise UnsupportedModel(
            f"{meta.where}: {lacking} is missing: the converter leaves out a layer of the head that makes scores in "
            "such models; read the checkpoint in Hugging Face layout"
        )
    return {"model_type": "bert", "type_vocab_size": _num_types(meta), **_labels(meta, "BertForSequenceClassification")}


def distil_bert(meta: Metadata, base: dict[str, Any]) -> Mapping[str, Any]:
    return {**bert(meta, base), "model_type": "distilbert", **_labels(meta, "DistilBertForSequenceClassification")}


def joined_bert(meta: Metadata, base: dict[str, Any]) -> Mapping[str, Any]:
    """XLM-RoBERTa as Jina writes it, with queries, keys and values in one tensor."""
    own = {**bert(meta, base), **_labels(meta, "XLMRobertaForSequenceClassification")}
    return {**own, "model_type": "xlm-roberta", "auto_map": "xlm-roberta-flash-implementation", "pad_token_id": -1}


def jina_bert(meta: Metadata, base: dict[str, Any]) -> Mapping[str, Any]:
    own = {"position_embedding_type": "alibi", "feed_forward_type": "geglu"}
    return {**bert(meta, base), **own}


def jina_embeddings_v3(meta: Metadata, base: dict[str, Any]) -> Mapping[str, Any]:
    return {"model_type": "jina_embeddings_v3", "type_vocab_size": _num_types(meta), "hidden_act": "gelu"}


def nomic(meta: Metadata, base: dict[str, Any]) -> Mapping[str, Any]:
    rope = {"rope_type": "default", **(base["rope_scaling"] or {}), "rope_theta": base["rope_theta"]}
    own = {"type_vocab_size": _num_types(meta), "hidden_act": "silu", "rope_parameters": rope}
    return {"model_type": "nomic_bert", **own}


def nomic_moe(meta: Metadata, base: dict[str, Any]) -> Mapping[str, Any]:
    counts = {
        "num_experts": "expert_count",
        "moe_top_k": "expert_used_count",
        "moe_every_n_layers": "moe_every_n_layers",
    }
    own = {name: meta.positive(key) for name, key in counts.items()}
    bias = {"qkv_proj_bias": meta.has("attn_qkv.bias")}
    bias |= dict.fromkeys(("mlp_fc1_bias", "mlp_fc2_bias"), meta.has("ffn_up.bias"))
    return {**nomic(meta, base), **own, **bias, "activation_function": "gelu"}


def modern_bert(meta: Metadata, base: dict[str, Any]) -> Mapping[str, Any]:
    mean_or_first = meta.optional_int("classifier.pooling_type") or 1
    if mean_or_first not in (1, 2):
        raise meta.error("classifier.pooling_type", "1 (mean) or 2 (first token)")
    local = meta.positive_float("rope.freq_base_swa", 10_000.0)
    return {
        "model_type": "modernbert",
        "local_attention": meta.positive("attention.sliding_window", 128),
        "global_attn_every_n_layers": meta.positive("attention.sliding_window_pattern", 3),
        "global_rope_theta": meta.positive_float("rope.freq_base", 160_000.0),
        "local_rope_theta": local,
        "hidden_activation": meta.str("hidden_activation", "gelu"),
        "attention_bias": meta.has("attn_qkv.bias"),
        "norm_bias": "output_norm.bias" in meta.types,
        "classifier_bias": "cls.bias" in meta.types,
        "classifier_pooling": _MODES[mean_or_first],
        **_labels(meta, "ModernBertForSequenceClassification"),
    }


def gemma_embedding(meta: Metadata, base: dict[str, Any]) -> Mapping[str, Any]:
    own = {"use_bidirectional_attention": True, "final_logit_softcapping": None}
    return {**configs.gemma3(meta, base), **own, "query_pre_attn_scalar": base["head_dim"]}


def dense_layers(file: GGUFFile) -> list[tuple[str, int, int]]:
    """Return the linear layers behind the pooling: what stands before `weight`, inputs and outputs.

    Raises CheckpointError for sizes that do not fit the model.
    """
    meta = Metadata(file)
    if meta.architecture != "gemma-embedding":
        return []
    found, width = [], meta.positive("embedding_length")
    for tensor in (meta.types[name] for name in DENSE if name in meta.types):
        if len(tensor.shape) != 2 or tensor.shape[1] != width:
            raise CheckpointError(
                f"{meta.where}: {tensor.name} has shape {list(tensor.shape)}, expected {width} columns"
            )
        found.append((tensor.name.removesuffix("weight"), width, width := tensor.shape[0]))
    return found


def _num_types(meta: Metadata) -> int:
    """Return the kinds of tokens that have embeddings of their own; one has a table without the dimension of kinds."""
    table = meta.types.get("token_types.weight")
    if table is None:
        return 0
    return table.shape[0] if len(table.shape) == 2 else 1


def _labels(meta: Metadata, family: str) -> dict[str, Any]:
    """Return the class of a model with a head that makes scores, and their names; nothing without one."""
    head = meta.types.get("cls.output.weight")
    if head is None:
        return {}
    count, labels = head.shape[0] if len(head.shape) == 2 else 1, meta.array("classifier.output_labels")
    labels = [f"LABEL_{number}" for number in range(count)] if labels is None else labels
    if len(labels) != count:
        raise meta.error("classifier.output_labels", f"a name for each of the {count} rows of cls.output.weight")
    return {
        "architectures": [family],
        "num_labels": count,
        "id2label": {str(number): label for number, label in enumerate(labels)},
    }
