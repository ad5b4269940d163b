"""LLMEngine: requests in, outputs out, and honest words after a failure."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.config.args import EngineArgs
from octavo.core.outputs import CompletionOutput, RequestOutput
from octavo.core.sampling_params import OutputKind, SamplingParams
from octavo.engine.engine_core import EngineCore
from octavo.engine.llm_engine import LLMEngine
from octavo.errors import EngineDeadError, InvalidRequest
from tests.fakes.accounting import check_scheduler
from tests.fakes.byte_tokenizer import byte_tokenizer
from tests.fakes.core import ScriptedCore, engine_config
from tests.fakes.engine import make_core


def make_engine(tmp_path: Path, core: Any | None = None, **model: Any) -> LLMEngine:
    return LLMEngine(engine_config(str(tmp_path), **model), core or ScriptedCore(), byte_tokenizer(tmp_path))


def run(engine: LLMEngine) -> list[RequestOutput]:
    outputs: list[RequestOutput] = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    return outputs


def test_requests_run_together_and_each_ends_once(tmp_path: Path) -> None:
    engine = make_engine(tmp_path)
    for request_id, prompt in (("x", "one"), ("y", "three")):
        engine.add_request(request_id, prompt, SamplingParams(output_kind=OutputKind.FINAL_ONLY))
    assert [(output.request_id, output.outputs[0].text) for output in run(engine)] == [("x", "one"), ("y", "three")]
    assert engine.step() == []


def test_a_core_that_waits_for_blocks_steps_when_it_is_woken(tmp_path: Path) -> None:
    core, woken = ScriptedCore(), threading.Event()
    engine = LLMEngine(engine_config(str(tmp_path)), core, byte_tokenizer(tmp_path), woken=woken)  # type: ignore[arg-type]
    engine.add_request("x", "abc")
    core.is_waiting = True
    thread = threading.Thread(target=engine.step)
    thread.start()
    thread.join(0.05)
    assert (core.num_steps, thread.is_alive()) == (0, True)
    woken.set()
    thread.join(100)
    assert (core.num_steps, woken.is_set()) == (1, False)


def test_defaults_of_the_model_hold_when_no_parameters_are_given(tmp_path: Path) -> None:
    engine = make_engine(tmp_path, generation_defaults={"max_tokens": 2})
    engine.add_request("x", "long")
    assert run(engine)[-1].outputs[0].text == "lo"
    assert engine.default_sampling_params(top_k=3) == SamplingParams(max_tokens=2, top_k=3)


def test_several_requests_are_aborted_at_once_and_counted_until_their_last_output(tmp_path: Path) -> None:
    core = ScriptedCore()
    engine = make_engine(tmp_path, core)
    for request_id in "xyz":
        engine.add_request(request_id, "abc")
    assert engine.get_num_unfinished_requests() == 3
    engine.abort_request(["x", "unknown", "z"])
    assert (core.aborted, engine.get_num_unfinished_requests()) == (["x", "z"], 3)
    ended = [output.request_id for output in run(engine) if output.finished]
    assert (sorted(ended), engine.get_num_unfinished_requests()) == (["x", "y", "z"], 0)
    assert not engine.has_unfinished_requests()


def test_engine_arguments_make_an_engine_under_both_names() -> None:
    args = EngineArgs(kv_cache_memory=1 << 22)
    engines = [LLMEngine.from_args(args), LLMEngine.from_engine_args(args)]
    assert engines[0].config == engines[1].config
    for engine in engines:
        engine.shutdown()


def test_refused_request_leaves_no_trace(tmp_path: Path) -> None:
    core = ScriptedCore()
    engine = make_engine(tmp_path, core)
    with pytest.raises(InvalidRequest):
        engine.add_request("x", "")
    engine.add_request("x", "ok")
    with pytest.raises(InvalidRequest, match="in use"):
        engine.add_request("x", "ok")
    assert len(run(engine)) > 0
    assert list(core.requests) == ["x"]


def test_parameters_have_the_name_that_users_of_vllm_type(tmp_path: Path) -> None:
    core = ScriptedCore()
    engine = make_engine(tmp_path, core)
    engine.add_request("x", "ok", params=SamplingParams(max_tokens=3))
    assert core.requests["x"].params.max_tokens == 3


def test_stop_string_frees_the_core_at_once(tmp_path: Path) -> None:
    core = make_core()
    engine = make_engine(tmp_path, core)
    engine.add_request("x", [1, 2, 3], SamplingParams(max_tokens=100, seed=1, output_kind=OutputKind.FINAL_ONLY))
    [whole] = run(engine)
    stop = whole.outputs[0].text[5:7]
    params = SamplingParams(max_tokens=100, seed=1, stop=stop, output_kind=OutputKind.FINAL_ONLY)
    engine.add_request("y", [1, 2, 3], params)
    [output] = run(engine)
    expected = whole.outputs[0].text.partition(stop)[0]
    assert (output.outputs[0].text, output.outputs[0].stop_reason) == (expected, stop)
    assert not core.has_unfinished()
    assert core.scheduler.block_manager.num_used_blocks == 0


def test_failed_step_surfaces_and_the_engine_says_so_from_then_on(tmp_path: Path) -> None:
    engine = make_engine(tmp_path, ScriptedCore(fail_at_step=1))
    engine.add_request("x", "abc")
    with pytest.raises(RuntimeError, match="the fake core fails"):
        engine.step()
    assert not engine.has_unfinished_requests()
    for action in (engine.step, lambda: engine.add_request("y", "abc"), lambda: engine.call("stats")):
        with pytest.raises(EngineDeadError, match="the fake core fails"):
            action()


def test_shut_down_engine_refuses_by_name(tmp_path: Path) -> None:
    core = ScriptedCore()
    engine = make_engine(tmp_path, core)
    engine.shutdown()
    engine.shutdown()
    assert core.is_shut_down
    with pytest.raises(EngineDeadError, match="has been shut down"):
        engine.add_request("x", "abc")


SEQUENCE = st.lists(st.integers(0, 49), min_size=1, max_size=14)
TEXT = st.text(alphabet=[chr(byte) for byte in range(32, 50)], min_size=1, max_size=2)


@given(
    requests=st.lists(
        st.tuples(SEQUENCE, st.integers(1, 3), st.integers(0, 99), st.integers(1, 12), st.lists(TEXT, max_size=2)),
        min_size=1,
        max_size=6,
    ),
    num_blocks=st.integers(24, 40),
    depth=st.integers(1, 3),
)
def test_text_does_not_depend_on_what_else_runs(
    tmp_path_factory: pytest.TempPathFactory, requests: list[Any], num_blocks: int, depth: int
) -> None:
    path = tmp_path_factory.getbasetemp()

    def outputs(core: EngineCore, some: list[int]) -> dict[str, list[CompletionOutput]]:
        engine = make_engine(path, core)
        for number in some:
            prompt, n, seed, max_tokens, stop = requests[number]
            params = SamplingParams(
                n=n, seed=seed, max_tokens=max_tokens, stop=stop, output_kind=OutputKind.FINAL_ONLY, logprobs=1
            )
            engine.add_request(str(number), prompt, params)
        finals = {output.request_id: output.outputs for output in run(engine)}
        check_scheduler(core.scheduler)
        assert core.scheduler.block_manager.num_used_blocks == 0
        return finals

    together = outputs(make_core(num_blocks=num_blocks, depth=depth), list(range(len(requests))))
    for number in range(len(requests)):
        assert outputs(make_core(num_blocks=512), [number])[str(number)] == together[str(number)]
