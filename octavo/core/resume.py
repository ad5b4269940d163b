"""Requests that are resumed: after the death of a core, on another replica, or after a prefill engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from octavo.errors import InvalidRequest

if TYPE_CHECKING:
    from octavo.core.messages import EngineCoreRequest


class ResumedSequence(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What one sequence of a request has produced so far.

    cumulative_logprob: the sum for `token_ids`; None where the request needs none.
    finish_reason, stop_reason: how it ended, "stop", "length" or "repetition"; None while it goes on.
    """

    index: int
    token_ids: list[int]
    cumulative_logprob: float | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


def check_resumed(request: EngineCoreRequest, vocab_size: int, max_model_len: int) -> None:
    """Raise InvalidRequest when an engine cannot have produced the tokens from which the request is resumed."""
    params, sequences = request.params, request.resumed
    if not sequences:
        return
    if params.use_beam_search:
        raise _refused("a beam search cannot go on from its tokens; send it without them, and it starts again")
    indices = [sequence.index for sequence in sequences]
    if indices != list(range(params.width)):
        raise _refused(f"resumed has the indices {indices}; give each from 0 to {params.width - 1} once, in this order")
    most = min(params.max_tokens or 1, max_model_len - len(request.prompt_token_ids))
    ends = {*request.end_token_ids, *params.stop_token_ids}
    for sequence in sequences:
        name, token_ids = f"resumed[{sequence.index}]", sequence.token_ids
        if not 1 <= len(token_ids) <= most:
            raise _refused(
                f"{name} has {len(token_ids)} tokens, must have 1 to {most} (max_tokens, and what the prompt leaves of "
                "the context); leave resumed out where nothing was drawn"
            )
        outside = [token_id for token_id in token_ids if not 0 <= token_id < vocab_size]
        if outside:
            raise _refused(f"{name} contains {outside[0]}; the model's token ids go from 0 to {vocab_size - 1}")
        if not ends.isdisjoint(token_ids[:-1]):
            raise _refused(f"{name} goes on behind a token that ends it; cut it there")
        if sequence.finish_reason not in (None, "stop", "length", "repetition"):
            reason = f"the finish_reason {sequence.finish_reason!r}"
            raise _refused(f'{name} has {reason}, must be "stop", "length", "repetition" or None')


def _refused(message: str) -> InvalidRequest:
    return InvalidRequest(message, field="resumed", code="cannot_be_resumed")
