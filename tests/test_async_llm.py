"""AsyncLLM: many readers, slow readers, readers that leave, and a core that dies."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from octavo.async_llm import AsyncLLM
from octavo.config.args import EngineArgs
from octavo.config.schema import EngineConfig, ReplicaConfig
from octavo.core.outputs import PinnedPrefix, RequestOutput
from octavo.core.sampling_params import OutputKind, SamplingParams
from octavo.engine.cores.core_client import ProcessClient
from octavo.engine.cores.replica import Replica
from octavo.engine.cores.replicas import Replicas
from octavo.engine.text.chat_template import ChatTemplate
from octavo.engine.text.tokenizer import LONG_TEXT_CHARS
from octavo.errors import ContextTooLong, EngineDeadError, InvalidRequest
from tests.fakes.byte_tokenizer import byte_tokenizer
from tests.fakes.core import ScriptedCore, core_ready, endless, engine_config
from tests.fakes.engine import make_core
from tests.fakes.served_core import served_core
from tests.fakes.whole_engines import eventually

pytestmark = pytest.mark.anyio

DELTA = SamplingParams(max_tokens=None, output_kind=OutputKind.DELTA)


@asynccontextmanager
async def serving(tmp_path: Path, core: Any | None = None, **model: Any) -> AsyncIterator[AsyncLLM]:
    tokenizer = byte_tokenizer(tmp_path)
    template = ChatTemplate.find(tmp_path, tokenizer)
    async with served_core(core or ScriptedCore()) as client:
        llm = AsyncLLM(engine_config(str(tmp_path), **model), Replicas([Replica(0, client)]), tokenizer, template)
        try:
            yield llm
        finally:
            await llm.shutdown()


async def collect(
    llm: AsyncLLM, prompt: Any, params: SamplingParams | None = None, **options: Any
) -> list[RequestOutput]:
    return [output async for output in llm.generate(prompt, params, **options)]


def text_of(outputs: list[RequestOutput]) -> str:
    return "".join(output.outputs[0].text for output in outputs if output.outputs)


def endless_core(**options: Any) -> ScriptedCore:
    return ScriptedCore(reply=endless, ready=core_ready(max_model_len=10**9, num_blocks=10**8), **options)


async def test_readers_get_their_own_text_at_the_same_time(tmp_path: Path) -> None:
    async with serving(tmp_path) as llm:
        prompts = [f"prompt {number}" for number in range(20)]
        results = await asyncio.gather(*(collect(llm, prompt, DELTA) for prompt in prompts))
        assert [text_of(outputs) for outputs in results] == prompts
        assert all([output.finished for output in outputs].count(True) == 1 for outputs in results)
        assert len(llm._output) == 0


async def test_requests_that_come_together_have_an_index_and_a_last_output_each(tmp_path: Path) -> None:
    async with serving(tmp_path) as llm:
        prompts = ["one", "the second", "3"]
        seen = [each async for each in llm.generate_together(prompts, DELTA)]
        assert [text_of([output for at, output in seen if at == index]) for index in range(3)] == prompts
        assert sorted(index for index, output in seen if output.finished) == [0, 1, 2]
        assert len(llm._output) == 0


async def test_reader_that_leaves_ends_all_that_came_together(tmp_path: Path) -> None:
    core = endless_core()
    async with serving(tmp_path, core) as llm:
        async with aclosing(llm.generate_together(["a", "b", "c"], DELTA, ["x", "y", "z"])) as outputs:
            await anext(outputs)
        assert len(llm._output) == 0
        await eventually(lambda: sorted(core.aborted) == ["x", "y", "z"])


async def test_nothing_is_sent_when_one_of_those_that_come_together_is_refused(tmp_path: Path) -> None:
    core = ScriptedCore()
    async with serving(tmp_path, core) as llm:
        with pytest.raises(ContextTooLong):
            await anext(llm.generate_together(["a", "b" * 1000], DELTA))
        with pytest.raises(InvalidRequest, match="in use"):
            await anext(llm.generate_together(["a", "b"], DELTA, ["same", "same"]))
        assert len(llm._output) == 0
        assert await collect(llm, "go on", DELTA)
        assert len(core.requests) == 1


async def test_core_takes_all_that_come_together_or_refuses_all(tmp_path: Path) -> None:
    core = make_core(max_num_seqs=2, max_queued_requests=1)
    async with serving(tmp_path, core) as llm:
        params, prompts = SamplingParams(max_tokens=3), [[1, 2], [3, 4], [5, 6], [7, 8]]
        refused = [output async for _, output in llm.generate_together(prompts, params)]
        assert [output.error and output.error.code for output in refused] == ["too_many_prompts"] * 4
        taken = [output async for _, output in llm.generate_together(prompts[:3], params)]
        assert [output.error for output in taken if output.finished] == [None] * 3


async def test_many_prompts_leave_the_loop_to_others(tmp_path: Path) -> None:
    """Other tasks have many turns before the first output of a request with hundreds of prompts."""
    async with serving(tmp_path) as llm:
        num_turns = 0

        async def count_turns() -> None:
            nonlocal num_turns
            while True:
                num_turns += 1
                await asyncio.sleep(0)

        async with aclosing(llm.generate_together(["a"] * 512, SamplingParams(max_tokens=1))) as outputs:
            counting = asyncio.create_task(count_turns())
            await anext(outputs)
            counting.cancel()
        assert num_turns >= 2 * 512 // 16


async def test_log_probabilities_of_many_positions_are_bounded(tmp_path: Path) -> None:
    async with serving(tmp_path, endless_core()) as llm:
        with pytest.raises(InvalidRequest, match="2,097,155") as caught:
            await collect(llm, [1] * 419_431, SamplingParams(max_tokens=1, prompt_logprobs=4))
        assert caught.value.field == "prompt_logprobs"
        assert len(llm._output) == 0


async def test_slow_reader_gets_what_it_missed_in_one_output(tmp_path: Path) -> None:
    async with serving(tmp_path) as llm:
        stream = llm.generate("a long enough text", DELTA)
        outputs = [await anext(stream)]
        await eventually(lambda: len(llm._output) == 0)
        outputs += [output async for output in stream]
        assert len(outputs) <= 2
        assert text_of(outputs) == "a long enough text"


async def test_reader_that_leaves_or_is_cancelled_ends_its_request(tmp_path: Path) -> None:
    core = endless_core()
    async with serving(tmp_path, core) as llm:
        async with aclosing(llm.generate("x", DELTA, "leaves")) as stream:
            await anext(stream)
        reader = asyncio.create_task(collect(llm, "x", DELTA, request_id="cancelled"))
        await eventually(lambda: "cancelled" in core.requests)
        reader.cancel()
        await asyncio.wait([reader])
        await eventually(lambda: core.aborted == ["leaves", "cancelled"])
        await eventually(lambda: llm.stats.num_running == 0)
        assert len(llm._output) == 0


async def test_several_requests_are_aborted_at_once(tmp_path: Path) -> None:
    core = endless_core()
    async with serving(tmp_path, core) as llm:
        readers = {name: asyncio.create_task(collect(llm, "abc", DELTA, request_id=name)) for name in "xyz"}
        await eventually(lambda: len(llm._output) == 3)
        await llm.abort(["x", "unknown", "z"])
        ended = await asyncio.gather(readers["x"], readers["z"])
        assert [outputs[-1].outputs[0].finish_reason for outputs in ended] == ["abort", "abort"]
        await eventually(lambda: core.aborted == ["x", "z"])
        await llm.abort("y")
        await readers["y"]


async def test_an_id_can_be_used_again_right_after_an_abort(tmp_path: Path) -> None:
    params = SamplingParams(max_tokens=3, seed=1)
    async with serving(tmp_path, make_core(depth=2)) as llm:
        expected = (await collect(llm, [1, 2, 3], params))[-1].outputs[0].token_ids
        for number in range(20):
            async with aclosing(
                llm.generate([9, 8, 7], SamplingParams(max_tokens=200, ignore_eos=True), "again")
            ) as stream:
                await anext(stream)
                await llm.abort("again")  # outputs of it are on their way
                using_it = asyncio.create_task(collect(llm, [1, 2, 3], params, request_id="again"))
                await asyncio.sleep(0)  # the first reader leaves when the second one has begun
            outputs = (await using_it)[-1].outputs[0]
            assert (outputs.token_ids, outputs.finish_reason) == (expected, "length"), number


async def test_refused_request_raises_before_its_first_output(tmp_path: Path) -> None:
    async with serving(tmp_path, endless_core()) as llm:
        for prompt, kind in (("", InvalidRequest), ([999], InvalidRequest)):
            with pytest.raises(kind):
                await anext(llm.generate(prompt, DELTA))
        async with aclosing(llm.generate("x", DELTA, "r")) as stream:
            await anext(stream)
            with pytest.raises(InvalidRequest, match="in use"):
                await anext(llm.generate("x", DELTA, "r"))
            assert (await anext(stream)).request_id == "r"


async def test_long_prompt_is_read_or_refused_like_a_short_one(tmp_path: Path) -> None:
    async with serving(tmp_path, ScriptedCore(ready=core_ready(max_model_len=10**5, num_blocks=10**4))) as llm:
        prompt = "long " * LONG_TEXT_CHARS
        outputs = await collect(llm, prompt, SamplingParams(max_tokens=4))
        assert (outputs[-1].outputs[0].text, outputs[-1].prompt) == ("long", prompt)
        with pytest.raises(ContextTooLong):
            await anext(llm.generate(prompt * 5, DELTA))


async def test_id_can_be_used_again_once_its_request_has_ended(tmp_path: Path) -> None:
    core = endless_core()
    async with serving(tmp_path, core) as llm:
        first = llm.generate("one", SamplingParams(max_tokens=1), "r")
        assert (await anext(first)).finished
        async with aclosing(llm.generate("two", DELTA, "r")) as second:
            await anext(second)
            await first.aclose()
            await anext(second)
            assert core.aborted == []


async def test_dead_core_reaches_every_reader_and_later_calls(tmp_path: Path) -> None:
    async with serving(tmp_path, ScriptedCore(reply=endless, fail_at_step=50)) as llm:
        readers = [asyncio.create_task(collect(llm, "x", DELTA)) for _ in range(3)]
        error = await llm.wait_dead()
        assert "the fake core fails" in str(error)
        for result in await asyncio.gather(*readers, return_exceptions=True):
            assert isinstance(result, EngineDeadError)
        assert not llm.is_running
        with pytest.raises(EngineDeadError):
            await anext(llm.generate("x"))
        with pytest.raises(EngineDeadError):
            await llm.call("reset_prefix_cache")


async def test_shutdown_ends_open_requests_and_waiters(tmp_path: Path) -> None:
    async with serving(tmp_path, endless_core()) as llm:
        reader = asyncio.create_task(collect(llm, "x", DELTA))
        waiter = asyncio.create_task(llm.wait_dead())
        await eventually(lambda: llm.stats.num_steps > 0)
        await llm.shutdown()
        await asyncio.wait([reader, waiter])
        assert isinstance(reader.exception(), EngineDeadError)
        assert "shut down" in str(waiter.result())
        await llm.shutdown()


async def test_conversation_and_defaults_are_those_of_the_model(tmp_path: Path) -> None:
    async with serving(tmp_path, generation_defaults={"max_tokens": 3}) as llm:
        prompt = llm.render_chat([{"role": "user", "content": "hi"}])
        assert prompt.text == "<bos>[user]hi<eos>[assistant]"
        assert text_of((await collect(llm, prompt))[-1:]) == "[us"
        assert llm.default_sampling_params(n=2) == SamplingParams(max_tokens=3, n=2)


@pytest.mark.slow
async def test_core_process_ignores_interrupts_and_its_death_is_told() -> None:
    llm = await AsyncLLM.start(EngineArgs(num_gpu_blocks_override=128, threads=1, max_core_restarts=0))
    process = llm._client._replicas[0].client._core.process
    assert process is not None
    try:
        process.send_signal(signal.SIGINT)
        params = SamplingParams(max_tokens=8, ignore_eos=True, output_kind=OutputKind.DELTA)
        outputs = await collect(llm, "Once upon a time", params)
        assert sum(len(output.outputs[0].token_ids) for output in outputs) == 8
        [found] = await collect(llm, "Once upon a time", SamplingParams(n=2, use_beam_search=True, stop="was"))
        assert [each.stop_reason for each in found.outputs] == ["was"] * 2
        reader = asyncio.create_task(collect(llm, "Once", SamplingParams(max_tokens=None, ignore_eos=True)))
        await eventually(lambda: llm.stats.num_running == 1)
        process.kill()
        assert "killed (signal 9)" in str(await llm.wait_dead())
        await asyncio.wait([reader])
        assert isinstance(reader.exception(), EngineDeadError)
    finally:
        await llm.shutdown()
    assert process.returncode == -9


async def test_prefixes_are_pinned_unpinned_and_forgotten_over_the_wire(tmp_path: Path) -> None:
    async with serving(tmp_path, make_core(num_blocks=12)) as llm:
        prefix, params = list(range(10)), SamplingParams(max_tokens=1)
        pinned = await llm.pin_prefix(prefix, 1e6, "s")
        assert pinned == PinnedPrefix(num_tokens=8, because="only full blocks are kept, of 4 tokens each")
        (output,) = await collect(llm, [*prefix, *range(20, 24)], params, cache_salt="s")
        assert (output.num_cached_tokens, output.cache_miss_reason) == (0, "the next block is new")
        await collect(llm, [30] * 40, params)
        (output,) = await collect(llm, {"prompt_token_ids": [*prefix, *range(20, 24)], "cache_salt": "s"}, params)
        assert (output.num_cached_tokens, output.cache_miss_reason) == (8, "the next block was evicted")
        assert not await llm.unpin_prefix(prefix)
        assert await llm.unpin_prefix(prefix, "s")
        assert await llm.reset_prefix_cache()
        (output,) = await collect(llm, [*prefix, 20], params, cache_salt="s")
        assert output.num_cached_tokens == 0
        with pytest.raises(InvalidRequest, match="ttl_s is 0"):
            await llm.pin_prefix(prefix, 0)
        with pytest.raises(InvalidRequest, match="the prompt is empty"):
            await llm.pin_prefix("", 1.0)


async def test_a_long_prefix_is_tokenised_aside(tmp_path: Path) -> None:
    core = make_core(num_blocks=8192)
    core.ready = core_ready(max_model_len=10**5)
    async with serving(tmp_path, core) as llm:
        assert (await llm.pin_prefix("a" * LONG_TEXT_CHARS, 60.0)).num_tokens == LONG_TEXT_CHARS


@pytest.mark.parametrize(("template", "is_valid"), [("{{ messages[0].content }}", True), ("{% if %}", False)])
async def test_chat_template_is_compiled_before_the_first_chat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, template: str, is_valid: bool
) -> None:
    """One that is not valid stops nothing but chats."""
    byte_tokenizer(tmp_path, chat_template=template)
    config = engine_config(str(tmp_path))
    monkeypatch.setattr("octavo.async_llm.configure", lambda args: config)
    async with served_core(ScriptedCore([])) as client:

        async def start(*_: object) -> ProcessClient:
            return client

        monkeypatch.setattr(ProcessClient, "start", start)
        llm = await AsyncLLM.start(EngineArgs())
        try:
            assert "_compiled" in vars(llm.input.chat_template)
            if not is_valid:
                with pytest.raises(InvalidRequest, match="not valid Jinja"):
                    llm.render_chat([{"role": "user", "content": "a"}])
        finally:
            await llm.shutdown()


@pytest.mark.parametrize(("count", "said"), [(1, "memory plan"), (2, "each of 2 replicas: memory plan")])
async def test_the_log_says_whose_memory_plan_it_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, count: int, said: str
) -> None:
    caplog.set_level("INFO", "octavo")
    byte_tokenizer(tmp_path)
    config = msgspec.structs.replace(
        engine_config(str(tmp_path)), replicas=ReplicaConfig(data_parallel_size=count, max_core_restarts=0)
    )
    monkeypatch.setattr("octavo.async_llm.configure", lambda args: config)
    async with served_core(ScriptedCore([])) as client:
        client.ready.plan = "memory plan"

        async def start(_: EngineConfig) -> Replicas:
            return Replicas([Replica(0, client)])

        llm = await AsyncLLM.start_over(EngineArgs(), start)
        await llm.shutdown()
    assert said in caplog.messages
