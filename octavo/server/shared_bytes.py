"""Limits on memory that open requests share, by sender; one of them is for features of images and sounds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from starlette.types import Scope

from octavo.core.media import MediaInput
from octavo.server.errors import ApiError
from octavo.server.keys import sender_of

_STATE: Final = "features"


class SharedBytes:
    """Counts held bytes: at most `most` in all, and `most_of_sender` of one sender."""

    def __init__(self, most: int, most_of_sender: int) -> None:
        self._most, self._most_of_sender = most, most_of_sender
        self._num_held = 0
        self._num_held_of: Counter[str] = Counter()

    def take(self, sender: str, num_bytes: int, *, is_first: bool = False) -> bool:
        """Count bytes and return True, or return False if they exceed a limit. is_first: a sender that holds nothing
        yet may exceed `most_of_sender`."""
        of_sender = self._num_held_of[sender] + num_bytes
        is_alone = is_first and of_sender == num_bytes
        if (of_sender > self._most_of_sender and not is_alone) or self._num_held + num_bytes > self._most:
            return False
        self.release(sender, -num_bytes)
        return True

    def release(self, sender: str, num_bytes: int) -> None:
        """Stop counting bytes."""
        self._num_held -= num_bytes
        self._num_held_of[sender] -= num_bytes
        if not self._num_held_of[sender]:
            del self._num_held_of[sender]


class FeatureLimits:
    """Refuses requests whose features of images and sounds exceed `most` bytes by themselves (413) or together with
    those of other open requests (503). One sender may hold half of it, but always one request."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.shared = SharedBytes(most, most // 2)

    @contextmanager
    def request(self, scope: Scope) -> Iterator[None]:
        """Until the end of the `with`, count the bytes that `take_features` takes for a request."""
        held = scope["state"][_STATE] = _Held(self, sender_of(scope))
        try:
            yield
        finally:
            self.shared.release(held.sender, held.num_bytes)


class _Held:
    """The features of one request."""

    def __init__(self, limits: FeatureLimits, sender: str) -> None:
        self.limits, self.sender = limits, sender
        self.num_bytes = 0


def take_features(scope: Scope, num_bytes: int) -> None:
    """Count the features of an open request until its response has been sent. Raises ApiError if they exceed a
    limit."""
    held: _Held | None = scope.get("state", {}).get(_STATE)
    if held is None or not num_bytes:
        return
    most = held.limits.most
    if num_bytes > most:
        raise ApiError(
            413,
            f"the images and sounds of the request become {num_bytes:,} bytes of features, must be at most {most:,}; "
            "send fewer or smaller ones, or start the server with a larger --max-features-size",
            code="request_too_large",
        )
    if not held.limits.shared.take(held.sender, num_bytes, is_first=True):
        raise ApiError(
            503,
            f"the images and sounds of open requests fill the {most:,} bytes of features that they may take, "
            f"half of them for one client, and this request has {num_bytes:,}; come back later, or start the "
            "server with a larger --max-features-size",
            code="too_many_features",
            headers={"Retry-After": "1"},
        )
    held.num_bytes += num_bytes


def feature_bytes(media: Iterable[Sequence[MediaInput]]) -> int:
    """Return the bytes of the prompts' media features, which encoders read, and of vectors in place of tokens."""
    arrays = (array for of_prompt in media for each in of_prompt for array in each.arrays.values())
    return sum(len(array.data) for array in arrays)
