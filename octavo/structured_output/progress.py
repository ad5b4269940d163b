"""Where a text stands: in its reasoning, in free text, or in a region that its grammar constrains."""

from __future__ import annotations

import time
from enum import Enum, auto
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from octavo.core.structured_outputs import StructuredOutputsParams
from octavo.structured_output.marks import Mask, Vocabulary, end_of_mark, open_tail

if TYPE_CHECKING:
    from llguidance import LLMatcher

_MOST_LOCKED_S: Final = 0.0005
_NO_TOKENS = np.empty(0, dtype=np.int32)


class CompiledForm:
    """What the matchers of a form are copied from, and its marks as bytes. matcher: None where only reasoning ends."""

    def __init__(self, params: StructuredOutputsParams, vocabulary: Vocabulary, matcher: LLMatcher | None) -> None:
        self.params = params
        self.vocabulary = vocabulary
        self.matcher = matcher
        self.begin = vocabulary.spelled(params.reasoning_begin)
        self.end = vocabulary.spelled(params.reasoning_end)
        self.end_tokens = vocabulary.token_ids(params.reasoning_end) if params.reasoning_budget is not None else []
        self.triggers = tuple(map(vocabulary.spelled, params.triggers))
        self.may_name_tokens = bool(params.grammar or params.structural_tag)
        """Whether the grammar may name tokens that are no text, such as that which ends the text."""


class _Kind(Enum):
    UNDECIDED = auto()  # the text so far is a part of the mark that begins reasoning, or empty
    REASONING = auto()
    FREE = auto()
    REGION = auto()
    ENDING = auto()
    UNBOUND = auto()


class _Phase(NamedTuple):
    """tail: the end of the text that may begin a mark. start: the first token of the region. num_forced: how many
    tokens of the end of reasoning were forced."""

    kind: _Kind
    tail: bytes = b""
    start: int = 0
    num_regions: int = 0
    num_forced: int = 0


class Progress:
    """Follows the output tokens of a sequence, forward and back. Its masks depend on these tokens alone."""

    def __init__(self, form: CompiledForm) -> None:
        self._form = form
        self._taken: NDArray[np.int32] = _NO_TOKENS
        self._matcher: LLMatcher | None = None
        self._first = self._num_consumed = 0
        self._phases: list[tuple[int, _Phase]] = []
        """Each phase with the number of tokens before it."""
        if form.begin:
            self._enter(0, _Phase(_Kind.UNDECIDED), _NO_TOKENS)
        elif form.end:
            self._enter(0, _Phase(_Kind.REASONING), _NO_TOKENS)
        else:
            self._enter(0, self._behind_reasoning(0), _NO_TOKENS)

    @property
    def error(self) -> str | None:
        """Why the grammar admits no further token; None where it does."""
        is_failed = self._matcher is not None and self._matcher.is_error()
        return self._matcher.get_error() if is_failed and self._matcher is not None else None

    def move_to(self, output: NDArray[np.int32]) -> int:
        """Give back the tokens that are not in `output`, and take those that are new. Returns how many are taken: fewer
        than there are where the form does not admit the next one."""
        same = _num_alike(self._taken, output)
        while self._phases[-1][0] > same:
            self._phases.pop()
        if self._phase.kind is _Kind.REGION:
            self._match(self._phase.start, output[:same])
        num_taken = same
        while num_taken < len(output):
            num_new = self._take(output, num_taken)
            if not num_new:
                break
            num_taken += num_new
        self._taken = output[:num_taken].copy()
        return num_taken

    def mask(self) -> Mask | None:
        """Return the tokens that may follow; None for all, and where the grammar fails."""
        phase, form = self._phase, self._form
        vocabulary, ends = form.vocabulary, form.vocabulary.end_token_ids
        match phase.kind:
            case _Kind.REGION:
                assert self._matcher is not None
                return self._mask_of(self._matcher)
            case _Kind.ENDING:
                return vocabulary.only(ends)
            case _Kind.REASONING if self._is_over_budget(len(self._taken)):
                return vocabulary.only(form.end_tokens[phase.num_forced : phase.num_forced + 1])
            case _Kind.REASONING if form.matcher is not None:
                return vocabulary.without([*vocabulary.crossing((form.end,), phase.tail), *ends])
            case _Kind.FREE:
                return self._free_mask(phase.tail, phase.num_regions)
            case _Kind.UNDECIDED if form.triggers:
                return self._free_mask(open_tail(phase.tail, form.triggers), 0)
            case _Kind.UNDECIDED if form.matcher is not None:
                begins = vocabulary.only(vocabulary.prefixes(form.begin[len(phase.tail) :]))
                matcher = form.matcher.deep_copy()
                if matcher.try_consume_tokens(self._taken.tolist()) < len(self._taken):
                    return begins
                mask = self._mask_of(matcher)
                return mask if mask is None else mask | begins
        return None

    def forced(self) -> list[int]:
        """Return the tokens that have to follow, as far as the grammar leaves no choice; perhaps none of them."""
        if self._phase.kind is not _Kind.REGION or self._matcher is None:
            return []
        found: list[int] = self._matcher.compute_ff_tokens()
        return found

    @property
    def _phase(self) -> _Phase:
        return self._phases[-1][1]

    def _free_mask(self, tail: bytes, num_regions: int) -> Mask | None:
        form = self._form
        barred = form.vocabulary.crossing(form.triggers, tail)
        if form.params.at_least_one and not num_regions:
            barred = [*barred, *form.vocabulary.end_token_ids]
        return form.vocabulary.without(barred) if barred else None

    def _mask_of(self, matcher: LLMatcher) -> Mask | None:
        mask = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint32)
        if matcher.is_error():
            return None
        if self._form.may_name_tokens and not matcher.is_accepting():
            # a grammar that names the end token inside of its text cannot end the text there
            for end in self._form.vocabulary.end_token_ids:
                if mask[end // 32] >> (end % 32) & 1 and not _ends_with(matcher, end):
                    mask = mask.copy()
                    mask[end // 32] &= np.uint32(~(1 << end % 32) & 0xFFFFFFFF)
        return mask

    def _is_over_budget(self, position: int) -> bool:
        budget = self._form.params.reasoning_budget
        return budget is not None and position >= budget

    def _take(self, output: NDArray[np.int32], position: int) -> int:
        """Take the token at `position`, or all from there on if none of them can end a region. Returns how many."""
        phase = self._phase
        if phase.kind is not _Kind.REGION:
            return int(self._enter(position + 1, self._next(phase, output, position), output))
        assert self._matcher is not None
        stop = position + 1 if self._form.triggers else len(output)
        num_new = _consume(self._matcher, output[position:stop].tolist())
        self._num_consumed += num_new
        if self._form.triggers and num_new and self._matcher.is_stopped() and not self._matcher.is_error():
            is_last = self._form.params.stop_after_first
            following = _Phase(_Kind.ENDING if is_last else _Kind.FREE, num_regions=phase.num_regions + 1)
            self._enter(position + 1, following, output)
        return num_new

    def _next(self, phase: _Phase, output: NDArray[np.int32], position: int) -> _Phase:
        """Return the phase behind the token at `position`, which is not in a region."""
        form = self._form
        if phase.kind in (_Kind.ENDING, _Kind.UNBOUND):
            return phase
        text = phase.tail + form.vocabulary.bytes_of(int(output[position]))
        if phase.kind is _Kind.FREE:
            return self._free(text, position + 1, phase.num_regions)
        num_forced = 0
        if phase.kind is _Kind.UNDECIDED:
            if len(text) < len(form.begin) and form.begin.startswith(text):
                return _Phase(_Kind.UNDECIDED, text)
            if not text.startswith(form.begin):
                behind = self._behind_reasoning(0)
                return self._free(text, position + 1, 0) if behind.kind is _Kind.FREE else behind
            text = text[len(form.begin) :]
        elif self._is_over_budget(position):
            num_forced = phase.num_forced + 1
        if form.end in text or (num_forced and num_forced == len(form.end_tokens)):
            return self._behind_reasoning(position + 1)
        return _Phase(_Kind.REASONING, open_tail(text, (form.end,)), num_forced=num_forced)

    def _free(self, text: bytes, position: int, num_regions: int) -> _Phase:
        """Return the phase at `position`, behind free text that ends with `text`."""
        if end_of_mark(text, self._form.triggers) is not None:
            return _Phase(_Kind.REGION, start=position, num_regions=num_regions)
        return _Phase(_Kind.FREE, open_tail(text, self._form.triggers), num_regions=num_regions)

    def _behind_reasoning(self, position: int) -> _Phase:
        if self._form.matcher is None:
            return _Phase(_Kind.UNBOUND)
        return _Phase(_Kind.FREE) if self._form.triggers else _Phase(_Kind.REGION, start=position)

    def _enter(self, position: int, phase: _Phase, output: NDArray[np.int32]) -> bool:
        """Go on with a phase behind `position` tokens. Returns whether the grammar admits those of its region."""
        is_admitted = phase.kind is not _Kind.REGION or self._match(phase.start, output[:position])
        if is_admitted and (not self._phases or self._phase != phase):
            self._phases.append((position, phase))
        return is_admitted

    def _match(self, first: int, output: NDArray[np.int32]) -> bool:
        """Bring the matcher behind the tokens of `output` from `first` on. Returns whether it admits them."""
        wanted = len(output) - first
        if self._matcher is None or self._first != first or self._num_consumed < wanted:
            assert self._form.matcher is not None
            self._matcher, self._first = self._form.matcher.deep_copy(), first
            self._num_consumed = _consume(self._matcher, output[first:].tolist())
        elif self._num_consumed > wanted:
            self._matcher.rollback(self._num_consumed - wanted)
            self._num_consumed = wanted
        return self._num_consumed == wanted


def _consume(matcher: LLMatcher, token_ids: list[int]) -> int:
    """Return how many of the tokens the matcher has taken. Between those that take long, other threads run: llguidance
    holds Python's lock here."""
    since = time.perf_counter()
    for place, token_id in enumerate(token_ids):
        if not matcher.try_consume_tokens([token_id]):
            return place
        held_s = time.perf_counter() - since
        if held_s > _MOST_LOCKED_S:
            time.sleep(held_s)  # a thread that waits for the lock needs a moment to get it
            since = time.perf_counter()
    return len(token_ids)


def _ends_with(matcher: LLMatcher, end_token_id: int) -> bool:
    """Return whether the text is complete with this token."""
    ended = matcher.deep_copy()
    return ended.consume_token(end_token_id) and ended.is_accepting()


def _num_alike(one: NDArray[np.int32], other: NDArray[np.int32]) -> int:
    """Return how many leading entries are the same."""
    shorter = min(len(one), len(other))
    different = np.flatnonzero(one[:shorter] != other[:shorter])
    return int(different[0]) if len(different) else shorter
