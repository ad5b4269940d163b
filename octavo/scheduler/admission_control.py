"""Admission control: requests that would only wait are refused at once, with the time after which to try again.

There are three checks: the requests in the queue, their prompt tokens, and deadlines of the first token. Requests that
arrive together are all admitted to the queue or all refused. What even an idle engine would refuse is an error of the
caller's, without a time to try again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as SequenceABC
from typing import NamedTuple

from octavo.config.schema import SchedulerConfig
from octavo.core.outputs import RequestError
from octavo.core.sequence import SequenceGroup
from octavo.scheduler.rates import Rates
from octavo.scheduler.registry import Registry


class QueueLoad(NamedTuple):
    """What arriving requests find.

    num_requests: requests in the waiting queue. num_tokens: prompt tokens of those of them that have never run.
    num_free_sequences, num_free_tokens: what the next step has for them. Both are 0 when the last step left a request
    in a queue that is still not empty: then free blocks are the limit, and arriving requests wait too.
    """

    num_requests: int
    num_tokens: int
    num_free_sequences: int
    num_free_tokens: int


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

    def load(self) -> QueueLoad:
        """Return what a request would find now."""
        config, registry = self._config, self._registry
        has_backlog = self._has_backlog and registry.has_queued
        return QueueLoad(
            num_requests=len(registry.waiting),
            num_tokens=registry.num_queued_tokens,
            num_free_sequences=0 if has_backlog else config.max_num_seqs - registry.num_running_sequences,
            num_free_tokens=0 if has_backlog else config.max_num_batched_tokens,
        )

    def refusal(self, groups: SequenceABC[SequenceGroup], now: float) -> RequestError | None:
        """Return why groups that arrive together at time `now` are refused; None when they are admitted."""
        load = self.load()
        return (
            self._too_many_requests(len(groups), load)
            or self._too_many_tokens(groups, load)
            or self._hopeless_deadline(groups, now)
        )

    def _too_many_requests(self, num_new: int, load: QueueLoad) -> RequestError | None:
        limit = self._config.max_queued_requests
        num_waiting = load.num_requests - load.num_free_sequences
        if limit is None or num_waiting + num_new <= limit:
            return None
        if num_new > limit + self._config.max_num_seqs:
            return _too_many_prompts(num_new, f"{num_new} requests would wait, and max_queued_requests is {limit}")
        message = f"{max(0, num_waiting)} requests are waiting, and max_queued_requests is {limit}"
        return self._queue_full(message, load.num_tokens / max(1, load.num_requests))

    def _too_many_tokens(self, groups: SequenceABC[SequenceGroup], load: QueueLoad) -> RequestError | None:
        limit, num_new = self._config.max_queued_tokens, sum(group.num_prompt_tokens for group in groups)
        num_waiting = load.num_tokens - load.num_free_tokens
        is_alone = len(groups) == 1 and not load.num_requests
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
            seconds = (num_before + num_tokens) / rate
            if seconds > deadline_s:
                return _try_again(
                    "deadline_unreachable",
                    f"the first token is due in {deadline_s:.3g} s, but {num_before} prompt tokens before this "
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
    return RequestError(
        f"{num_prompts} prompts at once are too many, even when nothing else runs: {because}; send fewer at once",
        field="prompt",
        code="too_many_prompts",
        is_client_error=True,
    )


def _deadline_too_short(deadline_s: float, num_tokens: int, prefill_tokens_per_s: float) -> RequestError:
    return RequestError(
        f"first_token_deadline_s is {deadline_s:.3g}, but {num_tokens} prompt tokens take about "
        f"{num_tokens / prefill_tokens_per_s:.3g} s even when nothing else runs; give more time or a shorter prompt",
        field="first_token_deadline_s",
        code="deadline_too_short",
        is_client_error=True,
    )
