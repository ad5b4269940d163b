"""Requests that are added now and waited for later have the outputs of a batch that is generated at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from octavo.core.outputs import RequestOutput
from octavo.errors import ConfigError, RequestFailed

PROMPTS = ["Once upon a time", "The cat", "A day"]
PARAMS = [SamplingParams(max_tokens=number, temperature=0.8, seed=number) for number in (9, 3, 6)]
CHATS: Any = [[{"role": "user", "content": text}] for text in PROMPTS]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("octavo-tiny", max_num_seqs=2) as llm:
        yield llm


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def test_what_is_added_is_returned_in_its_order_by_the_next_wait(llm: LLM) -> None:
    expected = tokens(llm.generate(PROMPTS, PARAMS))
    ids = [*llm.enqueue(PROMPTS[:2], PARAMS[:2]), *llm.enqueue(PROMPTS[2], PARAMS[2])]
    outputs = llm.wait_for_completion()
    assert [output.request_id for output in outputs] == ids
    assert tokens(outputs) == expected
    assert llm.wait_for_completion() == []
    assert not llm.engine.has_unfinished_requests()


def test_other_calls_meanwhile_take_no_outputs_of_what_was_added(llm: LLM) -> None:
    expected = tokens(llm.chat(CHATS, PARAMS))
    llm.enqueue_chat(CHATS, PARAMS)
    assert tokens(llm.chat(CHATS[0], PARAMS[0])) == expected[:1]
    assert tokens(llm.wait_for_completion(use_tqdm=False)) == expected


def test_what_is_refused_has_an_output_with_the_error(llm: LLM) -> None:
    llm.enqueue([PROMPTS[0], [10**6], PROMPTS[1]], SamplingParams(max_tokens=2))
    first, refused, last = llm.wait_for_completion()
    assert refused.error is not None
    assert "the model's token ids go from 0" in refused.error.message
    assert first.error is last.error is None


def test_an_interrupted_call_ends_its_own_requests_alone(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = tokens(llm.generate(PROMPTS, PARAMS))
    llm.enqueue(PROMPTS, PARAMS)
    step, num_steps = llm.engine.step, 0

    def interrupted() -> list[RequestOutput]:
        nonlocal num_steps
        num_steps += 1
        if num_steps == 2:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(llm.engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["One"] * 3, SamplingParams(max_tokens=500, ignore_eos=True))
    assert llm.engine.get_num_unfinished_requests() <= len(PROMPTS)
    assert tokens(llm.wait_for_completion()) == expected
    assert not llm.engine.has_unfinished_requests()


def test_an_interrupted_wait_ends_what_was_added(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    llm.enqueue(PROMPTS, SamplingParams(max_tokens=500, ignore_eos=True))
    with monkeypatch.context() as patched:
        patched.setattr("octavo.engine.interrupt.Interrupt.check", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            llm.wait_for_completion()
    assert not llm.engine.has_unfinished_requests()
    assert llm.wait_for_completion() == []
    assert len(llm.generate(PROMPTS, PARAMS)) == len(PROMPTS)


def test_a_wait_for_what_a_sleep_holds_back_is_refused_and_what_was_added_is_kept() -> None:
    with LLM(max_model_len=128, enable_sleep_mode=True) as llm:
        expected = tokens(llm.generate(PROMPTS[:2], PARAMS[:2], use_tqdm=False))
        for level in (0, 1):
            llm.enqueue(PROMPTS[:2], PARAMS[:2])
            llm.sleep(level)
            with pytest.raises(ConfigError, match="wake it up first"):
                llm.wait_for_completion(use_tqdm=False)
            llm.wake_up()
            assert tokens(llm.wait_for_completion(use_tqdm=False)) == expected
        llm.enqueue(PROMPTS[:2], PARAMS[:2])
        llm.sleep(1, mode="abort")
        ended = llm.wait_for_completion(use_tqdm=False)
        assert [each.outputs[0].finish_reason for each in ended] == ["abort", "abort"]


def test_a_wait_for_outputs_that_others_have_got_ends(llm: LLM) -> None:
    llm.enqueue(PROMPTS[:2], PARAMS[:2])
    while llm.engine.has_unfinished_requests():
        llm.engine.step()
    with pytest.raises(RequestFailed, match="2 requests finished in steps that other callers ran"):
        llm.wait_for_completion(use_tqdm=False)
    assert llm.wait_for_completion(use_tqdm=False) == []


def test_threads_share_an_engine_and_their_requests_run_together(llm: LLM) -> None:
    prompts = [f"{number} and" for number in range(12)]
    params = SamplingParams(max_tokens=40, ignore_eos=True, temperature=0.8, seed=5)
    expected = tokens(llm.generate(prompts, params))
    steps = llm.engine.stats.num_steps
    llm.generate(prompts[:1], params)
    steps_alone = llm.engine.stats.num_steps - steps
    llm.enqueue(PROMPTS, PARAMS)
    steps = llm.engine.stats.num_steps
    barrier = threading.Barrier(len(prompts))

    def generate(prompt: str) -> list[int]:
        barrier.wait(100)
        return tokens(llm.generate(prompt, params))[0]

    with ThreadPoolExecutor(len(prompts)) as threads:
        assert list(threads.map(generate, prompts)) == expected
    assert llm.engine.stats.num_steps - steps < len(prompts) * steps_alone * 0.8, "they ran one after the other"
    assert len(llm.wait_for_completion()) == len(PROMPTS)
    assert not llm.engine.has_unfinished_requests()


def test_a_thread_waits_while_another_lets_the_engine_pause(llm: LLM) -> None:
    params = SamplingParams(max_tokens=200, ignore_eos=True, temperature=0.0)
    expected = tokens(llm.generate("One", params))
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(llm.generate, "One", params)
        while not llm.engine.has_unfinished_requests():
            time.sleep(0.001)
        llm.sleep(level=0)
        time.sleep(0.1)
        assert not running.done() or tokens(running.result()) == expected
        llm.wake_up()
        assert tokens(running.result(100)) == expected


class Waits(list[Any]):
    """A list of waits behind whose last reading another call begins to wait, as the interpreter may let it."""

    def __init__(self, work: Callable[[], object]) -> None:
        self.thread = threading.Thread(target=work)

    def __iter__(self) -> Iterator[Any]:
        is_last = self.thread.ident is None and not any(super().__iter__())
        yield from list(super().__iter__())
        if is_last:
            count, deadline = len(self), time.monotonic() + 0.3
            self.thread.start()
            while len(self) == count and time.monotonic() < deadline:
                time.sleep(0.001)


def test_a_call_that_begins_while_another_ends_gets_its_outputs(llm: LLM) -> None:
    expected, found = tokens(llm.generate(PROMPTS, PARAMS)), list[list[list[int]]]()
    waits = llm._batches._waits = Waits(lambda: found.append(tokens(llm.generate(PROMPTS, PARAMS))))
    assert tokens(llm.generate(PROMPTS[:1], PARAMS[:1])) == expected[:1]
    waits.thread.join(100)
    assert found == [expected]


class Outputs(dict[str, Any]):
    """Outputs during whose reading another call goes on."""

    def __init__(self) -> None:
        self.is_read = threading.Event()

    def items(self) -> Any:
        for item in super().items():
            yield item
            self.is_read.set()
            time.sleep(0.1)


def test_a_call_that_begins_while_another_is_aborted_does_not_disturb_it(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    outputs = llm._batches._outputs = Outputs()
    params_of_each = llm._batches._params_of_each
    has_begun = threading.Event()

    def wait(*arguments: Any) -> Any:
        if threading.current_thread() is thread:
            has_begun.set()
            assert outputs.is_read.wait(100)
        return params_of_each(*arguments)

    def fail(*_: object) -> None:
        if threading.current_thread() is not thread:
            raise ValueError("the bar")

    monkeypatch.setattr(llm._batches, "_params_of_each", wait)
    monkeypatch.setattr("octavo.engine.batches.ProgressBar.update", fail)
    thread = threading.Thread(target=llm.generate, args=("One", PARAMS[0]))
    thread.start()
    assert has_begun.wait(100)
    with pytest.raises(ValueError, match="the bar"):
        llm.generate(PROMPTS, PARAMS)
    thread.join(100)
    assert outputs == {}
    assert not llm.engine.has_unfinished_requests()


def test_a_call_that_is_interrupted_before_it_waits_leaves_nothing(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupting(list[Any]):
        def append(self, value: Any) -> None:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(llm._batches, "_waits", Interrupting())
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS, PARAMS)
    assert llm._batches._outputs == {}
    assert not llm.engine.has_unfinished_requests()
