"""Engine cores over the hash executor in one process, whose ranks hand blocks over as commands say."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec

from octavo.core.messages import EngineCoreRequest
from octavo.core.process import frames
from octavo.core.step import ModelRunnerOutput, SchedulerOutput
from octavo.kv_cache.block_manager import BlockManager
from octavo.kv_transfer.messages import FetchBlocks, Fetched, PeerHello, PeerRank, RankCommands, RankNotes, SendBlocks
from octavo.kv_transfer.peer_link import listen
from octavo.kv_transfer.peer_server import PeerServer
from octavo.kv_transfer.peer_source import PeerSource
from octavo.kv_transfer.sources import PrefixSource, Sources
from tests.fakes.accounting import check_scheduler
from tests.fakes.engine import Collected, make_core
from tests.fakes.executor import HashExecutor

SECRET = b"0123456789abcdef"
Block = dict[int, int]
"""What is in the slots of a block."""


class LinkedExecutor:
    """A hash executor with the rank's half of transfers: what is sent is there when its step has run.

    ranks: those of all engines, by epoch. Blocks are spoilt while they are fetched.
    """

    def __init__(self, executor: HashExecutor, epoch: bytes, ranks: dict[bytes, LinkedExecutor]) -> None:
        self.executor = executor
        self.note: Callable[[int, bytes], None]
        self.sent: dict[bytes, dict[int, list[Block]]] = {}
        self.fetches: list[FetchBlocks] = []
        self.num_fresh = self.num_sent = 0
        self._ranks = ranks
        ranks[epoch] = self

    def __getattr__(self, name: str) -> Any:
        return getattr(self.executor, name)

    def submit(self, step: SchedulerOutput) -> Future[ModelRunnerOutput]:
        commands = RankCommands()
        if step.connector is not None:
            commands = msgspec.msgpack.decode(step.connector, type=RankCommands)
        for send in commands.sends:
            if not send.is_fresh:
                self._send(send)
        future = self.executor.submit(step)
        for send in commands.sends:
            if send.is_fresh:
                assert step.rows
                self._send(send)
        for fetch in commands.fetches:
            self.fetches.append(fetch)
            self._write(fetch, None)
        for transfer in commands.ends:
            self.sent.pop(transfer, None)
            self._end([fetch for fetch in self.fetches if fetch.transfer == transfer], "the transfer has ended")
            self.note(0, frames.encode(RankNotes(ended=[transfer])))
        self.pump()
        return future

    def pump(self) -> None:
        """Hand over what is there."""
        for fetch in list(self.fetches):
            sender = self._ranks.get(fetch.epoch)
            there = {} if sender is None else sender.sent.get(fetch.transfer, {})
            places = range(fetch.first, fetch.first + len(fetch.block_ids[0]))
            if all(place in there for place in places):
                self._write(fetch, [there[place] for place in places])
                self._end([fetch], "")

    def _end(self, fetches: list[FetchBlocks], error: str) -> None:
        for fetch in fetches:
            self.fetches.remove(fetch)
            self.note(0, frames.encode(RankNotes(fetched=[Fetched(fetch.fetch_id, error)])))

    def _send(self, send: SendBlocks) -> None:
        self.num_fresh += send.is_fresh
        there, size = self.sent.setdefault(send.transfer, {}), self.executor.block_size
        assert send.first not in there, "a block is sent twice"
        for index, blocks in enumerate(zip(*send.block_ids, strict=True)):
            there[send.first + index] = [
                {i: self.executor.slots.get((group, block, i), -1) for i in range(size)} if block else {}
                for group, block in enumerate(blocks)
            ]
            self.num_sent += 1

    def _write(self, fetch: FetchBlocks, blocks: Sequence[Sequence[Block]] | None) -> None:
        for group, ids in enumerate(fetch.block_ids):
            for place, block in enumerate(ids):
                if block:
                    for i in range(self.executor.block_size):
                        value = -7 if blocks is None else blocks[place][group][i]
                        self.executor.slots[group, block, i] = value


class Engine:
    """A core that gives KV blocks away, with `address`, or fetches them."""

    def __init__(
        self, ranks: dict[bytes, LinkedExecutor], *, host: str | Path | None = None, port: int = 0,
        identity: dict[str, str] | None = None, secret: bytes = SECRET, lease_s: float = 30.0, **options: Any,
    ) -> None:  # fmt: skip
        self.epoch, self.address, self.source = os.urandom(16), "", None
        hello = PeerHello(identity or {"files": "a"}, "hashes", 4, self.epoch, [PeerRank("ranks", 0, (0, 1), [(0, 1)])])

        def connect(block_manager: BlockManager, _: object) -> Sources:
            source: PrefixSource
            if host is None:
                source = PeerSource(secret, hello, lease_s, lambda: None)
            else:
                listener, self.address = listen(str(host), port, "control")
                source = PeerServer(listener, secret, hello, block_manager, lease_s, lambda: None)
            self.source = source
            self.connector = Sources([source], 1, lambda: None)
            return self.connector

        self.core = make_core(block_size=4, connect=connect, **options)
        assert isinstance(self.core.executor, HashExecutor)
        self.ranks = LinkedExecutor(self.core.executor, self.epoch, ranks)
        self.ranks.note = self.connector.note
        self.core.executor = self.ranks  # type: ignore[assignment]
        self.collected = Collected()

    def add(self, request: EngineCoreRequest) -> None:
        self.core.add_request(request)

    def step(self) -> None:
        self.ranks.pump()
        self.collected.add(self.core.step().outputs)
        check_scheduler(self.core.scheduler)

    @property
    def num_held(self) -> int:
        """Blocks that are used."""
        return self.core.scheduler.block_manager.num_used_blocks

    def close(self) -> None:
        self.connector.close()


def step_until(is_done: Callable[[], object], *engines: Any) -> None:
    """Step all engines in turn until something is the case."""
    deadline = time.monotonic() + 200
    while not is_done():
        assert time.monotonic() < deadline, "it does not come to that"
        for engine in engines:
            engine.step()
        time.sleep(0.001)


def finish(*engines: Engine) -> None:
    """Step until no engine has a request, and prove that nothing is held."""
    step_until(lambda: not any(engine.core.has_unfinished() for engine in engines), *engines)
    for engine in engines:
        engine.core.scheduler.block_manager.pins.clear()
    step_until(lambda: not any(engine.num_held for engine in engines), *engines)
