"""What one API key can learn of another one's requests, over HTTP on a real scheduler and prefix cache."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from octavo.async_llm import AsyncLLM
from octavo.config.args import ObservabilityArgs
from octavo.config.server_args import ServerArgs
from octavo.engine.cores.replica import Replica
from octavo.engine.cores.replicas import Replicas
from octavo.engine.text.chat_template import ChatTemplate
from octavo.server.serving import StopSignals
from tests.fakes.byte_tokenizer import byte_tokenizer
from tests.fakes.core import engine_config
from tests.fakes.engine import make_core
from tests.fakes.served_core import served_core
from tests.server.conftest import Served
from tests.server.raw import Answer, ask

SECRET = [7, 3, 9, 9, 1, 4, 2, 8, 6]
ALPHABET = range(1, 10)
PAD = 20
"""A token that no prompt goes on with: the last token of a prompt is always computed."""


class ServedEngine(Served):
    """A server over an engine whose model is made of hashes, and whose scheduler and cache are real."""

    def __init__(self, directory: Path, keys: str, **args: Any) -> None:
        directory.mkdir()
        (directory / "keys.yaml").write_text(keys)
        self._directory = directory
        super().__init__(ServerArgs(port=0, api_key_file=str(directory / "keys.yaml") if keys else None, **args))

    async def _serve(self, listener: Any) -> int:
        self.loop = asyncio.get_running_loop()
        self.signals = StopSignals()
        tokenizer = byte_tokenizer(self._directory)
        template = ChatTemplate.find(self._directory, tokenizer)
        config = engine_config(str(self._directory))
        config = msgspec.structs.replace(config, observability=ObservabilityArgs(enable_kv_events=True))
        core = make_core(num_blocks=512, max_num_seqs=2)
        core.log_kv_events()
        async with served_core(core) as client:
            llm = AsyncLLM(config, Replicas([Replica(0, client)]), tokenizer, template)
            self.loop.call_soon(self._up.set)
            try:
                return await self._serve_http(llm, listener)
            finally:
                await llm.shutdown()

    def ask(self, key: str, path: str, body: Any = None, **options: Any) -> Answer:
        return ask(self.url, path, body, headers={"Authorization": f"Bearer {key}-key"} if key else None, **options)

    def complete(self, key: str, prompt: Sequence[int], **fields: Any) -> dict[str, Any]:
        """Usage of a completion: cached tokens and the reason why it were not more."""
        body = {"prompt": list(prompt), "max_tokens": 1, "seed": 0, "return_cache_info": True, **fields}
        answer = self.ask(key, "/v1/completions", body)
        assert answer.status == 200, answer.body
        return answer.json["usage"]["prompt_tokens_details"]


Start = Callable[..., ServedEngine]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[ServedEngine] = []

    def start_engine(keys: str, **args: Any) -> ServedEngine:
        started.append(ServedEngine(tmp_path / str(len(started)), keys, **args))
        return started[-1]

    yield start_engine
    for served in started:
        served.stop()


def entries(*keys: str) -> str:
    """A key file; each key is written as its name and further fields."""
    return "\n".join(f"- {{name: {key.split(',')[0]}, key: {key.split(',')[0]}-key{key[1:]}}}" for key in keys)


def attack(server: ServedEngine, key: str, **fields: Any) -> tuple[list[int], list[Any]]:
    """Guess a prompt token by token from cached token counts: what was guessed, and all that the server told."""
    known: list[int] = []
    told = []
    for _ in SECRET:
        for token in ALPHABET:
            told.append(server.complete(key, [*known, token, PAD], **fields))
            if told[-1]["cached_tokens"] > len(known):
                known.append(token)
                break
        else:
            break
    return known, told


@pytest.mark.parametrize(
    ("alice", "bob", "is_shared"),
    [
        (("a", {}), ("b", {}), False),
        (("a", {}), ("a", {}), True),
        (("a", {"cache_salt": "s"}), ("b", {"cache_salt": "s"}), False),
        (("c", {}), ("d", {}), True),
        (("c", {"cache_salt": "s"}), ("d", {"cache_salt": "s"}), True),
        (("c", {"cache_salt": "s"}), ("d", {"cache_salt": "t"}), False),
        (("c", {"cache_salt": "s"}), ("d", {}), False),
        (("a", {}), ("c", {}), False),
        (("a", {}), ("e", {}), False),
    ],
)
def test_what_the_cache_tells_a_key_does_not_depend_on_what_another_key_sent(
    start: Start, alice: tuple[str, Any], bob: tuple[str, Any], is_shared: bool
) -> None:
    keys = entries("a", "b", "c, group: g", "d, group: g", "e, group: h")
    told = []
    for prompt in (SECRET, [30] * len(SECRET)):
        server = start(keys)
        server.complete(alice[0], prompt, **alice[1])
        told.append(attack(server, bob[0], **bob[1]))
    (guessed, with_secret), (_, without_secret) = told
    assert (with_secret == without_secret) == (not is_shared)
    # the last token of the secret's last block stays unknown: only full blocks are cached
    assert guessed == (SECRET[:8] if is_shared else [])


def test_without_keys_all_share_as_before(start: Start) -> None:
    server = start("")
    server.complete("", SECRET)
    assert attack(server, "")[0] == SECRET[:8]


def test_a_pin_is_of_the_namespace_of_its_key(start: Start) -> None:
    server = start(entries("a, rights: [cache]", "b, rights: [cache]", "c"))
    prefix = {"prompt": SECRET[:8]}
    server.complete("b", SECRET)
    pinned = server.ask("a", "/pin_prefix", {**prefix, "ttl_s": 60}).json
    assert (pinned["pinned_tokens"], pinned["cached_tokens"]) == (8, 0)
    assert server.ask("b", "/unpin_prefix", prefix).json == {"unpinned": False}
    assert server.ask("b", "/pin_prefix", {**prefix, "ttl_s": 60}).json["cached_tokens"] == 8
    assert server.ask("a", "/unpin_prefix", prefix).json == {"unpinned": True}
    assert server.complete("c", SECRET)["cached_tokens"] == 0


def test_a_key_sees_what_became_of_its_own_requests_alone(start: Start) -> None:
    server = start(entries("a", "b", "o, rights: [observe]"))
    # both choose the same id
    for key in "ab":
        server.complete(key, SECRET, request_id="same")

    def seen(key: str, path: str) -> list[dict[str, Any]]:
        answer = server.ask(key, path)
        assert answer.status == 200
        (entries,) = answer.json.values()
        return entries

    for path in ("/scheduler/decisions", "/scheduler/timelines"):
        for query in ("", "?request_id=cmpl-same"):
            assert {entry["tenant"] for entry in seen("a", path + query)} == {"a"}
            assert {entry["tenant"] for entry in seen("b", path + query)} == {"b"}
            assert {entry["tenant"] for entry in seen("o", path + query)} == {"a", "b"}
        (theirs, *_) = seen("b", path)
        assert seen("a", f"{path}?request_id={theirs['request_id']}") == []
    (own,) = seen("a", "/scheduler/decisions")
    assert (own["kind"], own["step"], own["last_step"]) == ("admitted", None, None)
    assert own["because"].startswith("0 of 9 tokens were in the cache")
    assert all(entry["step"] for entry in seen("o", "/scheduler/decisions"))


def test_reasons_that_tell_of_others_are_for_those_who_see_all_requests(start: Start) -> None:
    server = start(entries("a", "o, rights: [observe]"))
    body = {"prompt": [SECRET, SECRET[::-1], SECRET[2:]], "max_tokens": 4}
    assert server.ask("a", "/v1/completions", body).status == 200  # two run at once

    def blocked(key: str) -> list[str]:
        found = server.ask(key, "/scheduler/decisions").json["decisions"]
        return [entry["because"] for entry in found if entry["kind"] == "blocked"]

    assert blocked("a") == [""] * len(blocked("o"))
    assert all(blocked("o"))
    assert blocked("o")


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "param", "begins"),
    [
        ([[1, 2], [3, 900]], 1, "prompt[1]", "prompt[1]: "),
        ([[3, 900]], 1, "prompt", "prompt contains 900"),
        ([[1], [2] * 400], 200, "max_tokens", "prompt[1]: the prompt has 400 tokens and max_tokens"),
    ],
)
def test_of_several_prompts_the_one_that_does_not_fit_is_named(
    start: Start, prompt: list[list[int]], max_tokens: int, param: str, begins: str
) -> None:
    answer = start("").ask("", "/v1/completions", {"prompt": prompt, "max_tokens": max_tokens})
    assert (answer.status, answer.error["param"]) == (400, param)
    assert answer.error["message"].startswith(begins)
