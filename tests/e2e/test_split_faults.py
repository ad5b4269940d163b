"""Real prefill and decode processes whose transfers are damaged, or that are killed or stopped in the middle of them:
every stream is that of one engine, and no block is lost on either side."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import subprocess
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import pytest

from octavo import LLM
from octavo.async_llm import AsyncLLM
from octavo.config.schema import EngineConfig
from octavo.core.messages import SchedulerStats
from octavo.core.sampling_params import OutputKind, SamplingParams
from octavo.engine.cores import replica as replica_module
from octavo.engine.cores import router as router_module
from octavo.engine.cores import split as split_module
from octavo.engine.cores.replica import Replica
from octavo.errors import OctavoError
from tests.fakes import whole_engines
from tests.fakes.checked_core import spawn_checked
from tests.fakes.namespaces import Namespaces, is_permitted, namespaces
from tests.fakes.relay import Fault, PeerRelay

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

NUM_REQUESTS = 8
WAIT_S = 200.0
ENGINE = {"num_gpu_blocks_override": 512, "threads": 1, "block_size": 16}
SHORT_LEASE_S = 2.0


def prompt_of(number: int) -> list[int]:
    """A long prompt, whose last block is full for some and not for others."""
    return [3 + (number * 131 + place * (number + 7)) % 2900 for place in range(200 + 4 * number)]


def params_of(number: int) -> SamplingParams:
    return SamplingParams(
        max_tokens=12, seed=number, n=1 + number % 2, temperature=0.9, top_p=0.95, presence_penalty=0.3, logprobs=2,
        ignore_eos=True, output_kind=OutputKind.FINAL_ONLY,
    )  # fmt: skip


@cache
def undisturbed() -> list[Any]:
    """What one engine makes of all requests."""
    with LLM(**ENGINE) as llm:
        prompts, params = zip(*((prompt_of(number), params_of(number)) for number in range(NUM_REQUESTS)), strict=True)
        return [each.outputs for each in llm.generate(list(prompts), list(params), use_tqdm=False)]


def over_tcp(config: EngineConfig, _: str) -> EngineConfig:
    """Let cores meet over TCP, as those of several machines do."""
    transfer = replace(config.transfer, kv_host="0.0.0.0", secret=secrets.token_hex(32))
    return msgspec.structs.replace(config, transfer=transfer)


class Split:
    """A prefill and a decode core, with a relay between them that is made anew with the prefill core."""

    def __init__(self, llm: AsyncLLM, inward: Sequence[Fault] = (), host: str | None = None) -> None:
        """inward: what the relays do to all that a prefill core sends. host: where it is reached without a relay."""
        self.llm = llm
        self.relays: list[PeerRelay] = []
        self._inward, self._host = inward, host
        self.prefill, self.decode = llm._client._replicas
        assert (self.prefill.role, self.decode.role) == ("prefill", "decode")
        start = self.prefill._start
        assert start is not None

        async def start_relayed(*arguments: Any) -> Any:
            client = await start(*arguments)
            self._relay(client)
            return client

        self.prefill._start = start_relayed
        self._relay(self.prefill.client)

    def _relay(self, client: Any) -> None:
        port = int(client.ready.transfer.rpartition(":")[2])
        address = f"{self._host}:{port}"
        if self._host is None:
            self.relays.append(PeerRelay(("127.0.0.1", port), inward=self._inward))
            address = f"127.0.0.1:{self.relay.cores.address[1]}"
        client.ready = msgspec.structs.replace(client.ready, transfer=address)

    @property
    def relay(self) -> PeerRelay:
        return self.relays[-1]

    async def streams(self, disturb: Callable[[], Any] | None = None) -> list[Any]:
        """Return what all requests give. disturb: called when blocks begin to move."""

        self.num_computed = 0

        async def read(number: int) -> Any:
            [output] = [each async for each in self.llm.generate(prompt_of(number), params_of(number))]
            assert output.error is None, output.error
            self.num_computed += len(output.prompt_token_ids) - output.num_cached_tokens - output.num_fetched_tokens
            return output.outputs

        reading = [asyncio.create_task(read(number)) for number in range(NUM_REQUESTS)]
        if disturb is not None:
            await self.until(lambda: self.relay.num_bytes > 20_000)
            disturb()
        async with asyncio.timeout(WAIT_S):
            return list(await asyncio.gather(*reading))

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not condition():
                await asyncio.sleep(0.001)

    async def is_whole(self) -> None:
        """Wait until no block of either core is used, but for those that stay pinned for a time, and check them."""
        for each in (self.prefill, self.decode):
            await self.until(lambda each=each: each.is_ready)
            async with asyncio.timeout(WAIT_S):
                while await stats_of(each, "num_used_blocks") > await stats_of(each, "num_pinned_blocks"):
                    await asyncio.sleep(0.05)
            assert await each.client.call("check") is None

    async def fetches_again(self) -> None:
        """Wait until a core that waits before it connects again fetches whole prompts."""
        async with asyncio.timeout(WAIT_S):
            while True:
                assert await self.streams() == undisturbed()
                await self.forget()
                if self.num_computed == NUM_REQUESTS:
                    return
                await asyncio.sleep(0.2)

    async def forget(self) -> None:
        """Drop what both cores have cached, as soon as no transfer reads it: what it reads may be pinned as well."""
        await self.is_whole()
        async with asyncio.timeout(WAIT_S):
            while not await self.llm.call("reset_prefix_cache"):
                await asyncio.sleep(0.05)


async def stats_of(replica: Replica, name: str) -> int:
    stats = msgspec.convert(await replica.client.call("stats"), SchedulerStats)
    return int(getattr(stats, name))


def process_of(replica: Replica) -> subprocess.Popen[bytes]:
    assert replica.client._core is not None
    return replica.client._core.process


@asynccontextmanager
async def started(
    inward: Sequence[Fault] = (),
    apart: Namespaces | None = None,
    host: str | None = None,
    **args: Any,
) -> AsyncIterator[Split]:
    """Run both cores, with a relay between them, each in a namespace of its own, or reached at a host."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(split_module, "with_meeting_place", over_tcp)
        places = count()  # the prefill core starts first
        spawn_checked(patch, list if apart is None else lambda words: apart.command(next(places), words))
        values = ENGINE | {"prefill": 1, "decode": 1, "split_min_tokens": 1} | args
        async with whole_engines.started(**values) as llm:
            split = Split(llm, inward, apart.addresses[0] if apart is not None else host)
            yield split
        for relay in split.relays:
            relay.close()


TO_PREFILL = [Fault("cut", 150), Fault("corrupt", 80), Fault("half_close", 100)]
FROM_PREFILL = [
    *(Fault("cut", 50_000), Fault("corrupt", 60_000), Fault("corrupt", 200), Fault("repeat", 60_000)),
    *(Fault("swap", 60_000), Fault("half_close", 50_000), Fault("stall", 60_000), Fault("delay", 0, 0.005)),
]


@pytest.mark.long
async def test_damaged_transfers_are_computed_instead() -> None:
    async with started() as split:
        for outward, inward in [*(([each], []) for each in TO_PREFILL), *(([], [each]) for each in FROM_PREFILL)]:
            split.relay.damage_next(outward, inward)
            assert await split.streams() == undisturbed(), (outward, inward)
            assert split.relay.num_hits == 1
            await split.forget()
        assert await split.streams() == undisturbed()
        assert split.num_computed == NUM_REQUESTS  # the last token of each prompt: the next connection is whole
        await split.forget()
        assert await split.streams(lambda: split.relay.cores.cut_all()) == undisturbed()
        await split.forget()
        await split.fetches_again()


@pytest.mark.long
async def test_killed_stopped_and_restarted_cores_change_no_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_module, "WATCH_S", 0.2)
    monkeypatch.setattr(replica_module, "FROZEN_AFTER_S", 0.5)
    async with started([Fault("delay", 0, 0.002)], max_core_restarts=9, kv_lease_s=SHORT_LEASE_S) as split:
        victims = (split.prefill, signal.SIGKILL), (split.prefill, signal.SIGSTOP), (split.decode, signal.SIGKILL)
        for replica, signum in victims:
            pid = process_of(replica).pid
            assert await split.streams(lambda pid=pid, signum=signum: os.kill(pid, signum)) == undisturbed()
            with suppress(OctavoError):  # a core that stopped after its requests is found when its health is asked for
                await split.llm.check_health()
            await split.until(lambda replica=replica, pid=pid: process_of(replica).pid != pid)
            await split.forget()
        await split.fetches_again()


async def test_clients_that_go_in_mid_transfer_leave_no_block_behind() -> None:
    async with started(inward=[Fault("delay", 0, 0.01)]) as split:
        for _ in range(2):
            reading = [
                asyncio.create_task(anext(split.llm.generate(prompt_of(number), params_of(number))))
                for number in range(NUM_REQUESTS)
            ]
            before = split.relay.num_bytes
            await split.until(lambda before=before: split.relay.num_bytes > before + 20_000)
            for each in reading:
                each.cancel()
            await asyncio.gather(*reading, return_exceptions=True)
            await split.forget()
        assert await split.streams() == undisturbed()


@pytest.mark.long
@pytest.mark.skipif(not is_permitted(), reason="needs the right to make network namespaces")
async def test_cores_whose_network_drops_packets_silently_compute_alone_until_it_is_whole() -> None:
    with namespaces() as apart:
        async with started(apart=apart, kv_lease_s=SHORT_LEASE_S) as split:
            assert await split.streams() == undisturbed()
            assert split.num_computed == NUM_REQUESTS
            await split.forget()
            apart.partition()
            assert await split.streams() == undisturbed()
            assert split.num_computed == sum(len(prompt_of(number)) for number in range(NUM_REQUESTS))
            await split.forget()
            apart.heal()
            await split.fetches_again()


NUM_SHORT = 10_000


@pytest.mark.long
@pytest.mark.timeout(0)
async def test_ten_thousand_handovers_take_no_memory(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Figures of each fifth are printed: resident MiB of the front, the prefill and the decode core.

    What the front remembers of prompts is bounded by 131,072 blocks, here by so few that they come in the first fifth.
    """
    monkeypatch.setattr(router_module.SentPrefixes.__init__, "__defaults__", (1024,))
    monkeypatch.setattr(router_module.PrefixAware.__init__, "__defaults__", (1.5, 4, 1024))
    async with started(host="127.0.0.1", num_gpu_blocks_override=256) as split:
        numbers = iter(range(NUM_SHORT))
        params = SamplingParams(max_tokens=2, seed=1, ignore_eos=True, output_kind=OutputKind.FINAL_ONLY)
        pids = [os.getpid(), *(process_of(each).pid for each in (split.prefill, split.decode))]
        resident: list[list[float]] = []

        async def work() -> None:
            for number in numbers:
                prompt = [3 + (number * 131 + place * 7) % 2900 for place in range(40 + number % 30)]
                [output] = [each async for each in split.llm.generate(prompt, params)]
                assert output.error is None, output.error
                if number % (NUM_SHORT // 5) == NUM_SHORT // 5 - 1:
                    resident.append([_resident_mib(pid) for pid in pids])
                    with capsys.disabled():
                        print(number + 1, *(f"{each:.1f}" for each in resident[-1]))

        await asyncio.gather(*(work() for _ in range(16)))
        await split.is_whole()
        grown = [last - first for first, last in zip(resident[2], resident[-1], strict=True)]  # behind all warm-up
        assert max(grown) < 8, resident


def _resident_mib(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20)
