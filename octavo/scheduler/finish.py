"""Whether a sequence ends with a token, and why."""

from __future__ import annotations

from typing import NamedTuple

from octavo.core.sequence import Sequence, SequenceGroup, SequenceStatus


class Finish(NamedTuple):
    """The state that ends a sequence; `stop_reason` is the stop token id, None for an end-of-sequence id."""

    status: SequenceStatus
    stop_reason: int | None = None


def finish_after(group: SequenceGroup, sequence: Sequence, token_id: int) -> Finish | None:
    """Return how the sequence ends with `token_id`, its newest token; None when it does not. Stop strings are matched
    where text is made: in the front, and for beams in `engine/beam_texts.py`."""
    if token_id in group.end_token_ids:
        is_eos = token_id in group.request.end_token_ids
        return Finish(SequenceStatus.FINISHED_STOPPED, None if is_eos else token_id)
    if len(sequence.token_ids) - sequence.num_prompt_tokens >= group.max_tokens:
        return Finish(SequenceStatus.FINISHED_LENGTH_CAPPED)
    return None
