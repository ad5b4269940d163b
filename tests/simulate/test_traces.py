"""Traces: what a line may say, what the scheduler gets of it, and what generators make."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections import Counter
from pathlib import Path

import msgspec
import pytest

from octavo.errors import ConfigError
from octavo.simulate.executor import END_TOKEN
from octavo.simulate.trace_file import read_trace
from octavo.simulate.traces import Trace, TraceRequest, Workload, generate


def test_a_trace_survives_its_file(tmp_path: Path) -> None:
    requests = generate(Workload(num_requests=20, turns=3, shared_prefix_len=8), seed=1)
    (tmp_path / "trace").write_bytes(msgspec.json.Encoder().encode_lines(requests))
    assert read_trace(tmp_path / "trace").requests == requests


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"output_len": 3}', "line 2: a request has either num_prompt_tokens or prompt_token_ids"),
        ('{"num_prompt_tokens": 3, "output_len": 0}', "line 2: output_len: expected a whole number of at least 1"),
        ('{"num_prompt_tokens": 3, "output_len": 1, "prompt": "x"}', "line 2: prompt is not a field of a request"),
        ('{"num_prompt_tokens": 3, "output_len": 1, "prefixes": [["a", 4]]}', "prefixes are longer than"),
        (
            '{"num_prompt_tokens": 3, "output_len": 2, "output_lens": [1, 1], "n": 2}',
            "output_lens has a length for each",
        ),
        ('{"num_prompt_tokens": 3, "output_len": 1, "n": 3, "best_of": 2}', "line 2: best_of is 2, must be at least n"),
        (
            '{"num_prompt_tokens": 3, "output_len": 1, "prefixes": [["a", 0]]}',
            r"line 2: prefixes\[0\]\[1\]: ",
        ),
        ('{"num_prompt_tokens": 3, "outputlen": 3}', "line 2: outputlen is not a field .*; did you mean output_len"),
        ('{"num_prompt_tokens": 3}', "line 2: output_len is missing; a line is such as"),
        ('{"num_prompt_tokens": "3", "output_len": 1}', "num_prompt_tokens: expected a whole number or null, got text"),
        ('{"num_prompt_tokens": 3, "output_len": 1, "tenant": "\udcff"}', "line 2: is not UTF-8 text"),
        ('{"num_prompt_tokens": 3, "output_len":', "line 2: is not a JSON object .*; a line is such as"),
        (
            '{"num_prompt_tokens": 3, "output_len": 1, "request_id": "a"}',
            "line 2: request_id is 'a', which an earlier request has",
        ),
        (
            '{"num_prompt_tokens": 9, "output_len": 1, "placeholders": [[2, 3, "a"], [4, 1, "b"]]}',
            r"line 2: the placeholder 'b' is at \[4, 5\), must lie behind the one before it",
        ),
        (
            '{"num_prompt_tokens": 9, "output_len": 1, "placeholders": [[8, 2, "a"]]}',
            r"'a' is at \[8, 10\), must lie .* within the 9 tokens of the prompt",
        ),
        ('{"num_prompt_tokens": 3, "output_len": 1, "follows": "b"}', "line 2: follows is 'b', which is no earlier"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    first = '{"request_id": "a", "num_prompt_tokens": 3, "output_len": 1}'
    (tmp_path / "trace").write_bytes(f"{first}\n{line}\n".encode(errors="surrogateescape"))
    with pytest.raises(ConfigError, match=message):
        read_trace(tmp_path / "trace")


def test_an_empty_trace_and_a_missing_one_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(ConfigError, match="empty has no requests"):
        read_trace(tmp_path / "empty")
    with pytest.raises(ConfigError, match="trace is .* cannot be read"):
        read_trace(tmp_path / "missing")


def test_prompts_are_alike_as_far_as_they_name_the_same_prefixes() -> None:
    trace = Trace(
        [
            TraceRequest(num_prompt_tokens=9, prefixes=[("a", 4), ("b", 2)], output_len=1),
            TraceRequest(num_prompt_tokens=9, prefixes=[("a", 4), ("c", 2)], output_len=1),
            TraceRequest(num_prompt_tokens=9, output_len=1),
        ]
    )
    first, second, third = (trace.request(number, 0.0)[0].prompt_token_ids for number in range(3))
    assert [len(first), len(second), len(third)] == [9, 9, 9]
    assert first[:4] == second[:4]
    assert not set(first[4:]) & set(second[4:])
    assert not set(first + second) & set(third)


def test_a_later_turn_begins_with_prompt_and_output_of_the_one_before() -> None:
    trace = Trace(
        [
            TraceRequest(request_id="0", num_prompt_tokens=5, prefixes=[("a", 2)], conversation="x", output_len=4),
            TraceRequest(
                follows="0", num_prompt_tokens=12, prefixes=[("a", 2)], conversation="x", output_len=2, arrival_s=1.0
            ),
        ]
    )
    (first, script), (second, _) = trace.request(0, 0.0), trace.request(1, 9.0)
    assert second.prompt_token_ids[:9] == first.prompt_token_ids + [script.token] * 4
    assert trace.followers == {0: [1]}


def test_a_request_ends_by_itself_or_at_its_limit() -> None:
    trace = Trace(
        [
            TraceRequest(num_prompt_tokens=2, output_len=7, max_tokens=9),
            TraceRequest(num_prompt_tokens=2, output_len=7, max_tokens=3),
            TraceRequest(num_prompt_tokens=2, output_len=7, n=2, use_beam_search=True),
            TraceRequest(prompt_token_ids=[5, 6], output_len=7, priority=3, tenant="t", first_token_deadline_s=2.0),
        ]
    )
    made = [trace.request(number, 4.0) for number in range(4)]
    assert [request.params.max_tokens for request, _ in made] == [9, 3, 7, 7]
    assert [script.output_lens for _, script in made] == [[7], [3], [7], [7]]
    assert [request.end_token_ids for request, _ in made] == [(END_TOKEN,), (END_TOKEN,), (), (END_TOKEN,)]
    request = made[3][0]
    assert (request.prompt_token_ids, request.priority, request.tenant) == ([5, 6], 3, "t")
    assert (request.arrival_time, request.first_token_deadline) == (4.0, 6.0)


def test_impossible_sampling_is_an_error_of_the_trace() -> None:
    with pytest.raises(ConfigError, match="request 1 of the trace: best_of is 2, must be at least n"):
        Trace([TraceRequest(num_prompt_tokens=2, output_len=7, n=3, best_of=2)])


def test_tenants_priorities_and_deadlines_change_no_length() -> None:
    plain = Workload(num_requests=300, turns=2)
    several = dataclasses.replace(plain, num_tenants=3, num_priorities=4, first_token_deadline_s=2.5)
    requests, others = generate(several, seed=3), generate(plain, seed=3)
    assert [request.prompt_len for request in requests] == [request.prompt_len for request in others]
    counts = Counter(request.tenant for request in requests)
    assert counts["tenant-0"] > counts["tenant-1"] > counts["tenant-2"] > 0
    assert {request.priority for request in requests} == {0, 1, 2, 3}
    assert {request.first_token_deadline_s for request in requests} == {2.5}
    by_id = {request.request_id: request for request in requests}
    for request in requests:
        assert request.follows is None or by_id[request.follows].tenant == request.tenant


def test_generated_lengths_and_rates_are_those_asked_for() -> None:
    for arrivals in ("poisson", "gamma", "on-off"):
        workload = Workload(arrivals=arrivals, num_requests=20_000, request_rate=5.0, burstiness=2.0, max_len=100_000)
        requests = generate(workload, seed=2)
        assert len(requests) == 20_000
        assert len(requests) / requests[-1].arrival_s == pytest.approx(5.0, rel=0.06)
        assert statistics.fmean(each.prompt_len for each in requests) == pytest.approx(256, rel=0.05)
        assert statistics.fmean(each.output_len for each in requests) == pytest.approx(128, rel=0.05)


def test_gaps_vary_as_asked() -> None:
    def variation(arrivals: str) -> float:
        workload = Workload(arrivals=arrivals, num_requests=20_000, burstiness=3.0)
        times = [each.arrival_s for each in generate(workload, seed=3)]
        gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
        return statistics.stdev(gaps) / statistics.fmean(gaps)

    assert variation("poisson") == pytest.approx(1.0, rel=0.05)
    assert variation("gamma") == pytest.approx(3.0, rel=0.15)


def test_nothing_arrives_while_it_is_off() -> None:
    requests = generate(Workload(arrivals="on-off", num_requests=500, request_rate=2.0, on_s=5.0, off_s=15.0), seed=4)
    assert all(each.arrival_s % 20.0 <= 5.0 for each in requests)


def test_the_same_seed_makes_the_same_trace() -> None:
    workload = Workload(num_requests=50, turns=4, shared_prefix_len=10, num_shared_prefixes=3)
    assert generate(workload, seed=5) == generate(workload, seed=5) != generate(workload, seed=6)


def test_conversations_grow_until_they_are_too_long() -> None:
    requests = generate(Workload(num_requests=40, turns=8, input_len=40, output_len=20, max_len=200), seed=7)
    assert len(requests) == 40
    assert max(each.prompt_len + each.output_len for each in requests) <= 200
    by_id = {each.request_id: each for each in requests}
    later = [each for each in requests if each.follows is not None]
    assert len(later) > 20
    for each in later:
        assert each.follows is not None
        before = by_id[each.follows]
        assert each.prompt_len > before.prompt_len + before.output_len


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"arrivals": "rush"}, "arrivals is 'rush', must be one of poisson"),
        ({"request_rate": 0.0}, "request_rate is 0.0, must be greater than 0"),
        ({"input_len": 0.5}, "input_len is 0.5, must be at least 1"),
        ({"think_s": float("nan")}, "think_s is nan, must be a finite number"),
        ({"shared_prefix_len": 4096}, "shared_prefix_len is 4096, must be at most 4094"),
    ],
)
def test_what_cannot_be_generated_is_refused(values: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Workload(**values)  # type: ignore[arg-type]


def test_cache_keys_reach_the_scheduler_and_survive_a_file(tmp_path: Path) -> None:
    image = (1, 4, "cat")
    requests = [
        TraceRequest(
            num_prompt_tokens=9, output_len=1, cache_namespace="n", cache_salt="s", adapter="a", placeholders=[image]
        ),
        TraceRequest(num_prompt_tokens=9, output_len=1, placeholders=[image, (6, 2, "dog")]),
    ]
    (tmp_path / "trace").write_bytes(msgspec.json.Encoder().encode_lines(requests))
    trace = read_trace(tmp_path / "trace")
    first, second = (trace.request(number, 0.0)[0] for number in range(2))
    assert (first.cache_salt, first.adapter, second.cache_salt, second.adapter) == ("s", "a", None, None)
    assert (first.cache_namespace, second.cache_namespace) == ("n", None)
    cat, dog = second.placeholders
    assert first.placeholders == (cat,)
    assert (cat.offset, cat.length, dog.offset, dog.length) == (1, 4, 6, 2)
    assert cat.digest != dog.digest
