"""An executor without a model: results at once, with tokens that end each request where its trace says.

Its time is a cost model's. Steps run one after the other, as on a device; waiting for a result moves the clock.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from hashlib import blake2b
from math import exp, log
from typing import Any, Final

from octavo.core.step import (
    ModelRunnerOutput,
    NewSequence,
    RowOutput,
    ScheduledSequence,
    SchedulerOutput,
    TokenLogprobs,
)
from octavo.errors import ConfigError
from octavo.simulate.cost_model import CostModel, StepWork, num_pairs_of

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
    """Counts times between two tokens of a sequence, in classes a hundredth apart: by `round(100 * log(seconds))`."""

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
    """The time that `TokenGaps` counts under this key."""
    return exp(key / 100)


class Script:
    """What the executor knows of a request besides what steps tell.

    output_lens: tokens of its sequences, the ending one included; one number stands for all. token: the id of all its
    output tokens but the last: prefixes differ by stream and length, so one id per stream is enough. output_token_ids:
    the tokens themselves instead, of each sequence. num_transferred: leading tokens whose keys and values came from
    elsewhere.
    """

    __slots__ = ("num_transferred", "output_lens", "output_token_ids", "token")

    def __init__(
        self,
        output_lens: int | Sequence[int],
        token: int,
        num_transferred: int = 0,
        output_token_ids: Sequence[Sequence[int]] = (),
    ) -> None:
        self.output_lens = (output_lens,) if isinstance(output_lens, int) else tuple(output_lens)
        self.token = token
        self.num_transferred = num_transferred
        self.output_token_ids = output_token_ids

    def output_token(self, index: int, place: int) -> int:
        """The token at this place of an output; END_TOKEN at its end. Siblings differ, so that no block of theirs is
        taken for the other's."""
        if place + 1 >= self.output_len(index):
            return END_TOKEN
        return self.output_token_ids[index][place] if self.output_token_ids else self.token + index

    def output_len(self, index: int) -> int:
        """Tokens of the sequence with this index."""
        return self.output_lens[index] if len(self.output_lens) > 1 else self.output_lens[0]


class _State:
    """A sequence that the executor holds. `end`: tokens that are computed when the last one is drawn. `result`: of a
    row that draws one more token like the last; None where each is another."""

    __slots__ = ("end", "free_until", "index", "num_prompt_tokens", "path", "result", "script")

    def __init__(self, new: NewSequence, script: Script) -> None:
        self.script = script
        self.index = new.index
        # beams have no length of their own, and more indexes than the script has
        self.end = new.num_prompt_tokens + script.output_len(min(new.index, len(script.output_lens) - 1)) - 1
        # what was transferred is lost when the sequence is preempted
        self.free_until = script.num_transferred if new.epoch == 0 else 0
        self.num_prompt_tokens = new.num_prompt_tokens
        self.result = None if script.output_token_ids else _result(new.seq_id, new.epoch, script.token + new.index)
        self.path: list[int] = []


class SimulatedExecutor:
    """`Executor` over a cost model. Requests are known by their `params.seed`, which `expect` is told before."""

    def __init__(self, cost_model: CostModel, block_size: int, clock: Clock, candidate_spread: float = 0.5) -> None:
        self.busy_s = 0.0
        self.gaps = TokenGaps()
        self._cost_model = cost_model
        self._block_size = block_size
        self._clock = clock
        self._candidate_spread = candidate_spread
        self._free_at = 0.0
        self._states: dict[int, _State] = {}
        self._scripts: dict[int, Script] = {}

    def expect(self, seed: int, script: Script) -> None:
        """Say what becomes of the request with this seed."""
        self._scripts[seed] = script

    def forget(self, seed: int) -> None:
        """The request has ended."""
        del self._scripts[seed]

    def submit(self, step: SchedulerOutput) -> Future[ModelRunnerOutput]:
        """Run the step after those that were submitted before; `result()` moves the clock to its end."""
        output, work = self._execute(step)
        seconds = self._cost_model.step_seconds(work, self._block_size)
        self._free_at = max(self._free_at, self._clock.now) + seconds
        self.busy_s += seconds
        self.gaps.note([row.seq_id for row in output.rows if row.tokens], self._free_at)
        return _Finished(output, self._free_at, self._clock)

    def call(self, method: str, *arguments: Any) -> Any:
        raise ConfigError(f"{method} is not a call of a simulated worker; there are none")

    def check_health(self) -> None:
        """It is always well."""

    def shutdown(self) -> None:
        self._states.clear()
        self._scripts.clear()

    def _execute(self, step: SchedulerOutput) -> tuple[ModelRunnerOutput, StepWork]:
        states = self._states
        for new in step.new_sequences:
            self._add(new)
        if step.finished_ids:
            added = {new.seq_id for new in step.new_sequences}
            for seq_id in step.finished_ids:
                if seq_id not in added:
                    del states[seq_id]
        results: list[RowOutput] = []
        window = self._cost_model.sliding_window
        most_context = sys.maxsize if window is None else window
        num_tokens = num_prefill = num_context = num_pairs = 0
        for row in step.rows:
            state = states[row.seq_id]
            count, start = row.num_tokens, row.start
            end = start + count
            if count == 1 and row.num_samples == 1 and end != state.end and start >= state.free_until:
                num_tokens += 1
                num_context += end if end < most_context else most_context
                results.append(state.result or self._answer(row, state, end))
                continue
            if row.token_ids:
                state.path += row.token_ids
            results.append(self._answer(row, state, end))
            if start < state.free_until:
                start = min(end, state.free_until)
                count = end - start
            num_tokens += count
            if count > 1:
                num_prefill += count
                num_pairs += num_pairs_of(start, count, window)
            elif count:
                num_context += min(end, most_context)
        ops = step.block_ops
        num_swapped = len(ops.swap_outs) + len(ops.swap_ins)
        work = StepWork(len(results), num_tokens, num_prefill, num_context, num_pairs, num_swapped, len(ops.copies))
        swap_s = self._cost_model.swap_seconds(num_swapped, self._block_size) if num_swapped else 0.0
        return ModelRunnerOutput(step_id=step.step_id, rows=results, swap_s=swap_s), work

    def _add(self, new: NewSequence) -> None:
        seed = new.params.seed
        assert seed is not None, "seeds are resolved before a request is accepted"
        state = self._states[new.seq_id] = _State(new, self._scripts[seed])
        if new.params.use_beam_search:
            num_own = new.num_prompt_tokens - new.num_shared_tokens
            parent = self._states[new.parent_id].path if new.parent_id is not None else []
            state.path = parent[: max(0, -num_own)] + new.token_ids[max(0, num_own) :]

    def _answer(self, row: ScheduledSequence, state: _State, end: int) -> RowOutput:
        """A row that is not one more token like the last."""
        if row.num_candidates:
            found = _candidates(state.script.token, state.path, row.num_candidates, self._candidate_spread)
            return RowOutput(seq_id=row.seq_id, epoch=row.epoch, tokens=[], candidates=found)
        if not row.num_samples:
            return RowOutput(seq_id=row.seq_id, epoch=row.epoch, tokens=[])
        script, place = state.script, end - state.num_prompt_tokens
        if row.num_samples == 1:
            return _result(row.seq_id, row.epoch, script.output_token(state.index, place))
        # the prompt is computed: each sequence gets its first token
        tokens = [_drawn(script.output_token(index, 0)) for index in range(row.num_samples)]
        return RowOutput(seq_id=row.seq_id, epoch=row.epoch, tokens=tokens)


class _Finished(Future[ModelRunnerOutput]):
    """A result that is there, at a time to come."""

    def __init__(self, output: ModelRunnerOutput, finished_at: float, clock: Clock) -> None:
        super().__init__()
        self._output = output
        self._finished_at = finished_at
        self._sim_clock = clock

    def result(self, timeout: float | None = None) -> ModelRunnerOutput:
        self._sim_clock.now = max(self._sim_clock.now, self._finished_at)
        return self._output


def _drawn(token: int) -> TokenLogprobs:
    return TokenLogprobs(token_id=token, logprob=-1.0)


def _result(seq_id: int, epoch: int, token: int) -> RowOutput:
    return RowOutput(seq_id=seq_id, epoch=epoch, tokens=[_drawn(token)])


def _candidates(token: int, path: list[int], count: int, spread: float) -> TokenLogprobs:
    """What may follow a beam. The likeliest token has probability u ** spread, and each further one half of what is
    left; u is uniform, and drawn for the place and the 16 tokens before it. With a spread of 0.5 the likeliest has 2/3
    on average."""
    digest = blake2b(repr((token, len(path), path[-16:])).encode(), digest_size=8).digest()
    uniform = (int.from_bytes(digest, "little") + 1) / 2**64
    best = min(uniform**spread, 1 - 1e-9)
    left = log(1 - best)
    logprobs = [log(best), *(left - place * _LOG_2 for place in range(1, count))]
    logprobs.sort(reverse=True)
    ids = list(range(token, token + count))
    return TokenLogprobs(token_id=token, logprob=logprobs[0], rank=1, top_ids=ids, top_logprobs=logprobs)
