"""Queries and documents of a late-interaction model: how they are written, and how well their vectors match (MaxSim).

A query may be filled up with mask tokens, whose vectors count although, in most models, no token sees them. Of a
document the vectors of some tokens, of punctuation mostly, do not count. Source: https://arxiv.org/abs/2004.12832.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from octavo.config.pooling.pooling_config import LateInteraction
from octavo.core.prompt import Prompt, checked_text
from octavo.engine.text.tokenizer import Tokenizer
from octavo.errors import CheckpointError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class LatePrompts:
    """Writes queries and documents as `config` says, none with more than `longest` tokens."""

    def __init__(self, config: LateInteraction, tokenizer: Tokenizer, longest: int) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._longest = longest
        special = tokenizer.special_tokens
        self._expansion = tokenizer.token_id(config.expansion or special.get("mask_token") or special.get("eos_token"))
        padding = tokenizer.token_id(special.get("pad_token"))
        if config.num_paddings and padding is None:
            raise CheckpointError("tokenizer_config.json: pad_token is missing, which queries of this model end with")
        suffix = tokenizer.encode(config.query_suffix, False) if config.query_suffix else []
        self._ends = [*[padding or 0] * config.num_paddings, *suffix]
        found = {tokenizer.token_id(word) for word in config.skipped}
        self._skipped = found - {None, tokenizer.token_id(special.get("unk_token"))}

    def query(self, text: str) -> Prompt:
        """Return a query, cut to its length in tokens and filled up. Raises InvalidRequest."""
        config = self._config
        token_ids = [*self._written(text, config.query_prefix, config.query_length), *self._ends]
        num_added = max(0, min(config.expanded_length, self._longest) - len(token_ids))
        if self._expansion is None or not num_added:
            return Prompt(token_ids=token_ids)
        num_unseen = 0 if config.is_expansion_seen else num_added
        return Prompt(token_ids=[*token_ids, *[self._expansion] * num_added], num_unseen=num_unseen)

    def document(self, text: str) -> Prompt:
        """Return a document, cut to its length in tokens. Raises InvalidRequest."""
        return Prompt(token_ids=self._written(text, self._config.document_prefix, self._config.document_length))

    def score(self, query: NDArray[np.float32], document: NDArray[np.float32], document_ids: Sequence[int]) -> float:
        """Return the sum over query vectors [tokens, size] of the largest product with one of the document's.

        document: a vector of each of document_ids.
        """
        counts = [place for place, token_id in enumerate(document_ids) if token_id not in self._skipped]
        if not counts:
            return 0.0
        return float((query @ document[counts].T).max(axis=1).sum())

    def _written(self, text: str, prefix: str, length: int | None) -> list[int]:
        """Return the token ids of a text behind a prefix: a token in the second place, or text where it is none."""
        most = None if length is None else min(self._longest, length)
        mark = self._tokenizer.token_id(prefix)
        mark = self._tokenizer.token_id(prefix.strip()) if mark is None else mark
        checked_text(text, "prompt")
        if mark is None:
            return self._tokenizer.encode_whole([prefix + text], most)[0]
        token_ids, _ = self._tokenizer.encode_whole([text], None if most is None else max(1, most - 1))
        return [*token_ids[:1], mark, *token_ids[1:]]
