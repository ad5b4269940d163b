"""An executor without a model: it returns results at once, and ends each request at the length in its trace.

A cost model gives the time of a step, which is divided equally over the stages of a pipeline. Each stage runs one step
after the other; waiting for a result moves the clock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from hashlib import blake2b
from math import exp, log
from typing import Any, Final

from octavo.core.launched import LaunchedStep
from octavo.core.messages import EngineCoreRequest
from octavo.core.step import ModelRunnerOutput, RowOutput, ScheduledSequence, SchedulerOutput, TokenLogprobs
from octavo.errors import ConfigError
from octavo.simulate.cost_model import CostModel, StepWork, work_of
from octavo.simulate.link import Link

END_TOKEN: Final = 1 << 40
"""Ends a sequence. Larger than any real token id; streams are numbered from here on."""

_LOG_2: Final = log(2)


class Clock:
    """Seconds since the simulation began."""

    __slots__ = ("now",)

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class TokenGaps:
    """A histogram of the times between two tokens of a sequence, with classes 1% apart: the key is `round(100 *
    log(seconds))`."""

    def __init__(self) -> None:
        self.counts: Counter[int] = Counter()
        self._last: dict[int, float] = {}

    def note(self, seq_ids: Iterable[int], now: float) -> None:
        """Count a token of each of these sequences at `now`."""
        last = self._last
        gaps: Counter[float] = Counter()
        for seq_id in seq_ids:
            before = last.get(seq_id)
            if before is not None:
                gaps[before] += 1
            last[seq_id] = now
        for before, count in gaps.items():
            self.counts[round(100 * log(max(now - before, 1e-9)))] += count


def gap_seconds(key: int) -> float:
    """Return the time that `TokenGaps` counts under this key."""
    return exp(key / 100)


@dataclass(frozen=True, slots=True)
class Script:
    """The output that a request will produce, which the steps do not contain.

    output_lens: number of tokens of each sequence, including the ending one; a single number applies to all. token: the
    id of all its output tokens except the last: prefixes differ by stream and length, so one id per stream is enough.
    output_token_ids: instead of token, the tokens of each sequence.
    """

    output_lens: Sequence[int]
    token: int
    output_token_ids: Sequence[Sequence[int]] = ()

    def output_token(self, index: int, place: int) -> int:
        """Return the token at this place of an output; END_TOKEN at its end.

        Sequences of a request get different ids, so that none hits the other's blocks in the prefix cache.
        """
        if place + 1 >= self.output_len(index):
            return END_TOKEN
        return self.output_token_ids[index][place] if self.output_token_ids else self.token + index

    def output_len(self, index: int) -> int:
        """Return the length of the sequence with this index. Beams may have more indexes than the script."""
        return self.output_lens[min(index, len(self.output_lens) - 1)]


@dataclass(slots=True)
class _State:
    """A sequence that the executor holds.

    end: number of computed tokens when the last one is drawn. usual: the result of a row that draws any token except
    the last; None if tokens differ. path: the tokens of a beam.
    """

    script: Script
    index: int
    num_prompt_tokens: int
    end: int
    usual: RowOutput | None
    path: list[int]


class SimulatedExecutor:
    """`Executor` over a cost model. `expect` gives it the script of a request, which `params.seed` identifies."""

    def __init__(self, cost_model: CostModel, block_size: int, clock: Clock, candidate_spread: float = 0.5) -> None:
        self.busy_s = 0.0
        self.gaps = TokenGaps()
        self._cost_model = cost_model
        self._block_size = block_size
        self._clock = clock
        self._candidate_spread = candidate_spread
        self._free_at = [0.0] * cost_model.num_stages
        self._states: dict[int, _State] = {}
        self._scripts: dict[int, Script] = {}
        self.link: Link | None = None
        """Sends blocks to other replicas; None if this one sends none."""

    def expect(self, seed: int, script: Script) -> None:
        """Set the script of the request with this seed."""
        self._scripts[seed] = script

    def forget(self, seed: int) -> None:
        """Drop the script of a request that has ended."""
        del self._scripts[seed]

    def output_tokens(self, request: EngineCoreRequest, index: int, place: int, count: int) -> list[int]:
        """Return the next `count` tokens, or fewer at the end, of a sequence with `place` output tokens so far."""
        script = self._scripts[request.params.seed or 0]
        places = range(place, min(place + count, script.output_len(index)))
        return [script.output_token(index, each) for each in places]

    @property
    def sends_tokens(self) -> bool:
        return len(self._free_at) > 1

    def submit(self, step: SchedulerOutput) -> Future[ModelRunnerOutput]:
        """Run the step after those that were submitted before; `result()` moves the clock to its end."""
        output, work = self._execute(step)
        seconds = self._cost_model.step_seconds(work, self._block_size) / len(self._free_at)
        ends_at = self._clock.now
        for stage, free_at in enumerate(self._free_at):
            self._free_at[stage] = ends_at = max(free_at, ends_at) + seconds
        self.busy_s += seconds
        if self.link is not None:
            self.link.note_step(ends_at - seconds * len(self._free_at), ends_at)
        self.gaps.note([row.seq_id for row in output.rows if row.tokens], ends_at)

        def collect() -> ModelRunnerOutput:
            self._clock.now = max(self._clock.now, ends_at)
            return output

        return LaunchedStep(collect, lambda error: error)

    def call(self, method: str, *arguments: Any) -> Any:
        raise ConfigError(f"{method} is not a call of a simulated worker; there are none")

    def shutdown(self) -> None:
        self._states.clear()
        self._scripts.clear()

    def _execute(self, step: SchedulerOutput) -> tuple[ModelRunnerOutput, StepWork]:
        self._update_states(step)
        states = self._states
        results = []
        for row in step.rows:
            state = states[row.seq_id]
            if row.drafts:
                results.append(self._verified(row, state))
            elif row.num_samples == 1 and row.start + row.num_tokens < state.end and state.usual is not None:
                results.append(state.usual)
            else:
                results.append(self._result(row, state))
        work = work_of(step, self._cost_model.sliding_window, self._cost_model)
        num_swapped = work.num_swapped_blocks
        swap_s = self._cost_model.swap_seconds(num_swapped, self._block_size) if num_swapped else 0.0
        return ModelRunnerOutput(step_id=step.step_id, rows=results, swap_s=swap_s), work

    def _update_states(self, step: SchedulerOutput) -> None:
        for new in step.new_sequences:
            seed = new.params.seed
            assert seed is not None, "seeds are resolved before a request is accepted"
            script, index = self._scripts[seed], new.index
            usual = None if script.output_token_ids else _drawn(new.seq_id, new.epoch, script.token + index)
            end = new.num_prompt_tokens + script.output_len(index) - 1
            path: list[int] = []
            if new.params.use_beam_search:
                num_own = new.num_prompt_tokens - new.num_shared_tokens
                parent = self._states[new.parent_id].path if new.parent_id is not None else []
                path = parent[: max(0, -num_own)] + new.token_ids[max(0, num_own) :]
            self._states[new.seq_id] = _State(script, index, new.num_prompt_tokens, end, usual, path)
        if step.finished_ids:
            for seq_id in {*step.finished_ids} - {new.seq_id for new in step.new_sequences}:
                del self._states[seq_id]

    def _verified(self, row: ScheduledSequence, state: _State) -> RowOutput:
        """Return the accepted guesses of a row and the first token that differs from its guess."""
        place = row.start + row.num_tokens - len(row.drafts) - state.num_prompt_tokens
        tokens = [state.script.output_token(state.index, place)]
        while tokens[-1] != END_TOKEN and len(tokens) <= len(row.drafts) and tokens[-1] == row.drafts[len(tokens) - 1]:
            tokens.append(state.script.output_token(state.index, place + len(tokens)))
        return _drawn(row.seq_id, row.epoch, *tokens)

    def _result(self, row: ScheduledSequence, state: _State) -> RowOutput:
        script = state.script
        state.path += row.token_ids
        if row.num_candidates:
            found = _candidates(script.token, state.path, row.num_candidates, self._candidate_spread)
            return RowOutput(seq_id=row.seq_id, epoch=row.epoch, tokens=[], candidates=found)
        if row.num_samples == 1:
            place = row.start + row.num_tokens - state.num_prompt_tokens
            return _drawn(row.seq_id, row.epoch, script.output_token(state.index, place))
        # when the prompt is computed, each sequence gets its first token
        return _drawn(row.seq_id, row.epoch, *(script.output_token(index, 0) for index in range(row.num_samples)))


def _drawn(seq_id: int, epoch: int, *token_ids: int) -> RowOutput:
    return RowOutput(
        seq_id=seq_id, epoch=epoch, tokens=[TokenLogprobs(token_id=each, logprob=-1.0) for each in token_ids]
    )


def _candidates(token: int, path: list[int], count: int, spread: float) -> TokenLogprobs:
    """Return what may follow a beam.

    The likeliest token has probability u ** spread, and each further one half of what is left; u is uniform, and drawn
    for the place and the 16 tokens before it. With a spread of 0.5 the likeliest has 2/3 on average.
    """
    digest = blake2b(repr((token, len(path), path[-16:])).encode(), digest_size=8).digest()
    uniform = (int.from_bytes(digest, "little") + 1) / 2**64
    best = min(uniform**spread, 1 - 1e-9)
    left = log(1 - best)
    logprobs = [log(best), *(left - place * _LOG_2 for place in range(1, count))]
    logprobs.sort(reverse=True)
    ids = tuple(range(token, token + count))
    return TokenLogprobs(token_id=token, logprob=logprobs[0], rank=1, top_ids=ids, top_logprobs=tuple(logprobs))
