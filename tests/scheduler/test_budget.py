"""Budgets: what groups hold while they run, and what the rows of a step use up."""

from __future__ import annotations

import pytest

from octavo.core.media import MediaInput
from octavo.core.sequence import SequenceGroup
from octavo.scheduler.budget import (
    AdapterBudget,
    EncoderBudget,
    EncoderInput,
    SequenceBudget,
    TokenBudget,
    WholeSpans,
)
from octavo.scheduler.plan import StepPlan
from tests.fakes.engine import make_core, make_request, run, run_alone
from tests.fakes.executor import HashExecutor


def group(num_tokens: int = 4, adapter: str | None = None, n: int = 1) -> SequenceGroup:
    request = make_request("a", range(num_tokens), n=n)
    request.adapter = adapter
    return SequenceGroup(request, 0, 0)


class TestTokens:
    def test_what_is_left_is_granted(self) -> None:
        tokens, one = TokenBudget(5), group()
        assert tokens.grant(one, 0, 3) == 3
        tokens.take(one, 0, 3, 3)
        assert tokens.grant(one, 0, 3) == 2
        tokens.refund(one, 0, 3, 3)
        assert tokens.grant(one, 0, 9) == 5

    def test_prompts_never_have_more_tokens_left_than_the_step(self) -> None:
        tokens, one = TokenBudget(4), group()
        tokens.take(one, 0, 1, 1)
        tokens.take(one, 0, 2, 9)
        assert not tokens.is_full
        assert tokens.grant(one, 0, 5) == 1
        # the last token of a prompt that is cached otherwise is no chunk of a prompt
        tokens.take(one, 0, 1, 1)
        assert tokens.is_full
        assert tokens.grant(one, 0, 5) == 0

    def test_prompts_have_a_limit_of_their_own(self) -> None:
        tokens, one = TokenBudget(8), group()
        tokens.for_prompts = 3
        assert (tokens.grant(one, 0, 5), tokens.grant(one, 0, 1)) == (3, 1)
        tokens.take(one, 0, 3, 5)
        assert tokens.is_full
        assert tokens.grant(one, 0, 1) == 1
        tokens.refund(one, 2, 1, 3)  # a chunk of one token
        assert tokens.grant(one, 2, 3) == 1

    def test_a_prompt_gets_a_chunk_at_most(self) -> None:
        tokens, one = TokenBudget(8, 3), group()
        assert tokens.grant(one, 0, 5) == 3
        assert tokens.has_declined
        tokens.take(one, 0, 3, 5)
        assert [tokens.grant(one, 0, want) for want in (2, 9)] == [2, 3]


class TestGroups:
    def test_sequences_are_granted_all_or_none(self) -> None:
        sequences = SequenceBudget(5)
        sequences.admit(group(n=3))
        assert sequences.num_missing(group(n=2)) == 0
        assert sequences.num_missing(group(n=4)) == 2
        assert sequences.reason(group(n=4)) == "needs 4 sequences, 2 more may run"
        assert sequences.reason(group()) == "needs 1 sequence, 2 more may run"
        sequences.release(group(n=3))
        assert sequences.num_missing(group(n=5)) == 0

    def test_groups_with_the_same_adapter_share_its_slot(self) -> None:
        adapters = AdapterBudget(1, [group(), group(adapter="x")])
        assert [adapters.num_missing(group(adapter=name)) for name in (None, "x", "y")] == [0, 0, 1]
        adapters.admit(group(adapter="x"))
        adapters.release(group(adapter="x"))
        assert adapters.num_missing(group(adapter="y")) == 1
        adapters.release(group(adapter="x"))
        assert adapters.num_missing(group(adapter="y")) == 0


COSTS = [EncoderInput(2, 6), EncoderInput(5, 4), EncoderInput(6, 20)]
"""Offset and cost of the inputs of a group."""


class TestEncoderInputs:
    @pytest.mark.parametrize(
        ("start", "want", "granted"),
        [
            (0, 2, 2),  # before the first
            (0, 5, 5),
            (0, 6, 6),  # both cost the limit
            (0, 9, 6),  # the third does not fit beside them
            (3, 9, 3),  # the first was computed before
            (6, 9, 9),  # alone, though it is above the limit
        ],
    )
    def test_a_row_ends_before_the_first_input_that_does_not_fit(self, start: int, want: int, granted: int) -> None:
        assert EncoderBudget(10, lambda _: COSTS).grant(group(9), start, want) == granted

    def test_rows_of_a_step_share_the_limit_until_they_are_dropped(self) -> None:
        budget, one = EncoderBudget(10, lambda _: COSTS), group(9)
        budget.take(one, 0, 3, 9)
        assert budget.grant(one, 0, 9) == 2
        assert budget.grant(one, 3, 9) == 3
        budget.refund(one, 0, 3, 3)
        assert budget.grant(one, 0, 9) == 6

    def test_a_step_without_them_does_not_look(self) -> None:
        plan = StepPlan(TokenBudget(4), SequenceBudget(4))
        assert plan.row_budgets == [plan.tokens]

    def test_prompts_are_cut_where_an_input_does_not_fit(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Two prompts with an image each at the third token; one image fits into a step."""

        def begin_plan(config: object, registry: object) -> StepPlan:
            return StepPlan(TokenBudget(64), EncoderBudget(10, lambda _: [EncoderInput(2, 8)]), SequenceBudget(8))

        monkeypatch.setattr("octavo.scheduler.continuous.begin_plan", begin_plan)
        core = make_core(max_num_batched_tokens=64)
        requests = [make_request("a", range(6), max_tokens=2), make_request("b", range(9, 15), max_tokens=2)]
        seen = run(core, requests)
        assert isinstance(core.executor, HashExecutor)
        assert [[row.num_tokens for row in step.rows] for step in core.executor.steps] == [[6, 2], [1, 4], [1]]
        for request in requests:
            assert seen.token_ids[request.request_id] == run_alone(request).token_ids[request.request_id]


class TestWholeSpans:
    def make(self) -> SequenceGroup:
        request = make_request("a", range(40))
        request.media = (MediaInput("image", b"x" * 32, ((4, 6), (20, 6)), 12, {}, is_whole=True),)
        return SequenceGroup(request, 0, 0)

    @pytest.mark.parametrize(
        ("start", "want", "granted"),
        [(0, 4, 4), (0, 5, 4), (0, 10, 10), (0, 9, 4), (0, 22, 20), (7, 2, 3), (4, 1, 6), (12, 30, 30)],
    )
    def test_a_row_does_not_end_among_them(self, start: int, want: int, granted: int) -> None:
        assert WholeSpans(TokenBudget(100)).grant(self.make(), start, want) == granted

    def test_they_wait_for_a_step_that_has_room(self) -> None:
        assert WholeSpans(TokenBudget(5)).grant(self.make(), 4, 5) == 0

    def test_new_requests_do_not_take_the_tokens_that_they_wait_for(self) -> None:
        core = make_core(max_num_batched_tokens=16, max_num_seqs=8, num_blocks=256)
        for number in range(4):
            core.add_request(make_request(f"old{number}", [number], max_tokens=12))
        core.step()
        waiting = make_request("waiting", range(20), max_tokens=2)
        waiting.media = (MediaInput("image", b"x" * 32, ((2, 14),), 14, {}, is_whole=True),)
        core.add_request(waiting)
        for number in range(20):
            core.add_request(make_request(f"new{number}", [100 + number], max_tokens=12))
            core.step()
        assert "waiting" not in core.scheduler.groups
        run(core)
