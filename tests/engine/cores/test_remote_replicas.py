"""A front over scripted cores behind TCP: which engines it uses, and what becomes of requests when they come and go."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from octavo.async_llm import AsyncLLM
from octavo.core.sampling_params import SamplingParams
from octavo.engine.cores import dispatch, remote_replicas
from octavo.engine.cores.core_link import CoreAddress, connect
from octavo.engine.cores.remote_replicas import Engine, RemoteReplicas, read_engines
from octavo.errors import ConfigError, EngineDeadError, EngineRestartingError
from tests.fakes.byte_tokenizer import byte_tokenizer
from tests.fakes.core import core_ready, engine_config
from tests.fakes.engine import make_core
from tests.fakes.fleet import Slow
from tests.fakes.linked_core import FRONT, SECRET, LinkableCore, Served, linked
from tests.fakes.whole_engines import eventually

pytestmark = pytest.mark.anyio

DECODE = msgspec.structs.replace(FRONT, role="decode", build={"kernels": "amx"})
PARAMS = SamplingParams(max_tokens=30, seed=1, logprobs=1)


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RETRY_S", "MOST_RETRY_S", "LOOK_S"):
        monkeypatch.setattr(remote_replicas, name, 0.02)


def make_slow_core() -> Any:
    core: Any = make_core()
    core.executor = Slow(core.executor)
    return core


def engine_of(served: Served, role: str = "decode") -> Engine:
    return Engine(role, served.address)


@asynccontextmanager
async def front(directory: Path, *named: Engine, file: Path | None = None, **settings: Any) -> AsyncIterator[AsyncLLM]:
    config = engine_config(str(directory))
    remote = RemoteReplicas(named, file, settings.pop("secret", SECRET), FRONT, **{"timeout_s": 20.0} | settings)
    llm = AsyncLLM(config, await remote.start(config), byte_tokenizer(directory))
    try:
        yield llm
    finally:
        await llm.shutdown()


async def tokens(llm: AsyncLLM) -> tuple[list[int], Any]:
    outputs = [output async for output in llm.generate([1, 2, 3, 4], PARAMS)]
    (last,) = outputs[-1].outputs
    return list(last.token_ids), last.logprobs


def states(llm: AsyncLLM) -> list[tuple[int, str]]:
    return [(each.number, each.state) for each in llm.replicas]


def test_engines_are_read_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "engines"
    file.write_text("# ours\nprefill 10.0.0.1:9000  # the big one\n\ndecode [::1]:9001\n")
    assert read_engines(file) == [
        Engine("prefill", CoreAddress("10.0.0.1", 9000)),
        Engine("decode", CoreAddress("::1", 9001)),
    ]
    for line in ("decode", "decoder a:1", "decode a:1 b:2"):
        file.write_text(f"\n{line}\n")
        with pytest.raises(ConfigError, match="engines, line 2: .* is not `prefill host:port` or `decode host:port`"):
            read_engines(file)
    file.write_text("decode a")
    with pytest.raises(ConfigError, match="line 1: 'a' is not the address of an engine"):
        read_engines(file)
    with pytest.raises(ConfigError, match=r"engines is .*, which cannot be read"):
        read_engines(tmp_path / "nothing")


async def test_requests_go_on_elsewhere_when_their_engine_vanishes_or_is_ended(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        linked(make_slow_core, hello=DECODE) as first,
        linked(make_slow_core, hello=DECODE) as second,
        front(tmp_path, engine_of(first), engine_of(second)) as llm,
    ):
        expected = await tokens(llm)
        running = [asyncio.create_task(tokens(llm)) for _ in range(4)]
        await eventually(lambda: llm.stats.num_running == 4)
        llm._client._replicas[0].client._writer.transport.abort()
        assert await asyncio.gather(*running) == [expected] * 4
        assert llm.stats.num_resumed > 0
        await eventually(lambda: states(llm) == [(0, "ready"), (1, "ready")])
        assert "decode 0: connecting to it again (1 in 10 minutes)" in caplog.text
        running = [asyncio.create_task(tokens(llm)) for _ in range(4)]
        await eventually(lambda: llm.stats.num_running == 4)
        await first.end()
        assert await asyncio.gather(*running) == [expected] * 4
        assert states(llm) == [(0, "starting"), (1, "ready")]
        assert llm.stats.num_restarts == 1  # an end on request is no death


async def test_an_engine_that_comes_later_or_again_is_used(tmp_path: Path) -> None:
    async with linked(hello=DECODE) as first, linked(hello=DECODE) as other:
        port = other.address.port
        await other.end()
        async with front(tmp_path, engine_of(first), engine_of(other)) as llm:
            expected = await tokens(llm)
            assert states(llm) == [(0, "ready"), (1, "starting")]
            for _ in range(2):
                async with linked(hello=DECODE, port=port) as again:
                    await eventually(lambda: states(llm)[1] == (1, "ready"))
                    found = await asyncio.gather(*(tokens(llm) for _ in range(3)))
                    assert found == [expected] * 3
                    assert again.core.requests
                await eventually(lambda: states(llm)[1] == (1, "starting"))


async def test_the_file_adds_and_removes_engines_for_no_loss(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "engines"
    async with linked(make_slow_core, hello=DECODE) as first, linked(make_slow_core, hello=DECODE) as second:
        file.write_text(f"decode {first.address}")
        async with front(tmp_path, file=file) as llm:
            expected = await tokens(llm)
            running = [asyncio.create_task(tokens(llm)) for _ in range(3)]
            await eventually(lambda: llm.stats.num_running == 3)
            file.write_text(f"decode {second.address}\n")
            await eventually(lambda: states(llm) == [(1, "ready")])
            assert await asyncio.gather(*running) == [expected] * 3
            num_tokens = llm.stats.num_generated_tokens
            assert num_tokens >= 4 * len(expected[0])  # totals of an engine that was removed are kept
            file.write_text("decode nowhere")
            await eventually(lambda: "the engines stay as they are" in caplog.text)
            file.write_text(f"decode {first.address}\ndecode {second.address}\n")
            await eventually(lambda: states(llm) == [(0, "ready"), (1, "ready")])  # under the number that it had
            assert await tokens(llm) == expected
            running = asyncio.create_task(tokens(llm))
            await eventually(lambda: llm.stats.num_running == 1)
            file.write_text("")
            await eventually(lambda: not states(llm))
            with pytest.raises(EngineRestartingError, match="the server has no engine: it has none to use"):
                await tokens(llm)
            file.write_text(f"decode {first.address}\n")
            assert await running == expected


async def test_a_file_that_breaks_at_start_leaves_the_engines(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file, config = tmp_path / "engines", engine_config(str(tmp_path))
    async with linked(hello=DECODE) as only:
        file.write_text(f"decode {only.address}")
        replicas = await RemoteReplicas([], file, SECRET, FRONT).start(config)
        file.write_text("decode nowhere")
        llm = AsyncLLM(config, replicas, byte_tokenizer(tmp_path))
        await eventually(lambda: "the engines stay as they are" in caplog.text or not llm.is_running)
        assert await tokens(llm)
        await llm.shutdown()


async def test_an_engine_that_is_removed_while_it_is_connected_to_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, greeted, is_removed = tmp_path / "engines", asyncio.Event(), asyncio.Event()

    async def slow_connect(address: CoreAddress, *ends: Any) -> Any:
        found = await connect(address, *ends)
        if address == second.address:
            greeted.set()
            await is_removed.wait()
        return found

    monkeypatch.setattr(remote_replicas, "connect", slow_connect)
    async with linked(hello=DECODE) as first, linked(hello=DECODE) as second:
        file.write_text(f"decode {first.address}")
        async with front(tmp_path, file=file) as llm:
            await tokens(llm)
            file.write_text(f"decode {first.address}\ndecode {second.address}\n")
            await greeted.wait()
            file.write_text(f"decode {first.address}")
            await eventually(lambda: states(llm) == [(0, "ready"), (1, "stopped")])
            is_removed.set()
            await eventually(lambda: (1, "stopped") not in states(llm))
            assert states(llm) == [(0, "ready")]
            await eventually(lambda: second.link._front is None)  # another front may have it


async def test_requests_wait_for_an_engine_for_a_limited_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits, turns = [], [asyncio.Event(), asyncio.Event()]

    async def sleep(seconds: float) -> None:
        waits.append(seconds)
        await turns[len(waits) - 1].wait()

    monkeypatch.setattr(dispatch, "asyncio", SimpleNamespace(sleep=sleep))

    async def error(llm: AsyncLLM) -> Any:
        [last] = [each async for each in llm.generate([1, 2, 3, 4], PARAMS) if each.finished]
        return last.error

    async with linked(make_slow_core, hello=DECODE) as only, front(tmp_path, engine_of(only)) as llm:
        running = asyncio.create_task(error(llm))
        await eventually(lambda: llm.stats.num_running == 1)
        await only.end()
        await eventually(lambda: waits == [dispatch.PATIENCE_S])
        waiting = asyncio.create_task(error(llm))
        await eventually(lambda: len(llm._client._dispatch.entries) == 2)
        turns[0].set()
        refused = await waiting
        assert (refused.code, refused.retry_after_s) == ("engine_restarting", 5)
        assert "the server has no engine: none of the 1 that it uses is connected" in refused.message
        with pytest.raises(EngineRestartingError, match="the server has no engine"):
            await tokens(llm)
        assert not running.done()
        assert waits == [dispatch.PATIENCE_S, 20.0 - dispatch.PATIENCE_S]
        turns[1].set()
        assert await running == refused
        async with linked(make_slow_core, hello=DECODE, port=only.address.port):
            await eventually(lambda: states(llm) == [(0, "ready")])
            assert await tokens(llm)


async def test_an_engine_that_is_not_like_the_first_is_refused_by_name() -> None:
    other = msgspec.structs.replace(DECODE, build={"kernels": "avx2"})
    another_model = msgspec.structs.replace(DECODE, config="1", model="x")

    def longer() -> LinkableCore:
        return LinkableCore(ready=core_ready(max_model_len=999))

    for make, hello, message in (
        (LinkableCore, other, "its kernels is avx2, that of the first engine amx"),
        (longer, DECODE, "its max_model_len is 999, that of the first engine 256"),
        (LinkableCore, msgspec.structs.replace(DECODE, role="prefill"), "was started with --role prefill"),
        (
            LinkableCore,
            another_model,
            r"the model is x \(config.json 1\) at the engine and fake \(c0ffee\)",
        ),
    ):
        async with linked(hello=DECODE) as first, linked(make, hello=hello) as second:
            remote = RemoteReplicas([], None, SECRET, FRONT)
            client = await remote._connect(engine_of(first))
            with pytest.raises(ConfigError, match=f"{second.address}.*{message}"):
                await remote._connect(engine_of(second))
            await client.shutdown()


async def test_a_start_logs_once_which_engine_it_waits_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    absent = Engine("decode", CoreAddress("127.0.0.1", 1))
    remote = RemoteReplicas([absent], None, SECRET, FRONT, timeout_s=0.1)
    with caplog.at_level("WARNING"), pytest.raises(EngineDeadError):
        await remote.start(engine_config(str(tmp_path)))
    said = "waiting up to 0.1 s for an engine that decodes: no engine is at 127.0.0.1:1"
    assert [said in record.getMessage() for record in caplog.records] == [True]


async def test_a_start_without_an_engine_that_decodes_says_why(tmp_path: Path) -> None:
    prefill = msgspec.structs.replace(DECODE, role="prefill")
    async with linked(hello=prefill) as only:
        nobody = Engine("decode", CoreAddress("127.0.0.1", 1))
        with pytest.raises(EngineDeadError, match="no engine that decodes for 0 s: no engine is at 127.0.0.1:1"):
            async with front(tmp_path, engine_of(only, "prefill"), nobody, timeout_s=0.0):
                raise AssertionError("it has started")
        with pytest.raises(ConfigError, match="does not know the secret"):
            async with front(tmp_path, engine_of(only, "prefill"), secret=b"another secret 16"):
                raise AssertionError("it has started")


async def test_where_an_engine_gives_kv_away_is_where_the_front_reaches_it(tmp_path: Path) -> None:
    for given, reached in (("0.0.0.0:77", "127.0.0.1:77"), ("[::]:77", "127.0.0.1:77"), ("10.0.0.7:77", "10.0.0.7:77")):
        async with (
            linked(lambda given=given: LinkableCore(ready=core_ready(transfer=given)), hello=DECODE) as served,  # type: ignore[misc]
            front(tmp_path, engine_of(served)) as llm,
        ):
            assert llm.ready.transfer == reached


async def test_a_proxy_of_prompts_that_are_vectors_takes_no_engine_that_would_ignore_them(tmp_path: Path) -> None:
    config = engine_config(str(tmp_path))
    vectors = msgspec.structs.replace(config, model=dataclasses.replace(config.model, embedding_size=8))

    def taking() -> LinkableCore:
        return LinkableCore(ready=core_ready(takes_embeds=True))

    async with linked(hello=DECODE) as without, linked(taking, hello=DECODE) as with_them:
        for served, asked, is_refused in (
            (without, vectors, True),
            (with_them, vectors, False),
            (with_them, config, False),
        ):
            remote = RemoteReplicas([engine_of(served)], None, SECRET, FRONT, timeout_s=20.0)
            if is_refused:
                with pytest.raises(ConfigError, match="takes no prompts that are vectors.*--enable-prompt-embeds"):
                    await remote.start(asked)
            else:
                llm = AsyncLLM(asked, await remote.start(asked), byte_tokenizer(tmp_path))
                assert await tokens(llm)
                await llm.shutdown()
