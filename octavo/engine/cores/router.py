"""Routers: they choose the replica of each request, behind the front of a server and in a simulation."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, Protocol, TypeVar

from octavo.core.messages import EngineCoreRequest
from octavo.kv_cache.block_hash import extend_chain

_MAX_DIGESTS: Final = 256
"""Most leading blocks of a prompt compared with those sent before; a longer common prefix changes no choice."""


class Candidate(Protocol):
    """A replica that can be chosen. num_open: its requests that have not ended, those that wait included."""

    number: int
    num_open: int


R = TypeVar("R", bound=Candidate)


class Router(Protocol):
    """A way to choose. `needs_feedback`: the choice depends on the state of the replicas."""

    needs_feedback: bool

    def choose(self, request: EngineCoreRequest, replicas: Sequence[R]) -> R:
        """Return the one of `replicas` that gets the request. They are those that are ready, by their numbers."""


class RoundRobin:
    """Chooses the replicas in turn."""

    needs_feedback = False

    def __init__(self) -> None:
        self._next = 0

    def choose(self, request: EngineCoreRequest, replicas: Sequence[R]) -> R:
        chosen = next((each for each in replicas if each.number >= self._next), replicas[0])
        self._next = chosen.number + 1
        return chosen


class LeastLoaded:
    """Chooses the replica with the fewest open requests; among equals the first."""

    needs_feedback = True

    def choose(self, request: EngineCoreRequest, replicas: Sequence[R]) -> R:
        return min(replicas, key=lambda replica: replica.num_open)


class SentPrefixes:
    """Which replica was last sent each leading block of a prompt, for `capacity` blocks; beyond it the least recently
    used ones are dropped. What replicas still hold is not known outside of them."""

    def __init__(self, capacity: int = 1 << 17) -> None:
        self._capacity = capacity
        self._sent_to: OrderedDict[bytes, int] = OrderedDict()

    def find(self, digests: Sequence[bytes]) -> Iterator[int]:
        """Yield the numbers of the replicas that were sent the leading blocks, up to the first unknown one."""
        for digest in digests:
            number = self._sent_to.get(digest)
            if number is None:
                return
            yield number

    def note(self, digests: Sequence[bytes], number: int) -> None:
        """Note that a replica is sent a prompt with these blocks."""
        for digest in reversed(digests):  # the first block is found last: without it the others are of no use
            self._sent_to[digest] = number
            self._sent_to.move_to_end(digest)
        while len(self._sent_to) > self._capacity:
            self._sent_to.popitem(last=False)

    def clear(self) -> None:
        """Forget everything."""
        self._sent_to.clear()


class PrefixAware:
    """Chooses the replica that was last sent the longest prefix of the prompt, or the least loaded one where the former
    has `slack` requests more and `ratio` times as many. Blocks have `block_size` tokens.
    """

    needs_feedback = True

    def __init__(self, block_size: int, ratio: float = 1.5, slack: int = 4, capacity: int = 1 << 17) -> None:
        self._block_size = block_size
        self._ratio = ratio
        self._slack = slack
        self._sent = SentPrefixes(capacity)

    def choose(self, request: EngineCoreRequest, replicas: Sequence[R]) -> R:
        leading = request.prompt_token_ids[: _MAX_DIGESTS * self._block_size]
        digests = extend_chain([], leading, self._block_size, request.cache_key)
        by_number = {replica.number: replica for replica in replicas}
        chosen = least = min(replicas, key=lambda replica: replica.num_open)
        for number in self._sent.find(digests):
            if number not in by_number:
                break
            chosen = by_number[number]
        if chosen.num_open > max(least.num_open + self._slack, least.num_open * self._ratio):
            chosen = least
        self._sent.note(digests, chosen.number)
        return chosen


class Session:
    """Chooses the same replica for all requests of a session, by rendezvous hashing: while a replica is away, only its
    sessions move. A session is a cache_salt, or without one a tenant (`user`, or an API key's name); requests with
    neither go to the least loaded replica."""

    needs_feedback = True

    def choose(self, request: EngineCoreRequest, replicas: Sequence[R]) -> R:
        session = request.cache_salt or request.tenant
        if session is None:
            return min(replicas, key=lambda replica: replica.num_open)
        return max(replicas, key=lambda replica: hashlib.sha256(ascii((replica.number, session)).encode()).digest())


ROUTERS: Final[Mapping[str, Callable[[int], Router]]] = {
    "prefix-aware": PrefixAware,
    "least-loaded": lambda block_size: LeastLoaded(),
    "round-robin": lambda block_size: RoundRobin(),
    "session": lambda block_size: Session(),
}
"""The function that makes each router, by name; it is given the tokens of a block."""
