"""Simulates the transfer of keys and values from replicas that compute prompts to those that decode. As in an engine,
the prefix index of the former calls a listener, and the scheduler of the latter uses a `Connector`. Between them is a
link with a rate and a latency instead of ranks that move bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import takewhile
from typing import NamedTuple

import msgspec

from octavo.core.messages import EngineCoreRequest
from octavo.kv_cache.block_pool import Content
from octavo.kv_transfer.connector import Connector, Fetch


class Disaggregation(msgspec.Struct, frozen=True, kw_only=True):
    """The number of replicas that compute prompts, and how keys and values get from them to the others.

    A replica sends one block after the other at `bytes_per_s`; each arrives `latency_s` later. keep_s: seconds for
    which it keeps the blocks of a computed prompt, at most until they have arrived. min_tokens: the shortest prompt
    that is computed there; None: decided from measured times.
    """

    num_prefill: int
    bytes_per_s: float = 25e9
    latency_s: float = 1e-3
    keep_s: float = 30.0
    min_tokens: int | None = None


class _Step(NamedTuple):
    """The times at which a step ends, and at which its first layer is computed."""

    ends_at: float
    first_layer_at: float


class _Transfer(NamedTuple):
    """A fetch. left: digests of blocks not sent yet. done: called with the time at which all blocks have arrived, or
    with an error."""

    request_id: str
    left: list[bytes]
    done: Callable[[float, str], None]


class Link:
    """The sending side of one replica. It listens to the replica's prefix index, and is given the times of its steps.

    The layers of a block are sent as soon as the step has computed them: the last of `num_layers` leaves after the
    step.
    """

    def __init__(self, rates: Disaggregation, block_bytes: float, num_layers: int) -> None:
        self._rates = rates
        self._block_s = block_bytes / rates.bytes_per_s
        self._num_layers = num_layers
        self.release: Callable[[Sequence[bytes]], None] = lambda digests: None
        """Set by the replica: releases the blocks of a prompt."""
        self._free_at = 0.0
        self._stored: dict[bytes, _Step] = {}
        self._planned: list[bytes] = []
        self._computing: set[str] = set()
        self._transfers: list[_Transfer] = []

    def stored(self, group: int, block: int, content: Content) -> None:
        self._planned.append(content.digest)

    def removed(self, group: int, digest: bytes) -> None:
        self._stored.pop(digest, None)

    def note_step(self, begins_at: float, ends_at: float) -> None:
        """Note the times of the last planned step, and send those of its blocks that transfers wait for."""
        step = _Step(ends_at, begins_at + (ends_at - begins_at) / self._num_layers)
        self._stored.update(dict.fromkeys(self._planned, step))
        self._planned.clear()
        for transfer in list(self._transfers):
            self._send(transfer, begins_at)

    def begin(self, request_ids: Iterable[str]) -> None:
        """Note that the replica computes these prompts."""
        self._computing.update(request_ids)

    def end(self, request_id: str, now: float) -> None:
        """Note that the replica no longer computes a prompt. Transfers that wait for more of its blocks fail."""
        self._computing.discard(request_id)
        for transfer in [each for each in self._transfers if each.request_id == request_id]:
            self._transfers.remove(transfer)
            transfer.done(now, "the prompt's replica does not have all of its blocks")

    def num_promised(self, request_id: str, digests: Sequence[bytes]) -> int:
        """Return how many leading blocks of these the replica has or will compute."""
        if request_id in self._computing:
            return len(digests)
        return len(list(takewhile(self._stored.__contains__, digests)))

    def fetch(self, fetch: Fetch, now: float, done: Callable[[float, str], None]) -> None:
        """Send the blocks that are needed, and call `done` as soon as it is known when the last one arrives."""
        needed = [digest for digest, *blocks in zip(fetch.digests, *fetch.block_ids, strict=True) if any(blocks)]
        self._transfers.append(_Transfer(fetch.request_id, needed, done))
        self._send(self._transfers[-1], now)

    def _send(self, transfer: _Transfer, now: float) -> None:
        ready = list(takewhile(self._stored.__contains__, transfer.left))
        if ready:
            del transfer.left[: len(ready)]
            step, seconds = max(self._stored[digest] for digest in ready), len(ready) * self._block_s
            begins_at = max(now, self._free_at, step.first_layer_at)
            self._free_at = max(begins_at + seconds, step.ends_at + seconds / self._num_layers)
        if not transfer.left:
            self._transfers.remove(transfer)
            transfer.done(max(now, self._free_at) + self._rates.latency_s, "")


class LinkedConnector(Connector):
    """The connector of a replica that decodes: `EngineCoreRequest.prefill` names the link of a request's prompt.

    wake: called with the time at which the blocks of a request have arrived.
    """

    def __init__(self, links: Mapping[str, Link], clock: Callable[[], float], wake: Callable[[float], None]) -> None:
        self._links = links
        self._clock = clock
        self._wake = wake
        self._sources: dict[str, tuple[Link, Sequence[bytes]]] = {}
        self._planned: list[Fetch] = []
        self._arrivals: list[tuple[float, int, str, str]] = []

    def added(self, request: EngineCoreRequest, digests: Sequence[bytes]) -> None:
        if request.prefill is not None:
            self._sources[request.request_id] = self._links[request.prefill], digests

    def ended(self, request_id: str) -> None:
        """Release the prompt's blocks."""
        link, digests = self._sources.pop(request_id, (None, ()))
        if link is not None:
            link.release(digests)

    def find(self, request: EngineCoreRequest, digests: Sequence[bytes]) -> int:
        link, _ = self._sources.get(request.request_id, (None, ()))
        return 0 if link is None else link.num_promised(request.request_id, digests)

    def fetch(self, fetch: Fetch) -> None:
        self._planned.append(fetch)

    def take_fetched(self) -> list[tuple[int, str]]:
        now = self._clock()
        there = sorted(each for each in self._arrivals if each[0] <= now)
        self._arrivals = [each for each in self._arrivals if each[0] > now]
        for _, _, _, request_id in there:
            self.ended(request_id)
        return [(fetch_id, error) for _, fetch_id, error, _ in there]

    def payload(self, step_id: int, *, has_work: bool) -> bytes | None:
        """Begin the fetches that were planned before this step."""
        planned, self._planned = self._planned, []
        for fetch in planned:
            link, _ = self._sources.get(fetch.request_id, (None, ()))
            if link is None:
                self._note_arrival(fetch, self._clock(), "the request has ended")
            else:
                link.fetch(fetch, self._clock(), partial(self._note_arrival, fetch))
        return None

    def _note_arrival(self, fetch: Fetch, at: float, error: str) -> None:
        self._arrivals.append((at, fetch.fetch_id, error, fetch.request_id))
        self._wake(at)
