from __future__ import annotations

import torch

from octavo.sampling.logprobs import token_logprobs


def table(rows: int = 4, vocab_size: int = 50) -> torch.Tensor:
    return torch.log_softmax(torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(0)), -1)


def test_logprob_alone_when_nothing_more_is_wanted() -> None:
    logprobs = table()
    (token,) = token_logprobs(logprobs, [2], [7], [None])
    assert (token.token_id, token.rank, token.top_ids) == (7, 0, ())
    assert token.logprob == logprobs[2, 7].item()


def test_zero_gives_the_rank_of_the_drawn_token_only() -> None:
    logprobs = table()
    order = logprobs[1].argsort(descending=True).tolist()
    (token,) = token_logprobs(logprobs, [1], [order[4]], [0])
    assert (token.rank, token.top_ids, token.top_logprobs) == (5, (), ())


def test_likeliest_tokens_come_in_falling_order() -> None:
    logprobs = table()
    (token,) = token_logprobs(logprobs, [3], [0], [6])
    assert list(token.top_ids) == logprobs[3].argsort(descending=True)[:6].tolist()
    assert list(token.top_logprobs) == logprobs[3].sort(descending=True).values[:6].tolist()


def test_more_than_the_vocabulary_gives_the_vocabulary() -> None:
    (token,) = token_logprobs(table(vocab_size=3), [0], [0], [20])
    assert len(token.top_ids) == 3


def test_several_draws_of_one_row_and_rows_with_different_wishes() -> None:
    logprobs = table()
    rows, token_ids, wanted = [0, 0, 0, 1, 3, 3], [5, 5, 9, 1, 2, 4], [2, 2, 2, None, 0, 3]
    together = token_logprobs(logprobs, rows, token_ids, wanted)
    for row, token_id, count, token in zip(rows, token_ids, wanted, together, strict=True):
        assert token_logprobs(logprobs[row : row + 1], [0], [token_id], [count]) == [token]


def test_ties_are_listed_alike_whatever_the_neighbours_ask_for() -> None:
    logprobs = torch.log_softmax(torch.tensor([[1.0] * 40, [2.0] * 40]), -1)
    alone = token_logprobs(logprobs[:1], [0], [3], [4])
    together = token_logprobs(logprobs, [0, 1], [3, 3], [4, 20])
    assert (together[0], together[0].rank) == (alone[0], 1)
