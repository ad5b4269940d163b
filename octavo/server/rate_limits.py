"""Rate limits of API keys: requests and tokens per minute, and requests at once."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import msgspec

from octavo.server.errors import ApiError

_WINDOW_S: Final = 60.0


class RateLimits(msgspec.Struct, frozen=True):
    """The limits of one API key, by the names of the fields of its entry; None: there is no limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_parallel_requests: int | None = None


class _Bucket:
    """The rest of a limit per minute (token bucket). It refills evenly; below zero, requests wait until it is
    refilled."""

    def __init__(self, per_minute: int, now: float) -> None:
        self.per_minute = per_minute
        self._level, self._seen_at = float(per_minute), now

    def level(self, now: float) -> float:
        self._level = min(self.per_minute, self._level + (now - self._seen_at) * self.per_minute / _WINDOW_S)
        self._seen_at = now
        return self._level

    def take(self, amount: int, now: float) -> None:
        self._level = self.level(now) - amount

    def wait_s(self, level: float, now: float) -> float:
        """Return the seconds until the level is this."""
        return max(0.0, (level - self.level(now)) * _WINDOW_S / self.per_minute)


class Meter:
    """The use of the keys of one name. Used on the event loop only.

    A request is admitted while tokens are left, and its tokens are counted as they are generated: it may use more than
    are left, and later requests are refused until the bucket has refilled.
    """

    def __init__(self, name: str, limits: RateLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self._name = name
        self._clock = clock
        self._num_open = 0
        self._limits = RateLimits()
        self._buckets: dict[str, _Bucket] = {}
        self.set_limits(limits)

    def set_limits(self, limits: RateLimits) -> None:
        """Replace the limits; for a limit that stays the same, the use is kept."""
        per_minute = {"requests": limits.requests_per_minute, "tokens": limits.tokens_per_minute}
        self._buckets = {
            what: self._buckets[what]
            if what in self._buckets and self._buckets[what].per_minute == limit
            else _Bucket(limit, self._clock())
            for what, limit in per_minute.items()
            if limit is not None
        }
        self._limits = limits

    @contextmanager
    def request(self) -> Iterator[None]:
        """Count a request as open within the `with`. Raises ApiError 429 if it exceeds a limit."""
        most, now = self._limits.max_parallel_requests, self._clock()
        if most is not None and self._num_open >= most:
            raise self._too_many(f"{self._num_open} open requests", "max_parallel_requests", most, 1)
        for what, bucket in self._buckets.items():
            if bucket.level(now) < 1:
                wait_s = math.ceil(bucket.wait_s(1, now))
                raise self._too_many(f"used its {what}", f"{what}_per_minute", bucket.per_minute, wait_s)
        if (requests := self._buckets.get("requests")) is not None:
            requests.take(1, now)
        self._num_open += 1
        try:
            yield
        finally:
            self._num_open -= 1

    def spend(self, num_tokens: int) -> None:
        if (tokens := self._buckets.get("tokens")) is not None:
            tokens.take(num_tokens, self._clock())

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Return the limits, what is left of them, and when all of it is there again, in the headers of OpenAI."""
        now = self._clock()
        found = []
        for what, bucket in self._buckets.items():
            left, full_s = max(0, math.floor(bucket.level(now))), math.ceil(bucket.wait_s(bucket.per_minute, now))
            values = {"limit": f"{bucket.per_minute}", "remaining": f"{left}", "reset": f"{full_s}s"}
            found += [(f"x-ratelimit-{name}-{what}".encode(), value.encode()) for name, value in values.items()]
        return found

    def _too_many(self, used: str, field: str, limit: int, wait_s: int) -> ApiError:
        return ApiError(
            429,
            f"the API key {self._name} has {used}; its limit is {limit:,} ({field} in --api-key-file); try again in "
            f"{wait_s} s",
            code="rate_limit_exceeded",
            headers={"Retry-After": str(wait_s)},
        )
