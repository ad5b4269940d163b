"""Beam search on sequences: survivors fork, other beams end, and the output follows when the search ends."""

from __future__ import annotations

from octavo.core.beam_search import FinishedBeam
from octavo.core.messages import SequenceDelta
from octavo.core.outputs import RequestError
from octavo.core.sequence import Sequence, SequenceGroup, SequenceStatus
from octavo.errors import InvalidRequest
from octavo.scheduler.registry import Registry


def extend_beams(registry: Registry, group: SequenceGroup) -> list[SequenceDelta]:
    """Extend the group's beams by one token. A beam with several survivors forks, one with none is freed, all in this
    step. Returns an empty list while the search goes on, and at its end the deltas of the best n finished sequences,
    best first: fewer, or none, where all other continuations are barred."""
    assert group.beams is not None
    beams = list(group.live)
    survivors = group.beams.step([beam.candidates for beam in beams if beam.candidates is not None])
    if not survivors:
        for beam in beams:
            registry.end_sequence(group, beam, SequenceStatus.FINISHED_STOPPED)
        return [_delta(group, index, beam) for index, beam in enumerate(group.beams.finished[: group.request.params.n])]

    next_index = max(beam.index for beam in beams) + 1
    extended: list[Sequence] = []
    used: set[int] = set()
    # children first: a fork takes its parent as it was before it grew
    for survivor in survivors:
        parent = beams[survivor.parent]
        if survivor.parent in used:
            extended.append(registry.fork(group, parent, next_index))
            next_index += 1
        else:
            used.add(survivor.parent)
            extended.append(parent)
    for number, beam in enumerate(beams):
        if number not in used:
            registry.drop_sequence(group, beam)
    for sequence, survivor in zip(extended, survivors, strict=True):
        assert survivor.path is not None
        sequence.token_ids.append(survivor.path.token.token_id)
        sequence.candidates = None
        sequence.num_pending = 0
    group.live[:] = extended
    return []


def nothing_found(group: SequenceGroup) -> RequestError:
    """Return why a search has ended without a finished sequence."""
    params = group.request.params
    names = [name for name in ("allowed_token_ids", "min_tokens", "bad_words") if getattr(params, name)]
    message = (
        f"the beam search found no sequence: {' and '.join(names) or 'logits processors'} bar every token that could "
        "follow; loosen one of them"
    )
    return RequestError.of(InvalidRequest(message, field=names[0] if names else None))


def _delta(group: SequenceGroup, index: int, beam: FinishedBeam) -> SequenceDelta:
    token_ids = beam.token_ids
    if beam.is_stopped_by_text:
        # the front makes the text that is shown, finds the stop string in it, and says so
        return SequenceDelta(index=index, token_ids=token_ids, logprobs=beam.logprobs)
    status = SequenceStatus.FINISHED_LENGTH_CAPPED if beam.is_capped else SequenceStatus.FINISHED_STOPPED
    is_stop_id = not beam.is_capped and token_ids[-1] not in group.request.end_token_ids
    return SequenceDelta(
        index=index,
        token_ids=token_ids,
        logprobs=beam.logprobs,
        finish_reason=status.value,
        stop_reason=token_ids[-1] if is_stop_id else None,
    )
