"""Output processor: every way to read a request shows the same text, and each request has one final answer."""

from __future__ import annotations

import itertools
import pickle
import sys
import tracemalloc
from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.core.logprob_list import LogprobList
from octavo.core.messages import EngineCoreOutput, EngineCoreRequest, SequenceDelta, StopSequence
from octavo.core.outputs import (
    CompletionOutput,
    Logprob,
    RequestError,
    RequestMetrics,
    RequestOutput,
    WeightVersionSpan,
)
from octavo.core.resume import ResumedSequence
from octavo.core.sampling_params import OutputKind
from octavo.core.step import PromptLogprobs, TokenLogprobs
from octavo.engine.output.metrics import Metrics
from octavo.engine.output.open_sequence import OpenSequence
from octavo.engine.output.output_processor import OutputProcessor, Processed, in_turns
from octavo.engine.text.tokenizer import Tokenizer
from octavo.errors import InvalidRequest
from tests.fakes import engine as fakes
from tests.fakes.byte_tokenizer import EOS, byte_tokenizer
from tests.fakes.core import RefusingCore, ScriptedCore, token_logprobs


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return byte_tokenizer(tmp_path_factory.mktemp("byte"))


def make_request(text: str, request_id: str = "r", **params: Any) -> EngineCoreRequest:
    return fakes.make_request(request_id, text.encode(), end_token_ids=(EOS,), **{"max_tokens": 1000, **params})


def run(
    tokenizer: Tokenizer,
    core: ScriptedCore,
    requests: Iterable[EngineCoreRequest],
    metrics: Metrics | None = None,
    steps_per_look: int = 1,
) -> list[RequestOutput]:
    """The outputs that callers read, who look after so many steps."""
    processor = OutputProcessor(tokenizer, counts=None if metrics is None else metrics.requests)
    opened = [processor.add(request, "the prompt") for request in requests]
    for request in requests:
        core.add_request(request)
    outputs: list[RequestOutput] = []
    for number in itertools.count(1):
        if not core.has_unfinished():
            break
        processed = processor.process(core.step().outputs)
        if number % steps_per_look == 0 or len(processor) == 0:
            outputs += Processed(opened, []).read()
        for stop in processed.stops:
            core.stop_sequence(stop.request_id, stop.index)
    assert len(processor) == 0
    assert all(not output.finished for output in outputs[:-1]) or len({output.request_id for output in outputs}) > 1
    return outputs


def test_cumulative_outputs_hold_everything_so_far(tokenizer: Tokenizer) -> None:
    outputs = run(tokenizer, ScriptedCore(), [make_request("ab")])
    assert [output.outputs[0].text for output in outputs] == ["a", "ab", "ab"]
    assert [output.outputs[0].token_ids for output in outputs] == [[97], [97, 98], [97, 98, EOS]]
    assert [output.finished for output in outputs] == [False, False, True]
    assert (outputs[-1].outputs[0].finish_reason, outputs[-1].outputs[0].stop_reason) == ("stop", None)
    assert (outputs[-1].prompt, outputs[-1].num_cached_tokens) == ("the prompt", 3)


def test_delta_outputs_hold_what_is_new(tokenizer: Tokenizer) -> None:
    outputs = run(tokenizer, ScriptedCore(), [make_request("ab", output_kind=OutputKind.DELTA, logprobs=0)])
    assert [output.outputs[0].text for output in outputs] == ["a", "b", ""]
    assert [output.outputs[0].token_ids for output in outputs] == [[97], [98], [EOS]]
    assert [len(output.outputs[0].logprobs or []) for output in outputs] == [1, 1, 1]


def test_a_stream_keeps_no_log_probabilities_that_were_read(tokenizer: Tokenizer) -> None:
    request = make_request("p", output_kind=OutputKind.DELTA, logprobs=0)
    sequence = OpenSequence(0, request, tokenizer)
    for token_id in b"abc":
        described = TokenLogprobs(token_id=token_id, logprob=-1.0, rank=1)
        sequence.take(SequenceDelta(index=0, token_ids=[token_id], logprobs=[described]))
        part = sequence.delta()
        assert part is not None
        assert part.logprobs is not None
        assert [*part.logprobs[0]] == [token_id]
        num_references = sys.getrefcount(part.logprobs[0])
        assert num_references == 2, "of the list and of the call alone"


def test_log_probabilities_of_a_final_output_are_arrays_until_they_are_read(tokenizer: Tokenizer) -> None:
    request = make_request("p", output_kind=OutputKind.FINAL_ONLY, logprobs=20)
    sequence, num_tokens = OpenSequence(0, request, tokenizer), 500
    top = tuple(range(97, 117))
    tracemalloc.start()
    for number in range(num_tokens):
        values = tuple(-number - each / 8 for each in top)
        described = TokenLogprobs(
            token_id=97 + number % 30, logprob=values[-1], rank=7, top_ids=top, top_logprobs=values
        )
        sequence.take(SequenceDelta(index=0, token_ids=[described.token_id], logprobs=[described]))
    logprobs = sequence.whole().logprobs
    assert tracemalloc.get_traced_memory()[0] < num_tokens * 21 * 32
    tracemalloc.stop()
    assert isinstance(logprobs, LogprobList)
    assert (len(logprobs), logprobs.num_entries) == (num_tokens, 500 * 20 + 160), (
        "the drawn one is among the likeliest or not"
    )
    assert list(logprobs[29]) == [126, *top]
    assert logprobs[-1][97] == Logprob(-499 - 97 / 8, 1, "a")
    assert logprobs[1:3] == [logprobs[1], logprobs[2]] != logprobs[2:4]
    assert pickle.loads(pickle.dumps(logprobs[:2])) == [logprobs[0], logprobs[1]]
    assert logprobs[np.int64(29)] == logprobs[29]
    assert msgspec.json.encode(sequence.whole(), enc_hook=list).count(b'"logprob"') == logprobs.num_entries


@pytest.mark.parametrize("kind", [*OutputKind])
def test_an_output_tells_at_its_end_which_weights_drew_which_tokens(tokenizer: Tokenizer, kind: OutputKind) -> None:
    opened = OutputProcessor(tokenizer).add(make_request("p", output_kind=kind, stop="e"), None)
    found: list[Any] = []
    for version, token_ids in ((None, b"ab"), ("1", b""), ("2", b"c"), ("1", b"d"), ("3", b"efg")):
        delta = SequenceDelta(index=0, token_ids=list(token_ids), logprobs=[])
        opened.take(EngineCoreOutput(request_id="r", deltas=[delta], finished=False, weight_version=version))
        output = opened.output()
        found += [] if output is None else [each.weight_versions for each in output.outputs]
    spans = (("default", 0, 2), ("2", 2, 3), ("1", 3, 4), ("3", 4, 5))
    assert found.pop() == [WeightVersionSpan(*each) for each in spans]
    assert not any(found), "before the end it is not known"


def test_outputs_of_weights_without_a_label_name_none(tokenizer: Tokenizer) -> None:
    sequence = OpenSequence(0, make_request("p"), tokenizer)
    sequence.take(SequenceDelta(index=0, token_ids=[99], logprobs=[], finish_reason="length"))
    assert sequence.whole().weight_versions is None


def test_spans_of_a_resumed_request_begin_behind_what_others_have_delivered(tokenizer: Tokenizer) -> None:
    sequence = OpenSequence(0, make_request("p"), tokenizer)
    sequence.resume(ResumedSequence(index=0, token_ids=[97, 98]), ())
    sequence.take(SequenceDelta(index=0, token_ids=[99], logprobs=[], finish_reason="length"), "5")
    assert (sequence.whole().token_ids, sequence.whole().weight_versions) == ([99], [WeightVersionSpan("5", 0, 1)])


def test_final_output_alone_holds_everything(tokenizer: Tokenizer) -> None:
    [output] = run(tokenizer, ScriptedCore(), [make_request("ab", output_kind=OutputKind.FINAL_ONLY, max_tokens=2)])
    assert (output.finished, output.outputs[0].text, output.outputs[0].finish_reason) == (True, "ab", "length")


def test_stop_token_is_the_reason_and_is_not_shown(tokenizer: Tokenizer) -> None:
    output = run(tokenizer, ScriptedCore(), [make_request("abc", stop_token_ids=(ord("b"),))])[-1].outputs[0]
    assert (output.text, output.token_ids, output.finish_reason, output.stop_reason) == ("a", [97, 98], "stop", 98)


@pytest.mark.parametrize("late_tokens", [0, 1, 3])
def test_stop_string_ends_the_sequence_in_front_and_core(tokenizer: Tokenizer, late_tokens: int) -> None:
    core = ScriptedCore(late_tokens=late_tokens)
    outputs = run(tokenizer, core, [make_request("one. two", stop=".")])
    final = outputs[-1].outputs[0]
    assert (final.text, final.finish_reason, final.stop_reason) == ("one", "stop", ".")
    assert final.token_ids == list(b"one.")
    assert core.stopped == [("r", 0)]
    assert sum(output.finished for output in outputs) == 1


def test_stop_string_completed_by_the_last_token_needs_no_word_to_the_core(tokenizer: Tokenizer) -> None:
    core = ScriptedCore()
    final = run(tokenizer, core, [make_request("one.", stop=".", max_tokens=4)])[-1].outputs[0]
    assert (final.finish_reason, final.stop_reason, core.stopped) == ("stop", ".", [])


def test_tokens_behind_a_stop_string_in_the_same_step_are_dropped(tokenizer: Tokenizer) -> None:
    final = run(tokenizer, ScriptedCore(tokens_per_step=5), [make_request("ab.cdefgh", stop=".", logprobs=0)])[-1]
    assert final.outputs[0].token_ids == list(b"ab.")
    assert len(final.outputs[0].logprobs or []) == 3
    assert final.outputs[0].cumulative_logprob == pytest.approx(-1.5)


def test_siblings_go_on_after_one_sequence_has_stopped(tokenizer: Tokenizer) -> None:
    core = ScriptedCore(reply=lambda request, index: list([b"a.bcd", b"abcd."][index]))
    final = run(tokenizer, core, [make_request("x", n=2, stop=".")])[-1]
    assert [(output.index, output.text) for output in final.outputs] == [(0, "a"), (1, "abcd")]
    assert core.stopped == [("r", 0)]  # the other one ends with its last token anyway


def test_outputs_of_several_sequences_keep_their_order(tokenizer: Tokenizer) -> None:
    core = ScriptedCore(reply=lambda request, index: list(b"xyz"[index:]))
    outputs = run(tokenizer, core, [make_request("p", n=3, output_kind=OutputKind.DELTA)])
    assert [[(part.index, part.text) for part in output.outputs] for output in outputs] == [
        [(0, "x"), (1, "y"), (2, "z")],
        [(0, "y"), (1, "z")],
        [(0, "z")],
    ]
    assert [output.finished for output in outputs] == [False, False, True]


@pytest.mark.parametrize("kind", list(OutputKind))
def test_tokens_of_sequences_that_are_not_returned_are_counted(tokenizer: Tokenizer, kind: OutputKind) -> None:
    core = ScriptedCore(reply=lambda request, index: list(b"xyz"[index:]))
    final = run(tokenizer, core, [make_request("p", n=1, best_of=3, output_kind=kind)])[-1]
    assert len(final.outputs) == 1
    assert final.num_generated_tokens == sum(len(reply) for reply in (b"xyz", b"yz", b"z"))
    counts = [each.num_generated_tokens for each in run(tokenizer, core, [make_request("p", n=3, output_kind=kind)])]
    assert counts[-1] == final.num_generated_tokens
    assert counts == sorted(counts)


def test_logprobs_hold_the_drawn_token_and_the_likeliest(tokenizer: Tokenizer) -> None:
    final = run(tokenizer, ScriptedCore(), [make_request("x", logprobs=3, max_tokens=1)])[-1].outputs[0]
    assert final.logprobs == [
        {
            ord("x"): Logprob(-0.5, 2, "x"),
            ord("a"): Logprob(-0.1, 1, "a"),
            ord("b"): Logprob(-0.1 * 3, 3, "b"),
        }
    ]
    assert final.cumulative_logprob == -0.5


def test_prompt_logprobs_of_several_steps_are_put_together(tokenizer: Tokenizer) -> None:
    for kind, expected in ((OutputKind.CUMULATIVE, [True, True]), (OutputKind.DELTA, [True, False])):
        processor = OutputProcessor(tokenizer)
        processor.add(make_request("abc", prompt_logprobs=0, output_kind=kind), None)

        def output(*, finished: bool = False, **fields: Any) -> list[RequestOutput]:
            result = EngineCoreOutput(request_id="r", finished=finished, **{"deltas": [], **fields})
            return processor.process([result]).read()  # noqa: B023

        def piece(first: int, token: str) -> PromptLogprobs:
            return PromptLogprobs(first_position=first, tokens=[token_logprobs(ord(token), 0)])

        def delta(reason: str | None = None) -> SequenceDelta:
            return SequenceDelta(index=0, token_ids=[97], logprobs=[token_logprobs(97, 0)], finish_reason=reason)

        assert output(prompt_logprobs=piece(1, "b")) == []
        outputs = output(prompt_logprobs=piece(2, "c"), deltas=[delta()])
        outputs += output(finished=True, deltas=[delta("length")])
        assert [output.prompt_logprobs is not None for output in outputs] == expected
        assert outputs[0].prompt_logprobs == [
            None,
            {ord("b"): Logprob(-0.5, 2, "b")},
            {ord("c"): Logprob(-0.5, 2, "c")},
        ]


def test_error_of_the_core_is_the_final_answer(tokenizer: Tokenizer) -> None:
    error = RequestError("logits are NaN")
    [output] = run(tokenizer, RefusingCore(error), [make_request("ab")])
    assert (output.finished, output.error, output.outputs[0].finish_reason) == (True, error, "error")


def test_aborted_request_ends_with_what_it_has(tokenizer: Tokenizer) -> None:
    processor, core = OutputProcessor(tokenizer), ScriptedCore()
    request = make_request("abc")
    processor.add(request, None)
    core.add_request(request)
    processor.process(core.step().outputs)
    aborted = processor.abort("r")
    output = aborted and aborted.output()
    assert output is not None
    assert (output.finished, output.outputs[0].text, output.outputs[0].finish_reason) == (True, "a", "abort")
    assert processor.abort("r") is None
    assert processor.process(core.step().outputs) == ([], [])


def test_open_requests_of_a_dead_core_are_counted_as_errors(tokenizer: Tokenizer) -> None:
    metrics = Metrics("m")
    processor = OutputProcessor(tokenizer, counts=metrics.requests)
    for request_id in ("x", "y"):
        processor.add(make_request("abc", request_id), None)
    processor.fail()
    assert len(processor) == 0
    assert 'octavo:request_success_total{finished_reason="error",model_name="m"} 2.0' in metrics.render().decode()


def test_request_id_in_use_is_refused(tokenizer: Tokenizer) -> None:
    processor = OutputProcessor(tokenizer)
    processor.add(make_request("abc"), None)
    with pytest.raises(InvalidRequest, match="request id 'r' is in use"):
        processor.add(make_request("abc"), None)


def test_times_of_the_core_are_kept_and_its_own_object_is_left_alone(tokenizer: Tokenizer) -> None:
    processor = OutputProcessor(tokenizer, clock=lambda: 9.0)
    processor.add(make_request("abc", stop="a"), None)
    times = RequestMetrics(arrival_time=1.0, first_scheduled_time=2.0)
    delta = SequenceDelta(index=0, token_ids=[97], logprobs=[])
    core_output = EngineCoreOutput(request_id="r", finished=False, deltas=[delta], metrics=times)
    [output] = processor.process([core_output]).read()
    assert output.metrics is not None
    assert (output.metrics.time_in_queue, output.metrics.first_token_time, output.metrics.finished_time) == (
        1.0,
        9.0,
        9.0,
    )
    assert times.finished_time is None


@pytest.mark.parametrize(("stop", "word"), [("a", "finished"), ("x", "aborted")])
def test_an_end_on_this_side_is_in_the_timeline(tokenizer: Tokenizer, stop: str, word: str) -> None:
    processor = OutputProcessor(tokenizer, clock=lambda: 9.0)
    processor.add(make_request("abc", stop=stop), None)
    times = RequestMetrics(arrival_time=1.0, timeline=[(1.0, "queued"), (2.0, "scheduled")])
    delta = SequenceDelta(index=0, token_ids=[97], logprobs=[])
    processed = processor.process([EngineCoreOutput(request_id="r", finished=False, deltas=[delta], metrics=times)])
    processor.abort("r")
    [output] = processed.read()
    assert output.metrics is not None
    assert output.metrics.timeline == [(1.0, "queued"), (2.0, "scheduled"), (9.0, word)]
    assert len(times.timeline) == 2, "it is the scheduler's own"


def test_a_request_that_never_ran_has_a_timeline_too(tokenizer: Tokenizer) -> None:
    processor = OutputProcessor(tokenizer, clock=lambda: 9.0)
    processor.add(make_request("abc"), None)
    error = RequestError("full", code="queue_full", retry_after_s=1)
    refused = EngineCoreOutput(request_id="r", finished=True, deltas=[], error=error)
    [output] = processor.process([refused]).read()
    assert output.metrics is not None
    assert [event for _, event in output.metrics.timeline] == ["queued", "refused"]


def test_ended_requests_are_counted_by_reason(tokenizer: Tokenizer) -> None:
    metrics = Metrics("m")
    requests = [make_request("one. two", "x", stop="."), make_request("ab", "y", n=2, max_tokens=1)]
    run(tokenizer, ScriptedCore(), requests, metrics)
    text = metrics.render().decode()
    assert 'octavo:request_success_total{finished_reason="stop",model_name="m"} 1.0' in text
    assert 'octavo:request_success_total{finished_reason="length",model_name="m"} 2.0' in text
    assert 'octavo:request_generation_tokens_sum{model_name="m"} 6.0' in text
    assert 'octavo:inter_token_latency_seconds_count{model_name="m"} 3.0' in text


def test_refusals_of_the_core_are_counted_by_code_and_have_no_latency(tokenizer: Tokenizer) -> None:
    metrics = Metrics("m")
    full = RequestError("full", code="queue_full", retry_after_s=1)
    run(tokenizer, RefusingCore(full), [make_request("abc")], metrics)
    run(tokenizer, RefusingCore(RequestError("no", code="other", is_client_error=True)), [make_request("abc")], metrics)
    text = metrics.render().decode()
    for code, number in (("queue_full", 1), ("other", 1), ("deadline_unreachable", 0)):
        assert f'octavo:requests_refused_total{{code="{code}",model_name="m"}} {number}.0' in text
    for name in ("e2e_request_latency_seconds", "request_prompt_tokens", "request_generation_tokens"):
        assert f'octavo:{name}_count{{model_name="m"}} 0.0' in text
    assert "octavo:request_success_total{" not in text
    run(tokenizer, RefusingCore(RequestError("NaN")), [make_request("abc")], metrics)
    assert 'octavo:request_prompt_tokens_count{model_name="m"} 1.0' in metrics.render().decode()


def test_a_mistake_that_shows_late_is_no_refusal(tokenizer: Tokenizer) -> None:
    metrics = Metrics("m")
    processor = OutputProcessor(tokenizer, counts=metrics.requests)
    processor.add(make_request("abc"), None)
    times = RequestMetrics(arrival_time=1.0, first_scheduled_time=2.0, finished_time=3.0)
    error = RequestError("no beam is left", is_client_error=True)
    processor.process([EngineCoreOutput(request_id="r", finished=True, deltas=[], error=error, metrics=times)])
    assert 'octavo:e2e_request_latency_seconds_sum{model_name="m"} 2.0' in metrics.render().decode()


@given(
    replies=st.lists(st.text(alphabet="ab€.", min_size=1, max_size=12), min_size=1, max_size=3),
    stops=st.lists(st.text(alphabet="ab€.", min_size=1, max_size=3), max_size=2),
    tokens_per_step=st.integers(1, 4),
    late_tokens=st.integers(0, 3),
    max_tokens=st.integers(1, 20),
    steps_per_look=st.integers(1, 4),
)
def test_streams_read_at_any_pace_are_the_whole(
    tokenizer: Tokenizer,
    replies: list[str],
    stops: list[str],
    tokens_per_step: int,
    late_tokens: int,
    max_tokens: int,
    steps_per_look: int,
) -> None:
    def outputs_of(kind: OutputKind, per_step: int, steps_per_look: int = 1) -> list[RequestOutput]:
        core = ScriptedCore(
            reply=lambda request, index: list(replies[index].encode()),
            tokens_per_step=per_step,
            late_tokens=late_tokens,
        )
        params: dict[str, Any] = {"stop": tuple(stops), "logprobs": 1, "max_tokens": max_tokens, "output_kind": kind}
        return run(tokenizer, core, [make_request("p", n=len(replies), **params)], steps_per_look=steps_per_look)

    [final] = outputs_of(OutputKind.FINAL_ONLY, 1)
    cumulative = outputs_of(OutputKind.CUMULATIVE, tokens_per_step)
    assert cumulative[-1].outputs == final.outputs
    assert joined(outputs_of(OutputKind.DELTA, tokens_per_step)) == final.outputs
    assert joined(outputs_of(OutputKind.DELTA, tokens_per_step, steps_per_look)) == final.outputs
    texts = [[part.text for part in output.outputs] for output in cumulative]
    for earlier, later in itertools.pairwise(texts):
        assert all(new.startswith(old) for old, new in zip(earlier, later, strict=True))


def joined(outputs: list[RequestOutput]) -> list[CompletionOutput]:
    """The sequences that outputs of OutputKind.DELTA have together."""
    whole: dict[int, CompletionOutput] = {}
    for part in itertools.chain.from_iterable(output.outputs for output in outputs):
        old = whole.get(part.index)
        if old is not None:
            part = msgspec.structs.replace(
                part,
                text=old.text + part.text,
                token_ids=old.token_ids + part.token_ids,
                logprobs=(old.logprobs or []) + (part.logprobs or []),
                text_offsets=(old.text_offsets or []) + (part.text_offsets or []),
            )
        whole[part.index] = part
    return [whole[index] for index in sorted(whole)]


def test_outputs_are_cut_where_they_are_long_and_stay_the_same() -> None:
    token = TokenLogprobs(token_id=1, logprob=-1.0, rank=1)
    logprobs = PromptLogprobs(first_position=3, tokens=[token] * 300)
    short = EngineCoreOutput(request_id="short", deltas=[], finished=False)
    long = EngineCoreOutput(request_id="long", deltas=[], finished=True, prompt_logprobs=logprobs, num_cached_tokens=5)
    assert list(in_turns([short])) == [[short]]
    turns = list(in_turns([long, short]))
    assert turns[0][0] == short
    parts = [output for turn in turns for output in turn][1:]
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
    assert [len(turn) for turn in turns] == [2, 2, 2, 1]


def test_many_outputs_are_processed_in_several_turns() -> None:
    outputs = [EngineCoreOutput(request_id=str(index), deltas=[], finished=False) for index in range(300)]
    turns = list(in_turns(outputs))
    assert [len(turn) for turn in turns] == [128, 128, 44]
    assert [output for turn in turns for output in turn] == outputs


def delta(index: int, *token_ids: int) -> SequenceDelta:
    return SequenceDelta(index=index, token_ids=list(token_ids), logprobs=[])


def test_an_open_request_is_resumed_with_what_was_processed_of_it(tokenizer: Tokenizer) -> None:
    times = iter(range(1, 100))
    processor, core = OutputProcessor(tokenizer, clock=lambda: next(times)), ScriptedCore()
    request = make_request("a stop", n=2, seed=3, stop=["a s"], logprobs=0)
    for each in (request, make_request("the search", "s", use_beam_search=True, n=2)):
        processor.add(each, None)
    core.add_request(request)
    assert processor.to_resume("r") == msgspec.structs.replace(
        request, metrics=RequestMetrics(arrival_time=0.0, timeline=[(0.0, "queued"), (1, "resumed")])
    )
    for _ in range(2):
        processor.process(core.step().outputs)
    resumed = processor.to_resume("r")
    assert resumed is not None
    assert [(each.token_ids, each.cumulative_logprob, each.finish_reason) for each in resumed.resumed] == [
        (list(b"a "), -1.0, None)
    ] * 2
    assert (resumed.params.seed, resumed.num_cached_tokens, resumed.prompt_token_ids) == (3, 3, list(b"a stop"))
    assert resumed.metrics is not None
    assert resumed.metrics.first_token_time == 2
    processor.process([EngineCoreOutput(request_id="r", deltas=[delta(0, *b"s"), delta(1, *b"b")], finished=False)])
    resumed = processor.to_resume("r")
    assert resumed is not None
    assert [(each.finish_reason, each.stop_reason) for each in resumed.resumed] == [("stop", "a s"), (None, None)]
    search = processor.to_resume("s")
    assert search is not None
    assert search.resumed == ()
    assert processor.to_resume("other") is None


def test_a_request_cannot_be_resumed_behind_its_stop_string(tokenizer: Tokenizer) -> None:
    request = make_request("prompt", stop=["lo w"])
    request.resumed = (ResumedSequence(index=0, token_ids=list(b"hello w")),)
    with pytest.raises(InvalidRequest, match=r"resumed\[0\] has the stop string 'lo w' and goes on; cut it there"):
        OutputProcessor(tokenizer).add(request, None)


@pytest.mark.parametrize(("text", "rest"), [("hel", "lo"), ("hello", ""), ("hello ", ""), ("hello wo", "")])
def test_text_held_back_at_the_cut_comes_or_becomes_a_stop_string(tokenizer: Tokenizer, text: str, rest: str) -> None:
    request = make_request("hello world", stop=[" world"], output_kind=OutputKind.CUMULATIVE)
    request.resumed = (ResumedSequence(index=0, token_ids=list(text.encode())),)
    processor = OutputProcessor(tokenizer)
    processor.add(request, None)
    left = "hello world"[len(text) :].encode()
    processed = processor.process([EngineCoreOutput(request_id="r", deltas=[delta(0, *left)], finished=False)])
    [output] = processed.read()
    assert (output.outputs[0].text, output.outputs[0].stop_reason) == (rest, " world")
    assert (bytes(output.outputs[0].token_ids), output.num_generated_tokens) == (left, 11)
    assert processed.stops == [StopSequence("r", 0)]


def test_tokens_that_were_cached_and_fetched_are_those_of_one_core(tokenizer: Tokenizer) -> None:
    processor = OutputProcessor(tokenizer)
    opened = processor.add(make_request("abcdefgh"), "the prompt")

    def found(num_cached: int, num_fetched: int) -> tuple[int, int]:
        output = EngineCoreOutput(request_id=opened.request_id, deltas=[], finished=False)
        output.num_cached_tokens, output.num_fetched_tokens = num_cached, num_fetched
        processor.process([output])
        read = opened._output([], finished=False)
        return read.num_cached_tokens, read.num_fetched_tokens

    assert found(2, 4) == (2, 4)
    assert found(0, 0) == (2, 4), "of an output without a step"
    assert found(8, 0) == (8, 0), "of another core, on which it goes on"


@pytest.mark.parametrize("num_sequences", [1, 2])
def test_outputs_of_a_stream_have_as_many_tokens_as_the_interval(tokenizer: Tokenizer, num_sequences: int) -> None:
    processor, core = OutputProcessor(tokenizer, stream_interval=3), ScriptedCore()
    request = make_request("abcdefgh", n=num_sequences, output_kind="delta")
    opened = processor.add(request, None)
    texts: list[str] = []
    changes: list[None] = []
    opened.on_change = lambda: changes.append(None)
    core.add_request(request)
    while core.has_unfinished():
        processor.process(core.step().outputs)
        if changes:
            output = opened.output()
            assert output is not None
            texts.append("".join(each.text for each in output.outputs if each.index == 0))
            changes.clear()
    assert "".join(texts) == "abcdefgh"
    assert (len(texts[0]), len(texts)) == (1, 4)
