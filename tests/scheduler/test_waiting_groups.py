"""Waiting groups by the state of their adapters: the order in which they are admitted, and what a step looks at."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from octavo.core.sequence import SequenceGroup, SequenceStatus
from octavo.scheduler.admission import Admission, _Outcome
from octavo.scheduler.plan import StepPlan
from octavo.scheduler.policies import POLICIES
from octavo.scheduler.policies.deadline import EarliestDeadline
from octavo.scheduler.policies.fair_share import FairShare
from octavo.scheduler.policies.prefix_match import LongestPrefixMatch
from octavo.scheduler.policy import Policy
from octavo.scheduler.waiting_groups import WITH_ADAPTERS, AdapterState
from tests.fakes.engine import make_request
from tests.scheduler.test_adapters import Driver

NOTED = ("admitted", "swapped_in", "preempted")


class PlainWaiting:
    """All waiting groups in one list, of which the first is looked for anew each time."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._keys: dict[SequenceGroup, tuple[Any, ...]] = {}
        self._came: list[str] = []
        self._states: dict[str, AdapterState] = {}
        if isinstance(policy, FairShare):
            policy._queues.append(self)  # type: ignore[arg-type]
        self._passed: set[AdapterState] = set()
        self.num_adapter_changes = 0
        self.hidden: set[SequenceGroup] = set()

    def __len__(self) -> int:
        return len(self._keys)

    def push(self, group: SequenceGroup) -> None:
        self.num_adapter_changes += 1
        if isinstance(self._policy, FairShare):
            self._policy.note_pushed(group.request.tenant or "")
        if group.request.tenant not in [other.request.tenant for other in self._keys]:
            self._came.append(group.request.tenant or "")
        self._keys[group] = self._policy.key(group)

    def remove(self, group: SequenceGroup) -> None:
        del self._keys[group]
        self.num_adapter_changes += 1
        if group.request.adapter not in [other.request.adapter for other in self._keys]:
            self._states.pop(group.request.adapter or "", None)
        if group.request.tenant not in [other.request.tenant for other in self._keys]:
            self._came.remove(group.request.tenant or "")
        if isinstance(self._policy, FairShare):
            self._policy.note_removed(group.request.tenant or "")

    def peek(self, now: float) -> SequenceGroup | None:
        entries = [
            (key, group)
            for group, key in self._keys.items()
            if group not in self.hidden and self.state_of(group.request.adapter) not in self._passed
        ]
        if isinstance(self._policy, LongestPrefixMatch):
            return self._policy.first([SimpleNamespace(ordered=sorted(entries, key=lambda entry: entry[0]))], now)
        return min(entries, key=lambda entry: self._place(*entry, now), default=(None, None))[1]

    def num_prompt_tokens_between(self, first: tuple[Any, ...], end: tuple[Any, ...]) -> int:
        return sum(group.num_prompt_tokens for group, key in self._keys.items() if first <= key < end)

    def least_served(self) -> tuple[float, int, str] | None:
        assert isinstance(self._policy, FairShare)
        return min(((self._policy.counters[each], place, each) for place, each in enumerate(self._came)), default=None)

    def _place(self, key: tuple[Any, ...], group: SequenceGroup, now: float) -> tuple[Any, ...]:
        match self._policy:
            case FairShare(counters=counters):
                tenant = group.request.tenant or ""
                return (counters[tenant], self._came.index(tenant), *key)
            case EarliestDeadline() as policy if policy.latest_start(group) < now:
                return (True, group.virtual_start, group.arrival)
            case EarliestDeadline():
                return (False, *key)
        return key

    def set_state(self, adapter: str, state: AdapterState) -> None:
        if any(group.request.adapter == adapter for group in self._keys):
            self._states[adapter] = state

    def state_of(self, adapter: str | None) -> AdapterState:
        return AdapterState.NONE if adapter is None else self._states.get(adapter, AdapterState.READY)

    def look_at_all(self) -> None:
        self.hidden.clear()
        self._passed.clear()

    def pass_over(self, states: Iterable[AdapterState]) -> None:
        self._passed.update(states)

    @property
    def num_adapters(self) -> int:
        return len({group.request.adapter for group in self._keys} - {None})

    def has_adapter(self, adapter: str) -> bool:
        return any(group.request.adapter == adapter for group in self._keys)

    def one_of_each_adapter(self) -> Iterator[SequenceGroup]:
        return iter(self._keys)

    @property
    def preempted_with_adapters(self) -> list[SequenceGroup]:
        return [group for group in self._keys if group.was_preempted]


class PlainAdmission(Admission):
    """Looks at every waiting group in every step, one by one in the policy's order, but for those with adapters once
    one lacks a slot. Under prefix-match, the groups at which a step does not look are not among the oldest."""

    def _pass(self, group: SequenceGroup, outcome: _Outcome, plan: StepPlan, deferred: list[SequenceGroup]) -> None:
        if outcome is _Outcome.NO_SLOT and not self._whole_prompts:
            plan.adapter_waits = True
            self._registry.waiting.pass_over(WITH_ADAPTERS)
        if isinstance(self._registry.policy, LongestPrefixMatch):
            super()._pass(group, outcome, plan, deferred)
        elif outcome in (_Outcome.DEFERRED, _Outcome.COMPUTING) or group.status is SequenceStatus.SWAPPED:
            super()._pass(group, _Outcome.DEFERRED, plan, deferred)
        else:
            waiting = self._registry.waiting
            assert isinstance(waiting, PlainWaiting)
            waiting.hidden.add(group)


class Pair:
    """The scheduler, and one that looks at every waiting group in every step, get the same requests."""

    def __init__(self, **options: Any) -> None:
        self.drivers = [Driver(**options), Driver(**options)]
        scheduler = self.drivers[1].core.scheduler
        registry = scheduler._registry
        registry.waiting = scheduler.waiting = PlainWaiting(scheduler.policy)  # type: ignore[assignment]
        scheduler._admission.__class__ = PlainAdmission

    def step(self) -> None:
        for driver in self.drivers:
            driver.step()
        ours, plain = (self._noted(driver) for driver in self.drivers)
        assert ours == plain

    def _noted(self, driver: Driver) -> list[tuple[int, str, str]]:
        entries = driver.core.scheduler.log.entries
        return [(each.step, each.kind, each.request_id) for each in entries if each.kind in NOTED]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(each, marks=pytest.mark.long) for each in range(2, 6))])
def test_groups_are_admitted_in_the_order_of_a_scheduler_that_looks_at_all_of_them(policy: str, seed: int) -> None:
    """Where reads take time, no group has two sequences, and prompts are not computed whole under priorities: a step
    that looks at all groups would let none pass one that lacks sequences while its adapter is read, and would read the
    adapters of all that may preempt others."""
    draw, is_chunked = random.Random(f"{policy} {seed}"), seed % 3 > 0
    takes_time = seed % 2 == 0 and (is_chunked or policy != "priority")
    max_loras = draw.choice([1, 2, 3])
    pair = Pair(
        max_loras=max_loras,
        max_cpu_loras=draw.choice([max_loras, max_loras + 2]) if takes_time else 8,
        policy=policy,
        depth=draw.choice([1, 3]),
        num_blocks=draw.choice([20, 40, 90]),
        num_host_blocks=draw.choice([0, 20]),
        preemption_mode=draw.choice(["recompute", "swap"]),
        enable_chunked_prefill=is_chunked,
        max_num_seqs=draw.choice([2, 4, 8]),
        max_num_batched_tokens=draw.choice([24, 48]),
        max_bypasses=draw.choice([0, 0, 3]),
        priority_ageing=draw.choice([0.0, 4.0]),
        prefill_tokens_per_s=10.0,
    )
    adapters = [None, "v", "w", "x", "y", "z"][: draw.choice([3, 4, 6])]
    for number in range(80):
        name, adapter = f"r{number}", draw.choice(adapters)
        prompt = [draw.randrange(3)] * draw.randint(1, 20)
        params = {"max_tokens": draw.randint(1, 12), "seed": number, "n": 1 if takes_time else draw.choice([1, 1, 2])}
        chosen = (draw.randrange(3), draw.choice(["a", "b", None]), draw.choice([None, 30.0, 200.0]))
        num_polls, num_steps = draw.randrange(3) if takes_time else 0, draw.choice([0, 0, 0, 1, 2])
        aborted = draw.random() < 0.15
        victim, pinned = f"r{draw.randrange(number + 1)}", draw.random() < 0.1
        for driver in pair.drivers:
            driver.executor.num_polls[adapter or ""] = num_polls
            driver.add(name, adapter, prompt, asked=chosen, **params)
            if aborted:
                driver.core.abort_requests([victim])
            if pinned:
                driver.core.pin_prefix(prompt, 20.0, None)
        for _ in range(num_steps):
            pair.step()
    for _ in range(3000):
        if not pair.drivers[0].core.has_unfinished():
            break
        pair.step()
    assert not any(driver.core.has_unfinished() for driver in pair.drivers)


@pytest.mark.parametrize("is_chunked", [True, False])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_step_looks_at_few_groups_whose_adapters_cannot_run_however_many_wait(
    policy: str, is_chunked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver(2, 2, policy=policy, enable_chunked_prefill=is_chunked, max_num_seqs=8)
    looked_at: list[str] = []
    admit = Admission._admit

    def noted(admission: Admission, group: SequenceGroup, *arguments: Any) -> Any:
        looked_at.append(group.request_id)
        return admit(admission, group, *arguments)

    for number in range(2):
        driver.add(f"runs{number}", f"a{number}", max_tokens=30)
    driver.step()
    driver.step()
    for number in range(120):
        driver.add(f"r{number}", f"b{number % 40}", asked=(0, f"t{number}", 1e6), max_tokens=1)
    driver.step()  # which may look at a group of each adapter
    monkeypatch.setattr(Admission, "_admit", noted)
    driver.add("base")
    driver.step()
    assert "base" in driver.running
    assert looked_at[-1] == "base"
    assert len(looked_at) <= 3
    monkeypatch.undo()
    driver.finish()
    assert all(final.error is None for final in driver.seen.finals.values())


def test_a_step_looks_at_one_group_while_the_adapter_of_many_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(2, 2)
    driver.executor.num_polls["x"] = 1000
    looked_at: list[str] = []
    admit = Admission._admit

    def noted(admission: Admission, group: SequenceGroup, *arguments: Any) -> Any:
        looked_at.append(group.request_id)
        return admit(admission, group, *arguments)

    for number in range(60):
        driver.add(f"x{number}", "x", max_tokens=1)
    driver.add("y", "y", max_tokens=9)
    monkeypatch.setattr(Admission, "_admit", noted)
    driver.step()
    assert looked_at == ["x0", "y"]
    assert driver.running == ["y"]
    driver.executor.num_polls["x"] = 0
    driver.finish()
    assert all(final.error is None for final in driver.seen.finals.values())
    assert len(driver.seen.finals) == 61


def test_a_group_preempts_none_before_its_adapter_has_been_read() -> None:
    driver = Driver(policy="priority")
    driver.add("low", "x", asked=(5, None, None), max_tokens=30)
    driver.step()
    driver.executor.num_polls["y"] = 4
    driver.add("high", "y", asked=(0, None, None), max_tokens=2)
    for _ in range(4):
        driver.step()
        assert driver.running == ["low"]
    driver.step()
    assert driver.running == ["high"]
    driver.finish()
    assert driver.seen.finals["low"].metrics is not None
    assert [kind for _, kind in driver.seen.finals["low"].metrics.timeline].count("preempted, to be recomputed") == 1


@pytest.mark.parametrize("policy", POLICIES)
def test_the_prompt_tokens_before_a_request_are_those_of_all_groups_that_come_before_it(policy: str) -> None:
    draw, driver = random.Random(policy), Driver(2, 2, policy=policy, prefill_tokens_per_s=10.0, priority_ageing=3.0)
    scheduler = driver.core.scheduler
    registry, order = scheduler._registry, scheduler.policy
    counted = set[int]()
    for number in range(120):
        asked = (draw.randrange(3), None, draw.choice([None, 20.0, 300.0]))
        driver.add(f"r{number}", draw.choice([None, "x", "y", "z"]), range(draw.randint(1, 20)), asked, max_tokens=2)
        if draw.random() < 0.3:
            driver.step()
        if draw.random() < 0.2:
            driver.core.abort_requests([f"r{draw.randrange(number + 1)}"])
        now, request = driver.core.clock(), make_request("new", [1] * draw.randint(1, 9))
        request.priority, request.arrival_time = draw.randrange(3), now
        request.first_token_deadline_s = draw.choice([50.0, 200.0])
        [group] = registry.new_groups([request])
        waiting = [each for each in scheduler.groups.values() if each.status is SequenceStatus.WAITING]
        before = [each for each in waiting if order.place(each, now) < order.place(group, now)]
        before += [each for each in scheduler.running if not order.outranks(group, each, now)]
        expected = sum(max(0, each.num_prompt_tokens - each.live[0].num_computed_tokens) for each in before)
        assert registry.num_prompt_tokens_before(group, now) == expected
        counted.add(expected)
    assert len(counted) > 10
