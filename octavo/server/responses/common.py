"""What responses with generated text have in common."""

from __future__ import annotations

from msgspec import UNSET, Struct, UnsetType

from octavo.core.outputs import Logprob


class CacheInfo(Struct, frozen=True):
    """The tokens of one prompt that were in the prefix cache. `miss_reason`: why not more; None if all were.
    `fetched_tokens`: those whose KV came from another engine or from where it is kept; the rest was computed."""

    prompt_tokens: int
    cached_tokens: int
    miss_reason: str | None
    fetched_tokens: int = 0


class PromptTokensDetails(Struct, frozen=True):
    """Prompt tokens by where their KV came from, which add up; with `return_cache_info` also by prompt."""

    cached_tokens: int
    fetched_tokens: int
    computed_tokens: int
    cache_info: list[CacheInfo] | UnsetType = UNSET


class Usage(Struct, frozen=True):
    """Token counts of a request: each prompt once, the outputs of all choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails

    @classmethod
    def of(cls, prompt_tokens: int, completion_tokens: int, details: PromptTokensDetails) -> Usage:
        return cls(prompt_tokens, completion_tokens, prompt_tokens + completion_tokens, details)


PromptLogprobsField = list[dict[int, Logprob] | None] | UnsetType


class Generated(Struct, kw_only=True):
    """What every response with generated text, and every chunk of its stream, has."""

    id: str
    created: int
    model: str
    system_fingerprint: str
