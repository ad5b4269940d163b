"""Policies and their names."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from octavo.config.args import EngineArgs
from octavo.config.fields import arguments
from octavo.core.messages import EngineCoreRequest
from octavo.core.sequence import SequenceGroup
from octavo.kv_cache.block_manager import BlockManager
from octavo.scheduler.policies import POLICIES
from octavo.scheduler.policies.deadline import EarliestDeadline
from octavo.scheduler.policies.fair_share import FairShare
from octavo.scheduler.policies.prefix_match import MOST_PASSES
from octavo.scheduler.policies.priority import Priority
from octavo.scheduler.rates import Rates
from octavo.scheduler.registry import Registry
from octavo.scheduler.scheduler import Scheduler
from octavo.scheduler.waiting_groups import WITH_ADAPTERS, WaitingGroups
from tests.fakes.accounting import check_scheduler
from tests.fakes.block_manager import make_manager
from tests.fakes.engine import Collected, make_core, make_request, make_settings, run, run_alone


def test_the_policies_that_may_be_asked_for_are_those_that_there_are() -> None:
    assert arguments(EngineArgs)["scheduling_policy"].arg.choices == tuple(POLICIES)


class TestOrder:
    """Who runs first when one sequence fits at a time."""

    def finished(self, policy: str, requests: list[EngineCoreRequest], **options: Any) -> list[str]:
        core = make_core(max_num_seqs=1, policy=policy, **options)
        for request in requests:
            core.add_request(request)
        order = []
        while core.has_unfinished():
            order += [output.request_id for output in core.step().outputs if output.finished]
            check_scheduler(core.scheduler)
        return order

    def test_priority_goes_by_number_and_then_by_arrival(self) -> None:
        requests = [request("a", priority=2), request("b", priority=1), request("c", priority=1)]
        assert self.finished("priority", requests) == ["b", "c", "a"]

    def test_with_ageing_who_waits_long_catches_up(self) -> None:
        old, new = request("old", priority=2, arrival_time=0.0), request("new", priority=0, arrival_time=25.0)
        assert self.finished("priority", [new, old]) == ["new", "old"]
        assert self.finished("priority", [new, old], priority_ageing=10.0) == ["old", "new"]

    def test_deadline_goes_by_the_latest_start_and_puts_the_late_ones_last(self) -> None:
        requests = [
            request("none"),
            request("long", prompt=30, first_token_deadline_s=1010.0),
            request("short", prompt=2, first_token_deadline_s=1009.0),
            request("late", first_token_deadline_s=0.2),
        ]
        assert self.finished("deadline", requests) == ["long", "short", "none", "late"]

    def test_prefix_match_takes_who_finds_most(self) -> None:
        core = make_core(max_num_seqs=1, policy="prefix-match")
        run(core, [request("first", tokens=[9] * 16)])
        for each in (request("cold", tokens=[1] * 16), request("warm", tokens=[9] * 16 + [2])):
            core.add_request(each)
        core.step()
        assert [group.request_id for group in core.scheduler.running] == ["warm"]

    def test_a_deadline_that_has_passed_does_not_come_before_who_is_swapped_out(self) -> None:
        core = make_core(
            num_blocks=8, policy="deadline", num_host_blocks=20, preemption_mode="swap", enable_prefix_caching=False,
            max_num_batched_tokens=64,
        )  # fmt: skip
        core.add_request(request("a", prompt=12, max_tokens=16))
        core.add_request(request("b", prompt=12, max_tokens=16))
        while not len(core.scheduler.swapped):
            core.step()
        core.add_request(request("late", prompt=4, first_token_deadline_s=0.5))
        order = []
        while core.has_unfinished():
            order += [output.request_id for output in core.step().outputs if output.finished]
        kinds = [(entry.kind, entry.request_id) for entry in core.scheduler.log.entries]
        assert kinds.index(("swapped_in", "b")) < kinds.index(("admitted", "late"))

    def test_prefix_match_counts_only_who_came_in(self) -> None:
        core = make_core(max_num_seqs=1, policy="prefix-match", num_blocks=64)
        run(core, [request("first", tokens=[9] * 16)])
        core.add_request(request("runs", tokens=[3] * 4, max_tokens=MOST_PASSES + 20))
        core.step()
        for each in (request("cold", tokens=[1] * 16), request("warm", tokens=[9] * 16 + [2])):
            core.add_request(each)
        order = []
        while core.has_unfinished():
            order += [output.request_id for output in core.step().outputs if output.finished]
        assert order == ["runs", "warm", "cold"]

    def test_prefix_match_passes_nobody_more_often_than_it_states(self) -> None:
        core = make_core(max_num_seqs=1, policy="prefix-match", num_blocks=64)
        run(core, [request("first", tokens=[9] * 16)])
        core.add_request(request("cold", tokens=[1] * 16, max_tokens=1))
        admitted_before = 0
        for number in range(MOST_PASSES + 20):
            core.add_request(request(f"warm{number}", tokens=[9] * 16 + [number % 50], max_tokens=1))
            if any(output.request_id == "cold" for output in core.step().outputs):
                break
            admitted_before += 1
        assert admitted_before == MOST_PASSES

    @pytest.mark.parametrize(("policy", "most"), [("fcfs", 1), ("prefix-match", 2)])
    def test_a_step_makes_few_lookups_for_requests_that_wait_for_the_prefix_of_another(
        self, policy: str, most: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        core = make_core(max_num_seqs=64, max_num_batched_tokens=512, policy=policy, num_blocks=512)
        num_requests, looked_up = 50, Counter[str]()
        for number in range(num_requests):
            core.add_request(request(f"r{number}", tokens=[9] * 16 + [number], max_tokens=1))
        find = BlockManager.find_prefix

        def counted(manager: BlockManager, group: SequenceGroup, *arguments: Any) -> Any:
            looked_up[group.request_id] += 1
            return find(manager, group, *arguments)

        monkeypatch.setattr(BlockManager, "find_prefix", counted)
        core.step()
        assert set(looked_up.values()) <= {*range(1, most + 1)}
        assert len(looked_up) == num_requests
        run(core)

    def test_a_step_looks_at_no_more_groups_that_wait_for_a_prefix_than_may_run_at_once(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        core = make_core(max_num_seqs=4, max_num_batched_tokens=64, num_blocks=512)
        for number in range(50):
            core.add_request(request(f"r{number}", tokens=[9] * 16 + [number], max_tokens=1))
        looked_up, find = list[str](), BlockManager.find_prefix

        def noted(manager: BlockManager, group: SequenceGroup, *arguments: Any) -> Any:
            looked_up.append(group.request_id)
            return find(manager, group, *arguments)

        monkeypatch.setattr(BlockManager, "find_prefix", noted)
        core.step()
        assert looked_up == [f"r{number}" for number in range(5)]
        monkeypatch.undo()
        finished = list[str]()
        while core.has_unfinished():
            finished += [output.request_id for output in core.step().outputs if output.finished]
        assert finished == [f"r{number}" for number in range(1, 50)]

    @pytest.mark.parametrize("policy", ["fcfs", "fair-share"])
    def test_what_a_request_finds_is_not_looked_up_while_it_lacks_a_slot_for_its_adapter(
        self, policy: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        core = make_core(max_num_seqs=64, max_num_batched_tokens=512, policy=policy, num_blocks=512, max_loras=1)
        for number in range(20):
            asked = request(f"r{number}", tokens=[number] * 16, max_tokens=4)
            asked.adapter = f"a{number % 2}"
            core.add_request(asked)
        looked_up, find = set[str | None](), BlockManager.find_prefix

        def noted(manager: BlockManager, group: SequenceGroup, *arguments: Any) -> Any:
            looked_up.add(group.request.adapter)
            return find(manager, group, *arguments)

        monkeypatch.setattr(BlockManager, "find_prefix", noted)
        core.step()
        assert looked_up == {"a0"}
        run(core)

    def test_a_request_that_has_its_first_token_has_no_deadline_any_more(self) -> None:
        core = make_core(max_num_seqs=2, policy="deadline", prefill_tokens_per_s=10.0)
        core.add_request(request("met", first_token_deadline_s=50.0, max_tokens=9))
        core.step()
        core.scheduler._preemption.preempt(core.scheduler.running[0])
        core.add_request(request("due", first_token_deadline_s=60.0))
        group = core.scheduler.waiting.peek(1.0)
        assert group is not None
        assert group.request_id == "due"
        run(core)

    @pytest.mark.parametrize(("own", "other", "does"), [((1, 5.0), (1, 9.0), False), ((1, 5.0), (2, 9.0), True)])
    def test_only_a_better_priority_outranks(
        self, own: tuple[int, float], other: tuple[int, float], does: bool
    ) -> None:
        policy = Priority(ageing_s=1.0)
        registry = Registry(make_manager(8, enable_prefix_caching=False), policy)
        groups = registry.new_groups(
            [
                request(str(priority) + str(arrival), priority=priority, arrival_time=arrival)
                for priority, arrival in (own, other)
            ]
        )
        assert policy.outranks(groups[0], groups[1], 10.0) is does

    def test_prefix_match_lets_who_was_preempted_go_first(self) -> None:
        core = make_core(max_num_seqs=1, policy="prefix-match", num_blocks=64)
        run(core, [request("first", tokens=[9] * 32)])
        core.add_request(request("cold", tokens=[1] * 16, max_tokens=9))
        core.step()
        core.scheduler._preemption.preempt(core.scheduler.running[0])
        core.add_request(request("warm", tokens=[9] * 32 + [2]))
        core.step()
        assert [group.request_id for group in core.scheduler.running] == ["cold"]
        run(core)

    def test_fair_share_serves_the_tenant_that_was_served_least(self) -> None:
        requests = [request(f"x{i}", tenant="x", max_tokens=4) for i in range(3)]
        requests += [request(f"y{i}", tenant="y", max_tokens=4) for i in range(3)]
        assert self.finished("fair-share", requests) == ["x0", "y0", "x1", "y1", "x2", "y2"]

    def test_fair_share_heeds_weights(self) -> None:
        requests = [request(f"x{i}", tenant="x", max_tokens=4) for i in range(4)]
        requests += [request(f"y{i}", tenant="y", max_tokens=4) for i in range(4)]
        order = self.finished("fair-share", requests, tenant_weights={"y": 3.0})
        assert [name[0] for name in order[:6]].count("y") == 4

    def test_fair_share_looks_at_few_tenants_for_each_group_that_waits(self) -> None:
        class Counted(dict[str, float]):
            num_reads = 0

            def __getitem__(self, tenant: str) -> float:
                Counted.num_reads += 1
                return super().__getitem__(tenant)

        core = make_core(max_num_seqs=64, max_num_batched_tokens=512, policy="fair-share", num_blocks=2048)
        policy, num_requests = core.scheduler.policy, 200
        assert isinstance(policy, FairShare)
        policy.counters = Counted()
        for number in range(num_requests):  # of which all wait for the prefix of the first
            core.add_request(request(f"r{number}", tokens=[9] * 16 + [number % 50], tenant=f"t{number}", max_tokens=1))
        core.step()
        assert Counted.num_reads < 20 * num_requests
        run(core)

    def test_fair_share_takes_the_least_served_whatever_was_pushed_removed_and_served(self) -> None:
        chosen, policy = random.Random(3), FairShare({"t1": 2.0})
        registry = Registry(make_manager(8, enable_prefix_caching=False), policy)
        names = ["", *(f"t{number}" for number in range(9))]
        asked = [request(str(number), tenant=chosen.choice(names) or None) for number in range(120)]
        outside, waiting = registry.new_groups(asked), list[SequenceGroup]()
        queue = WaitingGroups(policy)
        for group in outside:
            group.request.adapter = chosen.choice([None, "x", "y"])
        came: dict[str, None] = {}  # tenants that wait, in the order in which they came
        for _ in range(3000):
            if outside and chosen.random() < 0.5:
                waiting.append(group := outside.pop(chosen.randrange(len(outside))))
                policy.note_arrival(group)
                queue.push(group)
                came.setdefault(group.request.tenant or "")
            elif waiting:
                outside.append(group := waiting.pop(chosen.randrange(len(waiting))))
                queue.remove(group)
                if not any(other.request.tenant == group.request.tenant for other in waiting):
                    del came[group.request.tenant or ""]
                policy.note_end(group)
            if waiting:
                policy.note_service(chosen.choice(waiting), chosen.randrange(9), 1)
            queue.set_state(chosen.choice("xy"), chosen.choice(WITH_ADAPTERS))
            assert len(queue) == len(waiting)
            found = queue.peek(0.0)
            expected = min(came, key=policy.counters.__getitem__, default=None)
            assert (found is None) == (expected is None)
            assert found is None or (found.request.tenant or "") == expected

    def test_a_tenant_saves_nothing_up_while_it_is_away(self) -> None:
        policy = FairShare()
        policy.counters.update({"busy": 1000.0})
        registry = Registry(make_manager(8, enable_prefix_caching=False), policy)
        for group in registry.new_groups([request("b", tenant="busy"), request("n", tenant="new")]):
            registry.add(group)
        assert policy.counters["new"] == 1000.0

    def test_who_comes_when_nobody_waits_has_saved_nothing_up_either(self) -> None:
        core = make_core(max_num_seqs=1, policy="fair-share")
        run(core, [request(f"x{i}", tenant="x", max_tokens=8) for i in range(20)])
        core.add_request(request("x", tenant="x", max_tokens=8))
        core.step()
        for i in range(3):
            core.add_request(request(f"y{i}", tenant="y", max_tokens=8))
            core.add_request(request(f"x{i}", tenant="x", max_tokens=8))
        order = []
        while core.has_unfinished():
            order += [output.request_id for output in core.step().outputs if output.finished]
        assert order == ["x", "y0", "x0", "y1", "x1", "y2", "x2"]

    def test_tenants_that_come_once_are_forgotten(self) -> None:
        core = make_core(max_num_seqs=2, policy="fair-share")
        policy = core.scheduler.policy
        assert isinstance(policy, FairShare)
        for number in range(3000):
            core.add_request(request(f"{number}", tenant=f"t{number}", max_tokens=1))
            core.step()
            if number % 50 == 0:
                run(core)
            assert len(policy.counters) <= 300
        run(core)
        assert len(policy.counters) <= 300

    @pytest.mark.parametrize("seed", range(12))
    def test_who_is_forgotten_is_served_as_if_it_were_not(self, seed: int) -> None:
        def served(max_idle: int) -> tuple[list[tuple[str, int]], int]:
            """When each of 120 requests ended, and the most counters that were kept."""
            source = random.Random(seed)
            policy = FairShare({"t1": 3.0}, max_idle=max_idle)
            core = make_core(num_blocks=16, max_num_seqs=3)
            config = make_settings(num_blocks=16, max_num_seqs=3).scheduler
            core.scheduler = Scheduler(make_manager(16), config, policy)
            ended: list[tuple[str, int]] = []
            most = 0
            for number in range(120):
                tenant = f"t{source.randrange(4)}" if source.random() < 0.6 else f"once{number}"
                prompt, tokens = source.randrange(1, 20), source.randrange(1, 9)
                core.add_request(request(f"r{number}", prompt=prompt, tenant=tenant, max_tokens=tokens))
                for _ in range(source.randrange(0, 12) if source.random() < 0.5 else 1):
                    ended += [(output.request_id, number) for output in core.step().outputs if output.finished]
                if number % 17 == 5:
                    core.abort_requests([f"r{number - 2}"])
                most = max(most, len(policy.counters))
            run(core)
            return ended, most

        forgetful, keeping = served(0), served(10**9)
        assert forgetful[0] == keeping[0]
        assert forgetful[1] < keeping[1]

    def test_a_tenant_whose_group_does_not_fit_keeps_its_claim(self) -> None:
        core = make_core(policy="fair-share", num_blocks=8, max_num_batched_tokens=64)
        core.add_request(request("y0", prompt=13, tenant="y", max_tokens=9))
        core.step()
        core.add_request(request("x0", prompt=20, tenant="x"))
        for number in range(1, 3):
            core.add_request(request(f"y{number}", prompt=3, tenant="y"))
        policy = core.scheduler.policy
        assert isinstance(policy, FairShare)
        before = policy.counters["x"]
        for _ in range(3):
            core.step()
        assert [group.request_id for group in core.scheduler.running] == ["y0"]
        assert policy.counters["x"] == before < policy.counters["y"]


class TestVictims:
    def test_under_deadlines_who_has_most_time_gives_way(self) -> None:
        groups = [
            SequenceGroup(request(name, first_token_deadline_s=due), number, number)
            for number, (name, due) in enumerate([("none", None), ("soon", 5.0), ("later", 9.0)])
        ]
        policy = EarliestDeadline(Rates())
        assert policy.victim(groups).request_id == "none"
        assert policy.victim(groups[1:]).request_id == "later"
        assert policy.victim(groups[:2]).request_id == "none"

    def test_under_fair_share_the_most_served_tenant_gives_way(self) -> None:
        groups = [SequenceGroup(request(name, tenant=name), number, number) for number, name in enumerate("xy")]
        policy = FairShare()
        policy.note_service(groups[0], 10, 1)
        policy.note_service(groups[1], 2, 1)
        assert policy.victim(groups) is groups[0]


class TestPreemption:
    def test_a_better_priority_preempts_a_worse_one_that_runs(self) -> None:
        core = make_core(max_num_seqs=1, policy="priority")
        low, high = request("low", priority=5, max_tokens=6), request("high", priority=1, max_tokens=3)
        core.add_request(low)
        seen = Collected()
        seen.add(core.step().outputs)
        core.add_request(high)
        seen.add(core.step().outputs)
        assert [group.request_id for group in core.scheduler.running] == ["high"]
        run(core, collected=seen)
        assert seen.finals["low"].metrics is not None
        assert seen.finals["low"].metrics.num_preemptions == 1
        for each in (low, high):
            assert seen.token_ids[each.request_id] == run_alone(each).token_ids[each.request_id]

    def test_an_equal_priority_waits(self) -> None:
        core = make_core(max_num_seqs=1, policy="priority", priority_ageing=1e-3)
        run(core, [request("a", priority=1, arrival_time=9.0), request("b", priority=1)])
        assert core.stats().num_preemptions == 0

    def test_without_blocks_the_worst_priority_gives_way(self) -> None:
        core = make_core(num_blocks=6, policy="priority", max_num_batched_tokens=64)
        requests = [
            request("low", priority=9, prompt=8, max_tokens=8),
            request("high", priority=0, prompt=8, max_tokens=8),
        ]
        seen = run(core, requests)
        assert [seen.finals[name].metrics.num_preemptions for name in ("low", "high")] == [1, 0]  # type: ignore[union-attr]

    def test_those_behind_go_on_when_several_before_them_gave_way(self) -> None:
        core = make_core(
            num_blocks=8, block_size=8, policy="priority", max_num_batched_tokens=16, enable_prefix_caching=False
        )
        for name in "ab":
            core.add_request(request(name, prompt=1, max_tokens=9, priority=2))
        core.step()
        core.add_request(request("c", prompt=16, max_tokens=2, priority=1, n=3))
        core.step()
        core.add_request(request("d", prompt=30, max_tokens=3, priority=0))
        core.step()
        assert [group.request_id for group in core.scheduler.running] == ["a", "b", "c", "d"]
        while not core.stats().num_preemptions:
            core.step()
        # three new blocks for c: a and b give two, so c gives way as well
        assert [group.request_id for group in core.scheduler.running] == ["d"]
        run(core)

    def test_nobody_is_preempted_in_vain(self) -> None:
        core = make_core(num_blocks=16, policy="priority", max_num_batched_tokens=64, enable_prefix_caching=False)
        core.add_request(request("best", prompt=34, max_tokens=3))
        for name in "ab":
            core.add_request(request(name, prompt=10, max_tokens=2, priority=5))
        core.step()
        core.add_request(
            request("large", prompt=30, max_tokens=2, priority=1)
        )  # eight blocks: all but best's are seven
        core.step()
        assert core.stats().num_preemptions == 0
        assert {entry.kind for entry in core.scheduler.log.entries if entry.request_id == "large"} == {"blocked"}
        run(core)

    def test_as_few_as_suffice_give_way(self) -> None:
        core = make_core(num_blocks=9, policy="priority", max_num_batched_tokens=64, enable_prefix_caching=False)
        for name, prompt, priority in (("small", 2, 9), ("large", 22, 8), ("other", 6, 7)):
            core.add_request(request(name, prompt=prompt, priority=priority, max_tokens=3))
        core.step()
        core.add_request(request("better", prompt=20, priority=0))
        core.step()
        assert [group.request_id for group in core.scheduler.running] == ["small", "other", "better"]
        run(core)

    @pytest.mark.parametrize("policy", ["priority", "deadline"])
    def test_a_better_prompt_is_computed_before_the_rest_of_a_worse_one(self, policy: str) -> None:
        core = make_core(policy=policy, max_num_batched_tokens=8)
        core.add_request(request("long", prompt=80, priority=9))
        core.step()
        core.add_request(request("vip", prompt=12, priority=0, first_token_deadline_s=1e6))
        core.add_request(request("later", prompt=8, priority=9))
        firsts = []
        while len(firsts) < 3:
            firsts += [output.request_id for output in core.step().outputs if output.metrics and not output.finished]
        assert firsts == ["vip", "long", "later"]
        run(core)

    def test_the_classic_policy_preempts_for_a_better_priority_too(self) -> None:
        core = make_core(max_num_seqs=1, policy="priority", enable_chunked_prefill=False)
        core.add_request(request("low", priority=5, max_tokens=30))
        core.step()
        core.add_request(request("high", priority=1, max_tokens=3))
        core.step()
        assert [group.request_id for group in core.scheduler.running] == ["high"]
        run(core)

    def test_nobody_gives_way_who_frees_no_adapter_slot(self) -> None:
        core = make_core(max_loras=1, policy="priority", max_num_batched_tokens=64)
        core.add_request(request("best", priority=0, max_tokens=9, adapter="x"))
        core.add_request(request("worst", priority=5, max_tokens=9))
        core.step()
        core.add_request(request("middle", priority=1, adapter="y"))
        core.step()
        assert [group.request_id for group in core.scheduler.running] == ["best", "worst"]
        run(core)

    def test_no_more_give_way_than_one_that_frees_an_adapter_slot(self) -> None:
        core = make_core(max_loras=1, policy="priority", max_num_batched_tokens=64)
        for name, adapter in (("a", None), ("b", None), ("c", "x")):
            core.add_request(request(name, priority=5, max_tokens=9, adapter=adapter))
        core.step()
        core.add_request(request("better", priority=0, adapter="y"))
        core.step()
        assert [group.request_id for group in core.scheduler.running] == ["a", "b", "better"]
        run(core)


class TestBypass:
    def test_a_head_that_does_not_fit_is_passed_as_often_as_allowed(self) -> None:
        core = make_core(num_blocks=8, max_bypasses=2, max_num_batched_tokens=64)
        core.add_request(request("running", prompt=12, max_tokens=9))
        core.step()
        core.add_request(request("large", prompt=24, max_tokens=4))
        for i in range(4):
            core.add_request(request(f"small{i}", tokens=[30 + i], max_tokens=2))
        core.step()
        assert [group.request_id for group in core.scheduler.running] == ["running", "small0", "small1"]
        passes = [entry.because for entry in core.scheduler.log.entries if entry.kind == "passed"]
        assert passes == ["by small1, time 2"]
        run(core)

    def test_a_group_that_is_swapped_in_passes_too(self) -> None:
        core = make_core(
            num_blocks=7, max_bypasses=3, max_num_batched_tokens=64, num_host_blocks=1, preemption_mode="swap",
            enable_prefix_caching=False,
        )  # fmt: skip
        core.add_request(request("forks", prompt=4, n=2, max_tokens=9))
        core.add_request(request("large", prompt=12, max_tokens=8))
        core.add_request(request("small", prompt=3, max_tokens=9))
        while not any(entry.kind == "swapped_in" for entry in core.scheduler.log.entries):
            core.step()
        # the host had room for the small one only, and the device has room for it before the large one
        assert [group.request_id for group in core.scheduler.running] == ["forks", "small"]
        assert core.scheduler.groups["large"].num_passed == 1
        run(core)

    def test_by_default_nobody_is_passed(self) -> None:
        core = make_core(num_blocks=8, max_num_batched_tokens=64)
        for each in (
            request("running", prompt=12),
            request("large", prompt=24, max_tokens=2),
            request("small", prompt=1),
        ):
            core.add_request(each)
        core.step()
        assert [group.request_id for group in core.scheduler.running] == ["running"]


def request(
    name: str, prompt: int = 3, tokens: list[int] | None = None, max_tokens: int = 2, n: int = 1, **fields: Any
) -> EngineCoreRequest:
    tokens = tokens or [ord(name[0]) % 50 + i % 7 for i in range(prompt)]
    found = make_request(name, tokens, max_tokens=max_tokens, n=n)
    for field, value in fields.items():
        setattr(found, field, value)
    return found
