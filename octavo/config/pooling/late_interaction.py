"""How a late-interaction model (ColBERT) writes queries and documents, by the files of the libraries that train such.

These are sentence-transformers' modules, PyLate's keys in config_sentence_transformers.json, and artifact.metadata of
ColBERT itself. Source: https://arxiv.org/abs/2004.12832.
"""

from __future__ import annotations

import string
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from octavo.config.checkpoint import Checkpoint
from octavo.config.pooling.pooling_config import LateInteraction
from octavo.config.section import Section, read_section

_METADATA: Final = "artifact.metadata"
_PUNCTUATION: Final = tuple(string.punctuation)


def colbert_files(c: Checkpoint) -> tuple[LateInteraction, int | None]:
    """Return what artifact.metadata of ColBERT says, and the size of vectors where it does. Raises CheckpointError."""
    meta = read_section(c.path / _METADATA, may_lack=True)
    length = meta.optional_positive("query_maxlen") or 32
    late = LateInteraction(
        query_prefix=str(meta.values.get("query_token_id") or "[unused0]"),
        document_prefix=str(meta.values.get("doc_token_id") or "[unused1]"),
        query_length=length,
        document_length=meta.optional_positive("doc_maxlen"),
        expanded_length=length,
        is_expansion_seen=meta.values.get("attend_to_mask_tokens") is True,
        skipped=() if meta.values.get("mask_punctuation") is False else _PUNCTUATION,
    )
    return late, meta.optional_positive("dim")


def module_files(folder: Path, transformer: Path, mask: Path | None, prompts: Mapping[str, str]) -> LateInteraction:
    """Return what the files beside modules.json say.

    transformer, mask: folders of the modules Transformer and MultiVectorMask. Raises CheckpointError.
    """
    c = read_section(folder / "config_sentence_transformers.json", may_lack=True)
    if mask is None:
        return _pylate(c)
    lengths = read_section(transformer / "sentence_bert_config.json", may_lack=True)
    masked = read_section(mask / "config.json")
    if masked.values.get("keep_only_token_ids"):
        masked.refuse("keep_only_token_ids", because="it is for documents that are images")
    expansion = lengths.section("query_expansion")
    fields: dict[str, Any] = {"query_length": lengths.optional_positive("query_length")}
    if expansion is not None:
        length = expansion.positive("length")
        if expansion.expect("strategy", "fixed", "min") == "fixed":
            fields["query_length"] = length
        token = expansion.values.get("token")
        fields |= {"expanded_length": length, "is_expansion_seen": expansion.bool("attend", False)}
        fields["expansion"] = None if token is None else expansion.str("token")
    return LateInteraction(
        query_prefix=prompts.get("query", ""),
        document_prefix=prompts.get("document", ""),
        document_length=lengths.optional_positive("document_length"),
        skipped=_words(masked, ()),
        **fields,
    )


def _pylate(c: Section) -> LateInteraction:
    length = c.optional_positive("query_length") or 32
    expands = c.values.get("do_query_expansion") is not False
    return LateInteraction(
        query_prefix=c.str("query_prefix", "[Q] "),
        document_prefix=c.str("document_prefix", "[D] "),
        query_length=length,
        document_length=c.optional_positive("document_length"),
        expanded_length=length if expands else 0,
        is_expansion_seen=c.values.get("attend_to_expansion_tokens") is True,
        skipped=_words(c, _PUNCTUATION),
    )


def _words(c: Section, default: tuple[str, ...]) -> tuple[str, ...]:
    words = c.values.get("skiplist_words")
    if words is None:
        return default
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise c.error("skiplist_words", "a list of words")
    return tuple(words)
