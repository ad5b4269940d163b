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

STATE = -1
"""In place of the window of a cache group: a block holds the state after its last computed token."""
ENCODING = -2
"""Likewise: blocks hold what the encoder makes of the sound that the first token stands for."""
NUM_ENCODED = 10
Slot = tuple[int, int, int]
"""Cache group, block, place in the block."""
Slots = dict[Slot, int]


def digest(*parts: object) -> int:
    return int.from_bytes(blake2b(repr(parts).encode(), digest_size=8).digest(), "little")


@dataclass
class State:
    index: int
    token_ids: list[int]
    tables: list[list[int]]
    params: SamplingParams
    epoch: int
    hashes: tuple[list[int], list[int]] = field(default_factory=lambda: ([], []))
    waits_until: int = 0
    encodes: bool = False

    def chain(self, position: int, window: int) -> int:
        """What the slot of a token holds: with a window of one, a hash of the token; else one of all tokens so far."""
        hashes = self.hashes[window > 1]
        for token_id in self.token_ids[len(hashes) : position + 1]:
            before = hashes[-1] if hashes and window > 1 else 0
            hashes.append(digest(before, token_id))
        return hashes[position]

    def drop_tokens(self, end: int) -> None:
        """Forget the tokens from `end` on."""
        del self.token_ids[end:], self.hashes[0][end:], self.hashes[1][end:]


@dataclass
class HashExecutor:
    """Tokens are `hash(everything that attention reads, seed, index, position) % vocab_size`.

    fail_token: a row that computes this token answers with an error, as a row with NaN logits would.
    max_num_batched_tokens: no step may have more.
    windows: for each cache group, how many of the last tokens attention reads there; None for all. Each of those of a
        window must be there, and right.
    num_lookahead_slots: every row must have so many slots beyond its tokens.
    swap_block_s: what moving a block to or from the host is said to take.
    draws: without it nothing is drawn: what a stage without a head does, which needs tokens to be sent.
    follower: another executor, which gets the same steps and must come to hold the same.
    compile_steps: rows of sequences with a form draw nothing until the worker has had the sequence for so many steps.
    """

    block_size: int
    vocab_size: int = 50
    fail_token: int | None = None
    windows: tuple[int | None, ...] = (None,)
    max_num_batched_tokens: int | None = None
    num_lookahead_slots: int = 0
    swap_block_s: float = 0.0
    draws: bool = True
    follower: HashExecutor | None = None
    compile_steps: int = 0
    ready_at: dict[int, int] = field(default_factory=dict)
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
        match method:
            case "open_weights" | "load_again":
                return [None]
            case "sleep":
                for each in (self, *([] if self.follower is None else [self.follower])):
                    each.slots, each.host_slots, each.states = {}, {}, {}
                return None
            case "wake_up":
                return None
        raise NotImplementedError(method)

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
        written: dict[Slot, int] = {}
        for row in step.rows:
            self._write(row, written)
        if self.follower is not None:
            self.follower.execute(step)
            self._check_follower(self.follower, step.rows)
        rows = [self._read(row, written) for row in step.rows]
        return ModelRunnerOutput(
            step_id=step.step_id,
            rows=rows,
            has_guesses=any(row.proposed for row in rows),
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
                target[copy.group, copy.target, offset] = source.get((copy.group, copy.source, offset), -1)

    def _add(self, new: NewSequence) -> None:
        shared: list[int] = []
        if new.parent_id is not None:
            parent = self.states[new.parent_id]
            assert len(parent.token_ids) >= new.num_shared_tokens
            shared = parent.token_ids[: new.num_shared_tokens]
        tables = [list(table) for table in new.block_tables]
        state = self.states[new.seq_id] = State(new.index, shared + new.token_ids, tables, new.params, new.epoch)
        state.encodes = bool(new.media)
        if new.params.structured_outputs is not None:
            state.waits_until = self.ready_at.setdefault(new.seq_id, len(self.steps) + self.compile_steps)

    def _slot(self, state: State, group: int, position: int) -> Slot:
        return group, state.tables[group][position // self.block_size], position % self.block_size

    def _first_seen(self, group: int, position: int) -> int:
        window = self.windows[group]
        if window == STATE:
            return position
        return 0 if window is None else max(0, position - window + 1)

    def _seen(self, state: State, position: int) -> list[int]:
        """What the query at `position` reads. What goes into a state follows from the tokens up to there: the state
        itself may be overwritten by then, but `_write_states` has checked that it is this one."""
        return [
            state.chain(p, 2) if self.windows[group] == STATE else self.slots.get(self._slot(state, group, p), -1)
            for group, window in enumerate(self.windows)
            for p in (
                range(NUM_ENCODED) if window == ENCODING else range(self._first_seen(group, position), position + 1)
            )
        ]

    def _check_windows(self, state: State, row: ScheduledSequence, written: dict[Slot, int]) -> None:
        """The row reads nothing that another row of its step writes, and under a window all that it should."""
        for group, window in enumerate(self.windows):
            if window in (STATE, ENCODING):
                continue
            for position in range(self._first_seen(group, row.start), row.start + row.num_tokens):
                slot = self._slot(state, group, position)
                assert written.get(slot, row.seq_id) == row.seq_id, "a row reads what another row of its step writes"
                assert slot[1] != 0, f"a row from {row.start} on reads the null block at {position}"
                if window is not None:
                    assert self.slots.get(slot, -1) == state.chain(position, window), (
                        f"a row from {row.start} on reads something else than its token {position}"
                    )

    def _write(self, row: ScheduledSequence, written: dict[Slot, int]) -> None:
        state = self.states[row.seq_id]
        assert state.epoch == row.epoch
        known = row.start + row.num_tokens - len(row.drafts)
        if row.token_ids:
            state.token_ids[known - len(row.token_ids) :] = row.token_ids
        if row.drafts:
            assert len(state.token_ids) == known, "drafts do not follow the last known token"
            state.token_ids += row.drafts
        for change in row.table_changes:
            state.tables[change.group][change.first_index :] = change.block_ids
        self.num_computed_tokens += row.num_tokens
        for group, window in enumerate(self.windows):
            if window == STATE:
                self._write_states(state, group, row, written)
                continue
            if window == ENCODING:
                self._write_encoding(state, group)
                continue
            num_slots = len(state.tables[group]) * self.block_size
            num_beyond = self.num_lookahead_slots + row.num_proposals
            assert num_slots >= row.start + row.num_tokens + num_beyond, "lookahead slots are missing"
            for position in range(row.start, row.start + row.num_tokens):
                is_first = self._first_seen(group, position) == position
                before = 0 if is_first else self.slots.get(self._slot(state, group, position - 1), -1)
                slot = self._slot(state, group, position)
                assert slot[1] != 0, "the null block is written"
                assert slot not in written, "two rows write one slot"
                value = digest(before, state.token_ids[position])
                if self.slots.get(slot) != value:  # a token that is computed again changes nothing for readers
                    self.slots[slot] = value
                    written[slot] = row.seq_id
            for position in range(row.start + row.num_tokens, row.start + row.num_tokens + row.num_proposals):
                slot = self._slot(state, group, position)
                assert slot[1] != 0, "a draft model writes the null block"
                assert slot not in written, "a draft model writes what a row writes"
                self.slots[slot] = digest("guess", row.seq_id)
                written[slot] = row.seq_id

    def _write_states(self, state: State, group: int, row: ScheduledSequence, written: dict[Slot, int]) -> None:
        """The row starts from the state behind exactly the tokens before it, and writes one wherever it has a block."""
        table, size = state.tables[group], self.block_size
        end = row.start + row.num_tokens - len(row.drafts)  # no state is kept behind a draft
        if row.start:
            source = group, table[(row.start - 1) // size], 0
            assert source[1] != 0, f"a row from {row.start} on starts from the null block"
            assert written.get(source, row.seq_id) == row.seq_id, "a row starts from what another row writes"
            expected = state.chain(row.start - 1, 2)
            assert self.slots.get(source) == expected, f"a row from {row.start} on starts from another state"
        assert table[(end - 1) // size] != 0, "the last state of a row is lost"
        for entry in range(row.start // size, (end - 1) // size + 1):
            slot = group, table[entry], 0
            if slot[1] != 0:
                assert slot not in written, "two rows write one state"
                self.slots[slot] = state.chain(min((entry + 1) * size, end) - 1, 2)
                written[slot] = row.seq_id

    def _write_encoding(self, state: State, group: int) -> None:
        """The first row that is told to writes what its sound makes, and every row finds that."""
        slots = {self._slot(state, group, i): digest("encoded", state.token_ids[0], i) for i in range(NUM_ENCODED)}
        assert all(slot[1] for slot in slots), "an encoding is in the null block"
        if state.encodes:
            self.slots.update(slots)
            state.encodes = False
        assert slots.items() <= self.slots.items(), "a row reads another encoding"

    def _read(self, row: ScheduledSequence, written: dict[Slot, int]) -> RowOutput:
        state = self.states[row.seq_id]
        end = row.start + row.num_tokens - len(row.drafts)
        self._check_windows(state, row, written)
        if row.drafts:
            state.drop_tokens(end)
        if not self.draws:
            return RowOutput(row.seq_id, row.epoch, [])
        if self._fails(state, row.start, end):
            state.token_ids += [0] * bool(row.num_samples)  # steps that are on their way go on after it
            return RowOutput(seq_id=row.seq_id, epoch=row.epoch, tokens=[], error=RequestError("the logits hold NaN"))
        if state.waits_until > len(self.steps) and (row.num_samples or row.num_candidates):
            return RowOutput(row.seq_id, row.epoch, [], self._prompt_logprobs(state, row), is_undrawn=True)
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
        prompt = self._prompt_logprobs(state, row)
        proposed = (
            tuple((tokens[-1].token_id + i) % self.vocab_size for i in range(row.num_proposals)) if tokens else ()
        )
        return RowOutput(
            seq_id=row.seq_id,
            epoch=row.epoch,
            tokens=tokens,
            prompt_logprobs=prompt,
            candidates=candidates,
            proposed=proposed,
        )

    def _prompt_logprobs(self, state: State, row: ScheduledSequence) -> PromptLogprobs | None:
        if not row.num_prompt_logprobs:
            return None
        described = [
            self._describe(self._seen(state, p), state.token_ids[p + 1])
            for p in range(row.start, row.start + row.num_prompt_logprobs)
        ]
        return PromptLogprobs(first_position=row.start + 1, tokens=described)

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
            top_ids=tuple(token.token_id for token in best),
            top_logprobs=tuple(token.logprob for token in best),
        )

    def _draw(self, read: list[int], params: SamplingParams, index: int, position: int) -> TokenLogprobs:
        token = digest(read, params.seed, index, position) % self.vocab_size
        return self._describe(read, token)

    def _describe(self, read: list[int], token: int) -> TokenLogprobs:
        return TokenLogprobs(token_id=token, logprob=-math.log(2 + digest(read, token) % 1000))
