"""The processor on octavo-tiny's vocabulary, and the compiled sampler under it against the reference."""

from __future__ import annotations

import json
import random
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from llguidance import LLParserLimits
from torch import Tensor

from octavo.builtin import model_directory
from octavo.core.sampling_params import SamplingParams
from octavo.core.step import TokenLogprobs
from octavo.core.structured_outputs import StructuredOutputsParams
from octavo.devices.cpu.sampler import NativeSampler
from octavo.devices.reference.sampler import ReferenceSampler
from octavo.engine.text.tokenizer import Tokenizer
from octavo.errors import InvalidRequest
from octavo.sampling.metadata import RowSamples, SamplingRow, verified
from octavo.sampling.processors import default_processors
from octavo.structured_output.matchers import MAX_COMPILED, Matchers
from octavo.structured_output.processor import GrammarProcessor
from octavo.structured_output.progress import Progress
from octavo.structured_output.sampler import GuidedSampler
from tests.conformance.runtimes import LEVELS, runtime
from tests.sampling.sequences import FakeSequence
from tests.structured_output.conftest import END, VOCABULARY

SCHEMA = {
    "type": "object",
    "properties": {"animal": {"enum": ["cat", "dog"]}, "names": {"type": "array", "items": {"type": "string"}}},
    "required": ["animal", "names"],
    "additionalProperties": False,
}


def guided(**params: Any) -> FakeSequence:
    params.setdefault("structured_outputs", {"json": SCHEMA})
    return FakeSequence(SamplingParams(seed=1, **params))


def ready(processor: GrammarProcessor, sequence: FakeSequence) -> None:
    processor.begin(sequence)
    processor._state(sequence).compiled.exception()


def allowed(processor: GrammarProcessor, row: SamplingRow) -> set[int]:
    mask = processor.mask(row)
    assert mask is not None
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[:VOCABULARY]
    return set(np.flatnonzero(bits).tolist())


def test_only_what_the_form_admits_may_follow(matchers: Matchers, tokenizer: Tokenizer) -> None:
    processor, sequence = GrammarProcessor(matchers), guided(structured_outputs={"choice": ["yes", "no"]})
    ready(processor, sequence)
    texts = {tokenizer.decode([token]) for token in allowed(processor, sequence.row())}
    assert texts == {"y", "ye", "yes", "n", "no"} & texts
    assert {"y", "n"} <= texts
    sequence.output = tokenizer.encode("yes", add_special_tokens=False)
    assert allowed(processor, sequence.row()) == {END}


def test_state_follows_the_tokens_whatever_happened_in_between(matchers: Matchers, tokenizer: Tokenizer) -> None:
    source = random.Random(5)
    texts = ['{"animal": "cat", "names": ["a", "b c"]}', '{"animal":"dog","names":[]}']
    outputs = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    processor, sequence = GrammarProcessor(matchers), guided()
    ready(processor, sequence)
    for _ in range(200):
        output = source.choice(outputs)
        sequence.output = output[: source.randrange(len(output) + 1)]  # forward, back, and to another text
        fresh = guided()
        fresh.output = list(sequence.output)
        ready(processor, fresh)
        assert allowed(processor, sequence.row()) == allowed(processor, fresh.row())


def test_drafts_leave_no_trace(matchers: Matchers, tokenizer: Tokenizer) -> None:
    processor, sequence = GrammarProcessor(matchers), guided()
    ready(processor, sequence)
    right = tokenizer.encode('{"animal": "cat"', add_special_tokens=False)
    expected = []
    for count in range(len(right) + 1):
        sequence.output = right[:count]
        expected.append(allowed(processor, sequence.row()))
    sequence.output, sequence.drafts = [], right
    assert [allowed(processor, row) for row in sequence.rows()] == expected
    wrong = next(token for token in range(1, VOCABULARY) if token not in expected[0])
    sequence.drafts = [wrong, right[0]]
    first, *behind = sequence.rows()
    assert allowed(processor, first) == expected[0]
    assert [processor.mask(row) for row in behind] == [None, None]
    sequence.drafts, sequence.output = [], right[:1]
    assert allowed(processor, sequence.row()) == expected[1]


def test_equal_forms_are_compiled_once_and_old_ones_forgotten(matchers: Matchers) -> None:
    first = guided().params.structured_outputs
    assert first is not None
    assert matchers.compile(first) is matchers.compile(first)
    for number in range(MAX_COMPILED + 5):
        other = guided(structured_outputs={"choice": [f"n{number}"]}).params.structured_outputs
        assert other is not None
        matchers.compile(other).result()
    assert len(matchers._compiled) == MAX_COMPILED


def test_a_form_full_of_backslashes_does_not_hold_up_other_threads(matchers: Matchers) -> None:
    start = time.process_time()
    matchers.compile(StructuredOutputsParams.of({"choice": ["\\" * 50_000, "b"]})).result()
    assert time.process_time() - start < 10  # it took as long as the square of their number


def rows_of(sequences: list[FakeSequence], num_samples: int = 1) -> list[SamplingRow]:
    return [sequence.row(num_samples) for sequence in sequences]


def sampler_of(matchers: Matchers) -> tuple[GuidedSampler, GrammarProcessor]:
    processor = GrammarProcessor(matchers, patience_s=60)
    return GuidedSampler(ReferenceSampler([processor, *default_processors()]), processor), processor


def test_a_row_whose_grammar_is_not_ready_is_drawn_later(matchers: Matchers, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = matchers.compile(guided().params.structured_outputs)  # type: ignore[arg-type]
    compiled.result()
    late: Future[Any] = Future()
    monkeypatch.setattr(matchers, "compile", lambda _: late)
    sampler, processor = sampler_of(matchers)
    sequences = [guided(), FakeSequence(SamplingParams(seed=1))]
    assert not processor.begin(sequences[0])
    logits = torch.randn(2, VOCABULARY, generator=torch.Generator().manual_seed(0))
    first, second = sampler.sample(logits.clone(), rows_of(sequences))
    assert (first.tokens, first.error) == ([], None)
    assert len(second.tokens) == 1
    late.set_result(compiled.result())
    again = sampler.sample(logits.clone(), rows_of(sequences))
    assert len(again[0].tokens) == 1
    assert again[1] == second


def test_a_mask_that_takes_long_holds_up_only_its_own_row(matchers: Matchers, monkeypatch: pytest.MonkeyPatch) -> None:
    processor = GrammarProcessor(matchers, patience_s=0)
    sampler = GuidedSampler(ReferenceSampler([processor, *default_processors()]), processor)
    slow, other, free = guided(), guided(), FakeSequence(SamplingParams(seed=1))
    for sequence in (slow, other):
        ready(processor, sequence)
    compute, may_go_on = processor._compute, threading.Event()

    def slow_compute(state: Any, *others: Any) -> Any:
        assert state is not processor._state(slow) or may_go_on.wait(60)
        return compute(state, *others)

    processor._compute = slow_compute  # type: ignore[method-assign]
    rows = rows_of([slow, other, free])
    processor.start(rows)
    other_job = processor._state(other).job
    assert other_job is not None
    other_job.masks.result()
    first, *behind = sampler.sample(logits_of(3), rows)
    assert (first.tokens, first.error) == ([], None)
    assert [len(each.tokens) for each in behind] == [1, 1]
    monkeypatch.setattr("octavo.structured_output.processor.wait", None)  # later steps do not wait for it at all
    assert sampler.sample(logits_of(3), rows) == [first, *behind]
    may_go_on.set()
    slow_job = processor._state(slow).job
    assert slow_job is not None
    slow_job.masks.result()
    again = sampler.sample(logits_of(3), rows)
    assert len(again[0].tokens) == 1
    assert again[1:] == behind


def test_a_mask_that_raises_ends_in_the_step(matchers: Matchers, monkeypatch: pytest.MonkeyPatch) -> None:
    sampler, processor = sampler_of(matchers)
    sequence = guided()
    ready(processor, sequence)
    monkeypatch.setattr(Progress, "mask", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        sampler.sample(logits_of(1), rows_of([sequence]))


def test_a_sequence_whose_masks_fail_again_and_again_ends(matchers: Matchers) -> None:
    sampler, processor = sampler_of(matchers)
    sequence = guided()
    errors: list[Any] = []
    while not errors:
        ready(processor, sequence)
        assert len(sampler.sample(logits_of(1), rows_of([sequence]))[0].tokens) == 1
        break_matcher(processor, sequence)
        processor._state(sequence).job = None
        [result] = sampler.sample(logits_of(1), rows_of([sequence]))
        errors += [result.error] if result.error else []
    assert "takes too much work" in errors[0].message


@pytest.mark.parametrize("failure", [InvalidRequest("too large", field="structured_outputs"), ValueError("broken")])
def test_a_grammar_that_cannot_be_compiled_ends_its_request_alone(
    matchers: Matchers, monkeypatch: pytest.MonkeyPatch, failure: Exception
) -> None:
    failed: Future[Any] = Future()
    failed.set_exception(failure)
    monkeypatch.setattr(matchers, "compile", lambda _: failed)
    sampler, processor = sampler_of(matchers)
    sequences = [guided(), FakeSequence(SamplingParams(seed=1))]
    assert processor.begin(sequences[0])
    first, second = sampler.sample(torch.randn(2, VOCABULARY), rows_of(sequences))
    assert first.error is not None
    assert str(failure) in first.error.message
    assert first.error.is_client_error == isinstance(failure, InvalidRequest)
    assert len(second.tokens) == 1


def break_matcher(processor: GrammarProcessor, sequence: FakeSequence) -> None:
    state = processor._state(sequence)
    assert state.progress is not None
    matcher = state.progress._matcher
    assert matcher is not None
    assert not matcher.consume_tokens([VOCABULARY - 1] * 3)  # the matcher is in error from now on


def test_a_mask_that_fails_is_computed_again_by_a_matcher_of_its_own(matchers: Matchers, tokenizer: Tokenizer) -> None:
    sampler, processor = sampler_of(matchers)
    sequence, other = guided(), guided()
    ready(processor, sequence)
    shared = matchers.compile(sequence.params.structured_outputs)  # type: ignore[arg-type]
    [expected] = sampler.sample(logits_of(1), rows_of([sequence]))
    break_matcher(processor, sequence)
    processor._state(sequence).job = None
    [result] = sampler.sample(logits_of(1), rows_of([sequence]))
    assert (result.tokens, result.error) == ([], None)
    ready(processor, sequence)
    assert sampler.sample(logits_of(1), rows_of([sequence])) == [expected]
    assert matchers.compile(other.params.structured_outputs) is not shared  # type: ignore[arg-type]


def test_one_text_that_uses_up_the_tables_does_not_fail_the_others(
    matchers: Matchers, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = LLParserLimits(max_lexer_states=100, verbose_errors=False)
    monkeypatch.setattr("octavo.structured_output.matchers.parser_limits", lambda: limits)
    words = {"json": {"type": "string", "pattern": r"^(\S+ ){0,40}\S+$"}}
    sampler, processor = sampler_of(matchers)
    text = tokenizer.encode('"' + "a " * 40, add_special_tokens=False)
    for _ in range(2):
        errors: list[int] = []
        sequence = guided(structured_outputs=words)
        while len(sequence.output) < 20 and not errors:
            ready(processor, sequence)
            [result] = sampler.sample(logits_of(1), rows_of([sequence]))
            if result.error is not None:
                errors.append(len(sequence.output))
            elif result.tokens:
                sequence.output.append(text[len(sequence.output)])
        assert not errors


def test_a_grammar_whose_tokens_take_ever_more_work_ends_as_an_error(matchers: Matchers, tokenizer: Tokenizer) -> None:
    grammar = StructuredOutputsParams(grammar='start: s\ns: s s s | s s | "a" | ""')
    compiled = matchers.compile(grammar).result().matcher
    assert compiled is not None
    matcher = compiled.deep_copy()
    [a] = tokenizer.encode("a")
    matcher.try_consume_tokens([a] * 300)
    assert "max is 600" in matcher.get_error()


def test_a_mask_that_a_new_matcher_cannot_compute_either_is_an_error(matchers: Matchers) -> None:
    sampler, processor = sampler_of(matchers)
    for rank in (False, True):
        sequence = guided(use_beam_search=True, n=2, temperature=0) if rank else guided()
        sequence.output = [VOCABULARY - 1] * 3  # which are not of the form
        results = []
        while not results or results[-1].error is None:
            ready(processor, sequence)
            rows, logits = rows_of([sequence]), logits_of(1)
            results += sampler.rank(logits, rows, [4]) if rank else sampler.sample(logits, rows)
            assert results[-1].tokens == []
            assert results[-1].candidates is None
            assert len(results) < 3
        assert "takes too much work" in results[-1].error.message


def test_drafts_behind_a_failed_mask_are_dropped_and_others_drawn(matchers: Matchers, tokenizer: Tokenizer) -> None:
    sampler, processor = sampler_of(matchers)
    sequence = guided()
    ready(processor, sequence)
    sequence.drafts = tokenizer.encode('{"animal"', add_special_tokens=False)
    rows = sequence.rows()
    expected = sampler.sample(logits_of(len(rows)), rows)
    compute = processor._compute

    def failing_compute(state: Any, position: int, *others: Any) -> Any:
        if position == rows[1].position:
            break_matcher(processor, sequence)
        return compute(state, position, *others)

    processor._compute = failing_compute  # type: ignore[method-assign]
    processor._state(sequence).job = None
    first, *behind = sampler.sample(logits_of(len(rows)), rows)
    assert first == expected[0]
    assert all((each.tokens, each.error) == ([], None) for each in behind)
    assert verified(sequence.drafts, [first, *behind]).tokens == first.tokens


def test_drafts_of_a_row_from_which_is_drawn_later_are_dropped() -> None:
    token = TokenLogprobs(token_id=4)
    assert verified([4], [RowSamples([]), RowSamples([token])]).tokens == []
    assert verified([4], [RowSamples([token]), RowSamples([])]).tokens == [token]


def logits_of(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 3


@pytest.mark.skipif(not LEVELS, reason="the compiled kernels cannot run on this machine")
@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0},
        {"temperature": 0, "logprobs": 3},
        {"temperature": 1.5},
        {"temperature": 1.5, "logprobs": 2},
        {"top_k": 5},
        {"top_p": 0.9, "min_p": 0.01, "logprobs": 0},
        {"logit_bias": {5: 100.0, 9: -100.0}, "repetition_penalty": 1.3, "logprobs": 1},
        {"allowed_token_ids": (5, 6, 7, 93, 94, 95), "logprobs": 1},
    ],
)
def test_the_compiled_sampler_draws_what_the_reference_draws(
    matchers: Matchers, tokenizer: Tokenizer, params: dict[str, Any]
) -> None:
    output = tokenizer.encode('{"animal": "cat", "names": ["', add_special_tokens=False)
    sequences = [guided(**params) for _ in range(len(output))] + [FakeSequence(SamplingParams(seed=1))]
    for count, sequence in enumerate(sequences[:-1]):
        sequence.output = output[: count + 1]
    processor = GrammarProcessor(matchers)
    for sequence in sequences[:-1]:
        ready(processor, sequence)
    rows, logits = rows_of(sequences, 3), logits_of(len(sequences))
    compiled = NativeSampler(runtime(LEVELS[0]).cpu, [processor]).sample(logits.clone(), rows)
    reference = ReferenceSampler([processor, *default_processors()]).sample(logits.clone(), rows)
    for row, one, other in zip(rows, compiled, reference, strict=True):
        assert (one.error is None) == (other.error is None)
        assert [token.token_id for token in one.tokens] == [token.token_id for token in other.tokens]
        assert [token.rank for token in one.tokens] == [token.rank for token in other.tokens]
        assert [token.top_ids for token in one.tokens] == [token.top_ids for token in other.tokens]
        for mine, theirs in zip(one.tokens, other.tokens, strict=True):
            assert mine.logprob == pytest.approx(theirs.logprob, abs=2e-6)
        if row.sequence.params.structured_outputs is not None:
            assert {token.token_id for token in one.tokens} <= allowed(processor, row)  # type: ignore[arg-type]


@pytest.mark.skipif(not LEVELS, reason="the compiled kernels cannot run on this machine")
def test_the_compiled_sampler_ranks_what_the_reference_ranks(matchers: Matchers) -> None:
    forms = [{"choice": ["yes", "no"]}, {"json": SCHEMA}]
    sequences = [guided(use_beam_search=True, n=2, temperature=0, structured_outputs=each) for each in forms]
    sequences.append(FakeSequence(SamplingParams(use_beam_search=True, n=2, temperature=0)))
    processor = GrammarProcessor(matchers)
    for sequence in sequences[:-1]:
        ready(processor, sequence)
    rows, logits, counts = rows_of(sequences), logits_of(3), [40, 5, 5]
    compiled = NativeSampler(runtime(LEVELS[0]).cpu, [processor]).rank(logits.clone(), rows, counts)
    reference = ReferenceSampler([processor, *default_processors()]).rank(logits.clone(), rows, counts)
    for one, other in zip(compiled, reference, strict=True):
        assert one.candidates is not None
        assert other.candidates is not None
        finite = sum(score > float("-inf") for score in other.candidates.scores)
        assert one.candidates.top_ids[:finite] == other.candidates.top_ids[:finite]
        assert one.candidates.scores[:finite] == pytest.approx(other.candidates.scores[:finite], abs=2e-6)
        assert set(one.candidates.scores[finite:]) <= {float("-inf")}


def test_text_under_random_choices_is_of_the_form(matchers: Matchers, tokenizer: Tokenizer) -> None:
    source = random.Random(1)
    processor = GrammarProcessor(matchers)
    for _ in range(5):
        sequence = guided(structured_outputs={"json": SCHEMA, "disable_any_whitespace": True})
        ready(processor, sequence)
        while END not in sequence.output and len(sequence.output) < 400:
            choices = allowed(processor, sequence.row())
            closing = choices & {END, *tokenizer.encode('"]}', add_special_tokens=False)}
            sequence.output.append(source.choice(sorted(closing or choices)))
        found = json.loads(tokenizer.decode(sequence.output[:-1]))
        assert found["animal"] in ("cat", "dog")
        assert set(found) == {"animal", "names"}


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ({"choice": ["x<|endoftext|>y"]}, "x<|endoftext|>y"),
        ({"json": {"const": "<|endoftext|>"}}, '"<|endoftext|>"'),
        ({"json": '{"const": "\\u003c|im_start|>"}'}, '"<|im_start|>"'),
        ({"regex": r"x<\|im_start\|>"}, "x<|im_start|>"),
        ({"regex": r"x<\|i[m]_start\|>"}, "x<|im_start|>"),
        ({"json": {"type": "string", "pattern": r"^<\|i[m]_start\|>$"}}, '"<|im_start|>"'),
        ({"grammar": 'start: "x<|im" "_start|>"'}, "x<|im_start|>"),
        ({"grammar": '%llguidance {}\nstart: %json {"const": "<|endoftext|>"}'}, '"<|endoftext|>"'),
    ],
)
def test_a_text_that_spells_a_special_token_is_text(
    form: dict[str, Any], text: str, matchers: Matchers, tokenizer: Tokenizer
) -> None:
    processor, sequence = GrammarProcessor(matchers), guided(structured_outputs=form)
    ready(processor, sequence)
    while (choices := allowed(processor, sequence.row())) != {END}:
        sequence.output.append(max(choices, key=lambda token: len(tokenizer.decode([token]))))
        assert len(sequence.output) < 40
    assert tokenizer.decode(sequence.output, skip_special_tokens=False) == text
    assert END not in sequence.output


def test_places_of_a_vocabulary_without_tokens_have_no_spelling() -> None:
    matchers = Matchers(model_directory(), VOCABULARY + 8, [END])
    vocabulary, _ = matchers._prepare(StructuredOutputsParams(json_object=True))
    assert vocabulary._special_names == ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


@pytest.mark.parametrize(
    ("path", "vocab_size", "ends", "message"),
    [
        (Path("/nonexistent/tokenizer.json"), VOCABULARY, [END], "need a tokenizer.json"),
        (model_directory(), 100, [END], "need a tokenizer.json of the model's vocabulary"),
        (model_directory(), VOCABULARY, [], "an end-of-sequence token"),
    ],
)
def test_a_model_that_cannot_have_forms_is_named(path: Path, vocab_size: int, ends: list[int], message: str) -> None:
    matchers = Matchers(path, vocab_size, ends)
    form = guided().params.structured_outputs
    assert form is not None
    with pytest.raises(InvalidRequest, match=message):
        matchers.compile(form).result()
    matchers.close()
