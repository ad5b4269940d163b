"""Helper processes: results are those of this process, senders take turns, and what fails concerns one job alone."""

from __future__ import annotations

import asyncio
import ctypes
import dataclasses
import json
import os
import signal
from array import array
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

from octavo.engine.input.input_processor import InputSetup
from octavo.server.errors import ApiError
from octavo.server.preparing import Prepared, TextPolicy, TextSetup, TokensResponse
from octavo.server.schema.chat import ChatCompletionRequest
from octavo.server.schema.chat_batch import ChatBatchRequest
from octavo.server.schema.completions import CompletionRequest
from octavo.server.schema.tokens import DetokenizeRequest, PrefixRequest, TokenizeRequest
from octavo.server.speech.sounds import HEAR
from octavo.server.text_pool import SHORT_JOB_BYTES, TextPool
from octavo.server.texts import name_of
from tests.fakes.byte_tokenizer import BOS, EOS, byte_tokenizer
from tests.fakes.core import core_ready, engine_config
from tests.fakes.image_host import image_host
from tests.fakes.rank import is_running
from tests.server.raw import eventually

MESSAGES = [{"role": "user", "content": "hello"}]
CHAT, COMPLETION = name_of(ChatCompletionRequest), name_of(CompletionRequest)
TOKENIZE, DETOKENIZE = name_of(TokenizeRequest), name_of(DetokenizeRequest)


class OwnRequest(PrefixRequest, kw_only=True, forbid_unknown_fields=True):
    """The body of an endpoint whose file the processes for text do not import."""


def setup(directory: Path, **tokenizer: Any) -> TextSetup:
    byte_tokenizer(directory, **tokenizer)
    ready = core_ready(max_model_len=1 << 22)
    return TextSetup(InputSetup(engine_config(str(directory)).model, ready, max_num_seqs=4), TextPolicy())


def with_pool(of: TextSetup, use: Callable[[TextPool], Coroutine[Any, Any, Any]], **options: Any) -> Any:
    async def run() -> Any:
        return await asyncio.wait_for(use(TextPool(of, **options)), 200)

    return asyncio.run(run())


def body(**fields: Any) -> list[bytes]:
    """In two pieces, as a connection may bring it."""
    whole = json.dumps(fields).encode()
    return [whole[:10], whole[10:]]


def prompts_of(result: bytes) -> list[list[int]]:
    return [array("i", each.token_ids).tolist() for each in msgspec.msgpack.decode(result, type=Prepared).prompts]


async def error_of(job: Coroutine[Any, Any, bytes]) -> ApiError:
    with pytest.raises(ApiError) as caught:
        await job
    return caught.value


def test_a_conversation_comes_back_as_tokens_and_a_request_without_text(tmp_path: Path) -> None:
    chat = body(messages=MESSAGES, temperature=0.5, logit_bias={"3": 1}, chat_template_kwargs={"a": 1}, stop="x")
    result = with_pool(setup(tmp_path), lambda pool: pool.run(CHAT, chat))
    assert prompts_of(result) == [[BOS, *b"[user]hello", EOS, *b"[assistant]"]]
    raw = msgspec.msgpack.decode(result, type=Prepared).asked
    asked = msgspec.json.decode(raw, type=ChatCompletionRequest)
    assert (asked.temperature, asked.logit_bias, asked.stop) == (0.5, {3: 1.0}, "x")
    assert asked.chat_template_kwargs is None
    assert [message.content for message in asked.messages] == [""]


def test_a_request_with_integers_beyond_64_bits_comes_back(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"maximum": 2**64, "minimum": -(2**63) - 1}}}]
    result = with_pool(setup(tmp_path), lambda pool: pool.run(CHAT, body(messages=MESSAGES, tools=tools)))
    asked = msgspec.json.decode(msgspec.msgpack.decode(result, type=Prepared).asked, type=ChatCompletionRequest)
    assert [tool.function.parameters for tool in asked.tools or ()] == [{"maximum": 2**64, "minimum": -(2**63) - 1}]


def test_the_body_of_a_new_endpoint_needs_no_entry_anywhere(tmp_path: Path) -> None:
    result = with_pool(setup(tmp_path), lambda pool: pool.run(name_of(OwnRequest), body(prompt="ab")))
    assert prompts_of(result) == [[*b"ab"]]


def answered(reply: bytes) -> Any:
    return json.loads(msgspec.msgpack.decode(reply, type=TokensResponse).body)


@pytest.mark.anyio
async def test_answers_about_tokens_are_made_there(tmp_path: Path) -> None:
    pool = TextPool(setup(tmp_path))
    asked = body(prompt="ab", return_token_strs=True, add_special_tokens=False)
    answer = answered(await pool.run(TOKENIZE, asked))
    assert (answer["tokens"], answer["token_strs"]) == ([97, 98], ["a", "b"])
    assert answered(await pool.run(DETOKENIZE, body(tokens=[97, 98]))) == {"prompt": "ab"}


@pytest.mark.anyio
async def test_what_is_wrong_comes_back_with_its_field(tmp_path: Path) -> None:
    pool = TextPool(setup(tmp_path))
    for kind, asked, status, param in (
        (CHAT, body(messages=MESSAGES, stop=["x" * 300]), 400, "stop[0]"),
        (CHAT, [b"{"], 400, None),
        (COMPLETION, body(prompt=["a", "x" * (1 << 21) + "x"]), 400, "prompt[1]"),
        (COMPLETION, body(prompt=[[999]]), 400, "prompt"),
        (COMPLETION, body(prompt=["a", [98]]), 400, "prompt"),
        (DETOKENIZE, body(tokens=[1, 99999]), 400, "tokens[1]"),
    ):
        error = await error_of(pool.run(kind, asked))
        assert (error.status, error.param) == (status, param)


@pytest.mark.anyio
async def test_sounds_and_form_types_beyond_ascii_are_read_by_the_workers_for_long_jobs(
    tmp_path: Path,
) -> None:
    kind = f"{HEAR}transcribe multipart/form-data; boundary=\u00e9abc"
    pool = TextPool(setup(tmp_path), silence_s=20)
    error = await error_of(pool.run(kind, [b"x" * 300]))
    assert (error.status, error.code) == (400, "invalid_form")
    assert [len(lane.idle) for lane in pool._lanes.values()] == [1, 1, 0], "the short worker has passed it on"


@pytest.mark.anyio
async def test_long_jobs_hold_up_neither_short_ones_nor_those_of_other_senders(tmp_path: Path) -> None:
    """One sender's long jobs take one worker after the other; a long job of another sender does not wait for them.

    There are many: the system may give either worker several times as much of a busy processor.
    """
    long = [b'{"prompt":"', b"x" * (SHORT_JOB_BYTES + 1), b'"}']
    pool = TextPool(setup(tmp_path))
    order: list[str] = []

    async def run(name: str, asked: list[bytes], sender: str) -> None:
        await pool.run(COMPLETION, asked, sender)
        order.append(name)

    await asyncio.gather(run("", long, "a"), run("", long, "b"), run("", body(prompt="a"), "a"))
    order.clear()  # the workers have started: what follows takes as long as it computes
    await asyncio.gather(
        *(run(f"long {number}", long, "a") for number in range(8)),
        run("long of another", long, "b"),
        run("short", body(prompt="a"), "a"),
    )
    assert [name for name in order if name.startswith("long ")][-1] == "long 7"
    assert order.index("long of another") < order.index("long 5")
    assert order.index("short") < order.index("long 5")


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("template", "batch"),
    [
        # many prompts, of which each takes little time, and one that takes much
        ("{% for m in messages %}[user]{{ m['content'] }}{% endfor %}", [MESSAGES] * 2000),
        ("{% for a in range(15) %}{% for b in range(60000) %}{% endfor %}{% endfor %}[user]", [MESSAGES]),
    ],
    ids=["many", "one"],
)
async def test_a_short_body_that_takes_long_leaves_the_worker_for_short_ones(
    tmp_path: Path, template: str, batch: Any
) -> None:
    pool = TextPool(setup(tmp_path, chat_template=template))
    short, long, _ = pool._lanes.values()
    asked = body(messages=batch)
    assert sum(map(len, asked)) < SHORT_JOB_BYTES
    # the first job of a new worker takes longer, above all on a busy machine
    await pool.run(COMPLETION, body(prompt="a"))
    done = msgspec.msgpack.decode(await pool.run(name_of(ChatBatchRequest), asked, "a"), type=Prepared)
    assert len(done.prompts) == len(batch)
    assert len(long.idle) == 1
    assert len(short.idle) == (len(batch) > 1), "the system has ended it within a prompt"
    assert prompts_of(await pool.run(COMPLETION, body(prompt="a"), "b")) == [[97]]


def test_a_host_that_does_not_respond_delays_no_other_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(
        '{"architectures": ["LlavaForConditionalGeneration"], "image_token_index": 4}'
    )
    (tmp_path / "preprocessor_config.json").write_text('{"image_processor_type": "CLIPImageProcessor"}')
    # importing the real one takes seconds, and no image gets as far as to it
    (tmp_path / "transformers.py").write_text("CLIPImageProcessorPil = dict")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)

    def chat(url: str) -> list[bytes]:
        content = [{"type": "image_url", "image_url": {"url": url}}]
        return body(messages=[{"role": "user", "content": content}])

    async def use(pool: TextPool) -> None:
        waiting = asyncio.create_task(error_of(pool.run(CHAT, chat(f"{host.url}/silent"), "a")))
        await asyncio.to_thread(eventually, lambda: host.paths == ["/silent"])
        await pool.run(COMPLETION, body(prompt="a"), "a")
        other = await error_of(pool.run(CHAT, chat(f"{host.url}/image"), "b"))
        assert "an image of the prompt is none of PNG" in str(other)
        held = await error_of(pool.run(CHAT, chat("data:image/png;base64,YWJj"), "a"))
        assert "an image of the prompt is none of PNG" in str(held)
        assert [len(lane.idle) for lane in pool._lanes.values()] == [1, 1, 1]
        assert not waiting.done()
        host.ends.set()
        assert "messages[0].content[0].image_url.url cannot be fetched" in str(await waiting)

    with image_host() as host:
        given = setup(tmp_path)
        model = dataclasses.replace(given.input.model, allowed_media_domains=("127.0.0.1",))
        with_pool(msgspec.structs.replace(given, input=msgspec.structs.replace(given.input, model=model)), use)


@pytest.mark.anyio
async def test_a_template_that_does_not_end_is_refused_and_others_go_on(tmp_path: Path) -> None:
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    pool = TextPool(setup(tmp_path, chat_template=endless))
    refused, others = await asyncio.gather(
        error_of(pool.run(CHAT, body(messages=MESSAGES))),
        pool.run(COMPLETION, body(prompt="a")),
    )
    assert "takes more than 1,000,000 steps" in str(refused)
    assert "tokenizer_config.json does not render" in str(refused)
    assert prompts_of(others) == [[97]]


finds_workers = pytest.mark.skipif(
    not Path("/proc/self/task").is_dir(), reason="workers are found by the files of Linux"
)


async def refused_by_a_worker_that_gets(number: signal.Signals, pool: TextPool, num_letters: int = 1) -> ApiError:
    """The error of the job that a worker is at when it gets a signal. Jobs beside it must succeed."""
    await pool.run(COMPLETION, body(prompt="a" * num_letters))
    stopped = workers_of(pool)
    for process in stopped:
        os.kill(process, signal.SIGSTOP)
    job = asyncio.create_task(error_of(pool.run(COMPLETION, body(prompt="a" * num_letters))))
    others = [asyncio.create_task(pool.run(COMPLETION, body(prompt="b"))) for _ in range(4)]
    await asyncio.sleep(0.05)
    for process in stopped:
        os.kill(process, number)
        with suppress(ProcessLookupError):  # SIGKILL has ended it already
            os.kill(process, signal.SIGCONT)
    refused = await job
    assert [prompts_of(await other) for other in others] == [[[98]]] * 4
    return refused


@pytest.mark.anyio
@finds_workers
@pytest.mark.parametrize(
    ("number", "num_letters", "status", "code"),
    [
        (signal.SIGPROF, SHORT_JOB_BYTES, 400, "request_too_expensive"),
        (signal.SIGABRT, 1, 400, "request_too_expensive"),
        (signal.SIGKILL, 1, 503, "server_busy"),
    ],
)
async def test_a_worker_that_ends_costs_the_job_that_it_worked_on_alone(
    tmp_path: Path, number: signal.Signals, num_letters: int, status: int, code: str
) -> None:
    """It ends as the system ends one whose job takes too long, as a library that gets no memory, or from outside."""
    pool = TextPool(setup(tmp_path))
    refused = await refused_by_a_worker_that_gets(number, pool, num_letters)
    assert (refused.status, refused.code) == (status, code)


@pytest.mark.anyio
@finds_workers
async def test_a_worker_that_hangs_costs_the_job_that_it_worked_on_alone(tmp_path: Path) -> None:
    pool = TextPool(setup(tmp_path))
    await pool.run(COMPLETION, body(prompt="a"))
    for process in workers_of(pool):
        os.kill(process, signal.SIGSTOP)
    pool._silence_s = 0.2
    job = asyncio.create_task(error_of(pool.run(COMPLETION, body(prompt="a"))))
    await asyncio.sleep(0)
    pool._silence_s = 60.0
    other = asyncio.create_task(pool.run(COMPLETION, body(prompt="b")))
    refused = await job
    assert (refused.status, refused.code, refused.headers) == (503, "server_busy", {"Retry-After": "1"})
    assert prompts_of(await other) == [[98]]


@pytest.mark.anyio
@finds_workers
async def test_a_worker_ends_when_the_client_of_its_job_goes_away(tmp_path: Path) -> None:
    """The system ends it, also inside a library; the next job gets another worker."""
    endless = "{% for a in range(9999) %}{% for b in range(99) %}{% endfor %}{% endfor %}"
    pool = TextPool(setup(tmp_path, chat_template=endless))
    assert prompts_of(await pool.run(COMPLETION, body(prompt="a"))) == [[97]]
    [worker] = workers_of(pool)
    job = asyncio.create_task(pool.run(CHAT, body(messages=MESSAGES)))
    before = cpu_s(worker)
    while cpu_s(worker) < before + 0.02:
        await asyncio.sleep(0.001)
    job.cancel()
    while is_running(worker):
        await asyncio.sleep(0.001)
    assert prompts_of(await pool.run(COMPLETION, body(prompt="b"))) == [[98]]


def cpu_s(process: int) -> float:
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@finds_workers
@pytest.mark.parametrize("server_is_killed", [False, True])
def test_workers_end_with_the_pool_whatever_they_do(tmp_path: Path, server_is_killed: bool) -> None:
    """A stopped worker stands for one in a long job. The system closes the sockets of a server that is killed."""
    workers: list[int] = []

    async def use(pool: TextPool) -> None:
        await pool.run(COMPLETION, body(prompt="a"))
        assert pool._process is not None
        workers.extend(workers_of(pool) + children_of(pool._process.pid))
        for process in workers:
            os.kill(process, signal.SIGSTOP)
        if server_is_killed:
            assert pool._control is not None
            pool._control.close()
            while any(map(is_running, workers)):
                await asyncio.sleep(0.01)

    with adopting_orphans():
        with_pool(setup(tmp_path), use)
        eventually(lambda: not any(map(is_running, workers)))
        for process in workers:
            with suppress(ChildProcessError):  # its parent has waited for it
                os.waitpid(process, 0)
    assert len(workers) == 2


@contextmanager
def adopting_orphans() -> Iterator[None]:
    """Be the parent of processes whose parent ends: the system wakes stopped ones that init would get."""
    set_child_subreaper = 36
    prctl = ctypes.CDLL(None).prctl
    assert prctl(set_child_subreaper, 1, 0, 0, 0) == 0
    try:
        yield
    finally:
        prctl(set_child_subreaper, 0, 0, 0, 0)


def children_of(process: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def workers_of(pool: TextPool) -> list[int]:
    """Each worker is the child of a process that waits for its end."""
    assert pool._process is not None
    return [worker for parent in children_of(pool._process.pid) for worker in children_of(parent)]


@pytest.mark.anyio
async def test_processes_that_do_not_start_are_reported(tmp_path: Path) -> None:
    config = setup(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    pool = TextPool(config)
    error = await error_of(pool.run(COMPLETION, body(prompt="a")))
    assert (error.status, error.code) == (503, "server_busy")


@pytest.mark.anyio
async def test_jobs_that_nobody_waits_for_are_dropped(tmp_path: Path) -> None:
    pool = TextPool(setup(tmp_path))
    await pool.run(COMPLETION, body(prompt="a"))
    task = asyncio.create_task(pool.run(COMPLETION, body(prompt=["x" * 1000] * 200)))
    await asyncio.sleep(0)
    task.cancel()
    assert prompts_of(await pool.run(COMPLETION, body(prompt="b"))) == [[98]]


@pytest.mark.anyio
async def test_special_tokens_in_content_are_text_there_too(tmp_path: Path) -> None:
    asked = body(messages=[{"role": "user", "content": "<eos>"}], add_generation_prompt=False)
    pool = TextPool(setup(tmp_path))
    whole = [BOS, *b"[user]<eos>", EOS]
    for kind in (CHAT, name_of(PrefixRequest)):
        assert prompts_of(await pool.run(kind, asked)) == [whole]
    assert answered(await pool.run(TOKENIZE, asked))["tokens"] == whole
    assert prompts_of(await pool.run(COMPLETION, body(prompt="a<eos>"))) == [[97, EOS]]
