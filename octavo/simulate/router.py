"""Routers: they choose the replica of each request."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol

from octavo.core.messages import EngineCoreRequest
from octavo.kv_cache.block_hash import extend_chain
from octavo.simulate.replica import Replica


class Router(Protocol):
    """A way to choose. `needs_feedback`: the choice depends on the state of the replicas."""

    needs_feedback: bool

    def choose(self, request: EngineCoreRequest, replicas: Sequence[Replica]) -> int:
        """Return the place in `replicas` of the one that gets the request."""
        ...


class RoundRobin:
    """Chooses the replicas in turn."""

    needs_feedback = False

    def __init__(self) -> None:
        self._next = 0

    def choose(self, request: EngineCoreRequest, replicas: Sequence[Replica]) -> int:
        chosen = self._next % len(replicas)
        self._next = chosen + 1
        return chosen


class LeastLoaded:
    """Chooses the replica with the fewest open requests; among equals the first."""

    needs_feedback = True

    def choose(self, request: EngineCoreRequest, replicas: Sequence[Replica]) -> int:
        return min(range(len(replicas)), key=lambda place: replicas[place].num_open)


class PrefixAware:
    """Chooses the replica that was last sent the longest part of the prompt, or the least loaded one where that replica
    has `slack` requests more and `ratio` times as many.

    It keeps what it sent where, in blocks of `block_size` tokens, and not what replicas still hold, which a router
    outside of them cannot observe. Above `capacity` blocks it drops the least recently used one.
    """

    needs_feedback = True

    def __init__(self, block_size: int, ratio: float = 1.5, slack: int = 4, capacity: int = 1 << 20) -> None:
        self._block_size = block_size
        self._ratio = ratio
        self._slack = slack
        self._capacity = capacity
        self._sent_to: OrderedDict[bytes, int] = OrderedDict()

    def choose(self, request: EngineCoreRequest, replicas: Sequence[Replica]) -> int:
        digests = extend_chain([], request.prompt_token_ids, self._block_size, request.cache_key)
        least = min(range(len(replicas)), key=lambda place: replicas[place].num_open)
        chosen = least
        for digest in digests:
            place = self._sent_to.get(digest)
            if place is None:
                break
            chosen = place
        open_here, open_there = replicas[least].num_open, replicas[chosen].num_open
        if open_there > max(open_here + self._slack, open_here * self._ratio):
            chosen = least
        for digest in digests:
            self._sent_to[digest] = chosen
            self._sent_to.move_to_end(digest)
        while len(self._sent_to) > self._capacity:
            self._sent_to.popitem(last=False)
        return chosen


ROUTERS = ("round-robin", "least-loaded", "prefix-aware")
"""The names of routers."""


def make_router(name: str, block_size: int) -> Router:
    """Return a new router of this name, one of `ROUTERS`."""
    match name:
        case "round-robin":
            return RoundRobin()
        case "least-loaded":
            return LeastLoaded()
    assert name == "prefix-aware", name
    return PrefixAware(block_size)
