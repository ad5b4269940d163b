"""Beam search against that of transformers (5.x, `generate` with num_beams): ids and scores, in float32."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from octavo import LLM
from octavo.core.outputs import CompletionOutput, RequestOutput
from tests.fakes.byte_tokenizer import write_byte_tokenizer
from tests.fakes.checkpoints import load_oracle, make_checkpoint

VOCABULARY = 300
MAX_TOKENS = 12


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("beams")
    make_checkpoint("llama", path, vocab_size=VOCABULARY)
    return write_byte_tokenizer(path)


@pytest.fixture(scope="module")
def oracle(checkpoint: Path) -> Any:
    return load_oracle(checkpoint)


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> Iterator[LLM]:
    with LLM(model=str(checkpoint), block_size=4, num_gpu_blocks_override=200, threads=1, dtype="float32") as llm:
        yield llm


def prompts() -> list[list[int]]:
    source = random.Random(3)
    return [[source.randrange(1, VOCABULARY) for _ in range(count)] for count in (1, 6, 13)]


def expected(
    oracle: Any, prompt: list[int], width: int, end: list[int], **settings: Any
) -> list[tuple[list[int], float]]:
    stops = [stop.encode() for stop in settings.get("stop_strings", ())]

    def is_stopped(ids: list[int]) -> bool:
        text = bytes(token if token < 256 else 0 for token in ids)
        return any(text.endswith(stop) for stop in stops)

    with torch.inference_mode():
        found = oracle.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            num_beams=width,
            num_return_sequences=width,
            max_new_tokens=MAX_TOKENS,
            do_sample=False,
            eos_token_id=end or None,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_scores=True,
            **settings,
        )
    answers = []
    for ids, score in zip(found.sequences[:, len(prompt) :].tolist(), found.sequences_scores.tolist(), strict=True):
        stop = next((place for place, token in enumerate(ids) if token in end or is_stopped(ids[: place + 1])), -1)
        answers.append((ids[: stop + 1] if stop >= 0 else ids, score))
    return answers


def answers_of(output: RequestOutput, length_penalty: float) -> list[tuple[list[int], float]]:
    assert output.error is None
    return [
        (each.token_ids, (each.cumulative_logprob or 0.0) / len(each.token_ids) ** length_penalty)
        for each in output.outputs
    ]


@pytest.mark.parametrize("early_stopping", [True, False, "never"])
@pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 1.0, 2.0])
@pytest.mark.parametrize("width", [2, 5])
def test_ids_and_scores_are_those_of_transformers(
    llm: LLM, oracle: Any, width: int, length_penalty: float, early_stopping: bool | str
) -> None:
    settings = {"length_penalty": length_penalty, "early_stopping": early_stopping}
    check(llm, oracle, prompts(), width, ends(width), settings, settings)


@pytest.mark.parametrize("length_penalty", [-2.0, -1.0, 1.0])
def test_never_looks_at_the_sign_of_the_length_penalty(checkpoint: Path, tmp_path: Path, length_penalty: float) -> None:
    """Only sharp distributions tell: a beam that is nearly sure of itself overtakes one that ended earlier."""
    oracle = load_oracle(checkpoint)
    with torch.no_grad():
        oracle.lm_head.weight.mul_(5.0)
    oracle.save_pretrained(tmp_path)
    settings = {"length_penalty": length_penalty, "early_stopping": "never"}
    source = random.Random(5)
    many = [[source.randrange(1, VOCABULARY) for _ in range(1 + number % 5)] for number in range(16)]
    with LLM(
        model=str(tmp_path), tokenizer=str(checkpoint), block_size=4, num_gpu_blocks_override=200, threads=1
    ) as llm:
        check(llm, oracle, many, 5, ends(5), settings, settings)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({"min_tokens": 11}, {"min_new_tokens": 11}),
        ({"repetition_penalty": 1.5}, {"repetition_penalty": 1.5}),
        ({"repetition_penalty": 0.8}, {"repetition_penalty": 0.8}),
        ({"logit_bias": {7: 6.0, 8: 5.0, 265: -4.0}}, {"sequence_bias": [[[7], 6.0], [[8], 5.0], [[265], -4.0]]}),
        ({"bad_words": [*"efghNOVv", "=?"]}, {"bad_words_ids": [*([ord(c)] for c in "efghNOVv"), [61, 63]]}),
        (
            {"min_tokens": 5, "repetition_penalty": 1.2, "logit_bias": {30: 2.0}, "bad_words": ["V"]},
            {"min_new_tokens": 5, "repetition_penalty": 1.2, "sequence_bias": [[[30], 2.0]], "bad_words_ids": [[86]]},
        ),
    ],
    ids=["min_tokens", "repetition", "attraction", "bias", "bad_words", "together"],
)  # fmt: skip
def test_processors_act_on_scores_as_those_of_transformers(
    llm: LLM, oracle: Any, ours: dict[str, Any], theirs: dict[str, Any]
) -> None:
    width = 4
    without = llm.beam_search(prompts(), width, max_tokens=MAX_TOKENS, stop_token_ids=ends(width), ignore_eos=True)
    changes_scores = bool(ours.keys() & {"repetition_penalty", "logit_bias"})
    asked = {**ours, "logprobs": 2}
    changed = check(llm, oracle, prompts(), width, ends(width), asked, theirs, has_scores_of_its_own=changes_scores)
    assert any(
        [each.token_ids for each in one.outputs] != [each.token_ids for each in other.outputs]
        for one, other in zip(without, changed, strict=True)
    )
    for output in changed:
        for each in output.outputs:
            check_model_logprobs(oracle, output.prompt_token_ids, each)


def check_model_logprobs(oracle: Any, prompt: list[int], found: CompletionOutput) -> None:
    """What is reported of a beam are log-probabilities of the model, whatever the search has made of them."""
    with torch.inference_mode():
        logits = oracle(torch.tensor([prompt + found.token_ids])).logits[0, len(prompt) - 1 : -1]
    logprobs = torch.log_softmax(logits, dim=-1)
    total = logprobs.gather(1, torch.tensor(found.token_ids).unsqueeze(1)).sum().item()
    assert found.cumulative_logprob == pytest.approx(total, rel=1e-5, abs=1e-4)
    for row, position in zip(logprobs, found.logprobs or [], strict=True):
        values = [each.logprob for each in position.values()]
        assert values == pytest.approx([row[token].item() for token in position], rel=1e-5, abs=1e-4)
        assert max(values) <= 0
        assert values[1:] == sorted(values[1:], reverse=True)


STOPS = ["V", "g", "f", "h", "N", "=", "Zz", "=?"]
"""Texts of frequent tokens, and some of two; no part of a special token, whose text transformers looks at, too."""


@pytest.mark.parametrize("early_stopping", [True, False, "never"])
@pytest.mark.parametrize("length_penalty", [0.0, 1.0])
@pytest.mark.parametrize("width", [2, 4])
def test_stop_strings_end_beams_as_those_of_transformers(
    llm: LLM, oracle: Any, checkpoint: Path, width: int, length_penalty: float, early_stopping: bool | str
) -> None:
    settings = {"length_penalty": length_penalty, "early_stopping": early_stopping}
    reader = PreTrainedTokenizerFast(tokenizer_file=str(checkpoint / "tokenizer.json"))
    theirs = {**settings, "stop_strings": STOPS, "tokenizer": reader}
    outputs = check(llm, oracle, prompts(), width, ends(width), {**settings, "stop": STOPS}, theirs)
    stopped = [each for output in outputs for each in output.outputs if isinstance(each.stop_reason, str)]
    assert stopped
    for each in stopped:
        assert each.finish_reason == "stop"
        assert each.stop_reason in STOPS
        assert not any(stop in each.text for stop in STOPS)
        assert bytes(each.token_ids[-1:]).decode() == each.stop_reason[-1]


def ends(width: int) -> list[int]:
    """End tokens: so many that beams do finish."""
    return random.Random(width).sample(range(1, VOCABULARY), 40)


def check(
    llm: LLM,
    oracle: Any,
    given: list[list[int]],
    width: int,
    end: list[int],
    ours: dict[str, Any],
    theirs: dict[str, Any],
    *,
    has_scores_of_its_own: bool = False,
) -> list[RequestOutput]:
    """Search for `given` prompts with our settings and with those of transformers; ids must be equal, scores close.

    has_scores_of_its_own: the scores of the search are not made of log-probabilities of the model.
    """
    outputs = llm.beam_search(given, width, max_tokens=MAX_TOKENS, stop_token_ids=end, ignore_eos=True, **ours)
    for prompt, output in zip(given, outputs, strict=True):
        wanted = expected(oracle, prompt, width, end, **theirs)
        penalty = ours.get("length_penalty", 1.0)
        found = answers_of(output, penalty)
        assert [ids for ids, _ in found] == [ids for ids, _ in wanted]
        for (ids, score), (_, same) in zip(found, [] if has_scores_of_its_own else wanted, strict=False):
            # a negative penalty multiplies what roundings make of the sum
            assert score == pytest.approx(same, rel=1e-5, abs=1e-4 * max(1.0, len(ids) ** -penalty))
    return outputs


@pytest.mark.parametrize("width", [2, 4])
def test_barred_tokens_are_never_part_of_a_beam(llm: LLM, width: int) -> None:
    allowed = [10, 20]
    for count, num_found in ((1, 1), (2, width)):
        (output,) = llm.beam_search([5, 9], width, max_tokens=3, allowed_token_ids=allowed[:count], logprobs=5)
        assert output.error is None
        assert [each.finish_reason for each in output.outputs] == ["length"] * num_found
        assert [each.index for each in output.outputs] == list(range(num_found))
        for each in output.outputs:
            assert set(each.token_ids) <= set(allowed[:count])
            assert each.cumulative_logprob is not None
            assert each.cumulative_logprob > -100
            assert [set(position) for position in each.logprobs or []] == [set(allowed[:count])] * 3


def test_a_beam_without_a_way_on_leaves_and_a_search_without_beams_says_why(llm: LLM) -> None:
    settings: dict[str, Any] = {"allowed_token_ids": [97, 98, 99], "max_tokens": 3, "ignore_eos": True}
    (free,) = llm.beam_search([5, 9], 3, bad_words=["aa", "ab", "ac"], **settings)
    assert {each.token_ids.index(97) for each in free.outputs if 97 in each.token_ids} <= {2}
    assert len(free.outputs) == 3
    (stuck,) = llm.beam_search([5, 9], 3, bad_words=[x + y for x in "abc" for y in "abc"], **settings)
    assert stuck.error is not None
    assert stuck.error.is_client_error
    assert stuck.error.message.startswith(
        "the beam search found no sequence: allowed_token_ids and bad_words bar every"
    )


@pytest.mark.parametrize("width", [1, 2, 8])
def test_as_many_alternatives_are_listed_as_were_asked_for(llm: LLM, oracle: Any, width: int) -> None:
    prompt = prompts()[1]
    (plain,) = llm.beam_search(prompt, width, max_tokens=4, ignore_eos=True)
    (output,) = llm.beam_search(prompt, width, max_tokens=4, ignore_eos=True, logprobs=10)
    assert answers_of(output, 1.0) == answers_of(plain, 1.0)
    for each in output.outputs:
        with torch.inference_mode():
            logits = oracle(torch.tensor([prompt + each.token_ids[:-1]])).logits[0, len(prompt) - 1 :]
        for position, row in zip(each.logprobs or [], torch.log_softmax(logits, dim=-1), strict=True):
            likeliest = row.topk(10).indices.tolist()
            # the beam's own token comes first
            assert list(position)[1:] == [token for token in likeliest if token not in list(position)[:1]]


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize(
    "others", [{}, {"stop": STOPS}, {"stop": STOPS, "min_tokens": 15, "include_stop_str_in_output": True}], ids=len
)
def test_beams_that_give_way_find_the_same(checkpoint: Path, mode: str, others: dict[str, Any]) -> None:
    def run(num_blocks: int) -> tuple[list[Any], int]:
        with LLM(
            model=str(checkpoint), block_size=4, num_gpu_blocks_override=num_blocks, max_model_len=48, threads=1,
            preemption_mode=mode, swap_space=0.01,
        ) as llm:  # fmt: skip
            found = llm.beam_search(prompts() * 3, 4, max_tokens=20, ignore_eos=True, **others)
            return [each.outputs for each in found], llm.engine.stats.num_preemptions

    roomy, none = run(400)
    tight, some = run(26)
    assert tight == roomy
    assert none == 0 < some
    stopped = [each for one in roomy for each in one if each.stop_reason is not None]
    assert bool(stopped) == ("stop" in others)
    assert all(len(each.token_ids) >= others.get("min_tokens", 0) for each in stopped)
    assert all(each.text.endswith(str(each.stop_reason)) is (len(others) > 1) for each in stopped)
