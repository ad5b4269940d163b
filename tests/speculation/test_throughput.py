"""Guesses do not slow an engine down, at any load and on any text, by the costs that were measured on processors."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest

from octavo.config.schema import SpeculativeConfig
from octavo.core.sequence import SequenceGroup
from octavo.speculation.speculation import Speculation
from tests.fakes.engine import make_request

Curve = dict[int, float]
CURVES: dict[str, Curve] = {
    # ms by tokens of a step: 0.6 billion weights in bfloat16 and in four bits, and 5 million
    "bfloat16": {1: 48.8, 2: 55.1, 4: 58.1, 8: 58.9, 9: 65.6, 12: 84.4, 16: 116, 24: 165, 32: 217, 256: 1736},
    "int4": {1: 16.6, 4: 22.1, 6: 28.8, 8: 38.2, 9: 44.1, 12: 56, 16: 70.7, 24: 112, 32: 136, 256: 1090},
    "tiny": {1: 0.33, 2: 0.68, 3: 0.73, 4: 0.75, 8: 0.95, 12: 1.3, 16: 1.7, 64: 6.0, 256: 24.0},
}


def words(source: random.Random, count: int) -> list[int]:
    """Return text of few words, so that pairs often come again and go on otherwise."""
    return [min(int(source.expovariate(0.05)), 150) for _ in range(count)]


def edited(source: random.Random, text: Sequence[int]) -> list[int]:
    """Return the text with about one word in forty changed."""
    return [each if source.random() > 0.025 else 200 + each for each in text]


def speed_up(
    curve: Curve, batch: int, *, edits: bool, repeats: bool = False, num_rounds: int = 4, num_tokens: int = 150
) -> float:
    """Return how much faster texts are written with guesses. Steps take times that are spread about the curve.

    repeats: right guesses are computed again by the next step, as by models with recurrent layers.
    """
    source = random.Random(batch)
    proposer = Speculation(SpeculativeConfig(method="ngram"), clock=lambda: 0.0, repeats=repeats)
    plain_s = guessed_s = 0.0

    def seconds(count: int) -> float:
        return float(np.interp(count, list(curve), list(curve.values()))) / 1e3

    for number in range(num_rounds):
        live = []
        for place in range(batch):
            prompt = words(source, num_tokens)
            text = edited(source, prompt) if edits else words(source, num_tokens)
            group = SequenceGroup(make_request(f"{number} {place}", prompt, max_tokens=num_tokens), 0, 0)
            group.sequences[0].token_ids.append(text[0])
            live.append((group, text))
        plain_s += (num_tokens - 1) * seconds(batch)
        num_repeated = 0
        while live:
            drafts: list[list[int]] = [[] for _ in live]
            if proposer.begin_step(len(live)):
                drafts = [proposer.propose(group, group.sequences[0], 64) for group, _ in live]
            count = len(live) + sum(map(len, drafts)) + num_repeated
            guessed_s += seconds(count)
            proposer.note_step(count, seconds(count) * max(0.5, source.gauss(1, 0.1)), 2 * (not any(drafts)))
            rights = [verify(group, text, drafted) for (group, text), drafted in zip(live, drafts, strict=True)]
            num_repeated = repeats * sum(rights)
            live = [(group, text) for group, text in live if group.sequences[0].num_output_tokens < len(text)]
    return plain_s / guessed_s


def verify(group: SequenceGroup, text: Sequence[int], drafted: Sequence[int]) -> int:
    """Append the next tokens of the text up to and with the first that was not guessed. Returns how many were."""
    sequence = group.sequences[0]
    for count, guess in enumerate([*drafted, None]):
        if sequence.num_output_tokens == len(text):
            return 0
        sequence.token_ids.append(text[sequence.num_output_tokens])
        if sequence.token_ids[-1] != guess:
            return count
    raise AssertionError("no token is None")


@pytest.mark.parametrize("repeats", [False, True])
@pytest.mark.parametrize("batch", [1, 4, 16, 64])
@pytest.mark.parametrize("name", CURVES)
def test_new_text_is_not_slower_with_guesses_at_any_load(name: str, batch: int, repeats: bool) -> None:
    assert speed_up(CURVES[name], batch, edits=False, repeats=repeats, num_rounds=4 if batch < 64 else 1) > 0.97


@pytest.mark.parametrize(("name", "batch", "least"), [("bfloat16", 1, 3.0), ("int4", 1, 1.8), ("bfloat16", 4, 1.4)])
def test_edits_are_written_faster(name: str, batch: int, least: float) -> None:
    assert speed_up(CURVES[name], batch, edits=True) > least


def test_edits_are_written_faster_where_right_guesses_are_computed_again() -> None:
    assert speed_up(CURVES["bfloat16"], 1, edits=True, repeats=True) > 2.0
