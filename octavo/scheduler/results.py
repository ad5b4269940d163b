"""Applies the results of a step: appends tokens, forks, extends beams, ends sequences, and makes the outputs."""

from __future__ import annotations

from octavo.core.messages import EngineCoreOutput, SequenceDelta
from octavo.core.outputs import RequestError
from octavo.core.sequence import Sequence, SequenceGroup, SequenceStatus
from octavo.core.step import ModelRunnerOutput, PromptLogprobs, RowOutput, TokenLogprobs
from octavo.scheduler.beams import extend_beams, nothing_found
from octavo.scheduler.preemption import Preemption
from octavo.scheduler.registry import Registry
from octavo.scheduler.repetition import Repetition


class Results:
    """Applies the results of steps to groups and sequences."""

    def __init__(self, registry: Registry, preemption: Preemption) -> None:
        self._registry = registry
        self._preemption = preemption

    def apply(self, output: ModelRunnerOutput, now: float) -> list[EngineCoreOutput]:
        """Apply the results of a step at time `now`. Returns one output per request for which there is news."""
        outputs: dict[str, EngineCoreOutput] = {}
        for row in output.rows:
            group, sequence = self._registry.find(row.seq_id)
            if group is None or sequence is None or sequence.status.is_finished:
                continue  # ended in the meantime
            if row.error is not None:
                outputs[group.request_id] = self._fail(group, row.error, now)
                continue
            prompt_logprobs = row.prompt_logprobs and _owed_prompt_logprobs(group, row.prompt_logprobs)
            # preempted in the meantime: what it drew is drawn again, but what it computed of the prompt may be kept
            is_late = sequence.epoch != row.epoch or (row.is_undrawn and not self._step_back(group, sequence))
            has_result = not is_late and (row.tokens or row.candidates is not None or row.pooled is not None)
            if prompt_logprobs is None and not has_result:
                continue
            result = outputs.get(group.request_id)
            if result is None:
                result = outputs[group.request_id] = EngineCoreOutput(
                    request_id=group.request_id,
                    deltas=[],
                    finished=False,
                    num_cached_tokens=group.num_cached_tokens,
                    num_fetched_tokens=group.num_fetched_tokens,
                )
            if prompt_logprobs is not None:
                result.prompt_logprobs = prompt_logprobs
            if has_result:
                self._apply_row(group, sequence, row, result, now)
        return [each for each in outputs.values() if each.deltas or each.finished or each.prompt_logprobs is not None]

    def _apply_row(
        self, group: SequenceGroup, sequence: Sequence, row: RowOutput, result: EngineCoreOutput, now: float
    ) -> None:
        """Apply what a row has brought of its sequence, and add it to its request's `result`."""
        if row.candidates is not None:
            sequence.candidates = row.candidates
            if any(beam.candidates is None for beam in group.live):
                return  # the group's other beams were computed in another step
        metrics = group.metrics
        if metrics.first_token_time is None:
            metrics.first_token_time = now
            metrics.note(now, "first token")
        metrics.last_token_time = now
        if row.candidates is not None:
            self._registry.stats.num_generated_tokens += len(group.live)
            result.deltas += extend_beams(self._registry, group)
        else:
            sequence.num_pending -= 1
            if row.pooled is not None:
                result.pooled = row.pooled
                last = SequenceDelta(index=0, token_ids=[], logprobs=[])
                result.deltas.append(self._end(group, sequence, SequenceStatus.FINISHED_STOPPED, last))
            else:
                if len(metrics.timeline) != group.num_sent_events:
                    # the front may end the request by a stop string before the core does
                    group.num_sent_events = len(metrics.timeline)
                    result.metrics, result.cache_miss_reason = metrics, group.cache_miss_reason
                if group.is_forked:
                    result.deltas.append(self._append(group, sequence, row.tokens))
                else:
                    result.deltas += self._fork(group, sequence, row.tokens)
        if not group.live:
            self._finish(group, result, now)

    def _finish(self, group: SequenceGroup, result: EngineCoreOutput, now: float) -> None:
        """End a group whose sequences have all ended; `result` becomes its last output."""
        result.finished = True
        result.metrics, result.cache_miss_reason = group.metrics, group.cache_miss_reason
        status = SequenceStatus.FINISHED_STOPPED
        if group.beams is not None and not group.beams.finished:
            result.error, status = nothing_found(group), SequenceStatus.FINISHED_ERROR
        self._registry.end_group(group, status, now)

    def _step_back(self, group: SequenceGroup, sequence: Sequence) -> bool:
        """Let the last token of a sequence be computed once more for its logits. Returns False where a state cannot go
        back: then the group starts from its last snapshot."""
        if self._registry.block_manager.keeps_states:
            self._preemption.preempt(group, because="the form of its next token was not ready")
            return False
        sequence.num_pending -= 1
        sequence.num_computed_tokens -= 1
        return True

    def end_complete(self, group: SequenceGroup, now: float) -> None:
        """End the sequences of a resumed group that need no further token, and the group when all have ended."""
        deltas = []
        for sequence in list(group.live):
            status = _status_after(group, sequence, sequence.token_ids[-1])
            if status is not None:
                last = SequenceDelta(index=sequence.index, token_ids=[], logprobs=[])
                deltas.append(self._end(group, sequence, status, last))
        is_over = not group.live
        if is_over:
            self._registry.end_group(group, SequenceStatus.FINISHED_STOPPED, now)
        if deltas or is_over:
            output = EngineCoreOutput(request_id=group.request_id, deltas=deltas, finished=is_over)
            output.metrics = group.metrics
            self._registry.send(output)

    def _fork(self, group: SequenceGroup, sequence: Sequence, tokens: list[TokenLogprobs]) -> list[SequenceDelta]:
        """Make all sequences of a group whose prompt is computed; they share its blocks."""
        for index in range(1, group.width):
            self._registry.fork(group, sequence, index)
        group.is_forked = True
        return [self._append(group, group.sequences[index], [token]) for index, token in enumerate(tokens)]

    def _append(self, group: SequenceGroup, sequence: Sequence, tokens: list[TokenLogprobs]) -> SequenceDelta:
        """Append tokens up to the one that ends the sequence. All but the last were drafts: they are in the blocks,
        unless there are states, which are kept behind known tokens alone."""
        known, status = sequence.token_ids, None
        num_known = len(known)
        for token in tokens:
            known.append(token.token_id)
            status = _status_after(group, sequence, token.token_id)
            if status is not None:
                break
        num_new = len(known) - num_known
        self._registry.stats.num_generated_tokens += num_new
        if len(tokens) > 1:
            if self._registry.block_manager.keeps_states:
                sequence.num_repeated = len(tokens) - 1
            else:
                sequence.num_computed_tokens += len(tokens) - 1
            tokens = tokens[:num_new]
        delta = SequenceDelta(index=sequence.index, token_ids=known[num_known:], logprobs=tokens)
        return delta if status is None else self._end(group, sequence, status, delta)

    def _end(
        self, group: SequenceGroup, sequence: Sequence, status: SequenceStatus, last: SequenceDelta
    ) -> SequenceDelta:
        """End a sequence, and return its last delta with the reason."""
        last.finish_reason, token_id = status.value, sequence.token_ids[-1]
        if status is SequenceStatus.FINISHED_STOPPED and token_id not in group.request.end_token_ids:
            last.stop_reason = token_id
        self._registry.end_sequence(group, sequence, status)
        return last

    def _fail(self, group: SequenceGroup, error: RequestError, now: float) -> EngineCoreOutput:
        for sequence in group.live:
            self._registry.block_manager.invalidate(sequence, group.num_cached_tokens)
        self._registry.end_group(group, SequenceStatus.FINISHED_ERROR, now)
        return EngineCoreOutput.failed(group.request_id, error, group.metrics)


def _status_after(group: SequenceGroup, sequence: Sequence, token_id: int) -> SequenceStatus | None:
    """Return how the sequence ends with `token_id`, its newest token; None when it does not. Stop strings are matched
    where text is made: in the front, and for beams in `engine/beam_texts.py`."""
    if token_id in group.end_token_ids:
        return SequenceStatus.FINISHED_STOPPED
    num_drawn = len(sequence.token_ids) - sequence.num_prompt_tokens
    if num_drawn >= group.max_tokens:
        return SequenceStatus.FINISHED_LENGTH_CAPPED
    params = group.request.params
    if (wanted := params.repetition_detection) is None:
        return None
    if (repetition := sequence.attached(Repetition)) is None:
        repetition = Repetition(wanted)
        sequence.attach(repetition)
    # read before min_tokens too: reading all of them at once would hold the step up
    ends = repetition.ends(sequence.token_ids, num_drawn) and num_drawn >= params.min_tokens
    return SequenceStatus.FINISHED_REPETITION if ends else None


def _owed_prompt_logprobs(group: SequenceGroup, got: PromptLogprobs) -> PromptLogprobs | None:
    """Return the log-probabilities of the prompt that were not sent yet: a preempted prompt is computed twice, and
    reported once.
    """
    first = max(got.first_position, group.num_prompt_logprobs_sent)
    tokens = got.tokens[first - got.first_position :]
    if not tokens:
        return None
    group.num_prompt_logprobs_sent = first + len(tokens)
    return PromptLogprobs(first_position=first, tokens=tokens)
