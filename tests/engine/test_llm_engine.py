"""LLMEngine: requests in, outputs out, and honest words after a failure."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.config.args import EngineArgs
from octavo.core.messages import EngineCoreRequest, StepOutputs
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


class WaitingCore(ScriptedCore):
    """Computes nothing while it `lacks_blocks`."""

    lacks_blocks = True

    def add_requests(self, requests: list[EngineCoreRequest]) -> None:
        super().add_requests(requests)
        self.is_waiting = False

    def abort_requests(self, request_ids: list[str]) -> None:
        super().abort_requests(request_ids)
        self.is_waiting = False

    def step(self) -> StepOutputs:
        self.is_waiting = self.lacks_blocks
        if self.lacks_blocks:
            self.num_steps += 1
            return StepOutputs(outputs=[], stats=self.stats())
        return super().step()


def waiting_engine(tmp_path: Path) -> tuple[LLMEngine, WaitingCore]:
    """Return an engine whose only request, x, waits for blocks since the last step."""
    core = WaitingCore()
    engine = make_engine(tmp_path, core)
    engine.add_request("x", "abc")
    assert (engine.step(), core.num_steps) == ([], 1)
    return engine, core


def run_in_thread(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(0.05)
    assert thread.is_alive()
    return thread


def test_a_core_that_waits_for_blocks_steps_when_it_is_woken(tmp_path: Path) -> None:
    engine, core = waiting_engine(tmp_path)
    thread = run_in_thread(engine.step)
    core.lacks_blocks = False
    assert core.num_steps == 1
    engine.wakes.notify()
    thread.join(100)
    assert (core.num_steps, thread.is_alive()) == (2, False)


def test_a_wake_while_the_step_before_ends_is_not_lost(tmp_path: Path) -> None:
    engine, core = waiting_engine(tmp_path)
    engine.wakes.notify()
    engine.step()
    assert core.num_steps == 2


def test_other_threads_have_their_turns_while_a_step_waits_for_blocks(tmp_path: Path) -> None:
    engine, core = waiting_engine(tmp_path)
    ended: list[str] = []

    def run_all() -> None:
        with engine.turns:  # as `LLM` has its turn around a step
            ended.extend(output.request_id for output in run(engine) if output.finished)

    stepping = run_in_thread(run_all)
    caller = threading.Thread(target=lambda: (engine.add_request("y", "abc"), engine.abort_request("x")), daemon=True)
    caller.start()
    caller.join(100)
    assert not caller.is_alive()
    core.lacks_blocks = False
    engine.wakes.notify()
    stepping.join(100)
    assert (sorted(ended), core.aborted) == (["x", "y"], ["x"])
    assert engine.turns._owner is None


def test_of_two_threads_that_wait_both_return_when_one_has_made_the_step(tmp_path: Path) -> None:
    engine, core = waiting_engine(tmp_path)
    threads = [run_in_thread(lambda: run(engine)) for _ in range(2)]
    num_steps = core.num_steps
    threads[0].join(0.05)
    assert core.num_steps == num_steps, "a thread steps in a loop"
    core.lacks_blocks = False
    engine.wakes.notify()
    for thread in threads:
        thread.join(100)
        assert not thread.is_alive()
    assert not engine.has_unfinished_requests()


def test_a_step_that_waits_fails_when_a_rank_ends(tmp_path: Path) -> None:
    engine, _ = waiting_engine(tmp_path)
    errors: list[str] = []

    def step() -> None:
        with pytest.raises(EngineDeadError) as caught:
            engine.step()
        errors.append(str(caught.value))

    thread = run_in_thread(step)
    engine.wakes.notify_death("rank 1 has been killed")
    thread.join(100)
    assert errors == ["rank 1 has been killed"]
    assert not engine.has_unfinished_requests()


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
