"""Split requests under every order of steps, messages, deaths, aborts and stops: the tokens are those of one core."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import msgspec
import pytest

from octavo.core.messages import AbortRequests, AddRequests, EngineCoreRequest, StepOutputs, StopSequence
from octavo.core.outputs import RequestMetrics
from octavo.engine.cores.replica import Replica
from octavo.engine.cores.replicas import Replicas
from octavo.engine.cores.router import LeastLoaded, RoundRobin
from octavo.engine.cores.split import Split, SplitRates
from octavo.errors import EngineDeadError
from tests.fakes.accounting import check_scheduler
from tests.fakes.engine import Collected, make_core, make_request, run

pytestmark = pytest.mark.anyio

SETTINGS: dict[str, Any] = {"num_blocks": 64, "max_num_seqs": 6, "max_num_batched_tokens": 8}


class Core:
    """A core that gets its messages, and whose outputs are read, when the test says so. It is its own client."""

    def __init__(self) -> None:
        self.core = make_core(**SETTINGS)
        self.core.announce = self._send
        self.ready = self.core.ready
        self.inbox: list[Any] = []
        self.outbox: list[bytes] = []

    def _send(self, step: StepOutputs) -> None:
        self.outbox.append(msgspec.msgpack.encode(step))

    def send(self, message: Any) -> None:
        self.inbox.append(msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=type(message)))

    def step(self) -> None:
        inbox, self.inbox = self.inbox, []
        for message in inbox:
            match message:
                case AddRequests(requests):
                    self.core.add_requests(requests)
                case AbortRequests(request_ids):
                    self.core.abort_requests(request_ids)
                case StopSequence(request_id, index):
                    self.core.stop_sequence(request_id, index)
        if self.core.has_unfinished():
            self._send(self.core.step())
        check_scheduler(self.core.scheduler)

    def read(self) -> StepOutputs | None:
        return msgspec.msgpack.decode(self.outbox.pop(0), type=StepOutputs) if self.outbox else None


def a_request(rng: random.Random, number: int) -> EngineCoreRequest:
    beginning = [rng.randrange(3)] * rng.choice([0, 4, 9])
    prompt = [*beginning, *(rng.randrange(40) for _ in range(rng.randrange(1, 14)))]
    options: dict[str, Any] = {"max_tokens": rng.choice([1, 2, 9]), "seed": number, "logprobs": 1}
    options |= rng.choice([{}, {}, {"n": 3}, {"n": 2, "best_of": 3}, {"n": 2, "use_beam_search": True}])
    if options.get("use_beam_search"):
        options |= {"temperature": 0.0}
        del options["logprobs"]
    ends = tuple(rng.sample(range(50), rng.choice([0, 15])))
    return make_request(f"r{number}", prompt, end_token_ids=ends, **options)


class Run:
    """A front over cores, and what its clients have got."""

    def __init__(self, rng: random.Random, num_prefills: int, count: int) -> None:
        self.rng = rng
        self.asked: dict[str, EngineCoreRequest] = {}
        self.open: set[str] = set()
        self.stopped: dict[str, set[int]] = {}
        self.got = Collected()
        self.failed: set[str] = set()
        roles = ["prefill"] * num_prefills + ["decode"] * count
        self.cores = [Core() for _ in roles]
        self.replicas = [
            Replica(number, self.cores[number], role=role)  # type: ignore[arg-type]
            for number, role in enumerate(roles)
        ]
        self.client = Replicas(
            self.replicas,
            RoundRobin(),
            make_split=lambda prefills, dispatch: Split(
                prefills, dispatch, LeastLoaded(), block_size=4, rates=SplitRates(3)
            ),
        )
        self.client._process, self.client._dispatch.to_resume = self.process, self.to_resume
        self.client._tasks = asyncio.TaskGroup()  # nothing begins in it: cores end and start when the test says so

    async def process(self, number: int, step: StepOutputs) -> None:
        for output in step.outputs:
            name = output.request_id
            if name not in self.open:
                continue
            output.deltas = [each for each in output.deltas if each.index not in self.stopped[name]]
            self.got.add([output])
            if output.error is not None:
                assert output.error.code == "request_quarantined", output.error
                self.failed.add(name)
            ended = self.stopped[name] | self.got.finish.get(name, {}).keys()
            if output.finished or len(ended) == self.asked[name].params.width:
                self.open.discard(name)

    def to_resume(self, name: str) -> EngineCoreRequest | None:
        if name not in self.open:
            return None
        return self.got.to_resume(self.asked[name], RequestMetrics.begin(0.0), self.stopped[name])

    def add(self, request: EngineCoreRequest) -> None:
        self.asked[request.request_id], self.stopped[request.request_id] = request, set()
        self.open.add(request.request_id)
        self.client.send(AddRequests([request]))

    async def read(self, number: int) -> None:
        step = self.cores[number].read()
        if step is not None:
            await self.client._take(self.replicas[number], step)

    def leave(self) -> None:
        """A client goes."""
        name = self.rng.choice(sorted(self.open))
        self.open.discard(name)
        self.failed.add(name)
        self.client.send(AbortRequests([name]))

    def stop(self) -> None:
        """The text of a sequence has a stop string, as long as that is news to its core."""
        name = self.rng.choice(sorted(self.open))
        running = self.got.token_ids.get(name, {}).keys() - self.got.finish.get(name, {}) - self.stopped[name]
        if not running or self.asked[name].params.use_beam_search:
            return
        index = self.rng.choice(sorted(running))
        self.stopped[name].add(index)  # what its core has sent meanwhile is dropped
        ended = self.stopped[name] | self.got.finish.get(name, {}).keys()
        if len(ended) == self.asked[name].params.width:
            self.open.discard(name)
        self.client.send(StopSequence(name, index))

    async def die(self, number: int) -> None:
        replica = self.replicas[number]
        if replica.is_ready:
            await self.client._resume_requests(replica, EngineDeadError("killed"))

    def start_again(self, number: int) -> None:
        replica = self.replicas[number]
        if not replica.is_ready:
            self.cores[number] = replica.client = Core()  # type: ignore[assignment]
            replica.is_ready = True
            self.client._dispatch.send_waiting()

    async def finish(self) -> None:
        for number in range(len(self.cores)):
            self.start_again(number)
        for _ in range(2000):
            for number, core in enumerate(self.cores):
                core.step()
                while core.outbox:
                    await self.read(number)
            if not self.open and not any(core.core.has_unfinished() or core.inbox for core in self.cores):
                return
        raise AssertionError(f"{self.open} do not end")

    def check(self) -> None:
        for name, request in self.asked.items():
            alone = run(make_core(**SETTINGS), [request])
            if name in self.failed:
                continue
            ends, expected_ends = self.got.finish.get(name, {}), alone.finish[name]
            for index, expected in alone.token_ids[name].items():
                token_ids, logprobs = self.got.token_ids[name][index], self.got.logprobs[name][index]
                if index in self.stopped[name]:
                    assert token_ids == expected[: len(token_ids)]
                else:
                    assert (token_ids, ends[index]) == (expected, expected_ends[index])
                assert logprobs == alone.logprobs[name][index][: len(token_ids)]
        assert not any(each.num_open for each in self.replicas)
        assert (self.client._dispatch.entries, self.client._split._handovers) == ({}, {})  # type: ignore[union-attr]
        assert sum(each.stats.num_handover_mismatches for each in self.replicas) == 0


@pytest.mark.parametrize("seed", range(20))
async def test_tokens_are_those_of_one_core_in_every_order_of_events(seed: int) -> None:
    rng = random.Random(seed)
    the_run = Run(rng, *rng.choice([(1, 1), (2, 1), (1, 2), (2, 2)]))
    numbers = range(len(the_run.cores))
    dies = rng.choice([0.0, 0.02])
    for number in range(12):
        the_run.add(a_request(rng, number))
        for _ in range(rng.randrange(25)):
            which = rng.choice(numbers)
            if rng.random() < dies:
                await the_run.die(which)
            elif rng.random() < 0.1:
                the_run.start_again(which)
            elif rng.random() < 0.5 and the_run.replicas[which].is_ready:
                the_run.cores[which].step()
            elif the_run.replicas[which].is_ready:
                await the_run.read(which)
            if the_run.open and rng.random() < 0.03:
                the_run.leave()
            if the_run.open and rng.random() < 0.1:
                the_run.stop()
    await the_run.finish()
    the_run.check()
