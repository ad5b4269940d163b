"""The outputs of a step, cut into turns of the event loop."""

from __future__ import annotations

from octavo.core.messages import EngineCoreOutput
from octavo.core.step import PromptLogprobs, TokenLogprobs
from octavo.engine.output_turns import in_turns


def test_outputs_are_cut_where_they_are_long_and_stay_the_same() -> None:
    token = TokenLogprobs(token_id=1, logprob=-1.0, rank=1)
    logprobs = PromptLogprobs(first_position=3, tokens=[token] * 300)
    short = EngineCoreOutput(request_id="short", deltas=[], finished=False)
    long = EngineCoreOutput(request_id="long", deltas=[], finished=True, prompt_logprobs=logprobs, num_cached_tokens=5)
    assert list(in_turns([short])) == [[short]]
    first, *others = in_turns([long, short])
    assert first == [short]
    parts = [output for turn in others for output in turn]
    assert [part.finished for part in parts] == [False, False, True]
    assert parts[-1].num_cached_tokens == 5
    cut = [part.prompt_logprobs for part in parts if part.prompt_logprobs is not None]
    assert [part.first_position for part in cut] == [3, 131, 259]
    assert [token for part in cut for token in part.tokens] == logprobs.tokens


def test_many_requests_with_few_positions_each_are_cut_as_one_with_many() -> None:
    token = TokenLogprobs(token_id=1, logprob=-1.0, rank=1)
    logprobs = PromptLogprobs(first_position=0, tokens=[token] * 50)
    outputs = [
        EngineCoreOutput(request_id=str(index), deltas=[], finished=True, prompt_logprobs=logprobs)
        for index in range(7)
    ]
    turns = list(in_turns(outputs))
    assert [output for turn in turns for output in turn] == outputs
    assert [len(turn) for turn in turns] == [0, 2, 2, 2, 1]
