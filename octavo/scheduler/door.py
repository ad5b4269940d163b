"""Admission control: what is refused at once because it would only wait, and when to come back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from octavo.core.messages import EngineCoreRequest
from octavo.core.outputs import RequestError
from octavo.scheduler.standing import Standing


class Load(NamedTuple):
    """What requests find at the door.

    free_sequences, free_tokens: what the next step has left for them, behind those that came before.
    num_queued: requests that no step has let in.
    num_waiting, num_waiting_tokens: those of them that the next step has no room for either, and the prompt tokens.
    num_tokens_before: prompt tokens that running and queued requests have left to compute.
    """

    free_sequences: int
    free_tokens: int
    num_queued: int = 0
    num_waiting: int = 0
    num_waiting_tokens: int = 0
    num_tokens_before: int = 0

    def after(self, num_tokens: int, width: int) -> Load:
        """With a request more, of `num_tokens` prompt tokens and `width` sequences. Nobody overtakes one that waits."""
        starts = width <= self.free_sequences
        num_started = min(num_tokens, self.free_tokens) if starts else 0
        return Load(
            free_sequences=self.free_sequences - width if starts else 0,
            free_tokens=self.free_tokens - num_started,
            num_queued=self.num_queued + 1,
            num_waiting=self.num_waiting + (not starts),
            num_waiting_tokens=self.num_waiting_tokens + num_tokens - num_started,
            num_tokens_before=self.num_tokens_before + num_tokens,
        )


class Newcomers:
    """Requests that came since the last step was planned."""

    def __init__(self) -> None:
        self._sizes: dict[str, tuple[int, int]] = {}
        self._before: Load | None = None
        self._behind = Load(0, 0)

    def add(self, request_id: str, num_tokens: int, width: int) -> None:
        self._sizes[request_id] = num_tokens, width
        self._behind = self._behind.after(num_tokens, width)

    def discard(self, request_id: str) -> None:
        """One that has gone again; others are passed over."""
        if self._sizes.pop(request_id, None) is not None:
            self._before = None

    def clear(self) -> None:
        self._sizes.clear()
        self._before = None

    def load_behind(self, before: Load) -> Load:
        """The load behind them, where they found `before`."""
        if before != self._before:
            self._before = self._behind = before
            for num_tokens, width in self._sizes.values():
                self._behind = self._behind.after(num_tokens, width)
        return self._behind


class _Reason(NamedTuple):
    """Why a request is not taken in now, the same without numbers of others, the word for it, and after how long it may
    be otherwise."""

    message: str
    public_message: str
    code: str
    wait_s: float


class Door(NamedTuple):
    """Limits of the queue; None is no limit."""

    max_queued_requests: int | None = None
    max_queued_tokens: int | None = None

    @property
    def has_limits(self) -> bool:
        return self.max_queued_requests is not None or self.max_queued_tokens is not None

    def refusal(
        self,
        requests: Sequence[EngineCoreRequest],
        load: Load,
        idle: Load,
        prefill_tokens_per_s: float | None,
        standing: Standing,
    ) -> RequestError | None:
        """Why requests that came together are not taken in: all of them are, or none. `idle`: the load of no request.

        What an idle engine would refuse too is the caller's mistake; anything else may come back. Time is reckoned at
        `prefill_tokens_per_s`; while that is not known no deadline is held to be out of reach.
        """
        rate = prefill_tokens_per_s or math.inf
        reason = self._reason(requests, load, rate, standing)
        if reason is None:
            return None
        among_themselves = standing.among_themselves()
        if len(requests) > 1 and (always := self._reason(requests, idle, rate, among_themselves)) is not None:
            return RequestError(
                f"{len(requests)} prompts at once are too many, even when nothing else runs: one would find that "
                f"{always.message}; send fewer at once",
                field="prompt",
                code="too_many_prompts",
                is_client_error=True,
            )
        seconds = max(1, math.ceil(reason.wait_s))
        return RequestError(
            f"{reason.message}; try again in {seconds} s",
            code=reason.code,
            retry_after_s=seconds,
            public_message=f"{reason.public_message}; try again later",
        )

    def _reason(
        self, requests: Sequence[EngineCoreRequest], load: Load, prefill_tokens_per_s: float, standing: Standing
    ) -> _Reason | None:
        for index, request in enumerate(requests):
            before, load = load, load.after(len(request.prompt_token_ids), request.params.width)
            reason = self._queue_full(before, load, prefill_tokens_per_s)
            reason = reason or _too_late(requests, index, before.num_tokens_before, prefill_tokens_per_s, standing)
            if reason is not None:
                return reason
        return None

    def _queue_full(self, before: Load, after: Load, prefill_tokens_per_s: float) -> _Reason | None:
        most_requests, most_tokens = self.max_queued_requests, self.max_queued_tokens
        if most_requests is not None and after.num_waiting > max(most_requests, before.num_waiting):
            return _Reason(
                f"{before.num_waiting} requests are waiting, and max_queued_requests is {most_requests}",
                "the queue is full",
                "queue_full",
                before.num_tokens_before / prefill_tokens_per_s / max(1, before.num_waiting),
            )
        # a prompt that is longer than the limit is taken where nobody stands before it, or it never would be
        if most_tokens is not None and before.num_queued and after.num_waiting_tokens > most_tokens:
            return _Reason(
                f"{before.num_waiting_tokens} prompt tokens are waiting, with this request it would be "
                f"{after.num_waiting_tokens}, and max_queued_tokens is {most_tokens}",
                "the queue is full",
                "queue_full",
                (after.num_waiting_tokens - most_tokens) / prefill_tokens_per_s,
            )
        return None


def hopeless_deadline(
    request: EngineCoreRequest, num_cached_tokens: int, prefill_tokens_per_s: float | None
) -> RequestError | None:
    """Why a request's first token cannot come in time even if nothing else runs; None when it can."""
    due, num_tokens = request.first_token_deadline, len(request.prompt_token_ids) - num_cached_tokens
    if due is None or prefill_tokens_per_s is None or request.arrival_time + num_tokens / prefill_tokens_per_s <= due:
        return None
    return RequestError(
        f"first_token_deadline_s is {due - request.arrival_time:.3g}, but {num_tokens} prompt tokens take about "
        f"{num_tokens / prefill_tokens_per_s:.3g} s even when nothing else runs; give more time or a shorter prompt",
        field="first_token_deadline_s",
        code="deadline_too_short",
        is_client_error=True,
    )


def _too_late(
    requests: Sequence[EngineCoreRequest],
    index: int,
    num_before: int,
    prefill_tokens_per_s: float,
    standing: Standing,
) -> _Reason | None:
    request = requests[index]
    due, num_tokens = request.first_token_deadline, len(request.prompt_token_ids)
    if due is None or request.arrival_time + (num_before + num_tokens) / prefill_tokens_per_s <= due:
        return None
    # only what would be refused is looked at closely
    num_before -= standing.num_tokens_behind(index)
    num_tokens -= standing.num_cached_tokens(index)
    expected_s = (num_before + num_tokens) / prefill_tokens_per_s
    if not num_before or request.arrival_time + expected_s <= due:
        return None
    return _Reason(
        f"the first token is due in {due - request.arrival_time:.3g} s, but {num_before} prompt tokens "
        f"before this request's {num_tokens} take about {expected_s:.3g} s",
        "what was sent before leaves no time for the first token by first_token_deadline_s",
        "deadline_unreachable",
        num_before / prefill_tokens_per_s,
    )
