"""Adapters of requests: reads, copies on the host, slots of the device, and what runs meanwhile."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest

from octavo.core.adapter import LoRARequest
from octavo.core.messages import MOST_ADAPTER_NAMES, CoreReady, EngineCoreOutput
from octavo.core.step import ModelRunnerOutput, SchedulerOutput
from octavo.engine.engine_core import EngineCore
from octavo.scheduler.adapters import AdapterCalls
from octavo.scheduler.build import build_scheduler
from tests.fakes.accounting import check_scheduler
from tests.fakes.engine import Clock, Collected, make_request, make_settings
from tests.fakes.executor import HashExecutor


@dataclass
class AdapterExecutor(HashExecutor):
    """Checks that each row runs with the adapter of its request, which is known by the seed.

    num_polls: for how many calls an adapter is being read; errors: what is wrong with it; both by digest.
    """

    num_polls: dict[str, int] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    host: set[str] = field(default_factory=set)
    contents: dict[int, str] = field(default_factory=dict)
    of_seed: dict[int | None, str | None] = field(default_factory=dict)
    slot_of: dict[int, tuple[int, int | None]] = field(default_factory=dict)
    calls: list[tuple[Any, ...]] = field(default_factory=list)

    def call(self, method: str, *arguments: Any) -> list[Any]:
        self.calls.append((method, *arguments))
        match method, arguments:
            case "read_adapter", (_, digest):
                if digest in self.errors:
                    return [self.errors[digest]]
                if self.num_polls.get(digest, 0) > 0:
                    self.num_polls[digest] -= 1
                    return [None]
                self.host.add(digest)
                return [""]
            case "load_adapter", (slot, digest):
                assert digest in self.host, "what is loaded was read before"
                self.contents[slot] = digest
            case "drop_adapter", (digest,):
                self.host.discard(digest)
        return [None]

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        self.slot_of.update({new.seq_id: (new.adapter, new.params.seed) for new in step.new_sequences})
        for row in step.rows:
            slot, seed = self.slot_of[row.seq_id]
            assert self.contents.get(slot) == self.of_seed.get(seed), f"slot {slot} holds another adapter"
        return super().execute(step)

    def num(self, method: str) -> int:
        return sum(name == method for name, *_ in self.calls)


class Driver:
    def __init__(self, max_loras: int = 1, max_cpu_loras: int = 1, depth: int = 1, **settings: Any) -> None:
        chosen = make_settings(max_loras=max_loras, max_cpu_loras=max_cpu_loras, max_steps_in_flight=depth, **settings)
        self.executor = AdapterExecutor(chosen.cache.block_size)
        self.woken = threading.Event()
        calls = AdapterCalls(self.executor.call, lambda: self.wake())
        scheduler = build_scheduler(chosen, adapter_calls=calls)
        ready = CoreReady(cache=chosen.limits, max_model_len=512, vocab_size=50, plan="")
        self.core = EngineCore(self.executor, scheduler, ready, max_steps_in_flight=depth, clock=Clock())
        self.seen = Collected()

    def add(
        self,
        name: str,
        adapter: str | None = None,
        prompt: Iterable[int] = range(6),
        asked: tuple[int, str | None, float | None] = (0, None, None),
        **params: Any,
    ) -> None:
        """asked: the priority, the tenant, and the deadline of the first token in seconds."""
        request = make_request(name, prompt, **{"seed": len(self.executor.of_seed), **params})
        request.priority, request.tenant, request.first_token_deadline_s = asked
        self.executor.of_seed[request.params.seed] = adapter
        if adapter is not None:
            request.lora_request = LoRARequest(adapter, 1, f"/{adapter}", digest=adapter)
            request.adapter = request.lora_request.key
        self.core.add_request(request)

    def wake(self) -> None:
        self.woken.set()

    def step(self) -> list[EngineCoreOutput]:
        outputs = self.core.step().outputs
        self.seen.add(outputs)
        check_scheduler(self.core.scheduler)
        return outputs

    def finish(self, until: Callable[[], bool] = lambda: False) -> None:
        for _ in range(2000):
            if not self.core.has_unfinished() or until():
                return
            if self.core.is_waiting:
                assert self.woken.wait(100), "nothing wakes a core that waits for an adapter"
                self.woken.clear()
            self.step()
        raise AssertionError("the requests do not end")

    @property
    def running(self) -> list[str]:
        return [group.request_id for group in self.core.scheduler.running]


def test_an_adapter_is_read_and_loaded_once_for_the_requests_that_follow_each_other() -> None:
    driver = Driver()
    for name in "abc":
        driver.add(name, "x")
        driver.finish()
    assert [driver.executor.num(each) for each in ("read_adapter", "load_adapter", "drop_adapter")] == [1, 1, 0]
    assert all(final.error is None for final in driver.seen.finals.values())


def test_the_statistics_name_the_adapters_that_run_and_those_that_wait() -> None:
    driver = Driver(max_loras=1)
    for name, adapter in (("1", "a"), ("2", "b"), ("3", None), ("4", "b")):
        driver.add(name, adapter)
    driver.step()
    stats = driver.core.scheduler.stats()
    assert (stats.max_adapters, stats.running_adapters, stats.waiting_adapters) == (1, ("a",), ("b",))
    assert stats.num_waiting_adapters == 1
    assert (stats + stats).waiting_adapters == ("b",)
    driver.finish()
    stats = driver.core.scheduler.stats()
    assert (stats.running_adapters, stats.waiting_adapters, stats.num_waiting_adapters) == ((), (), 0)


def test_of_many_adapters_that_wait_the_statistics_name_the_first_and_count_all() -> None:
    driver = Driver(max_loras=1)
    for number in range(200):
        driver.add(str(number), f"a{number:03}")
    driver.step()
    stats = driver.core.scheduler.stats()
    assert stats.running_adapters == ("a000",)
    assert stats.num_waiting_adapters == 199
    assert stats.waiting_adapters == tuple(f"a{number:03}" for number in range(1, MOST_ADAPTER_NAMES + 1))


def test_others_compute_while_an_adapter_is_read_and_an_idle_core_is_woken() -> None:
    driver = Driver()
    driver.executor.num_polls["x"] = 4
    driver.add("waits", "x")
    driver.step()
    assert driver.core.is_waiting
    driver.add("base")
    driver.step()
    assert driver.running == ["base"]
    assert ["blocked", "waits"] in [[each.kind, each.request_id] for each in driver.core.scheduler.log.entries]
    driver.finish()
    assert driver.seen.finals.keys() == {"waits", "base"}


def test_a_core_that_steps_while_the_timer_of_its_poll_still_runs_is_woken_again() -> None:
    class AtOnce(Driver):
        def wake(self) -> None:
            self.step()  # in the timer's thread, so that it runs until the step is over
            super().wake()

    driver = AtOnce()
    driver.executor.num_polls["x"] = 4
    driver.add("waits", "x")
    driver.step()
    while driver.core.is_waiting:
        assert driver.woken.wait(10)
        driver.woken.clear()
    assert driver.running == ["waits"]


def test_a_failed_read_ends_the_requests_of_its_adapter_alone_with_the_reason() -> None:
    driver = Driver(max_loras=2, max_cpu_loras=2)
    driver.executor.errors["bad"] = "target_modules names nothing"
    for name, adapter in (("a", "bad"), ("b", "x"), ("c", None), ("d", "bad")):
        driver.add(name, adapter)
    driver.finish()
    for name, final in driver.seen.finals.items():
        assert (final.error is not None) == (name in "ad")
    error = driver.seen.finals["a"].error
    assert error is not None
    assert error.code == "adapter_unusable"
    assert error.message == "the adapter bad cannot be used: target_modules names nothing"
    driver.executor.errors.clear()
    driver.add("later", "bad")
    driver.finish()
    assert driver.seen.finals["later"].error is None


def test_a_slot_is_taken_from_the_adapter_that_was_used_longest_ago_and_never_from_a_running_one() -> None:
    driver = Driver(max_loras=2, max_cpu_loras=3)
    driver.add("runs", "x", max_tokens=60)
    driver.step()
    for number, adapter in enumerate("yzy"):
        driver.add(f"{number}", adapter)
        driver.finish(until=lambda: driver.running == ["runs"] and not driver.core.scheduler.waiting)
    loaded = [digest for name, *rest in driver.executor.calls if name == "load_adapter" for digest in rest[1:]]
    assert loaded == ["x", "y", "z", "y"]
    assert driver.executor.num("read_adapter") == 3
    driver.finish()


def test_requests_without_an_adapter_pass_one_that_lacks_a_slot_and_those_with_one_do_not() -> None:
    driver = Driver()
    driver.add("x", "x", max_tokens=40)
    driver.step()
    for name, adapter in (("y", "y"), ("another x", "x"), ("base", None)):
        driver.add(name, adapter)
    driver.step()
    assert driver.running == ["x", "base"]
    driver.finish(until=lambda: "x" in driver.seen.finals)
    driver.step()
    assert "y" in driver.running
    assert "another x" not in driver.running
    driver.finish()


def test_copies_on_the_host_are_bounded_but_for_those_of_requests_that_have_begun() -> None:
    driver = Driver(max_cpu_loras=2)
    for number in range(12):
        driver.add(f"{number}", f"adapter{number}")
        driver.finish()
        assert len(driver.executor.host) <= 2
    assert driver.executor.num("drop_adapter") == 10


def test_a_preempted_request_finds_its_adapter_though_its_files_have_gone() -> None:
    driver = Driver(policy="priority")
    driver.add("a", "x", max_tokens=30)
    driver.core.scheduler.groups["a"].request.priority = 5
    driver.step()
    driver.add("b", "y")
    driver.core.scheduler.groups["b"].request.priority = 0
    driver.step()
    assert driver.running == ["b"]
    driver.executor.errors["x"] = "there is no such folder"
    driver.finish()
    assert all(final.error is None for final in driver.seen.finals.values())
    assert driver.executor.contents == {1: "x"}


def test_reading_for_the_endpoint_reports_progress_and_errors_and_keeps_what_it_read() -> None:
    driver = Driver()
    driver.executor.num_polls["x"] = 1
    driver.executor.errors["bad"] = "no"
    read = [driver.core.call("read_adapter", "x", 1, "/x", "x") for _ in range(3)]
    assert read == [None, "", ""]
    assert driver.core.call("read_adapter", "bad", 1, "/x", "bad") == "no"
    driver.add("a", "x")
    driver.finish()
    assert driver.executor.num("read_adapter") == 3


def test_the_endpoint_gets_the_error_of_a_read_that_ended_between_its_calls() -> None:
    driver = Driver()
    driver.executor.num_polls["bad"] = 1
    assert driver.core.call("read_adapter", "bad", 1, "/bad", "bad") is None
    driver.executor.errors["bad"] = "no"
    driver.step()  # which the end of the read wakes
    driver.executor.num_polls["bad"] = 1
    assert driver.core.call("read_adapter", "bad", 1, "/bad", "bad") == "no"
    driver.executor.errors.clear()
    assert [driver.core.call("read_adapter", "bad", 1, "/bad", "bad") for _ in range(2)] == [None, ""]


def test_an_engine_without_adapters_refuses_them() -> None:
    core = Driver().core
    core.scheduler._adapters = None  # as it is built without calls
    request = make_request("a", [1])
    request.lora_request = LoRARequest("x", 1, "/x", digest="x")
    core.add_request(request)
    [output] = core.step().outputs
    assert output.error is not None
    assert output.error.code == "adapters_off"
    assert "enable_lora" in (core.scheduler.read_adapter(request.lora_request) or "")


@pytest.mark.parametrize("seed", range(6))
def test_random_schedules_give_each_request_what_it_gets_alone(seed: int) -> None:
    """Adapters come and go with few slots and blocks, preemption, aborts, reads that take time, steps in flight."""
    draw = random.Random(seed)
    max_loras = draw.choice([1, 2, 3])
    driver = Driver(
        max_loras,
        draw.choice([max_loras, max_loras + 2]),
        draw.choice([1, 3]),
        policy=draw.choice(["fcfs", "priority"]),
        num_blocks=draw.choice([24, 48]),
        num_host_blocks=draw.choice([0, 20]),
        preemption_mode=draw.choice(["recompute", "swap"]),
        enable_chunked_prefill=draw.choice([True, True, False]),
        max_num_batched_tokens=48,
    )
    requests: list[tuple[str, str | None, dict[str, Any]]] = []
    for number in range(40):
        adapter = draw.choice([None, "v", "w", "x", "y", "z"])
        params = {"max_tokens": draw.randint(1, 20), "seed": number, "n": draw.choice([1, 1, 2])}
        requests.append((f"{number}", adapter, params | {"prompt": [draw.randrange(3)] * draw.randint(1, 20)}))
        driver.executor.num_polls[adapter or ""] = draw.randint(0, 4)
        driver.add(*requests[-1][:2], **requests[-1][2])
        driver.core.scheduler.groups[f"{number}"].request.priority = draw.randrange(3)
        for _ in range(draw.randrange(4)):
            driver.step()
        if draw.random() < 0.1:
            driver.core.abort_requests([f"{draw.randrange(number + 1)}"])
    driver.finish()
    driver.step()
    assert len(driver.executor.host) <= driver.core.scheduler.config.max_cpu_loras
    for name, adapter, params in requests:
        if name in driver.seen.finals:
            alone = Driver(num_blocks=48, max_num_batched_tokens=48)
            alone.add(name, adapter, **params)
            alone.finish()
            assert alone.seen.token_ids[name] == driver.seen.token_ids[name]
