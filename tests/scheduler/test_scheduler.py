"""What the scheduler promises, one behaviour at a time; the executor is the hash fake."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.core.outputs import PinnedPrefix
from octavo.core.step import SchedulerOutput
from octavo.engine.engine_core import EngineCore
from octavo.scheduler.budget import TokenBudget
from octavo.scheduler.plan import StepPlan
from tests.fakes.accounting import check_scheduler
from tests.fakes.engine import Collected, make_core, make_request, run, run_alone
from tests.fakes.executor import HashExecutor

PROMPTS = [("a", 0, 7), ("b", 10, 5), ("c", 20, 2)]
"""Names, first tokens and lengths."""


def steps_of(core: EngineCore) -> list[SchedulerOutput]:
    assert isinstance(core.executor, HashExecutor)
    return core.executor.steps


def row_tokens(core: EngineCore) -> list[list[int]]:
    return [[row.num_tokens for row in step.rows] for step in steps_of(core)]


def preempt_in_a_step(core: EngineCore) -> None:
    """Take the first running group's blocks away by a step of its own, while other steps are on their way."""
    scheduler, plan = core.scheduler, StepPlan(TokenBudget(16))
    scheduler._preemption.preempt(scheduler.running[0], plan)
    assert isinstance(core.executor, HashExecutor)
    core.executor.execute(plan.output(0, []))


class TestBatching:
    def test_a_long_prompt_is_computed_in_chunks_beside_running_sequences(self) -> None:
        core = make_core(max_num_batched_tokens=8)
        core.add_request(make_request("a", range(4), max_tokens=6))
        core.step()
        core.add_request(make_request("b", range(10, 30), max_tokens=2))
        for _ in range(4):
            core.step()
        assert row_tokens(core) == [[4], [1, 7], [1, 7], [1, 6], [1, 1]]

    def test_long_prompts_share_steps_where_chunks_have_a_limit(self) -> None:
        core = make_core(max_num_batched_tokens=8, long_prefill_token_threshold=3)
        run(core, [make_request(name, range(start, start + length), max_tokens=1) for name, start, length in PROMPTS])
        assert row_tokens(core) == [[3, 3, 2], [3, 2], [1]]

    def test_only_the_chunk_with_the_last_token_draws(self) -> None:
        core = make_core(max_num_batched_tokens=8)
        run(core, [make_request("a", range(20), max_tokens=1)])
        assert [[row.num_samples for row in step.rows] for step in steps_of(core)] == [[0], [0], [1]]

    def test_a_group_counts_with_the_most_sequences_it_can_still_run(self) -> None:
        core = make_core(max_num_seqs=4)
        core.add_request(make_request("a", range(3), n=3))
        core.add_request(make_request("b", range(3, 6), n=2))
        core.add_request(make_request("c", range(6, 9)))
        core.step()
        assert [group.request_id for group in core.scheduler.running] == ["a"]
        run(core)
        assert max(len(step.rows) for step in steps_of(core)) <= 4

    def test_first_come_first_served(self) -> None:
        core = make_core(num_blocks=4)
        core.add_request(make_request("large", range(12), max_tokens=4))
        core.add_request(make_request("larger", range(20, 32), max_tokens=4))
        core.add_request(make_request("small", [40], max_tokens=1))
        core.step()
        assert [group.request_id for group in core.scheduler.running] == ["large"]

    def test_table_changes_travel_as_differences(self) -> None:
        core = make_core(block_size=4)
        run(core, [make_request("a", range(3), max_tokens=7)])
        rows = [step.rows[0] for step in steps_of(core)]
        assert [[(change.first_index, len(change.block_ids)) for change in row.table_changes] for row in rows] == [
            [], [], [(1, 1)], [], [], [], [(2, 1)],
        ]  # fmt: skip


class TestAdmission:
    def test_a_request_that_can_never_fit_ends_with_an_error_and_the_others_finish(self) -> None:
        core = make_core(num_blocks=4)
        seen = run(core, [make_request("huge", range(17)), make_request("good", range(3))])
        error = seen.finals["huge"].error
        assert error is not None
        assert error.is_client_error
        assert "4" in error.message
        assert "max_tokens" in error.message
        assert seen.finish["good"][0][0] == "length"

    def test_more_sequences_than_can_run_at_once_are_refused(self) -> None:
        seen = run(make_core(max_num_seqs=2), [make_request("a", [1], n=3)])
        error = seen.finals["a"].error
        assert error is not None
        assert error.field == "n"

    def test_the_watermark_is_waived_when_nothing_runs(self) -> None:
        core = make_core(num_blocks=10, watermark=0.5)
        seen = run(core, [make_request("a", range(36), max_tokens=2), make_request("b", range(36), max_tokens=2)])
        assert set(seen.finals) == {"a", "b"}

    def test_the_watermark_holds_back_a_second_request(self) -> None:
        core = make_core(num_blocks=10, watermark=0.5, max_num_batched_tokens=64)
        core.add_request(make_request("a", range(16), max_tokens=2))
        core.add_request(make_request("b", range(20, 36), max_tokens=2))
        core.step()
        assert len(core.scheduler.running) == 1

    def test_a_prompt_that_takes_the_whole_pool_does_not_wait_for_a_block_to_copy_from(self) -> None:
        core = make_core(num_blocks=3)
        run(core, [make_request("first", range(5), max_tokens=1)])
        request = make_request("alike", [0, 1, *[9] * 10], max_tokens=1)
        assert run(core, [request]).token_ids == run_alone(request).token_ids

    def test_lookahead_slots_are_counted_before_a_group_comes_in(self) -> None:
        core = make_core(num_blocks=3, num_lookahead_slots=3, max_num_batched_tokens=64)
        core.add_request(make_request("first", range(4), max_tokens=2))
        core.step()
        core.add_request(make_request("second", range(20, 24), max_tokens=1))
        core.step()
        run(core)
        assert core.stats().num_preemptions == 0

    def test_pins_go_when_the_only_group_that_runs_needs_their_blocks(self) -> None:
        core = make_core(num_blocks=8, max_num_batched_tokens=64)
        run(core, [make_request("first", range(17), max_tokens=1)])
        assert core.pin_prefix(list(range(17)), 1e9).num_tokens == 16
        request = make_request("long", range(30, 39), max_tokens=20)
        assert run(core, [request]).token_ids == run_alone(request).token_ids
        assert core.stats().num_preemptions == 0

    def test_pins_stay_while_another_group_can_give_way(self) -> None:
        core = make_core(num_blocks=8, max_num_batched_tokens=64)
        run(core, [make_request("first", range(9), max_tokens=1)])
        assert core.pin_prefix(list(range(9)), 1e9).num_tokens == 8
        core.add_request(make_request("old", range(30, 39), max_tokens=9))
        core.add_request(make_request("young", range(20, 29), max_tokens=9))
        while not core.stats().num_preemptions:
            core.step()
        assert core.scheduler.block_manager.pins.num_blocks == 2

    def test_an_id_in_use_is_refused_and_the_first_request_goes_on(self) -> None:
        core = make_core()
        core.add_request(make_request("a", [1, 2]))
        core.add_request(make_request("a", [3]))
        outputs = core.step().outputs
        assert [output.error is not None for output in outputs] == [True, False]


class TestPrefixCache:
    def test_a_second_request_computes_only_what_is_new(self) -> None:
        core = make_core(block_size=4, max_num_batched_tokens=64)
        run(core, [make_request("a", [*range(12), 1], max_tokens=1)])
        seen = run(core, [make_request("b", [*range(12), 2, 3], max_tokens=1)])
        assert seen.finals["b"].num_cached_tokens == 12
        assert row_tokens(core)[-1] == [2]

    def test_a_request_waits_for_a_prefix_that_this_step_computes(self) -> None:
        core = make_core(block_size=4, max_num_batched_tokens=64)
        prompts = [[*range(12), tail] for tail in (20, 21, 22)]
        seen = run(core, [make_request(f"r{i}", prompt, max_tokens=2) for i, prompt in enumerate(prompts)])
        assert row_tokens(core) == [[13], [1, 1, 1], [1, 1]]
        assert [seen.finals[f"r{i}"].num_cached_tokens for i in range(3)] == [0, 12, 12]

    def test_others_pass_a_request_that_waits_for_its_prefix(self) -> None:
        core = make_core(block_size=4, max_num_batched_tokens=64)
        core.add_request(make_request("a", [*range(8), 1], max_tokens=2))
        core.add_request(make_request("b", [*range(8), 2], max_tokens=2))
        core.add_request(make_request("c", [30, 31], max_tokens=2))
        core.step()
        assert [group.request_id for group in core.scheduler.running] == ["a", "c"]

    def test_a_pin_outlives_the_demand_and_ends_when_it_stands_in_the_way(self) -> None:
        core = make_core(num_blocks=8, max_num_batched_tokens=64)
        pinned = core.call("pin_prefix", list(range(8)), 1e9, None)
        assert pinned == {"num_tokens": 8, "num_cached_tokens": 0, "because": ""}
        collected = Collected()

        def num_cached(name: str, prompt: list[int]) -> int:
            core.add_request(make_request(name, prompt, max_tokens=1))
            while core.has_unfinished():
                collected.add(core.step().outputs)
                check_scheduler(core.scheduler)
            return collected.finals[name].num_cached_tokens

        assert num_cached("first", [*range(8), 40]) == 0
        assert num_cached("large", [30] * 24) == 0
        assert num_cached("again", [*range(8), 41]) == 8
        assert core.stats().num_pinned_blocks == 2
        assert num_cached("whole", [31] * 32) == 0
        (entry,) = [entry for entry in core.scheduler.log.entries if entry.kind == "unpinned"]
        assert (entry.request_id, entry.because) == ("whole", "pins held 2 blocks, and it runs only without them")
        assert num_cached("last", [*range(8), 42]) == 0
        assert core.call("unpin_prefix", list(range(8))) is False

    def test_prompt_logprobs_do_not_read_the_cache(self) -> None:
        core = make_core(block_size=4, max_num_batched_tokens=64)
        run(core, [make_request("a", range(12), max_tokens=1)])
        seen = run(core, [make_request("b", range(12), max_tokens=1, prompt_logprobs=0)])
        assert seen.finals["b"].num_cached_tokens == 0
        assert len(seen.prompt_logprobs["b"]) == 11

    def test_a_request_that_skips_the_cache_computes_its_prompt_and_fills_it(self) -> None:
        core = make_core(block_size=4, max_num_batched_tokens=64)
        run(core, [make_request("first", range(12), max_tokens=1)])
        skipping = make_request("skipping", range(16), max_tokens=1, skip_reading_prefix_cache=True)
        assert core.scheduler.block_manager.num_cached_tokens(skipping) == 0
        assert run(core, [skipping]).finals["skipping"].num_cached_tokens == 0
        assert run(core, [make_request("last", range(16), max_tokens=1)]).finals["last"].num_cached_tokens == 15

    def test_reset_is_refused_while_requests_run(self) -> None:
        core = make_core()
        core.add_request(make_request("a", range(9), max_tokens=4))
        core.step()
        assert core.call("reset_prefix_cache") is False
        run(core)
        assert core.call("reset_prefix_cache") is True


class TestPreemption:
    def test_the_youngest_gives_way_and_everybody_finishes_with_the_same_text(self) -> None:
        requests = [make_request(f"r{i}", range(10 * i, 10 * i + 8), max_tokens=12) for i in range(3)]
        core = make_core(num_blocks=9, max_num_batched_tokens=32)
        for request in requests:
            core.add_request(request)
        core.step()
        assert len(core.scheduler.running) == 3
        seen = run(core, max_steps=500)
        assert seen.finals["r0"].metrics is not None
        assert seen.finals["r0"].metrics.num_preemptions == 0
        assert core.stats().num_preemptions > 0
        again = run(make_core(num_blocks=9, max_num_batched_tokens=32), requests)
        for request in requests:
            assert again.token_ids[request.request_id] == run_alone(request).token_ids[request.request_id]

    @pytest.mark.parametrize("enable_prefix_caching", [False, True])
    def test_a_preempted_group_computes_its_common_prefix_once(self, enable_prefix_caching: bool) -> None:
        core = make_core(num_blocks=32, max_num_batched_tokens=64, enable_prefix_caching=enable_prefix_caching)
        request = make_request("a", range(21), n=3, max_tokens=8)
        core.add_request(request)
        seen = Collected()
        for _ in range(4):
            seen.add(core.step().outputs)
        core.scheduler._preemption.preempt(core.scheduler.running[0])
        assert isinstance(core.executor, HashExecutor)
        before = core.executor.num_computed_tokens
        seen.add(core.step().outputs + core.step().outputs)
        recomputed = core.executor.num_computed_tokens - before
        known_tails = 3 * 4
        # from the cache the prefix comes whole, so the second step draws already
        assert recomputed == (3 if enable_prefix_caching else 21) + known_tails
        # the newest token of each sequence had not been computed before
        assert core.stats().num_recomputed_tokens == (0 if enable_prefix_caching else 21) + known_tails - 3
        assert run(core, collected=seen).token_ids == run_alone(request).token_ids

    def test_a_preempted_prompt_longer_than_the_step_comes_back_in_chunks(self) -> None:
        core = make_core(num_blocks=16, max_num_batched_tokens=8, enable_prefix_caching=False)
        request = make_request("a", range(5), max_tokens=30)
        core.add_request(request)
        for _ in range(21):
            core.step()
        core.scheduler._preemption.preempt(core.scheduler.running[0])
        seen = run(core)
        assert seen.token_ids["a"][0] == run_alone(request).token_ids["a"][0][21:]
        assert max(step.num_tokens for step in steps_of(core)) <= 8

    @pytest.mark.parametrize("depth", [1, 2, 3])
    def test_a_sequence_that_comes_back_in_the_next_step_is_announced_once(self, depth: int) -> None:
        # the younger one gives way in a step that then has no row, so that its dismissal travels with its return
        requests = [make_request("a", range(3), max_tokens=1), make_request("b", range(10, 18), max_tokens=4)]
        core = make_core(num_blocks=3, depth=depth)
        seen = run(core, requests)
        announced = [(new.seq_id, new.epoch) for step in steps_of(core) for new in step.new_sequences]
        assert len(announced) == len(set(announced))
        assert seen.token_ids["b"] == run_alone(requests[1]).token_ids["b"]
        assert core.stats().num_preemptions == (depth > 1)

    @pytest.mark.parametrize("mode", ["recompute", "swap"])
    @pytest.mark.parametrize("num_steps", [1, 3])  # the last one draws
    def test_prompt_logprobs_of_a_step_on_its_way_survive_a_preemption(self, mode: str, num_steps: int) -> None:
        request = make_request("a", range(30), max_tokens=2, prompt_logprobs=0)
        core = make_core(max_num_batched_tokens=8, depth=2, preemption_mode=mode, num_host_blocks=16)
        core.add_request(request)
        seen = Collected()
        for _ in range(num_steps):
            seen.add(core.step().outputs)
        preempt_in_a_step(core)
        run(core, collected=seen)
        alone = run_alone(request)
        assert (seen.prompt_logprobs, seen.token_ids) == (alone.prompt_logprobs, alone.token_ids)

    @pytest.mark.parametrize("mode", ["recompute", "swap"])
    def test_a_row_that_failed_on_its_way_ends_its_request_though_it_was_preempted(self, mode: str) -> None:
        core = make_core(
            max_num_batched_tokens=8, depth=2, preemption_mode=mode, num_host_blocks=16, fail_token=9
        )  # fmt: skip
        core.add_request(make_request("a", range(30), max_tokens=2))
        core.step()
        preempt_in_a_step(core)
        assert run(core).finals["a"].error is not None


def test_without_prefix_caching_there_is_nothing_to_pin() -> None:
    core = make_core(enable_prefix_caching=False)
    assert core.pin_prefix(list(range(8)), 1.0, None) == PinnedPrefix(because="prefix caching is off")


class TestForks:
    def test_the_prompt_is_computed_once_and_its_full_blocks_are_shared(self) -> None:
        core = make_core(block_size=4, max_num_batched_tokens=64)
        core.add_request(make_request("a", range(10), n=4, max_tokens=4))
        core.step()
        core.step()
        assert row_tokens(core) == [[10], [1, 1, 1, 1]]
        assert len(steps_of(core)[1].block_ops.copies) == 3
        assert core.stats().num_used_blocks == 2 + 4

    def test_children_are_announced_as_forks_of_their_parent(self) -> None:
        core = make_core(max_num_batched_tokens=64)
        core.add_request(make_request("a", range(10), n=3, max_tokens=4))
        core.step()
        core.step()
        children = steps_of(core)[1].new_sequences
        assert [(child.num_shared_tokens, len(child.token_ids)) for child in children] == [(10, 1), (10, 1)]

    def test_a_child_lives_on_when_its_parent_has_finished(self) -> None:
        request = make_request("a", range(10), n=3, max_tokens=6, seed=1)
        alone = run_alone(request)
        first = alone.token_ids["a"][0][0]
        ending = make_request("a", range(10), n=3, max_tokens=6, seed=1, end_token_ids=(first,))
        seen = run(make_core(), [ending])
        assert (seen.token_ids["a"][0], seen.finish["a"][0]) == ([first], ("stop", None))
        assert len(seen.token_ids["a"][1]) > 1


class TestEnds:
    def test_an_end_of_sequence_id_has_no_stop_reason_and_a_stop_id_names_itself(self) -> None:
        tokens = run_alone(make_request("a", [1, 2, 3])).token_ids["a"][0]
        eos = run_alone(make_request("a", [1, 2, 3], end_token_ids=(tokens[2],)))
        stop = run_alone(make_request("a", [1, 2, 3], stop_token_ids=(tokens[2],)))
        assert eos.finish["a"][0] == ("stop", None)
        assert stop.finish["a"][0] == ("stop", tokens[2])
        assert eos.token_ids["a"][0] == tokens[: tokens.index(tokens[2]) + 1]

    @pytest.mark.parametrize("depth", [1, 3])
    def test_a_sequence_that_repeats_itself_ends_there_but_not_before_its_least_tokens(self, depth: int) -> None:
        def tokens(**params: Any) -> tuple[list[int], tuple[str, object]]:
            seen = run(make_core(depth=depth), [make_request("a", [1, 2, 3], max_tokens=100, **params)])
            return seen.token_ids["a"][0], seen.finish["a"][0]

        plain, _ = tokens()
        pairs = [at + 1 for at in range(1, len(plain)) if plain[at] == plain[at - 1]]
        assert len(pairs) > 1
        wanted = {"max_pattern_size": 1, "min_count": 2}
        assert tokens(repetition_detection=wanted) == (plain[: pairs[0]], ("repetition", None))
        later = tokens(repetition_detection=wanted, min_tokens=pairs[0] + 1)
        assert later == (plain[: pairs[1]], ("repetition", None))

    def test_an_aborted_request_gives_its_blocks_back_and_says_nothing_more(self) -> None:
        core = make_core(depth=2)
        core.add_request(make_request("a", range(9)))
        core.step()
        core.abort_requests(["a", "unknown"])
        assert core.stats().num_used_blocks == 0
        assert run(core).finals == {}

    def test_a_stopped_sequence_ends_and_its_siblings_go_on(self) -> None:
        core = make_core()
        core.add_request(make_request("a", range(5), n=2, max_tokens=6))
        core.step()
        core.stop_sequence("a", 0)
        seen = run(core)
        assert list(seen.finish["a"]) == [1]

    def test_a_sequence_that_ends_while_it_computes_for_its_siblings_leaves_them_whole(self) -> None:
        request = make_request("a", range(20), n=3, max_tokens=6)
        core = make_core(enable_prefix_caching=False, max_num_batched_tokens=8)
        core.add_request(request)
        seen = Collected()
        for _ in range(4):
            seen.add(core.step().outputs)
        group = core.scheduler.running[0]
        core.scheduler._preemption.preempt(group)
        seen.add(core.step().outputs)
        assert group.refork_at is not None
        core.stop_sequence("a", 0)
        check_scheduler(core.scheduler)
        run(core, collected=seen)
        alone = run_alone(request).token_ids["a"]
        assert [seen.token_ids["a"][index] for index in (1, 2)] == [alone[1], alone[2]]

    def test_a_failed_row_ends_its_request_only(self) -> None:
        good, bad = make_request("good", range(4)), make_request("bad", [1, 2, 49, 3])
        seen = run(make_core(fail_token=49), [bad, good])
        assert seen.finals["bad"].error is not None
        assert "NaN" in seen.finals["bad"].error.message
        assert seen.finals["good"].error is None

    def test_what_a_failed_row_computed_is_not_found_by_the_next(self) -> None:
        core = make_core(fail_token=49)
        first = run(core, [make_request("first", [1, 2, 3, 4, 5], max_tokens=1)])
        run(core, [make_request("bad", [1, 2, 3, 4, 49, 6, 7, 8, 9])], collected=first)
        again = make_request("again", [1, 2, 3, 4, 49, 6, 7, 8, 10])
        error = run(core, [again], collected=first).finals["again"].error
        assert error is not None
        assert "NaN" in error.message
        # what others had computed before it went wrong is still found
        assert core.stats().num_cached_tokens == 8

    def test_no_step_is_planned_past_the_last_token(self) -> None:
        core = make_core(depth=3)
        run(core, [make_request("a", range(4), max_tokens=5)])
        assert len(steps_of(core)) == 5


class TestMetrics:
    def test_times_of_a_request_stand_in_order(self) -> None:
        seen = run(make_core(), [make_request("a", range(4), max_tokens=3)])
        metrics = seen.finals["a"].metrics
        assert metrics is not None
        assert metrics.first_scheduled_time is not None
        assert metrics.first_token_time is not None
        assert metrics.finished_time is not None
        assert metrics.first_scheduled_time < metrics.first_token_time < metrics.finished_time

    def test_the_first_token_brings_the_times_so_far(self) -> None:
        core = make_core()
        core.add_request(make_request("a", range(4), max_tokens=3))
        first, second = core.step().outputs[0], core.step().outputs[0]
        assert first.metrics is not None
        assert first.metrics.first_token_time is not None
        assert second.metrics is None

    def test_prompt_tokens_count_when_they_are_computed_and_once(self) -> None:
        core = make_core(max_num_batched_tokens=8, block_size=4, num_blocks=10, preemption_mode="recompute")
        core.add_request(make_request("a", range(20), max_tokens=20))
        counts = []
        for _ in range(4):
            core.step()
            counts.append(core.stats().num_prompt_tokens)
        assert counts == [8, 16, 20, 20]
        run(core, [make_request("b", range(50, 62), max_tokens=20)])
        assert core.stats().num_preemptions > 0
        assert core.stats().num_prompt_tokens == 32

    def test_counts_add_up(self) -> None:
        core = make_core(max_num_batched_tokens=64)
        run(core, [make_request("a", range(9), max_tokens=3), make_request("b", range(9), n=2, max_tokens=3)])
        stats = core.stats()
        assert (stats.num_prompt_tokens, stats.num_generated_tokens) == (18, 3 + 6)
        assert stats.num_cached_tokens == 8
        assert (stats.num_running, stats.num_waiting, stats.num_used_blocks) == (0, 0, 0)
