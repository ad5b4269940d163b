"""A fake executor whose KV cache stores a hash of the whole prefix per slot and reads it back through the block tables.

A block that was freed too early, shared wrongly, not copied, or not computed gives another token than the right one.
"""

from __future__ import annotations

import math
from concurrent.futures import Future
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import msgspec

from octavo.core.outputs import RequestError
from octavo.core.sampling_params import SamplingParams
from octavo.core.step import (
    BlockCopy,
    ModelRunnerOutput,
    NewSequence,
    PromptLogprobs,
    RowOutput,
    ScheduledSequence,
    SchedulerOutput,
    TokenLogprobs,
)

Slots = dict[tuple[int, int], int]


def digest(*parts: object) -> int:
    return int.from_bytes(blake2b(repr(parts).encode(), digest_size=8).digest(), "little")


@dataclass
class State:
    index: int
    token_ids: list[int]
    table: list[int]
    params: SamplingParams
    epoch: int
    hashes: list[int] = field(default_factory=list)

    def chain(self, position: int, sliding_window: int) -> int:
        """What the slot of a token holds: with a window of one, a hash of the token; else one of all tokens so far."""
        for token_id in self.token_ids[len(self.hashes) : position + 1]:
            before = self.hashes[-1] if self.hashes and sliding_window > 1 else 0
            self.hashes.append(digest(before, token_id))
        return self.hashes[position]


@dataclass
class HashExecutor:
    """Tokens are `hash(everything that attention reads, seed, index, position) % vocab_size`.

    fail_token: a row that computes this token answers with an error, as a row with NaN logits would.
    max_num_batched_tokens: no step may have more.
    sliding_window: what attention reads is the last tokens only. Each of them must be there, and right.
    num_lookahead_slots: every row must have so many slots beyond its tokens.
    swap_block_s: what moving a block to or from the host is said to take.
    draws: without it nothing is drawn: what a stage without a head does, which needs tokens to be sent.
    follower: another executor, which gets the same steps and must come to hold the same.
    """

    block_size: int
    vocab_size: int = 50
    fail_token: int | None = None
    sliding_window: int | None = None
    max_num_batched_tokens: int | None = None
    num_lookahead_slots: int = 0
    swap_block_s: float = 0.0
    draws: bool = True
    follower: HashExecutor | None = None
    slots: Slots = field(default_factory=dict)
    host_slots: Slots = field(default_factory=dict)
    states: dict[int, State] = field(default_factory=dict)
    steps: list[SchedulerOutput] = field(default_factory=list)
    num_computed_tokens: int = 0
    is_shut_down: bool = False

    @property
    def sends_tokens(self) -> bool:
        return self.follower is not None

    def submit(self, step: SchedulerOutput) -> Future[ModelRunnerOutput]:
        future: Future[ModelRunnerOutput] = Future()
        future.set_result(self.execute(step))
        return future

    def call(self, method: str, *arguments: Any) -> Any:
        raise NotImplementedError(method)

    def check_health(self) -> None:
        assert not self.is_shut_down

    def shutdown(self) -> None:
        self.is_shut_down = True

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        self.steps.append(step)
        assert self.max_num_batched_tokens is None or step.num_tokens <= self.max_num_batched_tokens
        for new in step.new_sequences:
            self._add(new)
        new_ids = {new.seq_id for new in step.new_sequences}
        for seq_id in step.finished_ids:
            if seq_id not in new_ids:
                del self.states[seq_id]  # the scheduler names only sequences that the worker holds
        self._move(step.block_ops.swap_outs, self.slots, self.host_slots)
        self._move(step.block_ops.swap_ins, self.host_slots, self.slots)
        self._move(step.block_ops.copies, self.slots, self.slots)
        written: dict[tuple[int, int], int] = {}
        for row in step.rows:
            self._write(row, written)
        if self.follower is not None:
            self.follower.execute(step)
            self._check_follower(self.follower, step.rows)
        return ModelRunnerOutput(
            step_id=step.step_id,
            rows=[self._read(row, written) for row in step.rows],
            swap_s=self.swap_block_s * (len(step.block_ops.swap_outs) + len(step.block_ops.swap_ins)),
        )

    def _check_follower(self, follower: HashExecutor, rows: list[ScheduledSequence]) -> None:
        assert (follower.slots, follower.host_slots) == (self.slots, self.host_slots)
        assert follower.states.keys() == self.states.keys()
        for row in rows:
            known = row.start + row.num_tokens - len(row.drafts)
            assert follower.states[row.seq_id].token_ids[:known] == self.states[row.seq_id].token_ids[:known]

    def _move(self, copies: list[BlockCopy], source: Slots, target: Slots) -> None:
        for copy in copies:
            for offset in range(self.block_size):
                target[copy.target, offset] = source.get((copy.source, offset), -1)

    def _add(self, new: NewSequence) -> None:
        shared: list[int] = []
        if new.parent_id is not None:
            parent = self.states[new.parent_id]
            assert len(parent.token_ids) >= new.num_shared_tokens
            shared = parent.token_ids[: new.num_shared_tokens]
        table = list(new.block_tables[0])
        self.states[new.seq_id] = State(new.index, shared + new.token_ids, table, new.params, new.epoch)

    def _slot(self, state: State, position: int) -> tuple[int, int]:
        return state.table[position // self.block_size], position % self.block_size

    def _first_seen(self, position: int) -> int:
        return 0 if self.sliding_window is None else max(0, position - self.sliding_window + 1)

    def _seen(self, state: State, position: int) -> list[int]:
        """What the query at `position` reads."""
        return [self.slots.get(self._slot(state, p), -1) for p in range(self._first_seen(position), position + 1)]

    def _check_window(self, state: State, row: ScheduledSequence, written: dict[tuple[int, int], int]) -> None:
        """The row reads nothing that another row of its step writes, and under a window all that it should."""
        for position in range(self._first_seen(row.start), row.start + row.num_tokens):
            slot = self._slot(state, position)
            assert written.get(slot, row.seq_id) == row.seq_id, "a row reads what another row of its step writes"
            assert slot[0] != 0, f"a row from {row.start} on reads the null block at {position}"
            if self.sliding_window is not None:
                assert self.slots.get(slot, -1) == state.chain(position, self.sliding_window), (
                    f"a row from {row.start} on reads something else than its token {position}"
                )

    def _write(self, row: ScheduledSequence, written: dict[tuple[int, int], int]) -> None:
        state = self.states[row.seq_id]
        assert state.epoch == row.epoch
        known = row.start + row.num_tokens - len(row.drafts)
        if row.token_ids:
            state.token_ids[known - len(row.token_ids) :] = row.token_ids
        if row.drafts:
            assert len(state.token_ids) == known, "drafts do not follow the last known token"
            state.token_ids += row.drafts
        for change in row.table_changes:
            state.table[change.first_index :] = change.block_ids
        self.num_computed_tokens += row.num_tokens
        num_slots = len(state.table) * self.block_size
        assert num_slots >= row.start + row.num_tokens + self.num_lookahead_slots, "lookahead slots are missing"
        for position in range(row.start, row.start + row.num_tokens):
            before = (
                0 if self._first_seen(position) == position else self.slots.get(self._slot(state, position - 1), -1)
            )
            slot = self._slot(state, position)
            assert slot[0] != 0, "the null block is written"
            assert slot not in written, "two rows write one slot"
            self.slots[slot] = digest(before, state.token_ids[position])
            written[slot] = row.seq_id

    def _read(self, row: ScheduledSequence, written: dict[tuple[int, int], int]) -> RowOutput:
        state = self.states[row.seq_id]
        end = row.start + row.num_tokens - len(row.drafts)
        self._check_window(state, row, written)
        if row.drafts:
            del state.token_ids[end:], state.hashes[end:]
        if not self.draws:
            return RowOutput(row.seq_id, row.epoch, [])
        if self._fails(state, row.start, end):
            state.token_ids += [0] * bool(row.num_samples)  # steps that are on their way go on after it
            return RowOutput(seq_id=row.seq_id, epoch=row.epoch, tokens=[], error=RequestError("the logits hold NaN"))
        read = self._seen(state, end - 1)
        tokens = []
        for i in range(row.num_samples):
            index = i if row.num_samples > 1 else state.index
            tokens.append(self._draw(read, state.params, index, end))
        if tokens:
            state.token_ids.append(tokens[0].token_id)
        for position, draft in enumerate(row.drafts, start=end + 1):
            if tokens[-1].token_id != draft or self._fails(state, row.start, position):
                break
            tokens.append(self._draw(self._seen(state, position - 1), state.params, state.index, position))
            state.token_ids.append(tokens[-1].token_id)
        candidates = self._candidates(read, row.num_candidates, state.params) if row.num_candidates else None
        prompt = None
        if row.num_prompt_logprobs:
            described = [
                self._describe(self._seen(state, p), state.token_ids[p + 1])
                for p in range(row.start, row.start + row.num_prompt_logprobs)
            ]
            prompt = PromptLogprobs(first_position=row.start + 1, tokens=described)
        return RowOutput(
            seq_id=row.seq_id, epoch=row.epoch, tokens=tokens, prompt_logprobs=prompt, candidates=candidates
        )

    def _fails(self, state: State, start: int, end: int) -> bool:
        return self.fail_token is not None and self.fail_token in state.token_ids[start:end]

    def _candidates(self, read: list[int], count: int, params: SamplingParams) -> TokenLogprobs:
        """The likeliest tokens. `allowed_token_ids` bar others, and `bad_words`, whatever they are, two of three."""
        described = [self._describe(read, token) for token in range(self.vocab_size)]
        for token, each in enumerate(described):
            is_allowed = params.allowed_token_ids is None or token in params.allowed_token_ids
            if not is_allowed or (params.bad_words and digest(read, token, "bad") % 3):
                described[token] = msgspec.structs.replace(each, logprob=-math.inf)
        best = sorted(described, key=lambda t: -t.logprob)[:count]
        return TokenLogprobs(
            token_id=best[0].token_id,
            logprob=best[0].logprob,
            top_ids=[token.token_id for token in best],
            top_logprobs=[token.logprob for token in best],
        )

    def _draw(self, read: list[int], params: SamplingParams, index: int, position: int) -> TokenLogprobs:
        token = digest(read, params.seed, index, position) % self.vocab_size
        return self._describe(read, token)

    def _describe(self, read: list[int], token: int) -> TokenLogprobs:
        return TokenLogprobs(token_id=token, logprob=-math.log(2 + digest(read, token) % 1000))
