"""A connector over the hash executor: it knows some prompts, a fetch takes some steps, and some fetches fail."""

from __future__ import annotations

from collections.abc import Sequence

from octavo.core.messages import EngineCoreRequest
from octavo.core.sampling_params import SamplingParams
from octavo.kv_cache.block_hash import extend_chain, tail_digest
from octavo.kv_transfer.connector import Fetch
from tests.fakes.executor import HashExecutor, State


class ToySource:
    """fail_every: each so-many-th fetch fails, and leaves the blocks spoilt; 0: none. Blocks are spoilt from the step
    with which their fetch begins until it has ended.

    requests: those that have come and not ended, by id.
    """

    address: str | None = None

    def __init__(self, fail_every: int = 0, most_steps: int = 3) -> None:
        self.executor: HashExecutor
        self.num_fetched = self.num_failed = 0
        self.requests: dict[str, EngineCoreRequest] = {}
        self._given: list[Fetch] = []
        self._fail_every = fail_every
        self._most_steps = most_steps
        self._contents: dict[bytes, list[list[int]]] = {}
        self._pending: list[tuple[int, Fetch]] = []
        self._count = 0

    @property
    def is_busy(self) -> bool:
        return bool(self._given or self._pending)

    def learn(self, request: EngineCoreRequest) -> None:
        """Have the blocks of the prompt from now on, its tail among them."""
        size, tokens, key = self.executor.block_size, request.prompt_token_ids, request.cache_key
        state = State(0, tokens, [], SamplingParams(), 0)
        digests = extend_chain([], tokens, size, key)
        if len(tokens) % size:
            digests.append(tail_digest(digests, tokens, len(tokens), size, key))
        for i, digest in enumerate(digests):
            places = range(i * size, min((i + 1) * size, len(tokens)))
            self._contents[digest] = [
                [state.chain(place, 2 if window is None else window) for place in places]
                for window in self.executor.windows
            ]

    def added(self, request: EngineCoreRequest, digests: Sequence[bytes]) -> None:
        assert request.request_id not in self.requests
        self.requests[request.request_id] = request

    def ended(self, request_id: str) -> None:
        self.requests.pop(request_id, None)

    def find(self, request: EngineCoreRequest, digests: Sequence[bytes]) -> int:
        assert self.requests.get(request.request_id, request) is request
        return next((i for i, digest in enumerate(digests) if digest not in self._contents), len(digests))

    def fetch(self, fetch: Fetch) -> None:
        self._given.append(fetch)

    def payload(self, step_id: int, *, has_rows: bool) -> bytes | None:
        given, self._given = self._given, []
        for fetch in given:
            self._count += 1
            self._write(fetch, is_complete=False)  # it may begin at once
            self._pending.append((1 + self._count * 7 % self._most_steps, fetch))
        return b"fetch" if given else None

    def end_reads(self) -> None:
        """Nobody reads."""

    def note(self, rank: int, payload: bytes) -> None:
        raise NotImplementedError

    def close(self) -> None:
        """Nothing is open."""

    def take_fetched(self) -> list[tuple[int, str]]:
        ended: list[tuple[int, str]] = []
        pending, self._pending = self._pending, []
        for num_steps, fetch in pending:
            if num_steps > 1:
                self._pending.append((num_steps - 1, fetch))
                continue
            is_complete = not self._fail_every or fetch.fetch_id % self._fail_every != 0
            self._write(fetch, is_complete=is_complete)
            ended.append((fetch.fetch_id, "" if is_complete else "it is every so-manyth"))
            self.num_fetched += is_complete
            self.num_failed += not is_complete
        return ended

    def _write(self, fetch: Fetch, *, is_complete: bool) -> None:
        for group, blocks in enumerate(fetch.block_ids):
            for digest, block in zip(fetch.digests, blocks, strict=True):
                if not block:
                    continue
                for offset, value in enumerate(self._contents[digest][group]):
                    for executor in (self.executor, self.executor.follower):
                        if executor is not None:
                            executor.slots[group, block, offset] = value if is_complete else -7
