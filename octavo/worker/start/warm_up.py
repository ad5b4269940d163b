"""Executes the largest steps at start, on devices with their own memory, to measure the memory that they take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from octavo.config.explain import MemoryPlan
from octavo.config.schema import SchedulerConfig
from octavo.core.arithmetic import num_blocks_for
from octavo.core.sampling_params import SamplingParams
from octavo.core.step import BlockOps, NewSequence, ScheduledSequence, SchedulerOutput
from octavo.devices.device import MemoryUse
from octavo.worker.model_runner import ModelRunner
from octavo.worker.start.memory import refusing_too_little

NUM_BLOCKS: Final = 2
"""KV blocks of each cache group when steps are measured: all sequences share them."""

_TOP: Final = 20
"""Number of likeliest tokens to list."""
_DESCRIBED_TOKENS: Final = 1024
"""Tokens of a prompt with log-probabilities: with a large vocabulary, more logits than are computed at once."""
_LEAST_OTHER: Final = 8
"""Least rows of a decode step from which on steps of three quarters of its rows are captured, too."""

_ASKED: Final[dict[str, Any]] = {"temperature": 0.8, "top_p": 0.95, "seed": 0}
_DESCRIBED: Final = SamplingParams(**_ASKED, top_k=200, repetition_penalty=1.1, logprobs=_TOP, prompt_logprobs=_TOP)
"""Parameters that need every stage of sampling."""
_PLAIN: Final = SamplingParams(**_ASKED)
"""Parameters with which capable devices launch a whole decode step at once."""
_SEVERAL: Final = SamplingParams(**_ASKED, n=2)
"""Parameters with which every device waits for the host."""


def _row(length: int, num_tokens: int = 1, *, num_samples: int = 1, **others: Any) -> ScheduledSequence:
    """Return a row of the last `num_tokens` of the first `length` tokens of a sequence, which gets its id in a step."""
    start = length - num_tokens
    return ScheduledSequence(seq_id=-1, epoch=0, start=start, num_tokens=num_tokens, num_samples=num_samples, **others)


@dataclass(frozen=True)
class WarmUp:
    """Executes the largest steps over the caches of a runner, of any size. Their content is lost.

    plan: the memory plan with these caches. max_model_len: most tokens of a sequence. num_drafts: most guesses that a
    row verifies. The
    steps follow from the sizes alone: ranks of a model make the same ones.
    """

    runner: ModelRunner
    scheduler: SchedulerConfig
    plan: MemoryPlan
    max_model_len: int
    num_drafts: int = 0

    def measure(self, taken: Callable[[], MemoryUse]) -> int:
        """Execute steps of every kind, and return the bytes of one more graph. taken: returns the bytes taken so
        far."""
        self._run(self._prompt_rows(), _DESCRIBED)
        self._draw_otherwise()
        self._verify()
        sizes = [self._num_rows >> halvings for halvings in range(self._num_rows.bit_length())]
        self._decode(_DESCRIBED, sizes[0], self.max_model_len)
        for size in sizes:
            self._decode(_PLAIN, size, self.max_model_len)
        # smaller and shorter steps of other sizes: beside their graphs they take nothing that is not there
        before, others = taken().beside, [3 * size // 4 for size in sizes if size >= _LEAST_OTHER]
        for size in others:
            self._decode(_PLAIN, size, 1)
        return max(0, -((before - taken().beside) // max(1, len(others))))

    def repeat(self) -> None:
        """Execute the largest prompts, and capture the largest decode steps of both kinds."""
        self._run(self._prompt_rows(), _DESCRIBED)
        for params in (_DESCRIBED, _PLAIN):
            self._decode(params, self._num_rows, 1)

    @property
    def _num_rows(self) -> int:
        return min(self.scheduler.max_num_seqs, self.scheduler.max_num_batched_tokens)

    def _prompt_rows(self) -> list[ScheduledSequence]:
        """Return the rows of the fullest step: prompts of about the same length."""
        num_rows = self._num_rows
        num_tokens = min(self.scheduler.max_num_batched_tokens, num_rows * self.max_model_len)
        each, more = divmod(num_tokens, num_rows)
        return [_row(length, length) for length in (each + (row < more) for row in range(num_rows))]

    def _draw_otherwise(self) -> None:
        """Execute the other ways of drawing and listing tokens: beams, several samples, and log-probabilities of
        prompts."""
        self._run([_row(1)] * self._num_rows, _PLAIN)
        self._run([_row(1, num_samples=2)] * self._num_rows, _SEVERAL)
        self._run([_row(1, num_samples=0, num_candidates=_TOP)] * self._num_rows, _PLAIN)
        length = min(self.scheduler.max_num_batched_tokens, self.max_model_len, _DESCRIBED_TOKENS)
        self._run([_row(length, length, num_prompt_logprobs=length - 1)], _DESCRIBED)

    def _verify(self) -> None:
        """Verify guesses, and make some if the worker has a drafter; twice, so that the drafter is captured."""
        num_drafts = min(self.num_drafts, self.max_model_len - 1, self.scheduler.max_num_batched_tokens - 1)
        num_proposals = 0 if self.runner.parts.drafter is None else num_drafts
        row = _row(1 + num_drafts, 1 + num_drafts, drafts=(0,) * num_drafts, num_proposals=num_proposals)
        num_rows = min(self._num_rows, self.scheduler.max_num_batched_tokens // row.num_tokens)
        if num_drafts:
            for _ in range(2):
                self._run([row] * num_rows, _DESCRIBED)

    def _decode(self, params: SamplingParams, num_rows: int, longest: int) -> None:
        """Execute a decode step with one long row twice: the second time it is captured."""
        for _ in range(2):
            self._run([_row(longest), *[_row(1)] * (num_rows - 1)], params)

    def _run(self, rows: Sequence[ScheduledSequence], params: SamplingParams) -> None:
        """Execute a step of new sequences, and forget them. Raises ConfigError where it does not fit."""
        num_tokens = sum(row.num_tokens for row in rows)
        purpose = f"in a step of {num_tokens:,} tokens of {len(rows):,} sequences"
        with refusing_too_little(purpose, self.plan.weights_bytes, self.plan.kv_bytes):
            self.runner.execute(self._step(rows, params))
        ids = [-1 - row for row in range(len(rows))]
        self.runner.execute(
            SchedulerOutput(step_id=-1, new_sequences=[], rows=[], finished_ids=ids, block_ops=BlockOps())
        )

    def _step(self, rows: Sequence[ScheduledSequence], params: SamplingParams) -> SchedulerOutput:
        """Return a step of new sequences with negative ids, which share blocks where there are too few for all."""
        limits = self.plan.cache
        sequences, scheduled, given = [], [], 0
        for number, row in enumerate(rows):
            length = row.start + row.num_tokens
            count = num_blocks_for(length + row.num_proposals, limits.block_size)
            tables = [[1 + block % each.num_blocks for block in range(given, given + count)] for each in limits.groups]
            given += count
            num_known = length - len(row.drafts)
            sequences.append(
                NewSequence(
                    seq_id=-1 - number,
                    index=0,
                    epoch=0,
                    token_ids=[0] * num_known,
                    num_prompt_tokens=num_known,
                    block_tables=tables,
                    params=params,
                    is_drafted=self.runner.parts.drafter is not None,
                )
            )
            scheduled.append(msgspec.structs.replace(row, seq_id=-1 - number))
        return SchedulerOutput(
            step_id=-1, new_sequences=sequences, rows=scheduled, finished_ids=[], block_ops=BlockOps()
        )
