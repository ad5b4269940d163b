"""Admission control: what is refused at once because it would only wait, and when to come back."""

from __future__ import annotations

import math
from typing import NamedTuple

from octavo.core.messages import EngineCoreRequest
from octavo.core.outputs import RequestError


class Door(NamedTuple):
    """Limits of the queue; None is no limit."""

    max_queued_requests: int | None = None
    max_queued_tokens: int | None = None

    def refusal(
        self,
        request: EngineCoreRequest,
        num_queued: int,
        num_queued_tokens: int,
        num_running_tokens: int,
        prefill_tokens_per_s: float | None,
    ) -> RequestError | None:
        """Why a request is not taken in, with `num_queued` requests of `num_queued_tokens` prompt tokens before it, and
        `num_running_tokens` more that running requests have left to compute.

        Time is reckoned at `prefill_tokens_per_s`; while that is not known no deadline is held to be out of reach.
        """
        num_tokens = len(request.prompt_token_ids)
        rate = prefill_tokens_per_s or float("inf")
        num_before = num_queued_tokens + num_running_tokens
        wait_s = num_before / rate
        if self.max_queued_requests is not None and num_queued >= self.max_queued_requests:
            return _refused(
                f"{num_queued} requests are waiting, and max_queued_requests is {self.max_queued_requests}",
                "queue_full",
                wait_s / max(1, num_queued),
            )
        if self.max_queued_tokens is not None and num_queued_tokens + num_tokens > self.max_queued_tokens:
            return _refused(
                f"{num_queued_tokens} prompt tokens are waiting, this request has {num_tokens}, and max_queued_tokens "
                f"is {self.max_queued_tokens}",
                "queue_full",
                (num_queued_tokens + num_tokens - self.max_queued_tokens) / rate,
            )
        due = request.first_token_deadline
        expected = request.arrival_time + wait_s + num_tokens / rate
        if due is not None and expected > due:
            return _refused(
                f"the first token is due in {due - request.arrival_time:.3g} s, but {num_before} prompt tokens "
                f"before this request's {num_tokens} take about {expected - request.arrival_time:.3g} s",
                "deadline_unreachable",
                wait_s,
            )
        return None


def _refused(message: str, code: str, retry_after_s: float) -> RequestError:
    seconds = max(1, math.ceil(retry_after_s))
    return RequestError(f"{message}; try again in {seconds} s", code=code, retry_after_s=seconds)
