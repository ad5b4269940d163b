"""The proposer of an engine: guesses come from where they may, save steps, and change nothing."""

from __future__ import annotations

import msgspec
import pytest

from octavo.config.speculative_args import SpeculativeConfig
from octavo.core.messages import EngineCoreRequest
from octavo.core.sequence import SequenceGroup
from octavo.speculation.length import MOST_TOKENS
from octavo.speculation.speculation import Speculation
from tests.fakes.engine import make_core, make_request, run, run_alone
from tests.fakes.executor import HashExecutor
from tests.fakes.proposer import LOOKUPS


def speculation(method: str = "ngram", **options: int) -> Speculation:
    made = Speculation(SpeculativeConfig(method=method, **options))  # type: ignore[arg-type]
    for num_tokens in (1, 2, 64):
        made.note_step(num_tokens, 0.05, 0)  # tokens are free here
    return made


def guesses(proposer: Speculation, request: EngineCoreRequest, *drawn: int) -> list[int]:
    group = SequenceGroup(request, 0, 0)
    sequence = group.sequences[0]
    sequence.token_ids += drawn
    assert proposer.begin_step(1)
    return proposer.propose(group, sequence, 4)


def salted(request_id: str, prompt: list[int], salt: str) -> EngineCoreRequest:
    return msgspec.structs.replace(make_request(request_id, prompt), cache_salt=salt)


def test_guesses_are_what_followed_the_last_tokens_before() -> None:
    assert guesses(speculation(), make_request("a", [5, 6, 7, 8, 9, 1]), 5, 6) == [7, 8, 9, 1]
    assert guesses(speculation(), make_request("a", [5, 6, 7, 8, 9, 1]), 2, 6) == []
    assert guesses(speculation(prompt_lookup_min=1), make_request("a", [5, 6, 7, 8, 9, 1]), 2, 6) == [7, 8, 9, 1]


def test_outputs_are_shared_where_a_prefix_cache_is() -> None:
    proposer = speculation("suffix")
    ended = salted("a", [1, 2], "one")
    group = SequenceGroup(ended, 0, 0)
    group.sequences[0].token_ids += [5, 6, 7, 8, 9]
    proposer.begin_step(1)
    proposer.propose(group, group.sequences[0], 4)
    group.sequences[0].status = type(group.sequences[0].status).FINISHED_STOPPED
    assert guesses(proposer, salted("b", [3, 4], "two"), 5, 6) == []
    assert guesses(proposer, salted("c", [3, 4], "one"), 5, 6) == [7, 8, 9, 7]
    assert guesses(speculation("ngram"), salted("c", [3, 4], "one"), 5, 6) == []


@pytest.mark.parametrize("method", LOOKUPS)
@pytest.mark.parametrize("depth", [1, 2])
def test_an_engine_with_guesses_gives_the_same_results(method: str, depth: int) -> None:
    requests = [
        make_request(f"r{i}", [i % 3, *range(10)] * 3, max_tokens=40, n=1 + i % 2, temperature=0.2, seed=i % 2)
        for i in range(6)
    ]
    alone = [run_alone(each) for each in requests]
    core = make_core(proposer=speculation(method), depth=depth, num_blocks=60)
    seen = run(core, requests)
    for request, expected in zip(requests, alone, strict=True):
        assert seen.token_ids[request.request_id] == expected.token_ids[request.request_id]
        assert seen.finish[request.request_id] == expected.finish[request.request_id]


def test_right_guesses_save_steps_and_are_counted() -> None:
    core = make_core(proposer=speculation("suffix"))
    executor = core.executor
    assert isinstance(executor, HashExecutor)
    run(core, [make_request("a", [1, 2], max_tokens=30)])
    first = len(executor.steps)
    run(core, [make_request("b", [1, 2], max_tokens=30)])
    assert len(executor.steps) - first < first / 2
    stats = core.stats()
    assert stats.num_draft_tokens >= stats.num_accepted_tokens > 15
    assert sum(stats.accepted_per_position) == stats.num_accepted_tokens


def test_a_predicted_output_is_guessed_from_its_beginning_and_found_again_behind_a_change() -> None:
    tokens = run_alone(make_request("a", [1, 2], max_tokens=30)).token_ids["a"][0]
    request = make_request("a", [1, 2], max_tokens=30)
    for wrong, most_steps in (([], 8), ([tokens[9] + 1], 16)):
        predicted = [*tokens[:9], *wrong, *tokens[10 if wrong else 9 :]]
        core = make_core(proposer=speculation())
        seen = run(core, [msgspec.structs.replace(request, prediction_token_ids=predicted)])
        assert seen.token_ids["a"][0] == tokens
        assert isinstance(core.executor, HashExecutor)
        assert len(core.executor.steps) <= most_steps


def test_where_nothing_is_found_text_is_searched_less_often() -> None:
    now = iter(range(1_000_000))
    proposer = Speculation(SpeculativeConfig(method="ngram"), clock=lambda: next(now) * 1e-4)
    group = SequenceGroup(make_request("a", [5, 6, 7, 8, 9, 1]), 0, 0)
    sequence = group.sequences[0]
    may_draft, num_resting = [], 0
    for token in range(100, 300):
        sequence.token_ids.append(token)
        if proposer.take_rest():
            may_draft.append(False)
            num_resting += 1
            continue
        may_draft.append(proposer.begin_step(1))
        if may_draft[-1]:
            assert proposer.propose(group, sequence, 4) == []
        proposer.note_step(1, 0.01, 2)
    assert all(may_draft[:32])
    assert num_resting > 100
    # to begin, to look, and to note a step take 0.1 ms each here: 3 % of a step
    assert 160 // 16 <= may_draft[50:].count(True) <= 160 // 10
    sequence.token_ids += [5, 6]
    while not proposer.begin_step(1):
        pass
    assert proposer.propose(group, sequence, 4) == [7, 8, 9, 1]
    assert proposer.begin_step(1)


def test_guesses_that_came_back_are_used_in_the_next_step() -> None:
    proposer = speculation("grammar")
    group = SequenceGroup(make_request("a", [5, 6]), 0, 0)
    sequence = group.sequences[0]
    for _ in range(200):
        if proposer.begin_step(1):
            proposer.propose(group, sequence, 4)
        sequence.token_ids.append(7)
        proposer.note_forced(group, sequence, (7, 7), len(sequence.token_ids))
        assert proposer.begin_step(1)
        assert proposer.propose(group, sequence, 4) == [7, 7]


def test_beside_many_sequences_a_step_is_begun_without_any_work() -> None:
    proposer = speculation()
    proposer.costs.seconds = None  # type: ignore[assignment, method-assign]
    assert not proposer.begin_step(MOST_TOKENS + 1)
    proposer.note_step(MOST_TOKENS + 1, 0.1, 0)
    with_model = speculation("draft_model")
    with_model.note_drawn(MOST_TOKENS + 9, 2 * MOST_TOKENS, 0.1)  # sequences were admitted behind the guesses
