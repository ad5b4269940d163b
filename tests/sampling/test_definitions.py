"""Every sampler does what each filter and each processor is defined to do: none is known to one sampler alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from octavo.core.sampling_params import OF_DRAWING, SamplingParams
from octavo.devices.cpu.sampler import NativeSampler
from octavo.sampling.filters import Filter, default_filters, scale
from octavo.sampling.metadata import SamplingRow
from octavo.sampling.processors import LogitsProcessor, Penalties, ProcessedRow, default_processors
from octavo.sampling.sampler import Sampler
from tests.conformance.runtimes import LEVELS, REFERENCE, runtime
from tests.sampling.sequences import FakeSequence

VOCAB = 300

FILTERED: dict[str, dict[str, Any]] = {
    "min_p": {"min_p": 0.3},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.6},
}
"""Parameters by the filter that they ask for; they drop some of the tokens that would be drawn."""

PROCESSED: dict[str, list[dict[str, Any]]] = {
    "allowed_token_ids": [{"allowed_token_ids": [7, 8, 9]}],
    "logit_bias": [{"logit_bias": {5: 90.0}}],
    "min_tokens": [{"min_tokens": 9}],
    "bad_words": [{"bad_words": ["x"]}],
    "penalties": [{"repetition_penalty": 9.0}, {"frequency_penalty": 2.0}, {"presence_penalty": 2.0}],
}
"""Parameters by the processor that they ask for; they change which token is the likeliest."""

NOT_OF_THE_DISTRIBUTION = {
    *("n", "best_of", "use_beam_search", "length_penalty", "early_stopping"),
    *("temperature", "seed", "logprobs", "prompt_logprobs"),
    *("stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "max_tokens"),
    *("skip_special_tokens", "spaces_between_special_tokens", "detokenize", "output_kind", "truncate_prompt_tokens"),
    *("repetition_detection", "logprob_token_ids", "skip_reading_prefix_cache"),
    "structured_outputs",  # its processor needs a vocabulary: tests/structured_output/test_processor.py
}


class DropsTheLikeliest:
    """A filter of one's own, which asks for an odd seed."""

    name = "drops_the_likeliest"

    def needs(self, params: SamplingParams) -> bool:
        return (params.seed or 0) % 2 == 1

    def drop(self, scaled: Tensor, params: Sequence[SamplingParams]) -> None:
        scaled.masked_fill_(scaled == 0.0, -math.inf)


def sampler_at(
    level: str | None, processors: Sequence[LogitsProcessor] = (), filters: Sequence[Filter] = ()
) -> Sampler:
    """The reference where there is no level."""
    if level is None:
        return REFERENCE.sampler(processors, filters)
    return NativeSampler(runtime(level).cpu, processors, filters)


def samplers(filters: Sequence[Filter] = ()) -> list[Sampler]:
    return [sampler_at(level, (), filters) for level in (None, *LEVELS)]


def make_logits(rows: int = 1) -> Tensor:
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(0)) * 2
    logits[:, 4] = logits.max() + 0.5  # known to prompt and output, an end token, and a bad word
    return logits.repeat(rows, 1)


def make_row(num_samples: int = 1, **params: Any) -> SamplingRow:
    given = SamplingParams(**{"seed": 0, "max_tokens": 99, **params})
    words = ((4,),) if given.bad_words else ()
    return FakeSequence(given, [1, 4], [4, 4], 0, (4,), words).row(num_samples)


def drawn(sampler: Sampler, row: SamplingRow) -> set[int]:
    (result,) = sampler.sample(make_logits(), [row])
    assert result.error is None
    return {token.token_id for token in result.tokens}


def test_every_definition_has_a_case_and_every_parameter_that_changes_the_distribution_a_definition() -> None:
    assert {each.name for each in default_filters()} == set(FILTERED)
    assert {each.name for each in default_processors()} == set(PROCESSED)
    claimed = {name for cases in PROCESSED.values() for case in cases for name in case}
    claimed |= {name for case in FILTERED.values() for name in case}
    unclaimed = set(SamplingParams.__struct_fields__) - NOT_OF_THE_DISTRIBUTION
    assert claimed == unclaimed, "each has a case in PROCESSED or FILTERED, or stands in NOT_OF_THE_DISTRIBUTION"
    # what beam search, which draws nothing, refuses or leaves out
    assert set(OF_DRAWING) == {"temperature", *FILTERED}


@pytest.mark.parametrize("definition", default_filters(), ids=lambda each: str(each.name))
def test_every_sampler_draws_what_a_filter_keeps(definition: Filter) -> None:
    row = make_row(400, temperature=1.5, **FILTERED[definition.name])
    params = row.sequence.params
    assert [each.name for each in default_filters() if each.needs(params)] == [definition.name]
    scaled = scale(make_logits(), [params.temperature])
    definition.drop(scaled, [params])
    kept = set(scaled[0].isfinite().nonzero().flatten().tolist())
    for sampler in samplers():
        assert drawn(sampler, row) == kept
        assert not drawn(sampler, make_row(400, temperature=1.5)) <= kept


@pytest.mark.parametrize(
    ("definition", "given"),
    [(each, case) for each in default_processors() for case in PROCESSED[each.name]],
    ids=lambda value: str(getattr(value, "name", value)),
)
def test_every_sampler_takes_what_processors_favour(definition: LogitsProcessor, given: dict[str, Any]) -> None:
    row = make_row(temperature=0.0, **given)
    assert [each.name for each in default_processors() if each.needs(row.sequence.params)] == [definition.name]
    logits = make_logits()
    definition.update([ProcessedRow(0, row)])
    definition.apply(logits)
    likeliest = {int(logits.argmax())}
    for sampler in samplers():
        assert drawn(sampler, row) == likeliest != drawn(sampler, make_row(temperature=0.0)) == {4}


def test_a_filter_that_no_sampler_has_built_in_acts_in_all_of_them() -> None:
    rows = [make_row(20, seed=seed, logprobs=1, top_k=3) for seed in (1, 2, 3)]
    expected = None
    for sampler in samplers([DropsTheLikeliest()]):
        results = sampler.sample(make_logits(3), rows)
        tokens = [{token.token_id for token in result.tokens} for result in results]
        assert 4 not in tokens[0] | tokens[2]
        assert 4 in tokens[1]
        assert len(tokens[0]) == 2  # behind the others: of three that top_k keeps
        assert expected in (None, tokens)
        expected = tokens
        # its rows and their neighbours have the same bits alone
        for place, row in enumerate(rows):
            assert sampler.sample(make_logits(), [row]) == [results[place]]
    # a greedy row takes the likeliest token, whatever a filter says
    greedy = make_row(seed=1, temperature=0.0)
    assert [drawn(sampler, greedy) for sampler in samplers([DropsTheLikeliest()])] == [{4}] * (1 + len(LEVELS))


def test_parameters_that_no_definition_claims_change_no_draw() -> None:
    fields = {field.name: field.default for field in msgspec.structs.fields(SamplingParams)}
    plain = SamplingParams(**{name: fields[name] for name in NOT_OF_THE_DISTRIBUTION})
    assert not any(each.needs(plain) for each in (*default_filters(), *default_processors()))


def sequences_with_history(num_output: int) -> list[FakeSequence]:
    """One sequence per processor, per filter, greedy, and one that asks for everything."""
    together = {"logprobs": 3, "top_p": 0.9, "repetition_penalty": 1.3, "min_tokens": 4, "bad_words": ["x"]}
    kinds = [*(case for cases in PROCESSED.values() for case in cases), *FILTERED.values(), {}, together]
    sequences = []
    for place, kind in enumerate([*kinds, {"temperature": 0.0, "frequency_penalty": 0.7}]):
        params = SamplingParams(**{"seed": place, "max_tokens": 99, "temperature": 1.5, **kind})
        sequences.append(FakeSequence(params, [1, 4], [4] * num_output, place, (4, 5), ((4,), (5, 6), (4, 4, 7))))
    return sequences


@pytest.mark.parametrize("processors", [0, 1], ids=["built in", "one's own too"])
def test_rows_behind_drafts_are_drawn_as_if_the_drafts_had_been_decoded(processors: int) -> None:
    own = [Penalties() for _ in range(processors)]  # before the built-in ones: tokens are penalised twice
    for level in (None, *LEVELS):
        ahead, behind = (sampler_at(level, own) for _ in range(2))
        drafted, decoded = sequences_with_history(1), sequences_with_history(1)
        for step in range(4):
            # partly right in a later step: what rejected drafts were must leave no trace
            for one in drafted:
                one.drafts = [(5 * step + one.index + place) % 9 for place in range(3)]
            rows = [row for one in drafted for row in one.rows()]
            found = iter(ahead.sample(make_logits(len(rows)), rows))
            for one, other in zip(drafted, decoded, strict=True):
                results = [next(found) for _ in range(4)]
                (expected,) = behind.sample(make_logits(), [other.row()])
                assert results[0] == expected
                for place, result in enumerate(results[1:], start=1):
                    alone = FakeSequence(
                        other.params, other.prompt, other.output + one.drafts[:place], other.index,
                        other.end_token_ids, other.bad_words_token_ids,
                    )  # fmt: skip
                    assert [result] == behind.sample(make_logits(), [alone.row()])
                for sequence in (one, other):
                    sequence.output.append(expected.tokens[0].token_id)
