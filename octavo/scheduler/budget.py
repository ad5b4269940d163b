"""What a step may use: tokens, adapters, sequences, encoder inputs. Each is a `Budget` of the `StepPlan`.

A group is admitted when every budget grants it; a row computes what every budget grants of it. A new budget is a class
here and a line in `make_budgets`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import ClassVar, NamedTuple

from octavo.config.schema import SchedulerConfig
from octavo.core.sequence import SequenceGroup


class Budget:
    """One resource. Running groups hold a part of it (`admit`, `release`), or the rows of a step use it up (`take`,
    `refund`). A budget overrides what concerns it; the defaults limit nothing."""

    limits_rows: ClassVar[bool] = False
    """Whether `grant`, `take` and `refund` do anything."""

    @property
    def is_full(self) -> bool:
        """Whether no group can be admitted, however little it needs."""
        return False

    def num_missing(self, group: SequenceGroup) -> int:
        """Return how much more would have to be free for the group to be admitted; 0 when it can be."""
        return 0

    def reason(self, group: SequenceGroup) -> str:
        """Return in words what the group lacks, where `num_missing` is above 0."""
        return ""

    def admit(self, group: SequenceGroup) -> None:
        """Count what the group holds while it runs."""

    def release(self, group: SequenceGroup) -> None:
        """Undo `admit`: the group no longer runs."""

    def grant(self, group: SequenceGroup, start: int, want: int) -> int:
        """Return how many of tokens [start, start + want) of a sequence of the group a row may compute."""
        return want

    def take(self, group: SequenceGroup, start: int, num_tokens: int, want: int) -> None:
        """Count a row of `num_tokens` tokens from `start` on, for which `grant` was called with `want`."""

    def refund(self, group: SequenceGroup, start: int, num_tokens: int, want: int) -> None:
        """Undo `take`: the row is not part of the step."""


class TokenBudget(Budget):
    """Tokens of the step. A prompt gets what is left, in chunks if need be.

    longest_chunk: the most tokens of one prompt; 0 is no limit.
    for_prompts: how much of `remaining`, if there is as much, sequences with more than one token to compute may take.
    has_declined: a row was granted less than it could use, since the caller last set this to False.
    """

    limits_rows = True

    def __init__(self, limit: int, longest_chunk: int = 0) -> None:
        self.remaining = self.for_prompts = limit
        self._longest_chunk = longest_chunk or limit
        self.has_declined = False

    @property
    def is_full(self) -> bool:
        return self.remaining <= 0 or self.for_prompts <= 0

    def grant(self, group: SequenceGroup, start: int, want: int) -> int:
        limit = self.remaining if want <= 1 else min(self.remaining, self.for_prompts, self._longest_chunk)
        if want <= limit:
            return want
        self.has_declined = True
        return limit

    def take(self, group: SequenceGroup, start: int, num_tokens: int, want: int) -> None:
        self.remaining -= num_tokens
        if want > 1:
            self.for_prompts -= num_tokens

    def refund(self, group: SequenceGroup, start: int, num_tokens: int, want: int) -> None:
        self.remaining += num_tokens
        if want > 1:
            self.for_prompts += num_tokens


class SequenceBudget(Budget):
    """Sequences that run at once. A group counts with the most that it can still run."""

    def __init__(self, remaining: int) -> None:
        self.remaining = remaining

    @property
    def is_full(self) -> bool:
        return self.remaining <= 0

    def num_missing(self, group: SequenceGroup) -> int:
        return max(0, group.max_running_sequences - self.remaining)

    def reason(self, group: SequenceGroup) -> str:
        needed = group.max_running_sequences
        return f"needs {needed} sequence{'s' * (needed != 1)}, {self.remaining} more may run"

    def admit(self, group: SequenceGroup) -> None:
        self.remaining -= group.max_running_sequences

    def release(self, group: SequenceGroup) -> None:
        self.remaining += group.max_running_sequences


class AdapterBudget(Budget):
    """`limit` different adapters run at once; groups without one may always run."""

    def __init__(self, limit: int, running: Iterable[SequenceGroup]) -> None:
        self._limit = limit
        self._num_groups: Counter[str] = Counter()
        for group in running:
            self.admit(group)

    @property
    def has_free_slots(self) -> bool:
        """Whether a further adapter may run."""
        return len(self._num_groups) < self._limit

    def num_missing(self, group: SequenceGroup) -> int:
        name = group.request.adapter
        return int(name is not None and name not in self._num_groups and not self.has_free_slots)

    def reason(self, group: SequenceGroup) -> str:
        return f"adapter {group.request.adapter} needs a slot, all {self._limit} are in use (max_loras)"

    def admit(self, group: SequenceGroup) -> None:
        if group.request.adapter is not None:
            self._num_groups[group.request.adapter] += 1

    def release(self, group: SequenceGroup) -> None:
        name = group.request.adapter
        if name is not None:
            self._num_groups[name] -= 1
            if not self._num_groups[name]:
                del self._num_groups[name]


class EncoderInput(NamedTuple):
    """Content, such as an image, that an encoder computes before the prompt token at `offset`, and what that costs."""

    offset: int
    cost: int


class EncoderBudget(Budget):
    """Encoder inputs of one step, at most `limit` in costs; an input that costs more is the only one of its step.

    `inputs_of` returns the inputs of a group in the order of their offsets. An input counts in the step whose row
    computes the token at its offset; a row ends before the first input that is not granted.
    """

    limits_rows = True

    def __init__(self, limit: int, inputs_of: Callable[[SequenceGroup], Iterable[EncoderInput]]) -> None:
        self._limit = limit
        self._inputs_of = inputs_of
        self._used = 0

    def grant(self, group: SequenceGroup, start: int, want: int) -> int:
        used = self._used
        for offset, cost in self._inputs_in(group, start, want):
            if used and used + cost > self._limit:
                return offset - start
            used += cost
        return want

    def take(self, group: SequenceGroup, start: int, num_tokens: int, want: int) -> None:
        self._used += sum(cost for _, cost in self._inputs_in(group, start, num_tokens))

    def refund(self, group: SequenceGroup, start: int, num_tokens: int, want: int) -> None:
        self._used -= sum(cost for _, cost in self._inputs_in(group, start, num_tokens))

    def _inputs_in(self, group: SequenceGroup, start: int, num_tokens: int) -> Iterable[EncoderInput]:
        return (each for each in self._inputs_of(group) if start <= each.offset < start + num_tokens)


class WholeSpans(Budget):
    """A row does not end among tokens that attend to each other: it computes all that are left of them, or none.

    Where they come first in the row, the row may exceed the prompt tokens that a step computes beside decoding
    sequences.
    """

    limits_rows = True

    def __init__(self, tokens: TokenBudget) -> None:
        self._tokens = tokens

    def grant(self, group: SequenceGroup, start: int, want: int) -> int:
        end = start + want
        for offset, length in (span for each in group.request.media if each.is_whole for span in each.spans):
            if offset < end < offset + length:
                num_left = offset + length - start
                return offset - start if offset > start else num_left if num_left <= self._tokens.remaining else 0
        return want


def encoder_inputs(group: SequenceGroup) -> list[EncoderInput]:
    """Return the encoder inputs of a group's prompt."""
    encoded = (each for each in group.request.media if each.spans and each.kind not in ("embeds", "prompt"))
    return [EncoderInput(each.spans[0][0], each.num_embeddings) for each in encoded]


def make_budgets(
    config: SchedulerConfig, running: Iterable[SequenceGroup], num_running_sequences: int, *, has_media: bool = False
) -> list[Budget]:
    """Return the budgets of a step, its tokens first. has_media: some prompts have images or sounds."""
    tokens = TokenBudget(config.max_num_batched_tokens, config.long_prefill_token_threshold)
    adapters = [AdapterBudget(config.max_loras, running)] if config.max_loras else []
    media = [EncoderBudget(config.max_num_batched_tokens, encoder_inputs), WholeSpans(tokens)] if has_media else []
    return [tokens, *adapters, *media, SequenceBudget(config.max_num_seqs - num_running_sequences)]
