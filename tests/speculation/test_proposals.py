"""How many tokens a draft model guesses follows from its own time, the time of steps, and how often it is right."""

from __future__ import annotations

import numpy as np

from octavo.config.schema import SpeculativeConfig
from octavo.core.messages import EngineCoreRequest
from octavo.core.sequence import SequenceGroup
from octavo.core.step import NO_PROPOSALS, Proposals
from octavo.speculation.proposals import DraftCosts, ProposalLength
from octavo.speculation.speculation import Speculation
from tests.fakes.engine import make_request

FLAT = np.full(257, 0.05)
LINEAR = np.arange(257) * 0.01


def test_a_cheap_and_good_model_guesses_much_and_others_less() -> None:
    def best(probability: float, pass_s: float) -> int:
        return ProposalLength(8).choose(FLAT, 1, probability, pass_s)[0]

    assert best(0.95, 0.001) == 8
    assert 1 <= best(0.6, 0.005) < best(0.8, 0.005) < 8
    assert best(0.9, 0.05) == 0
    assert best(0.1, 0.01) == 0


def test_before_it_is_measured_it_guesses() -> None:
    length = ProposalLength(8)
    assert length.choose(FLAT, 3, 0.6, None) == Proposals(4, 3)
    assert length.kept(3) == Proposals(4, 3)


def test_under_load_it_is_asked_now_and_then_for_one_row() -> None:
    length = ProposalLength(8)
    probe = Proposals(2, 1)

    def choose() -> Proposals:
        chosen = length.choose(LINEAR, 100, 0.9, 0.001)
        if chosen == probe:
            length.note_measured()
        return chosen

    chosen = [choose() for _ in range(1000)]
    assert [step for step, each in enumerate(chosen, start=1) if each == probe] == [128, 384, 896]
    assert chosen.count(NO_PROPOSALS) == 997
    assert length.choose(FLAT, 1, 0.9, 0.001)[1] == 1
    assert [choose() for _ in range(128)][-1] == probe
    assert ProposalLength(8).choose(LINEAR, 1000, 0.9, 0.001) == NO_PROPOSALS
    assert ProposalLength(8).choose(LINEAR, 1000, 0.9, None) == NO_PROPOSALS
    assert ProposalLength(8).choose(LINEAR, 0, 0.9, 0.001) == NO_PROPOSALS


def test_a_probe_of_one_row_is_no_choice_for_the_steps_behind_it() -> None:
    length = ProposalLength(8)
    chosen = []
    for _ in range(400):
        kept = length.kept(1)
        chosen.append(length.choose(LINEAR, 1, 0.1, 0.02) if kept is None else kept)
    assert sum(each.num_rows for each in chosen) == 1


def test_a_draft_model_that_does_not_pay_takes_a_small_share_of_the_time() -> None:
    step_s, prompt_s, pass_s, spent_s, num_steps = 0.01, 0.02, 0.01, 0.0, 20_000
    length, is_drafted = ProposalLength(8), False
    for step in range(num_steps):
        if step % 8 == 0:  # a request of eight tokens
            is_drafted = length.drafts_prompt(8)
            if is_drafted:
                spent_s += prompt_s
                length.credit.note_saved(-prompt_s)
        kept = length.kept(1)
        chosen = length.choose(LINEAR, 1, 0.1, pass_s) if kept is None else kept
        if is_drafted and chosen.num_rows:
            spent_s += 2 * pass_s
            length.credit.note_saved(-2 * pass_s)
            length.note_measured()
        length.note_step(step_s, is_plain=True)
    assert 0.003 < spent_s / (num_steps * step_s) < 0.01


def test_guesses_that_seem_to_pay_and_do_not_are_given_up() -> None:
    length, plain_s, spent_s, lost_s = ProposalLength(8), 0.01, 0.0, 0.0
    length.note_step(plain_s, is_plain=True)
    for _ in range(20_000):
        kept = length.kept(1)
        chosen = length.choose(FLAT, 1, 0.9, 0.001) if kept is None else kept
        spent_s += plain_s
        if chosen.num_rows and length._num_since:  # each costs half a step, whatever the curve says
            length.note_saved(-0.005)
            spent_s, lost_s = spent_s + 0.005, lost_s + 0.005
        length.note_step(plain_s, is_plain=not chosen.num_rows)
    assert 0.001 < lost_s / spent_s < 0.015


def test_steps_without_guesses_are_measured_while_guesses_pay() -> None:
    length, chosen = ProposalLength(8), []
    for _ in range(2_000):
        kept = length.kept(1)
        chosen.append(length.choose(FLAT, 1, 0.9, 0.001) if kept is None else kept)
        length.note_saved(0.01)
    without = [step for step, each in enumerate(chosen) if not each.num_rows]
    first = [step for step in without if step - 1 not in without]
    assert all(set(range(step, step + 12)) <= set(without) for step in first)
    assert len(first) >= 5
    assert len(without) < 0.06 * len(chosen)


def test_plain_steps_count_where_the_one_before_was_plain_too() -> None:
    proposer = Speculation(SpeculativeConfig(method="draft_model", model="a"))
    for _ in range(8):
        proposer.note_step(1, 0.01, 1)
    assert proposer.costs.seconds()[1] == 1.0  # nothing is measured yet
    for _ in range(4):
        proposer.note_step(1, 0.01, 2)
    for _ in range(100):
        proposer.note_step(1, 0.02, 1)
    assert abs(proposer.costs.seconds()[1] - 0.01) < 1e-6
    for number in range(2, 10):  # a streak makes up for what was measured before
        proposer.note_step(1, 0.004, number)
    assert proposer.costs.seconds()[1] < 0.005


def test_what_guesses_save_is_spent_on_prompts() -> None:
    length = ProposalLength(8)
    assert length.drafts_prompt(8)  # before anything is measured
    length.credit.note_step(0.01)
    length.credit.note_saved(-0.33)
    assert not length.drafts_prompt(8)
    assert length.drafts_prompt(0)  # others may find what it computes
    length.credit.note_saved(-0.2)
    assert not length.drafts_prompt(0)
    length.credit.note_saved(0.3)
    assert length.drafts_prompt(8)


def test_the_time_of_a_pass_is_measured_by_rows() -> None:
    costs = DraftCosts()
    assert costs.pass_s(1) is None
    for _ in range(40):
        costs.note(1, 4, 0.04)
        costs.note(9, 2, 0.06)
    assert abs((costs.pass_s(1) or 0) - 0.01) < 1e-4
    assert abs((costs.pass_s(5) or 0) - 0.02) < 1e-3
    costs.note(1, 1, 5.0)
    assert (costs.pass_s(1) or 0) < 0.013


def test_a_slow_first_pass_is_soon_forgotten() -> None:
    costs = DraftCosts()
    costs.note(1, 1, 1.0)
    for _ in range(3):
        costs.note(1, 1, 0.01)
    assert (costs.pass_s(1) or 0) < 0.02


def drafting(request: EngineCoreRequest, known: list[int], proposed: tuple[int, ...], drawn: list[int]) -> list[int]:
    proposer = Speculation(SpeculativeConfig(method="draft_model", model="a", num_speculative_tokens=4))
    for num_tokens in (1, 2, 64):
        proposer.note_step(num_tokens, 0.05, 0)
    group = SequenceGroup(request, 0, 0)
    sequence = group.sequences[0]
    sequence.token_ids += known
    proposer.note_proposed(group, sequence, proposed, len(sequence.token_ids))
    sequence.token_ids += drawn
    assert proposer.begin_step(1)
    return proposer.propose(group, sequence, 4)


def test_what_is_left_of_guesses_is_used_while_they_are_right() -> None:
    request = make_request("a", [1, 2])
    assert drafting(request, [3], (4, 5, 6), []) == [4, 5, 6]
    assert drafting(request, [3], (4, 5, 6), [4]) == [5, 6]
    assert drafting(request, [3], (4, 5, 6), [7]) == []
    assert drafting(request, [3], (4, 5, 6), [4, 5, 6]) == []
