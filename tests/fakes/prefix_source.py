"""A connector over the hash executor: it knows some prompts, a fetch takes some steps, and some fetches fail."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from octavo.core.messages import EngineCoreRequest
from octavo.core.sampling_params import SamplingParams
from octavo.kv_cache.block_hash import extend_chain, tail_digest
from octavo.kv_cache.block_manager import BlockManager
from octavo.kv_transfer.connector import Connector, Fetch
from tests.fakes.executor import STATE, HashExecutor, State


class ToySource(Connector):
    """fail_share: share of the fetches that fail, at random, and leave the blocks spoilt. Blocks are spoilt from the
    step with which their fetch begins until it has ended.

    `hold` lets another engine read a prefix of the local pools, until `release`, or until nothing else could run.

    requests: those that have come and not ended, by id.
    """

    def __init__(self, fail_share: float = 0.0, most_steps: int = 3) -> None:
        self.executor: HashExecutor
        self.block_manager: BlockManager
        self.holders: dict[int, bool] = {}
        self._random = Random(0)
        self.num_fetched = self.num_failed = 0
        self.requests: dict[str, EngineCoreRequest] = {}
        self._given: list[Fetch] = []
        self._fail_share = fail_share
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
                [state.chain(places[-1], 2)]
                if window == STATE
                else [state.chain(place, 2 if window is None else window) for place in places]
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

    def payload(self, step_id: int, *, has_work: bool) -> bytes | None:
        given, self._given = self._given, []
        for fetch in given:
            self._count += 1
            self._write(fetch, is_complete=False)  # it may begin at once
            self._pending.append((1 + self._count * 7 % self._most_steps, fetch))
        ended = [number for number, is_ending in self.holders.items() if is_ending]
        for number in ended:  # the ranks say so at once
            del self.holders[number]
            self.block_manager.holds.end(("holder", number))
        return b"commands" if given or ended else None

    def hold(self, request: EngineCoreRequest, number: int) -> None:
        """Hold the blocks of a prompt that are there."""
        pools = self.block_manager.groups
        for digest in extend_chain([], request.prompt_token_ids, self.executor.block_size, request.cache_key):
            if self.block_manager.holds.hold_found(("holder", number), digest, [True for _ in pools]) is None:
                break
            self.holders[number] = False

    def release(self) -> None:
        """End what others hold, with the next step."""
        self.holders = dict.fromkeys(self.holders, True)

    def end_reads(self) -> None:
        self.release()

    def take_fetched(self) -> list[tuple[int, str]]:
        ended: list[tuple[int, str]] = []
        pending, self._pending = self._pending, []
        for num_steps, fetch in pending:
            if num_steps > 1:
                self._pending.append((num_steps - 1, fetch))
                continue
            is_complete = self._random.random() >= self._fail_share
            self._write(fetch, is_complete=is_complete)
            ended.append((fetch.fetch_id, "" if is_complete else "it was torn"))
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
