"""Linear layers behind the last hidden states that a checkpoint has among the weights of the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from msgspec.structs import replace

from octavo.config.checkpoint import Checkpoint
from octavo.config.pooling.late_interaction import colbert_files
from octavo.config.pooling.pooling_config import DenseModule, LateInteraction, PoolingConfig
from octavo.config.released.retrieval import RETRIEVAL
from octavo.core.pooling import TOKEN_EMBED

_COLBERT: Final = (
    *("HF_ColBERT", "ColBERTModel", "ColBERTModernBertModel", "ColBERTJinaRobertaModel", "ColBERTLfm2Model"),
)
"""Late-interaction models, whose layer may also be a module of sentence-transformers."""
_VOYAGE: Final = "VoyageQwen3BidirectionalEmbedModel"
_JINA_RANKING: Final = "JinaForRanking"
_JINA_ROWS: Final = (151670, 151671)
"""Jina's tokens after each document, and after the query."""
PROJECTED: Final = frozenset({*_COLBERT, _VOYAGE, _JINA_RANKING})
"""Architectures that make vectors with such layers."""
_SIZES: Final = ("colbert_dim", "dim", "projection_dim")
"""Keys of the size of ColBERT's vectors."""
_SIZES_OF_PAGES: Final = ("embedding_dim", "embed_dim", "dims", *_SIZES[1:], _SIZES[0])
_UNPROJECTED: Final = ("Qwen3VLNemotronEmbedModel",)
"""Models for retrieval whose vectors may be the last states."""
_QUERIES: Final[Mapping[str, LateInteraction]] = {
    "ColPaliForRetrieval": LateInteraction(query_prefix="Question: ", num_paddings=10, query_suffix="\n"),
    "ColQwen2ForRetrieval": LateInteraction(query_prefix="Query: ", num_paddings=10, query_suffix="\n"),
}
"""How queries are written, as the processors of transformers write them; those of others are taken as they are."""


def with_projection(c: Checkpoint, architecture: str, found: PoolingConfig) -> PoolingConfig:
    """Return the config with the layers that the weights have, and with what the architecture makes of them. Raises
    CheckpointError where there are none."""
    if (outside := c.values.get(RETRIEVAL)) is not None:
        return _retrieval(c, str(outside), found)
    if architecture in _COLBERT and found.late is None:
        late, size = colbert_files(c)
        dense = _stored_layer(c, ("linear", "colbert_linear"), size or _size(c, _SIZES))
        return replace(found, task=TOKEN_EMBED, late=late, dense=(dense,))
    if architecture == _VOYAGE:
        return replace(found, dense=(_stored_layer(c, ("linear",), c.positive("num_labels", 2048)), *found.dense))
    if architecture == _JINA_RANKING:
        first = _stored_layer(c, ("projector.0",), c.positive("hidden_size") // 2, activation="relu")
        second = _stored_layer(c, ("projector.2",), 512, inputs=first.outputs)
        own: Mapping[str, Any] = {"task": TOKEN_EMBED, "row_token_ids": _JINA_ROWS, "normalize": False}
        return replace(found, dense=(first, second), **own)
    return found


def _retrieval(c: Checkpoint, architecture: str, found: PoolingConfig) -> PoolingConfig:
    layer = _stored_layer(c, ("embedding_proj_layer", "custom_text_proj"), _size(c, _SIZES_OF_PAGES))
    has_none = architecture in _UNPROJECTED and f"{layer.prefix}weight" not in c.tensors
    late = _QUERIES.get(architecture, LateInteraction())
    return replace(found, task=TOKEN_EMBED, late=late, dense=() if has_none else (layer,), normalize=True)


def _size(c: Checkpoint, names: Sequence[str]) -> int:
    return next((c.positive(name) for name in names if c.values.get(name) is not None), 128)


def _stored_layer(
    c: Checkpoint, names: Sequence[str], size: int, *, inputs: int | None = None, activation: str = "identity"
) -> DenseModule:
    """Return the layer whose tensors have one of the names, perhaps behind others and a dot.

    size: of its outputs where the headers of the weights do not say. inputs: the hidden size unless given.
    """
    inputs = c.positive("hidden_size") if inputs is None else inputs
    for stored, tensor in c.tensors.items():
        module, _, kind = stored.rpartition(".")
        is_matrix = kind == "weight" and len(tensor.shape) == 2 and tensor.shape[0] > 0
        if is_matrix and any(f".{module}".endswith(f".{name}") for name in names):
            has_bias = f"{module}.bias" in c.tensors
            return DenseModule("", inputs, tensor.shape[0], activation, has_bias, prefix=f"{module}.")
    return DenseModule("", inputs, size, activation, bias=False, prefix=f"{names[0]}.")
