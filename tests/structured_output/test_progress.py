"""Where a form begins and ends in a text, on octavo-tiny's vocabulary."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from octavo.core.structured_outputs import StructuredOutputsParams
from octavo.engine.text.tokenizer import Tokenizer
from octavo.structured_output.matchers import Matchers
from octavo.structured_output.progress import CompiledForm, Progress
from tests.structured_output.conftest import END, VOCABULARY

EVERY = frozenset(range(VOCABULARY))
CALLS = {"grammar": 'start: "{" /[a-c]{1,3}/ "}</c>"', "triggers": ("<c>",)}


def compiled(matchers: Matchers, **params: Any) -> CompiledForm:
    return matchers.compile(StructuredOutputsParams(**params)).result()


def allowed(progress: Progress, output: list[int]) -> frozenset[int]:
    assert progress.move_to(np.array(output, dtype=np.int32)) == len(output)
    mask = progress.mask()
    if mask is None:
        assert progress.error is None
        return EVERY
    return frozenset(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[:VOCABULARY]).tolist())


def allowed_behind(form: CompiledForm, tokenizer: Tokenizer, text: str) -> frozenset[int]:
    return allowed(Progress(form), tokenizer.encode(text, add_special_tokens=False))


def texts(tokenizer: Tokenizer, tokens: frozenset[int]) -> set[str]:
    return {tokenizer.decode([token], skip_special_tokens=False) for token in tokens}


def test_a_form_begins_behind_reasoning(matchers: Matchers, tokenizer: Tokenizer) -> None:
    form = compiled(matchers, choice=("yes", "no"), reasoning_end="</think>")
    inside = allowed_behind(form, tokenizer, "it may be yes")
    assert END not in inside
    assert len(inside) > VOCABULARY - 30
    assert texts(tokenizer, allowed_behind(form, tokenizer, "it may be</think>")) <= {"y", "ye", "yes", "n", "no"}
    assert allowed_behind(form, tokenizer, "it may be</think>yes") == {END}


def test_no_token_runs_over_the_end_of_a_mark(matchers: Matchers, tokenizer: Tokenizer) -> None:
    form = compiled(matchers, choice=("yes",), reasoning_end="th")
    barred = texts(tokenizer, EVERY - allowed_behind(form, tokenizer, "a t") - {END})
    assert "he" in barred
    assert all("th" in ("t" + each)[:-1] for each in barred)
    assert {"h", "e"} & barred == set()


@pytest.mark.parametrize("params", [{"choice": ("yes",)}, CALLS, {"reasoning_budget": 100}])
def test_a_text_that_does_not_begin_with_the_mark_has_no_reasoning(
    matchers: Matchers, tokenizer: Tokenizer, params: dict[str, Any]
) -> None:
    form = compiled(matchers, reasoning_begin="<think>", reasoning_end="</think>", **params)
    without = compiled(matchers, **params) if "reasoning_budget" not in params else None
    found = allowed_behind(form, tokenizer, "")
    [first, *_] = tokenizer.encode("<think>", add_special_tokens=False)
    assert first in found
    assert len(allowed_behind(form, tokenizer, "<think>yes")) > VOCABULARY - 30
    if without is not None:
        assert found >= allowed_behind(without, tokenizer, "")
        for text in ("y", "yes") if "choice" in params else ("<c>", "<c>{a", "a </think> <c>{b}</c"):
            assert allowed_behind(form, tokenizer, text) == allowed_behind(without, tokenizer, text)
            behind = "<think> a <c> b </think>" + text
            assert allowed_behind(form, tokenizer, behind) == allowed_behind(without, tokenizer, text)
    else:
        assert END in found


@pytest.mark.parametrize("params", [{}, {"choice": ("yes",)}])
def test_reasoning_ends_with_its_last_token(matchers: Matchers, tokenizer: Tokenizer, params: dict[str, Any]) -> None:
    form = compiled(matchers, reasoning_end="</think>", reasoning_budget=3, **params)
    progress = Progress(form)
    output = tokenizer.encode("a b c d", add_special_tokens=False)[:3]
    end = tokenizer.encode("</think>", add_special_tokens=False)
    for token in end:
        assert allowed(progress, output) == {token}
        output.append(token)
    assert (END in allowed(progress, output)) == (not params)
    assert END in allowed(progress, output + tokenizer.encode("yes", add_special_tokens=False))


def test_a_region_holds_from_its_trigger_to_its_end(matchers: Matchers, tokenizer: Tokenizer) -> None:
    form = compiled(matchers, **CALLS)
    assert allowed_behind(form, tokenizer, "some { text") == EVERY
    assert texts(tokenizer, allowed_behind(form, tokenizer, "text <c>")) <= {"{", "{a", "{b", "{c"}
    assert END not in allowed_behind(form, tokenizer, "text <c>{a")
    assert allowed_behind(form, tokenizer, "text <c>{a}</c>") == EVERY
    assert texts(tokenizer, allowed_behind(form, tokenizer, "text <c>{a}</c>, <c>")) <= {"{", "{a", "{b", "{c"}


def test_a_text_ends_behind_the_regions_that_it_must_have(matchers: Matchers, tokenizer: Tokenizer) -> None:
    form = compiled(matchers, at_least_one=True, stop_after_first=True, **CALLS)
    assert allowed_behind(form, tokenizer, "text") == EVERY - {END}
    assert allowed_behind(form, tokenizer, "text <c>{a}</c>") == {END}


def test_a_grammar_that_names_the_end_ends_a_text_only_where_complete(matchers: Matchers, tokenizer: Tokenizer) -> None:
    inside = compiled(matchers, grammar=f'start: "a" (<[{END}]> | "b") "c"')
    assert texts(tokenizer, allowed_behind(inside, tokenizer, "a")) <= {"b", "bc"}
    behind = compiled(matchers, grammar=f'start: "a" <[{END}]>')
    assert allowed_behind(behind, tokenizer, "a") == {END}


@pytest.mark.parametrize(
    "params",
    [
        CALLS,
        CALLS | {"at_least_one": True, "stop_after_first": True, "reasoning_end": "</think>"},
        {"choice": ("yes", "<t"), "reasoning_begin": "<think>", "reasoning_end": "</think>", "reasoning_budget": 4},
    ],
)
def test_it_follows_from_the_tokens_alone(matchers: Matchers, tokenizer: Tokenizer, params: dict[str, Any]) -> None:
    form, source = compiled(matchers, **params), random.Random(3)
    known, outputs = Progress(form), [list[int]()]
    for text in ("<think>a</think>b <c>{a}</c> <c>{b}</c>c", "yes", "a</think><c>{ab}</c>", "<t", "<th"):
        output: list[int] = []
        for token in tokenizer.encode(text, add_special_tokens=False):
            if token not in allowed(Progress(form), output):
                break
            output.append(token)
        outputs.append(output)
    assert max(map(len, outputs)) >= 4
    for _ in range(150):
        output = source.choice(outputs)
        output = output[: source.randrange(len(output) + 1)]
        assert allowed(known, output) == allowed(Progress(form), output)
