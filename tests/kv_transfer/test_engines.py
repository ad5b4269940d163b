"""Two engine cores of octavo-tiny, in one process and in two: bit for bit what one gives, whatever happens to one."""

from __future__ import annotations

import dataclasses
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from octavo.config.args import EngineArgs
from octavo.config.resolve import configure
from octavo.config.schema import EngineConfig
from octavo.core.messages import AddRequests, CoreReady, EngineCoreRequest, FromCore, StepOutputs
from octavo.core.process import frames, processes
from octavo.engine.cores.core_spawn import SpawnedCore
from octavo.engine.engine_core import EngineCore
from tests.fakes.accounting import check_scheduler
from tests.fakes.engine import Collected
from tests.fakes.engine import make_request as make_fake_request
from tests.fakes.linked_engines import step_until

KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.8, "logprobs": 2},
    {"n": 3, "temperature": 0.9},
    {"use_beam_search": True, "n": 2, "temperature": 0.0},
    {"presence_penalty": 0.7, "repetition_penalty": 1.2, "temperature": 1.0},
]


def config_of(role: str | None, host: str | Path = "", **args: Any) -> EngineConfig:
    sizes = {
        "num_gpu_blocks_override": 256,
        "swap_space": 0.01,
        "threads": 1,
        "seed": 0,
    }  # all blocks are checked each step
    made = configure(EngineArgs(**(sizes | args)))
    transfer = dataclasses.replace(made.transfer, role=role, kv_host=str(host), secret="ab" * 16)
    return msgspec.structs.replace(made, transfer=transfer)


def requests_of(salt: str | None = None) -> list[EngineCoreRequest]:
    made = []
    for number, kind in enumerate(KINDS if salt is None else KINDS[:2]):
        prompt = [(7 * place + number) % 250 for place in range(60 + 41 * number)]
        request = make_fake_request(f"{number}{salt}", prompt, **{"max_tokens": 30, "logprobs": 1, "seed": 4} | kind)
        request.cache_salt = salt
        made.append(request)
    return made


class Woken:
    """A core that is stepped whenever it has something to do."""

    def __init__(self, config: EngineConfig) -> None:
        self.event, self.seen = threading.Event(), Collected()
        self.core = EngineCore.build(config, wake=self.event.set)

    @property
    def is_done(self) -> bool:
        return not self.core.has_unfinished()

    def step(self) -> None:
        if self.event.is_set() or not (self.is_done or self.core.is_waiting):
            self.event.clear()
            self.seen.add(self.core.step().outputs)
            check_scheduler(self.core.scheduler)
        else:
            time.sleep(0.001)

    def check_free(self) -> None:
        """Nothing holds a block, at the latest when the other end has said what it has to say."""
        manager = self.core.scheduler.block_manager
        manager.pins.clear()
        step_until(lambda: not manager.num_used_blocks, self)


@contextmanager
def cores(*configs: EngineConfig) -> Iterator[list[Woken]]:
    made: list[Woken] = []
    try:
        for config in configs:
            made.append(Woken(config))
        yield made
    finally:
        for each in made:
            each.core.shutdown()


def first_part(request: EngineCoreRequest) -> EngineCoreRequest:
    params = msgspec.structs.replace(request.params, max_tokens=1)
    return msgspec.structs.replace(request, params=params, keep_s=10.0)


@pytest.fixture(scope="module")
def alone() -> Collected:
    with cores(config_of(None)) as [engine]:
        for request in [*requests_of(), *requests_of("salted")]:
            engine.core.add_request(request)
            step_until(lambda: engine.is_done, engine)
        return engine.seen


def check(seen: Collected, alone: Collected, requests: Sequence[EngineCoreRequest]) -> None:
    for name in (request.request_id for request in requests):
        assert seen.token_ids[name] == alone.token_ids[name]
        assert seen.logprobs[name] == alone.logprobs[name]


@pytest.mark.parametrize("num_blocks", [256, 30], ids=["room", "preempted"])
def test_two_cores_give_what_one_gives(alone: Collected, tmp_path: Path, num_blocks: int) -> None:
    small = {"num_gpu_blocks_override": num_blocks, "max_model_len": 288, "swap_space": 0.01}
    with cores(config_of("prefill", tmp_path), config_of("decode", **small)) as [prefill, decode]:
        address = prefill.core.ready.transfer
        for salt in (None, "salted"):
            for request in requests_of(salt):
                prefill.core.add_request(first_part(request))
                prefill.step()
                decode.core.add_request(msgspec.structs.replace(request, prefill=address))
            step_until(lambda: prefill.is_done and decode.is_done, prefill, decode)
            check(decode.seen, alone, requests_of(salt))
        fetched = [each.num_fetched_tokens for each in decode.seen.finals.values()]
        assert max(fetched) > 40
        if num_blocks < 256:
            assert decode.core.stats().num_preemptions > 0
        else:
            # prompts that begin alike are partly cached; all but the last token comes from somewhere
            for request in [*requests_of(), *requests_of("salted")]:
                final = decode.seen.finals[request.request_id]
                assert final.num_cached_tokens + final.num_fetched_tokens == len(request.prompt_token_ids) - 1
        step_until(lambda: not prefill.core.scheduler.block_manager.holds, prefill, decode)
        prefill.check_free()
        decode.check_free()


class OtherProcess:
    """A core in a process of its own, whose outputs nobody reads."""

    def __init__(self, config: EngineConfig) -> None:
        self.spawned = SpawnedCore()
        self.connection: socket.socket = self.spawned.connection
        self.connection.sendall(frames.pack(config))
        ready = self._read()
        assert isinstance(ready, CoreReady)
        assert ready.transfer is not None
        self.address = ready.transfer

    def _read(self) -> Any:
        body = frames.read(self.connection)
        assert body is not None
        return msgspec.msgpack.decode(body, type=FromCore)

    def begin(self, request: EngineCoreRequest) -> None:
        self.connection.sendall(frames.pack(AddRequests([first_part(request)])))
        while not (isinstance(message := self._read(), StepOutputs) and (message.outputs or message.began)):
            pass

    def signal(self, number: signal.Signals) -> None:
        self.spawned.process.send_signal(number)

    def end(self) -> None:
        self.connection.close()
        processes.end(self.spawned.process, 10)


@pytest.mark.slow
@pytest.mark.long
def test_a_prefill_process_is_killed_stopped_and_started_again(alone: Collected, tmp_path: Path) -> None:
    first, second, third, *_ = requests = requests_of()
    config = config_of("prefill", tmp_path, kv_lease_s=2.0)
    with cores(config_of("decode", kv_lease_s=2.0)) as [decode]:
        process = OtherProcess(config)
        try:
            process.begin(first)
            decode.core.add_request(msgspec.structs.replace(first, prefill=process.address))
            step_until(lambda: decode.is_done, decode)
            assert decode.seen.finals[first.request_id].num_fetched_tokens == len(first.prompt_token_ids) - 1
            process.signal(signal.SIGSTOP)
            decode.core.add_request(msgspec.structs.replace(second, prefill=process.address))
            step_until(lambda: decode.is_done, decode)
        finally:
            process.signal(signal.SIGKILL)
            process.end()
        assert decode.seen.finals[second.request_id].num_fetched_tokens == 0
        process = OtherProcess(config)
        try:
            process.begin(third)
            decode.core.add_request(msgspec.structs.replace(third, prefill=process.address))
            step_until(lambda: decode.core.is_waiting or decode.is_done, decode)
            process.signal(signal.SIGKILL)
            step_until(lambda: decode.is_done, decode)
        finally:
            process.end()
        check(decode.seen, alone, requests[:3])
        decode.check_free()


def test_an_engine_without_transfers_imports_nothing_of_them_and_starts_no_thread() -> None:
    code = """
import sys, threading
from octavo import LLM, SamplingParams
llm = LLM(num_gpu_blocks_override=64, threads=1)
before = threading.active_count()
llm.generate("abc", SamplingParams(max_tokens=2))
packages = "octavo.kv_transfer.", "octavo.worker.transfer", "octavo.pipes"
names = [name for name in sys.modules if name.startswith(packages)]
names += [thread.name for thread in threading.enumerate() if "kv-" in thread.name and "pages" not in thread.name]
print(sorted(names), threading.active_count() - before, llm.engine.core.scheduler.connector)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "['octavo.kv_transfer.connector', 'octavo.kv_transfer.messages'] 0 None\n", done.stderr
