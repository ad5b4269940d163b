"""The responses of `POST /v1/completions`."""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, Struct, UnsetType

from octavo.server.responses.common import Generated, PromptLogprobsField, Usage


class CompletionLogprobs(Struct, frozen=True):
    """Log-probabilities of a completion choice; with echo the prompt's come first, its first token has none."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Struct, kw_only=True):
    """One completion, or what is new of it in a chunk of a stream."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_logprobs: PromptLogprobsField = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class CompletionResponse(Generated, kw_only=True):
    """Response of `POST /v1/completions`, and each chunk of its stream."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
