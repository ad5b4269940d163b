"""One file per logits processor; `default_processors` lists them in the order in which they act.

Used by the sampler.
"""

from __future__ import annotations

from octavo.sampling.processors.allowed_token_ids import AllowedTokenIds
from octavo.sampling.processors.bad_words import BadWords
from octavo.sampling.processors.logit_bias import LogitBias
from octavo.sampling.processors.min_tokens import MinTokens
from octavo.sampling.processors.penalties import Penalties
from octavo.sampling.processors.processor import LogitsProcessor, MaskingProcessor, ProcessedRow

__all__ = [
    "AllowedTokenIds",
    "BadWords",
    "LogitBias",
    "LogitsProcessor",
    "MaskingProcessor",
    "MinTokens",
    "Penalties",
    "ProcessedRow",
    "default_processors",
]


def default_processors() -> tuple[LogitsProcessor, ...]:
    """Return new processors for one sampler."""
    return (AllowedTokenIds(), LogitBias(), MinTokens(), BadWords(), Penalties())
