"""Requests are read without holding up the loop: what one turn of it costs, whatever the bytes of a request."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request

from octavo.config.pooling.pooling_config import LateInteraction, PoolingConfig
from octavo.engine.input.input_processor import InputProcessor, InputSetup
from octavo.engine.text.chat_template import ChatTemplate
from octavo.errors import InvalidRequest
from octavo.server.decode import decode
from octavo.server.errors import ApiError, shutting_down
from octavo.server.preparing import Preparer, TextPolicy, TextSetup
from octavo.server.schema.chat import ChatCompletionRequest
from octavo.server.schema.chat_batch import ChatBatchRequest
from octavo.server.schema.cohere_chat import CohereChatRequest
from octavo.server.schema.completions import CompletionRequest
from octavo.server.schema.generate import GenerateRequest
from octavo.server.schema.infill import InfillRequest
from octavo.server.schema.messages import CountTokensRequest, MessagesRequest
from octavo.server.schema.pairs import RerankRequest, ScoreRequest
from octavo.server.schema.responses import InputTokensRequest, ResponsesRequest
from octavo.server.schema.scoring import GenerativeScoringRequest
from octavo.server.schema.tokens import TokenizeRequest
from octavo.server.sending import OpenRequests
from octavo.server.text_pool import TextPool
from octavo.server.texts import INLINE_BYTES, Texts
from tests.fakes.byte_tokenizer import BOS, EOS, byte_tokenizer
from tests.fakes.core import core_ready, engine_config

USER = {"role": "user", "content": "a"}
TURN_CPU_S = 0.3
"""Several times what the worst turn takes, processor time alone: a busy machine does not count."""


def texts(
    directory: Path,
    template: str | None = None,
    max_model_len: int = 1 << 20,
    policy: TextPolicy | None = None,
    tokenizer_config: dict[str, Any] | None = None,
    vocab_size: int | None = None,
    **model: Any,
) -> Texts:
    config = {**(tokenizer_config or {}), **({} if template is None else {"chat_template": template})}
    tokenizer = byte_tokenizer(directory, **config)
    ready = core_ready(max_model_len=max_model_len, **({} if vocab_size is None else {"vocab_size": vocab_size}))
    setup = InputSetup(engine_config(str(directory), **model).model, ready, max_num_seqs=4)
    tools = InputProcessor(setup, tokenizer=tokenizer, chat_template=ChatTemplate.find(directory, tokenizer))
    policy = policy or TextPolicy()
    return Texts(Preparer(tools, policy), TextPool(TextSetup(setup, policy)), OpenRequests())


def request(body: Any) -> Request:
    """A request whose body comes in pieces of 64 KiB."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    pieces = [data[start : start + (64 << 10)] for start in range(0, len(data), 64 << 10)]

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(0)
        if not pieces:
            await asyncio.Event().wait()  # the client stays
        return {"type": "http.request", "body": pieces.pop(0), "more_body": bool(pieces)}

    return Request({"type": "http", "headers": [(b"content-type", b"application/json")]}, receive)


async def longest_turn(job: Awaitable[Any]) -> tuple[Any, float]:
    """What a job returns or raises, and the processor time of the loop's longest turn meanwhile."""
    longest = 0.0

    async def tick() -> None:
        nonlocal longest
        last = time.thread_time()
        while True:
            await asyncio.sleep(0.001)
            now = time.thread_time()
            longest, last = max(longest, now - last), now

    ticking = asyncio.create_task(tick())
    try:
        [result] = await asyncio.gather(job, return_exceptions=True)
        await asyncio.sleep(0.005)
    finally:
        ticking.cancel()
    return result, longest


ATTACKS: dict[str, tuple[Any, Any, Any]] = {
    "bad_words": (CompletionRequest, lambda: {"prompt": "a", "bad_words": ["x" * 30_000_000]}, "bad_words[0]"),
    "text": (TokenizeRequest, lambda: {"prompt": "word " * 6_000_000}, "prompt"),
    "messages": (
        ChatCompletionRequest,
        lambda: b'{"messages": [' + json.dumps(USER).encode() + (b"," + json.dumps(USER).encode()) * 500_000 + b"]}",
        "messages",
    ),
    "items": (ResponsesRequest, lambda: {"input": [{"role": "user", "content": "a"}] * 50_000}, "input"),
    "blocks": (
        MessagesRequest,
        lambda: {
            "max_tokens": 1,
            "messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a"}] * 50_000}],
        },
        "messages",
    ),
    "arrays": (CompletionRequest, lambda: b'{"prompt": "a", "vllm_xargs": [' + b"[]," * 6_000_000 + b"0]}", None),
    "depth": (CompletionRequest, lambda: b'{"prompt": "a", "vllm_xargs": ' + b"[" * 9_000_000, None),
    "ids": (CompletionRequest, lambda: b'{"prompt": [' + b"65," * 3_000_000 + b"1]}", "prompt"),
    "allowed": (CompletionRequest, lambda: {"prompt": "a", "allowed_token_ids": [5] * 3_000_000}, "allowed_token_ids"),
    "kwargs": (
        ChatCompletionRequest,
        lambda: {"messages": [USER], "chat_template_kwargs": {"a": [[0] * 1000] * 2000}},
        "chat_template_kwargs",
    ),
}


@pytest.mark.anyio
async def test_no_body_holds_up_the_loop(tmp_path: Path) -> None:
    reads = texts(tmp_path)
    await reads.read(request({"prompt": "x" * INLINE_BYTES}), CompletionRequest)
    for name, (kind, make, field) in ATTACKS.items():
        asked = request(make())
        job: Any = reads.respond(asked, kind) if kind is TokenizeRequest else reads.read(asked, kind)
        error, seconds = await longest_turn(job)
        assert isinstance(error, ApiError), name
        assert (error.status, error.param) == (400, field), name
        assert seconds < TURN_CPU_S, name


@pytest.mark.anyio
async def test_a_costly_template_does_not_hold_up_the_loop(tmp_path: Path) -> None:
    """A small request is rendered on the loop first, with a small budget."""
    costly = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    error, seconds = await longest_turn(
        texts(tmp_path, costly).read(request({"messages": [USER]}), ChatCompletionRequest)
    )
    assert isinstance(error, ApiError)
    assert (error.status, error.code) == (400, "template_too_expensive")
    assert seconds < TURN_CPU_S


@pytest.mark.anyio
async def test_small_and_large_requests_become_the_same_prompts(tmp_path: Path) -> None:
    reads = texts(tmp_path)
    tokenizer = byte_tokenizer(tmp_path)
    kinds: tuple[Any, ...] = (ChatCompletionRequest, ResponsesRequest, MessagesRequest, CohereChatRequest)
    for length, kind in itertools.product((1, INLINE_BYTES), kinds):
        content = "x" * length
        messages = [{"role": "user", "content": content}]
        fields: Any = {"input": content} if kind is ResponsesRequest else {"messages": messages}
        if kind is MessagesRequest:
            fields["max_tokens"] = 5
        asked, [prompt] = await reads.read(request({**fields, "temperature": 0.5}), kind)
        ids = prompt.token_ids or tokenizer.encode(prompt.text or "", prompt.add_special_tokens, prompt.cuts)
        assert ids == [BOS, *b"[user]", *content.encode(), EOS, *b"[assistant]"]
        assert asked.temperature == 0.5
        if kind is MessagesRequest:
            counted = await reads.respond(request({"messages": messages}), CountTokensRequest)
            assert json.loads(counted.body) == {"input_tokens": len(ids)}
        if kind is ResponsesRequest:
            counted = await reads.respond(request({"input": content}), InputTokensRequest)
            assert json.loads(counted.body) == {"input_tokens": len(ids), "object": "response.input_tokens"}


@pytest.mark.anyio
async def test_tokens_of_large_requests_come_once(tmp_path: Path) -> None:
    reads, ids = texts(tmp_path), [98] * INLINE_BYTES
    asked, [prompt] = await reads.read(request({"token_ids": ids, "sampling_params": {"seed": 1}}), GenerateRequest)
    assert (asked.token_ids, asked.sampling_params, prompt.token_ids) == ([0], {"seed": 1}, ids)
    fields = {"query": ids, "items": [[97]], "label_token_ids": [1]}
    scored, [prompt] = await reads.read(request(fields), GenerativeScoringRequest)
    assert (scored.query, scored.items, prompt.token_ids) == ("", [], [*ids, 97])


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("kind", "fields", "field"),
    [
        (ChatBatchRequest, {"messages": [[USER], [{"role": "user", "content": "b" * 40_000}], [USER]]}, "messages[1]"),
        (CompletionRequest, {"prompt": ["a", "b" * 40_000]}, "prompt[1]"),
        (CompletionRequest, {"prompt": ["b" * 40_000]}, "prompt"),
    ],
)
async def test_of_several_prompts_the_one_that_is_too_long_is_named(
    tmp_path: Path, kind: Any, fields: dict[str, Any], field: str
) -> None:
    reads = texts(tmp_path, max_model_len=1000)
    with pytest.raises(ApiError) as caught:
        await reads.read(request(fields), kind)
    assert caught.value.param == field
    assert str(caught.value).startswith(f"{field}: " * field.endswith("]"))
    assert caught.value.code == "context_length_exceeded"


@pytest.mark.anyio
@pytest.mark.parametrize("padding", [1, INLINE_BYTES])
async def test_conversations_of_a_batch_become_the_prompts_that_each_has_alone(tmp_path: Path, padding: int) -> None:
    reads = texts(tmp_path)
    tokenizer = byte_tokenizer(tmp_path)
    begun = [USER, {"role": "assistant", "content": "b" * padding}]
    fields = {"echo": True, "continue_final_message": True, "temperature": 0.5}
    chats = [[USER], begun, [USER]]
    asked, prompts = await reads.read(request({"messages": chats, **fields}), ChatBatchRequest)
    ids = [each.token_ids or tokenizer.encode(each.text or "", each.add_special_tokens, each.cuts) for each in prompts]
    assert ids[0] == ids[2] == [BOS, *b"[user]a"]
    assert ids[1] == [BOS, *b"[user]a", EOS, *b"[assistant]", *b"b" * padding]
    assert [asked.chat(index).echoed_text for index in range(3)] == ["", "b" * padding, ""]
    assert asked.temperature == 0.5
    wrong = [[{"role": "user", "content": "c" * padding}], [{"role": "user"}]]
    with pytest.raises((InvalidRequest, ApiError), match=r"^messages\[1\]\[0\].content is missing"):
        await reads.read(request({"messages": wrong}), ChatBatchRequest)


@pytest.mark.anyio
async def test_many_small_conversations_do_not_hold_up_the_loop(tmp_path: Path) -> None:
    reads = texts(tmp_path)
    chats = [[USER]] * 100
    assert len(json.dumps({"messages": chats})) < INLINE_BYTES
    _, prompts = await reads.read(request({"messages": chats}), ChatBatchRequest)
    assert len(prompts) == 100
    assert reads.pool._process is not None


@pytest.mark.anyio
async def test_a_small_request_starts_no_process(tmp_path: Path) -> None:
    reads = texts(tmp_path)
    await reads.read(request({"messages": [USER]}), ChatCompletionRequest)
    with pytest.raises(InvalidRequest):
        await reads.read(request({"messages": []}), ChatCompletionRequest)
    assert reads.pool is not None
    assert reads.pool._process is None


@pytest.mark.anyio
@pytest.mark.parametrize("kind", [CompletionRequest, TokenizeRequest])
async def test_what_helper_processes_work_on_gets_an_error_when_the_server_stops(tmp_path: Path, kind: Any) -> None:
    reads = texts(tmp_path)
    assert reads.pool is not None
    started = asyncio.Event()

    async def stuck(kind: str, pieces: Any, sender: str) -> bytes:
        started.set()
        await asyncio.Event().wait()
        return b""

    reads.pool.run = stuck  # type: ignore[method-assign]
    asked = request({"prompt": "x" * 2 * INLINE_BYTES})
    coroutine: Any = reads.respond(asked, kind) if kind is TokenizeRequest else reads.read(asked, kind)
    job = asyncio.create_task(coroutine)
    await started.wait()
    reads._open_requests.end_all(shutting_down())
    with pytest.raises(ApiError, match="shutting down"):
        await job


@pytest.mark.anyio
@pytest.mark.parametrize("padding", [0, INLINE_BYTES])
async def test_templates_see_documents_effort_and_the_values_of_a_request(tmp_path: Path, padding: int) -> None:
    prepared = texts(tmp_path, "{{ documents[0].text }}, {{ reasoning_effort }}")
    begun = [USER, {"role": "assistant", "content": "begun"}]
    body = {"messages": begun, "documents": [{"text": "a", "rest": "x" * padding}], "reasoning_effort": "low"}
    body |= {"echo": True, "truncate_prompt_tokens": 4}
    asked, [prompt] = await prepared.read(request(body), ChatCompletionRequest)
    assert asked.echoed_text == "begun"
    if padding:
        assert prompt.token_ids == [*b" low"]
        assert asked.documents is None
    else:
        assert prompt.text == "a, low"
    body["chat_template_kwargs"] = {"reasoning_effort": "high"}
    _, [prompt] = await prepared.read(request(body), ChatCompletionRequest)
    assert prompt.text == "a, high" or prompt.token_ids == [*b"high"]


@pytest.mark.anyio
@pytest.mark.parametrize("padding", [0, INLINE_BYTES])
async def test_each_api_gives_templates_the_engines_values_or_the_requests(tmp_path: Path, padding: int) -> None:
    template = "{{ enable_thinking }}{{ reasoning_effort }}"
    values = {"enable_thinking": False, "reasoning_effort": "low"}
    prepared = texts(tmp_path, template, default_chat_template_kwargs=values)
    chat: dict[str, Any] = {"messages": [{"role": "user", "content": "x" * padding}]}

    async def written(kind: Any, **fields: Any) -> str:
        if kind is TokenizeRequest:
            answered = await prepared.respond(request(chat | fields), kind)
            return bytes(json.loads(answered.body)["tokens"]).decode()
        body = {"input": "x" * padding} if kind is ResponsesRequest else chat | {"max_tokens": 1}
        _, [prompt] = await prepared.read(request(body | fields), kind)
        return prompt.text if prompt.token_ids is None else bytes(prompt.token_ids).decode()

    kinds = (ChatCompletionRequest, ResponsesRequest, MessagesRequest, TokenizeRequest)
    for kind in kinds:
        assert await written(kind) == "Falselow"
        assert await written(kind, chat_template_kwargs={"enable_thinking": True}) == "Truelow"
    assert await written(ChatCompletionRequest, reasoning_effort="high") == "Truehigh"
    assert await written(ChatCompletionRequest, reasoning_effort="none") == "Falsenone"
    assert await written(ResponsesRequest, reasoning={"effort": "high"}) == "Truehigh"
    assert await written(MessagesRequest, thinking={"type": "enabled"}) == "Truelow"


@pytest.mark.anyio
@pytest.mark.parametrize("padding", [0, INLINE_BYTES])
async def test_a_server_may_rename_efforts_for_a_template(tmp_path: Path, padding: int) -> None:
    policy = TextPolicy(reasoning_effort_map={"medium": "low", "minimal": "none"})
    prepared = texts(tmp_path, "{{ thinking }}{{ reasoning_effort }}", policy=policy)
    chat: dict[str, Any] = {"messages": [{"role": "user", "content": "x" * padding}]}

    async def written(**fields: Any) -> str:
        _, [prompt] = await prepared.read(request(chat | fields), ChatCompletionRequest)
        return prompt.text if prompt.token_ids is None else bytes(prompt.token_ids).decode()

    assert await written(reasoning_effort="medium") == "Truelow"
    assert await written(reasoning_effort="minimal") == "Falsenone"
    assert await written(reasoning_effort="high") == "Truehigh"
    assert await written(chat_template_kwargs={"reasoning_effort": "medium"}) == "medium"


@pytest.mark.anyio
@pytest.mark.parametrize("template", ["{{ tools[0].function.name if tools }}", "{{ messages[0].content }}"])
async def test_tools_that_may_not_be_called_are_in_the_prompt_unless_the_server_leaves_them_out(
    tmp_path: Path, template: str
) -> None:
    function = {"name": "look_up", "parameters": {"type": "object"}}
    chat = {"messages": [USER], "tools": [{"type": "function", "function": function}]}
    item = {"input": "a", "tools": [{"type": "function", **function}]}
    message = {"messages": [USER], "max_tokens": 1, "tools": [{"name": "look_up", "input_schema": {"type": "object"}}]}
    none: dict[str, Any] = {"type": "none"}
    for excludes in (False, True):
        policy = TextPolicy(tool_call_parser="hermes", exclude_tools_when_tool_choice_none=excludes)
        prepared = texts(tmp_path, template, policy=policy)
        for kind, body, choices in (
            (ChatCompletionRequest, chat, ("auto", "none")),
            (ResponsesRequest, item, ("auto", "none")),
            (MessagesRequest, message, ({"type": "auto"}, none)),
        ):
            for choice in choices:
                _, [prompt] = await prepared.read(request({**body, "tool_choice": choice}), kind)
                is_none = choice in ("none", none)
                assert ("look_up" in (prompt.text or "")) != (excludes and is_none)


def test_messages_are_counted_without_the_one_that_describes_tools(tmp_path: Path) -> None:
    preparer = texts(tmp_path, "{% for message in messages %}{{ message.content }}{% endfor %}")._preparer
    url, source = "data:image/png;base64,AAAA", {"type": "base64", "media_type": "image/png", "data": "AAAA"}
    function: dict[str, Any] = {"name": "f", "parameters": {}}
    for kind, part, tool in (
        (ChatCompletionRequest, {"type": "image_url", "image_url": {"url": url}}, {"function": function}),
        (MessagesRequest, {"type": "image", "source": source}, {"name": "f", "input_schema": {"type": "object"}}),
    ):
        body = {"messages": [{"role": "user", "content": [part]}], "tools": [tool], "max_tokens": 1}
        with pytest.raises(InvalidRequest, match="is an image, and this model reads text alone") as caught:
            decode(json.dumps(body).encode(), kind).prompts(preparer)
        assert caught.value.field == "messages[0].content[0]"


@pytest.mark.anyio
@pytest.mark.parametrize("padding", [0, INLINE_BYTES])
async def test_a_completion_with_a_suffix_is_a_prompt_to_fill_in(tmp_path: Path, padding: int) -> None:
    names = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
    listed = {str(259 + at): {"content": name, "special": True} for at, name in enumerate(names)}
    prepared = texts(tmp_path, tokenizer_config={"added_tokens_decoder": listed}, vocab_size=262)
    body = {"prompt": ["a", "b"], "suffix": "c" + "x" * padding}
    asked, prompts = await prepared.read(request(body), CompletionRequest)
    behind = [260, *body["suffix"].encode(), 261]
    assert [prompt.token_ids for prompt in prompts] == [[259, *b"a", *behind], [259, *b"b", *behind]]
    assert asked.suffix == "c", "there is one, so that tokens behind a text that is filled in end the output"
    for fields, words in (
        ({"echo": True}, "cannot be combined with echo"),
        ({"prompt": [1, 2]}, "needs a prompt of text"),
    ):
        with pytest.raises((InvalidRequest, ApiError), match=f"suffix {words}"):
            await prepared.read(request(body | fields), CompletionRequest)


@pytest.mark.anyio
@pytest.mark.parametrize("padding", [0, INLINE_BYTES])
async def test_other_files_of_an_editor_are_read_in_either_process(tmp_path: Path, padding: int) -> None:
    names = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|file_sep|>")
    listed = {str(259 + at): {"content": name, "special": True} for at, name in enumerate(names)}
    prepared = texts(tmp_path, tokenizer_config={"added_tokens_decoder": listed}, vocab_size=263)
    body = {"input_prefix": "a", "input_suffix": "b", "input_extra": [{"text": "x" * padding}, {"text": "y"}]}
    asked, [prompt] = await prepared.read(request(body | {"n_predict": 1}), InfillRequest)
    file = [262, *b"tmp\n", *b"x" * padding]
    assert prompt.token_ids == [*file, 262, *b"tmp\ny", 262, *b"filename\n", 259, *b"a", 260, *b"b", 261]
    assert (asked.input_prefix, asked.input_extra is None) == (("", True) if padding else ("a", False))
    with pytest.raises((InvalidRequest, ApiError), match="guided_regex: regex cannot be used"):
        await prepared.read(request(body | {"guided_regex": "("}), InfillRequest)


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("kind", "body", "field"),
    [
        (RerankRequest, {"query": "a"}, "documents"),
        (ScoreRequest, {"queries": "a"}, "documents"),
        (ScoreRequest, {"data_1": "a"}, "data_2"),
        (GenerativeScoringRequest, {"query": "a", "label_token_ids": [1]}, "items"),
    ],
)
async def test_texts_that_are_too_long_are_named_by_their_field(
    tmp_path: Path, kind: Any, body: dict[str, Any], field: str
) -> None:
    pooling = None if kind is GenerativeScoringRequest else PoolingConfig(task="classify", labels=("fits",))
    prepared = texts(tmp_path, pooling=pooling, max_model_len=1000)
    with pytest.raises(ApiError) as caught:
        await prepared.read(request({**body, field: ["b" * INLINE_BYTES]}), kind)
    assert (caught.value.param, caught.value.code) == (field, "context_length_exceeded")


@pytest.mark.anyio
@pytest.mark.parametrize("padding", [0, INLINE_BYTES])
async def test_requests_for_scores_keep_their_texts_and_masks_in_either_process(tmp_path: Path, padding: int) -> None:
    late = LateInteraction(query_prefix="q", expanded_length=4, expansion="m")
    prepared = texts(tmp_path, pooling=PoolingConfig(task="token_embed", late=late))
    documents = ["b", "c" + "x" * padding]
    for kind, body in (
        (RerankRequest, {"query": "a", "documents": documents}),
        (ScoreRequest, {"queries": "a", "documents": documents}),
    ):
        asked, prompts = await prepared.read(request(body), kind)
        assert asked.documents == documents
        assert [prompt.num_unseen for prompt in prompts] == [2, 0, 0]
        assert [len(prompt.token_ids or ()) for prompt in prompts] == [4, 1, 1 + padding]
