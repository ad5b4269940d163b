"""Admission control: requests that would only wait are refused at once, with the time after which to try again.

There are three checks: the requests in the queue, their prompt tokens, and deadlines of the first token. Requests that
arrive together are all admitted to the queue or all refused. What even an idle engine would refuse is an error of the
caller's, without a time to try again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as SequenceABC

from octavo.config.schema import SchedulerConfig
from octavo.core.outputs import RequestError
from octavo.core.sequence import SequenceGroup
from octavo.errors import InvalidRequest
from octavo.scheduler.rates import Rates
from octavo.scheduler.registry import Registry


class AdmissionControl:
    """Checks arriving requests against `config.max_queued_requests`, `config.max_queued_tokens` and their deadlines.

    Requests that the next step can start do not count as waiting. As an estimate, it starts as many requests as
    sequences are free, whatever their `n`, and computes all tokens of its budget. A prompt is never refused for its own
    length when no other request is in the queue. Deadlines are checked when the tokens per second of prefill are known.
    """

    def __init__(self, config: SchedulerConfig, registry: Registry, rates: Rates) -> None:
        self._config = config
        self._registry = registry
        self._rates = rates
        self._has_backlog = False

    def note_planned(self) -> None:
        """Note after each planned step whether it left requests in a queue."""
        self._has_backlog = self._registry.has_queued

    @property
    def _may_start_requests(self) -> bool:
        """Whether the next step may start requests: not when the last one left some in a queue that is still not empty,
        because then free blocks are the limit."""
        return not (self._has_backlog and self._registry.has_queued)

    def refusal(self, groups: SequenceABC[SequenceGroup], now: float) -> RequestError | None:
        """Return why groups that arrive together at time `now` are refused; None when they are admitted."""
        return (
            self._too_many_requests(len(groups))
            or self._too_many_tokens(groups)
            or self._hopeless_deadline(groups, now)
        )

    def _too_many_requests(self, num_new: int) -> RequestError | None:
        registry, limit = self._registry, self._config.max_queued_requests
        num_waiting = num_queued = len(registry.waiting) + len(registry.held)
        if self._may_start_requests:
            num_waiting -= self._config.max_num_seqs - registry.num_running_sequences
        if limit is None or num_waiting + num_new <= limit:
            return None
        if num_new > limit + self._config.max_num_seqs:
            return _too_many_prompts(num_new, f"{num_new} requests would wait, and max_queued_requests is {limit}")
        message = f"{max(0, num_waiting)} requests are waiting, and max_queued_requests is {limit}"
        return self._queue_full(message, registry.num_queued_tokens / max(1, num_queued))

    def _too_many_tokens(self, groups: SequenceABC[SequenceGroup]) -> RequestError | None:
        limit, num_new = self._config.max_queued_tokens, sum(group.num_prompt_tokens for group in groups)
        num_waiting = self._registry.num_queued_tokens
        if self._may_start_requests:
            num_waiting -= self._config.max_num_batched_tokens
        is_alone = len(groups) == 1 and not len(self._registry.waiting) and not self._registry.held
        if limit is None or is_alone or num_waiting + num_new <= limit:
            return None
        because = f"it would be {num_waiting + num_new}, and max_queued_tokens is {limit}"
        if len(groups) > 1 and num_new > limit + self._config.max_num_batched_tokens:
            return _too_many_prompts(len(groups), f"of prompt tokens that wait {because}")
        message = f"{max(0, num_waiting)} prompt tokens are waiting, with this request {because}"
        return self._queue_full(message, num_waiting + num_new - limit)

    def _hopeless_deadline(self, groups: SequenceABC[SequenceGroup], now: float) -> RequestError | None:
        """Check each deadline against the tokens of its prompt and of those before it: tokens in the prefix cache take
        no time, and neither do groups that the policy computes later."""
        rate = self._rates.known_prefill_tokens_per_s
        if rate is None or all(group.request.first_token_deadline_s is None for group in groups):
            return None
        num_tokens = 0
        for group in groups:
            deadline_s = group.request.first_token_deadline_s
            num_tokens += group.num_prompt_tokens - self._registry.block_manager.num_cached_tokens(group.request)
            if deadline_s is None:
                continue
            if num_tokens / rate > deadline_s:
                return _deadline_too_short(deadline_s, num_tokens, rate)
            num_before = self._registry.num_prompt_tokens_before(group, now)
            seconds, left_s = (num_before + num_tokens) / rate, max(0.0, deadline_s - group.request.waited_s)
            if seconds > left_s:
                return _try_again(
                    "deadline_unreachable",
                    f"the first token is due in {left_s:.3g} s, but {num_before} prompt tokens before this "
                    f"request's {num_tokens} take about {seconds:.3g} s",
                    "what was sent before leaves no time for the first token by first_token_deadline_s",
                    num_before / rate,
                )
        return None

    def _queue_full(self, message: str, num_tokens: float) -> RequestError:
        """Return the error; there may be room after `num_tokens` prompt tokens."""
        wait_s = num_tokens / (self._rates.known_prefill_tokens_per_s or math.inf)
        return _try_again("queue_full", message, "the queue is full", wait_s)


def _try_again(code: str, message: str, public_message: str, wait_s: float) -> RequestError:
    """Return the error of a request that may be admitted after `wait_s` seconds. `public_message` says nothing about
    the requests of others."""
    seconds = max(1, math.ceil(wait_s))
    return RequestError(
        f"{message}; try again in {seconds} s",
        code=code,
        retry_after_s=seconds,
        public_message=f"{public_message}; try again later",
    )


def _too_many_prompts(num_prompts: int, because: str) -> RequestError:
    message = f"{num_prompts} prompts at once are too many, even when nothing else runs: {because}; send fewer at once"
    return RequestError.of(InvalidRequest(message, field="prompt", code="too_many_prompts"))


def _deadline_too_short(deadline_s: float, num_tokens: int, prefill_tokens_per_s: float) -> RequestError:
    message = (
        f"first_token_deadline_s is {deadline_s:.3g}, but {num_tokens} prompt tokens take about "
        f"{num_tokens / prefill_tokens_per_s:.3g} s even when nothing else runs; give more time or a shorter prompt"
    )
    return RequestError.of(InvalidRequest(message, field="first_token_deadline_s", code="deadline_too_short"))
