"""Random requests over engines that hand prompts over: small pools, forks, preemption, aborts, resets, pins, pauses.

Whatever happens, each request that ends has the tokens and log-probabilities of its lonely run, and no block is lost.
"""

from __future__ import annotations

import random
import time
from typing import Any

import msgspec
import pytest

from octavo.core.messages import EngineCoreRequest
from tests.fakes.engine import make_request, run_alone
from tests.fakes.executor import STATE
from tests.fakes.linked_engines import Engine, LinkedExecutor, finish, step_until
from tests.fakes.listener import Mirror

KINDS: list[dict[str, Any]] = [
    {},
    {},
    {"n": 2},
    {"n": 1, "best_of": 3},
    {"n": 2, "best_of": 2, "use_beam_search": True},
    {"prompt_logprobs": 0},
]
POOLS: list[dict[str, Any]] = [
    {"num_blocks": 64},
    {"num_blocks": 24},
    {"num_blocks": 24, "num_host_blocks": 30, "preemption_mode": "swap"},
    {"num_blocks": 40, "prefix_cache_eviction": "cost"},
]


class Chaos:
    """Two prefill engines and a decode engine, and what was asked of them. source: of all that is random."""

    def __init__(self, seed: int) -> None:
        self.source = source = random.Random(seed)
        self.window: Any = source.choice([None, 6, (None, 6), (None, STATE), (6, STATE, None)])
        self.ranks: dict[bytes, LinkedExecutor] = {}
        options = {"sliding_window": self.window, "max_num_batched_tokens": source.choice([16, 48])}
        self.prefills = [self._engine(options, host="127.0.0.1") for _ in range(2)]
        self.decode = self._engine(options)
        self.engines = [*self.prefills, self.decode]
        self.mirrors = [Mirror() for _ in self.engines]
        for engine, mirror in zip(self.engines, self.mirrors, strict=True):
            engine.core.scheduler.block_manager.listeners.append(mirror)
        self.requests: dict[str, EngineCoreRequest] = {}
        self.aborted: set[str] = set()
        self.count = 0

    def _engine(self, options: dict[str, Any], **place: Any) -> Engine:
        depth = self.source.choice([1, 1, 2, 3])
        return Engine(self.ranks, depth=depth, **place, **options, **self.source.choice(POOLS))

    def arrive(self) -> None:
        source = self.source
        self.count += 1
        prompt = [source.randrange(2)] * source.choice([0, 4, 9, 16]) + [
            source.randrange(30) for _ in range(source.randrange(1, 30))
        ]
        request = make_request(
            f"r{self.count}", prompt, max_tokens=source.choice([1, 2, 6, 12]), seed=self.count, **source.choice(KINDS)
        )
        request.cache_salt = source.choice([None, None, "s"])
        self.requests[request.request_id] = request
        if source.random() < 0.15 or request.params.prompt_logprobs is not None:
            self.decode.add(request)
            return
        prefill = source.choice(self.prefills)
        params = msgspec.structs.replace(request.params, max_tokens=1)
        keep_s = source.choice([0.01, 1.0, 1000.0])
        if source.random() < 0.9:
            prefill.add(msgspec.structs.replace(request, params=params, keep_s=keep_s))
        for _ in range(source.randrange(3)):
            prefill.step()
        self.decode.add(msgspec.structs.replace(request, prefill=prefill.address))

    def disturb(self) -> None:
        source, engine = self.source, self.source.choice(self.engines)
        request = source.choice(list(self.requests.values()))
        manager = engine.core.scheduler.block_manager
        match source.choice(["abort", "abort here", "reset", "pin", "unpin", "clear", "pause"]):
            case "abort":
                self.decode.core.abort_requests([request.request_id])
                self.aborted.add(request.request_id)
            case "abort here" if engine is not self.decode:
                engine.core.abort_requests([request.request_id])
            case "reset":
                engine.core.reset_prefix_cache()
            case "pin":
                engine.core.pin_prefix(request.prompt_token_ids, source.choice([0.0, 1e3]), request.cache_salt)
            case "unpin":
                engine.core.call("unpin_prefix", request.prompt_token_ids, request.cache_salt)
            case "clear":
                manager.pins.clear()
            case "pause":
                engine.core.call("pause", "keep", source.choice([True, True, False]))
                step_until(lambda: engine.core.call("pause_is_complete"), engine)
                engine.core.call("resume")

    def step(self) -> None:
        self.source.choice(self.engines).step()
        for engine, mirror in zip(self.engines, self.mirrors, strict=True):
            mirror.check(engine.core.scheduler.block_manager)

    def run(self, num_events: int) -> int:
        """Let so many things happen, and prove what comes of them. Returns how many tokens were fetched."""
        for _ in range(num_events):
            roll = self.source.random()
            if roll < 0.12 or not self.requests:
                self.arrive()
            elif roll < 0.2:
                self.disturb()
            else:
                self.step()
                if self.source.random() < 0.2:
                    time.sleep(0.0005)  # messages between engines are on their way
        finish(*self.engines)
        seen, num_fetched = self.decode.collected, 0
        for name, request in self.requests.items():
            if name in self.aborted:
                continue
            alone = run_alone(request, self.window)
            assert seen.finals[name].error is None or alone.finals[name].error is not None
            assert seen.token_ids.get(name) == alone.token_ids.get(name), name
            assert seen.logprobs.get(name) == alone.logprobs.get(name), name
            num_fetched += seen.finals[name].num_fetched_tokens
        return num_fetched

    def close(self) -> None:
        for engine in self.engines:
            engine.close()


@pytest.mark.parametrize("seed", range(4))
def test_random_handovers_lose_no_block_and_change_no_bit(seed: int) -> None:
    chaos = Chaos(seed)
    try:
        assert chaos.run(250) > 0
    finally:
        chaos.close()


@pytest.mark.long
@pytest.mark.timeout(0)
def test_many_random_handovers_lose_no_block_and_change_no_bit() -> None:
    for seed in range(100, 600):
        chaos = Chaos(seed)
        try:
            chaos.run(300)
        except BaseException as error:
            raise AssertionError(f"seed {seed}") from error
        finally:
            chaos.close()
