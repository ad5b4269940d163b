from __future__ import annotations

import pytest
import torch

from octavo.core.sampling_params import SamplingParams
from octavo.core.step import BlockCopy, BlockOps, ModelRunnerOutput, TableChange
from octavo.worker import drawing
from tests.worker.prefix_model import VOCAB, make_runner, new_sequence, next_token, row, step, tokens_of


def continued(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


def test_a_prompt_and_its_decode_steps() -> None:
    runner, _ = make_runner()
    prompt = [3, 1, 4, 1, 5]
    drawn = tokens_of(runner.execute(step([new_sequence(1, prompt, [2, 5])], [row(1, 0, 5)])))
    for position in range(5, 11):
        # the table grows by a delta where a block begins
        delta = {"table_changes": [TableChange(0, position // 4, [7 + position])]} if position % 4 == 0 else {}
        drawn += tokens_of(runner.execute(step(rows=[row(1, position, 1, **delta)])))
    assert [each[0] for each in drawn] == continued(prompt, 7)


def test_a_prompt_in_pieces_gives_what_it_gives_at_once() -> None:
    runner, _ = make_runner()
    prompt = list(range(10, 21))
    runner.execute(step([new_sequence(1, prompt, [9])], [row(1, 0, 4, 0)]))
    runner.execute(step(rows=[row(1, 4, 5, 0, table_changes=[TableChange(0, 1, [3, 4])])]))
    assert tokens_of(runner.execute(step(rows=[row(1, 9, 2)]))) == [continued(prompt, 1)]


def test_rows_of_all_kinds_in_one_step() -> None:
    runner, model = make_runner()
    runner.execute(step([new_sequence(1, [1, 2, 3], [1])], [row(1, 0, 3)]))
    first = continued([1, 2, 3], 2)
    output = runner.execute(
        step(
            [new_sequence(2, [7] * 6, [2, 3]), new_sequence(3, [8, 9], [4])],
            [row(2, 0, 5, 0), row(1, 3, 1), row(3, 0, 2)],
        )
    )
    assert tokens_of(output) == [[], [first[1]], continued([8, 9], 1)]
    assert [each.seq_id for each in output.rows] == [2, 1, 3]
    assert model.batches[-1] == [7, 7, 7, 7, 7, first[0], 8, 9]


def test_a_decode_step_is_filled_up_with_copies_that_change_nothing() -> None:
    runner, model = make_runner(max_num_tokens=7, padded=lambda num_rows: -(-num_rows // 4) * 4)
    prompts = [[8, 9], [3, 1], [4, 5]]
    new = [new_sequence(number, prompt, [number]) for number, prompt in enumerate(prompts, 1)]
    steps = [tokens_of(runner.execute(step(new, [row(each.seq_id, 0, 2) for each in new])))]
    assert len(model.batches[-1]) == 6, "prompts are left as they are"
    steps.append(tokens_of(runner.execute(step([], [row(each.seq_id, 2, 1) for each in new]))))
    (first,), *_ = steps[0]
    assert model.batches[-1] == [*(token_id for (token_id,) in steps[0]), first]
    more = [new_sequence(number, [6], [number]) for number in (4, 5)]
    rows = [*(row(each.seq_id, 3, 1) for each in new), *(row(each.seq_id, 0, 1) for each in more)]
    steps.append(tokens_of(runner.execute(step(more, rows))))
    assert len(model.batches[-1]) == 7, "no step has more tokens than there is room for"
    for number, prompt in enumerate(prompts):
        assert [token_id for drawn in steps for token_id in drawn[number]] == continued(prompt, 3)
    assert steps[-1][3:] == [continued([6], 1)] * 2


def test_a_table_can_be_replaced_from_an_entry_on() -> None:
    runner, _ = make_runner()
    prompt = [5, 6, 7, 8, 9, 10]
    runner.execute(step([new_sequence(1, prompt, [1, 2])], [row(1, 0, 6)]))
    token = continued(prompt, 1)
    ops = BlockOps(copies=[BlockCopy(2, 6)])
    output = runner.execute(step(rows=[row(1, 6, 1, table_changes=[TableChange(0, 1, [6])])], block_ops=ops))
    assert tokens_of(output) == [continued([*prompt, *token], 1)]


def test_children_fork_with_the_parents_cache_and_tokens() -> None:
    runner, _ = make_runner()
    params = SamplingParams(temperature=3.0, seed=5, n=3)
    prompt = [11, 12, 13, 14, 15]
    output = runner.execute(step([new_sequence(1, prompt, [1, 2], params=params)], [row(1, 0, 5, 3)]))
    assert len(output.rows[0].tokens) == 3
    drawn = tokens_of(output)[0]
    children = [
        new_sequence(
            1 + i, [drawn[i]], [1, 2 + i], params=params, num_prompt_tokens=5, index=i, parent_id=1, num_shared_tokens=5
        )
        for i in (1, 2)
    ]
    ops = BlockOps(copies=[BlockCopy(2, 3), BlockCopy(2, 4)])
    output = runner.execute(step(children, [row(1, 5, 1), row(2, 5, 1), row(3, 5, 1)], block_ops=ops))
    # each goes on as a sequence would that drew its token alone
    for i, token in enumerate(tokens_of(output)):
        alone, _ = make_runner()
        single = new_sequence(9, [*prompt, drawn[i]], [1, 2], params=params, num_prompt_tokens=5, index=i)
        assert tokens_of(alone.execute(step([single], [row(9, 0, 6)]))) == [token]


def test_a_fork_may_name_a_parent_that_finishes_in_the_same_step() -> None:
    runner, _ = make_runner()
    runner.execute(step([new_sequence(1, [1, 2, 3], [1])], [row(1, 0, 3)]))
    child = new_sequence(2, [50], [1], num_prompt_tokens=3, parent_id=1, num_shared_tokens=3)
    output = runner.execute(step([child], [row(2, 3, 1)], finished=[1]))
    assert tokens_of(output) == [continued([1, 2, 3, 50], 1)]
    assert 1 not in runner.sequences


def test_a_preempted_sequence_that_comes_back_in_the_same_step_stays() -> None:
    runner, _ = make_runner()
    runner.execute(step([new_sequence(1, [1, 2, 3], [1])], [row(1, 0, 3)]))
    again = new_sequence(1, [1, 2, 3, *continued([1, 2, 3], 1)], [6], num_prompt_tokens=3, epoch=1)
    output = runner.execute(step([again], [row(1, 0, 4, epoch=1)], finished=[1]))
    assert tokens_of(output) == [continued([1, 2, 3], 2)[1:]]


def test_a_row_of_another_life_is_a_broken_promise() -> None:
    runner, _ = make_runner()
    with pytest.raises(AssertionError, match="another life"):
        runner.execute(step([new_sequence(1, [1], [1], epoch=2)], [row(1, 0, 1, epoch=1)]))


def test_a_step_without_rows_only_takes_changes_in() -> None:
    runner, model = make_runner()
    runner.execute(step([new_sequence(1, [1], [1])]))
    assert runner.execute(step(finished=[1])).rows == []
    assert len(runner.sequences) == 0
    assert model.batches == []


def test_a_row_with_nan_ends_alone_even_when_its_next_step_is_planned() -> None:
    runner, _ = make_runner(bad=13)
    output = runner.execute(step([new_sequence(1, [13], [1]), new_sequence(2, [4], [2])], [row(1, 0, 1), row(2, 0, 1)]))
    bad, good = output.rows
    assert bad.tokens == []
    assert bad.error is not None
    assert "NaN" in bad.error.message
    assert good.tokens[0].token_id == next_token([4])
    # planned before the error was known
    later = runner.execute(step(rows=[row(1, 1, 1), row(2, 1, 1)]))
    assert later.rows[0].error == bad.error
    assert tokens_of(step_rows(later, 1)) == [continued([4], 2)[1:]]


def step_rows(output: ModelRunnerOutput, start: int) -> ModelRunnerOutput:
    return ModelRunnerOutput(step_id=output.step_id, rows=output.rows[start:])


@pytest.mark.parametrize("rows_at_once", [1, 2, 100])
def test_prompt_logprobs_describe_each_following_token(monkeypatch: pytest.MonkeyPatch, rows_at_once: int) -> None:
    monkeypatch.setattr(drawing, "LOGITS_BYTES", rows_at_once * 4 * VOCAB)
    runner, model = make_runner()
    prompt = [3, 1, 4, 1, 5, 9, 2, 6]
    params = SamplingParams(temperature=0.0, prompt_logprobs=2)
    first = runner.execute(
        step(
            [new_sequence(1, prompt, [1, 2], params=params), new_sequence(2, [7], [3])],
            [row(2, 0, 1), row(1, 0, 5, 0, num_prompt_logprobs=5)],
        )
    ).rows[1]
    second = runner.execute(step(rows=[row(1, 5, 3, 1, num_prompt_logprobs=2)])).rows[0]
    assert first.prompt_logprobs is not None
    assert second.prompt_logprobs is not None
    assert (first.prompt_logprobs.first_position, second.prompt_logprobs.first_position) == (1, 6)
    described = first.prompt_logprobs.tokens + second.prompt_logprobs.tokens
    assert [token.token_id for token in described] == prompt[1:]
    for position, token in enumerate(described, start=1):
        expected = torch.log_softmax(
            model.compute_logits(torch.tensor([[float(next_token(prompt[:position]))]]))[0], -1
        )
        assert token.logprob == expected[prompt[position]].item()
        assert list(token.top_logprobs) == expected.topk(2).values.tolist()
    assert second.tokens[0].token_id == next_token(prompt)


def test_prompt_logprobs_that_are_no_numbers_are_an_error_of_the_row() -> None:
    runner, _ = make_runner(bad=9)
    params = SamplingParams(temperature=0.0, prompt_logprobs=0)
    output = runner.execute(
        step([new_sequence(1, [1, 9, 3, 4], [1], params=params)], [row(1, 0, 3, 0, num_prompt_logprobs=3)])
    )
    assert output.rows[0].prompt_logprobs is None
    assert output.rows[0].error is not None
    assert "position 2" in output.rows[0].error.message


def test_logits_are_computed_in_bounded_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drawing, "LOGITS_BYTES", 2 * 4 * VOCAB)
    runner, model = make_runner()
    shapes: list[int] = []
    compute = model.compute_logits

    def counted(hidden: torch.Tensor) -> torch.Tensor:
        shapes.append(len(hidden))
        return compute(hidden)

    monkeypatch.setattr(model, "compute_logits", counted)
    prompts = [[i, i + 1] for i in range(5)]
    output = runner.execute(
        step([new_sequence(i, p, [i + 1]) for i, p in enumerate(prompts)], [row(i, 0, 2) for i in range(5)])
    )
    assert tokens_of(output) == [continued(p, 1) for p in prompts]
    assert shapes == [2, 2, 1]


def test_penalties_see_what_the_worker_has_drawn_itself() -> None:
    runner, _ = make_runner()
    params = SamplingParams(temperature=0.0, presence_penalty=2.0, frequency_penalty=2.0, max_tokens=50)
    runner.execute(step([new_sequence(1, [5], [1, 2, 3], params=params)], [row(1, 0, 1)]))
    for position in range(1, 11):
        runner.execute(step(rows=[row(1, position, 1)]))
    drawn = runner.sequences[1].first_tokens(12)[1:].tolist()
    expected: list[int] = []
    for _ in drawn:
        target = next_token([5, *expected])
        scores = [-0.5 * abs(t - target) - 2.0 * expected.count(t) - 2.0 * (t in expected) for t in range(VOCAB)]
        expected.append(max(range(VOCAB), key=lambda t: scores[t]))
    assert drawn == expected


@pytest.mark.parametrize("params", [{}, {"presence_penalty": 2.0, "frequency_penalty": 2.0}, {"logprobs": 2}])
@pytest.mark.parametrize("num_right", [0, 2, 3])
def test_the_result_of_drafts_is_what_decoding_draws(num_right: int, params: dict[str, float]) -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=50, **params)  # type: ignore[arg-type]
    plain, drafting = (make_runner()[0] for _ in range(2))
    first = [
        each.execute(step([new_sequence(1, [5, 6], [1, 2, 3], params=sampling)], [row(1, 0, 2)]))
        for each in (plain, drafting)
    ]
    assert first[0] == first[1]
    tokens = [plain.execute(step(rows=[row(1, position, 1)])).rows[0].tokens[0] for position in range(2, 10)]
    right = [token.token_id for token in tokens]
    drafts = [*right[:num_right], *((token + 1) % VOCAB for token in right[num_right:3])]
    found = drafting.execute(step(rows=[row(1, 2, 4, drafts=drafts)])).rows[0].tokens
    assert found == tokens[: num_right + 1]
    # what was rejected leaves no trace, neither in the cache nor in the counts
    for position in range(3 + num_right, 10):
        found += drafting.execute(step(rows=[row(1, position, 1)])).rows[0].tokens
    assert found == tokens


def test_rows_with_drafts_stand_beside_others() -> None:
    runner, _ = make_runner()
    prompts = [[1, 2, 3], [4, 5], [6]]
    new = [new_sequence(i, prompt, [1 + 2 * i, 2 + 2 * i]) for i, prompt in enumerate(prompts)]
    runner.execute(step(new, [row(i, 0, len(prompt)) for i, prompt in enumerate(prompts)]))
    expected = [continued(prompt, 4)[1:] for prompt in prompts]
    output = runner.execute(
        step(
            [new_sequence(3, [9, 9], [9])],
            [row(0, 3, 1), row(1, 2, 3, drafts=expected[1][:2]), row(3, 0, 1, 0), row(2, 1, 2, drafts=[0])],
        )
    )
    assert tokens_of(output) == [expected[0][:1], expected[1], [], expected[2][:1]]


def test_an_error_behind_a_draft_is_left_to_the_row_that_comes_to_it() -> None:
    prompt = [3, 4]
    bad = continued(prompt, 2)[1]
    runner, _ = make_runner(bad=bad)
    runner.execute(step([new_sequence(1, prompt, [1, 2])], [row(1, 0, 2)]))
    assert tokens_of(runner.execute(step(rows=[row(1, 2, 2, drafts=[bad])]))) == [[bad]]
    assert runner.execute(step(rows=[row(1, 3, 1)])).rows[0].error is not None


def test_a_runner_that_draws_nothing_computes_the_tokens_that_are_sent() -> None:
    drawing, model = make_runner()
    stage, same = make_runner(draws=False)
    steps = [step([new_sequence(1, [3, 1, 4], [2, 5])], [row(1, 0, 3)])]
    drawn = tokens_of(drawing.execute(steps[0]))[0]
    assert stage.execute(steps[0]).rows == []
    for position in range(3, 8):
        drafts = [0] if position == 5 else []
        later = step(rows=[row(1, position, 1 + len(drafts), token_ids=drawn[-1:], drafts=drafts)])
        drawn += tokens_of(drawing.execute(later))[0]
        stage.execute(later)
    assert drawn == continued([3, 1, 4], 6)
    assert model.batches == same.batches
    assert stage.sequences[1].first_tokens(8).tolist() == [3, 1, 4, *drawn[:-1]]
