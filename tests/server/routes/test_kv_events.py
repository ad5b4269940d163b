"""`GET /kv/events`: what a router outside reads, and what a reader cannot find out."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from octavo.core.block_events import BlockEvent, BlockEvents
from octavo.core.cache_key import CacheKey, namespace_digest
from octavo.kv_cache.block_hash import extend_chain
from octavo.server.key_file import read_callers
from octavo.server.routes import kv_events
from octavo.server.routes.kv_events import EventCursor
from tests.server.conftest import Served
from tests.server.raw import EventReader, ask, eventually
from tests.server.test_isolation import ServedEngine, entries
from tests.server.test_isolation import start as start

PROMPT = [7, 3, 9, 9, 1, 4, 2, 8, 6]
KEYS = entries("a", "b", "r, rights: [kv-events]", "s, rights: [observe, cache, operate]")


@pytest.fixture
def read(read_events: Any) -> Callable[..., EventReader]:
    def open_events(server: ServedEngine, key: str = "", after: str | None = None) -> Any:
        return read_events(server, "/kv/events", key, **({} if after is None else {"Last-Event-ID": after}))

    return open_events


def digests(events: EventReader, num: int) -> list[str]:
    """The next so many digests that are stored."""
    found: list[str] = []
    while len(found) < num:
        found += [digest for data in [events.next()] if data["kind"] == "stored" for digest in data["digests"]]
    return found


def chain(namespace: str | None, salt: str | None = None) -> list[str]:
    return [digest.hex() for digest in extend_chain([], PROMPT, 4, CacheKey(salt, cache_namespace=namespace))]


def test_a_reader_sees_what_is_cached_and_goes_on_where_it_was(start: Any, read: Any) -> None:
    server = start("")
    server.complete("", PROMPT)
    events = read(server)
    assert events.response.getheader("content-type").startswith("text/event-stream")
    assert events.next()["kind"] == "cleared"
    stored = events.next()
    assert stored["digests"] == chain(None)
    assert {name: stored[name] for name in ("kind", "cache_group", "block_size", "num_tokens", "replica")} == {
        "kind": "stored",
        "cache_group": 0,
        "block_size": 4,
        "num_tokens": 8,
        "replica": 0,
    }
    assert server.ask("", "/reset_prefix_cache", b"", method="POST").status == 200
    removed = events.next()
    assert (removed["kind"], removed["digests"], "parent" in removed) == ("removed", chain(None)[::-1], False)
    events.close()
    server.complete("", PROMPT, cache_salt="s")
    again = read(server, after=events.last_id)
    assert digests(again, 2) == chain(None, "s")


def test_a_reader_without_the_secret_of_a_key_can_compute_no_digest(start: Any, read: Any) -> None:
    server = start(KEYS)
    server.complete("a", PROMPT)
    server.complete("b", PROMPT)
    server.complete("b", PROMPT, cache_salt="s")
    events = read(server, "r")
    seen = digests(events, 6)
    callers = {caller.tenant: caller for caller in read_callers(server.args).values()}
    secrets = {name: callers[name].cache_namespace for name in "abr"}
    of = {name: chain(namespace_digest(secret)) for name, secret in secrets.items()}
    assert set(seen) == {*of["a"], *of["b"], *chain(namespace_digest(secrets["b"]), "s")}
    # what others know: the prompt, their own secrets, each other's names, all salts
    guesses = [None, *(namespace_digest(word) for word in ("a", "b", "r", secrets["r"])), secrets["r"]]
    for salt in (None, "s"):
        assert not {digest for guess in guesses for digest in chain(guess, salt)} & set(seen)
    assert secrets["a"] not in secrets["b"]


def test_a_router_with_the_keys_computes_digests_as_the_documentation_says(start: Any, read: Any) -> None:
    text = Path("docs/reference/server.md").read_text().partition("### Names of a prompt")[2]
    names: dict[str, Any] = {}
    exec(text.partition("```python")[2].partition("```")[0], names)
    server = start(KEYS)
    server.complete("a", PROMPT)
    server.complete("b", PROMPT, cache_salt="s")
    seen = digests(read(server, "r"), 4)
    assert seen[:2] == names["names"](PROMPT, 4, "a-key")
    assert seen[2:] == names["names"](PROMPT, 4, "b-key", "s")
    assert names["names"](PROMPT, 4) == chain(None)


def test_a_router_follows_the_stream_as_the_recipe_says(start: Any) -> None:
    text = Path("docs/recipes/operations.md").read_text().partition("### Route by what is cached")[2]
    names: dict[str, Any] = {}
    exec(text.partition("```python")[2].partition("```")[0], names)
    server = start(KEYS)
    server.complete("a", PROMPT)
    cached: dict[int, set[str]] = {}

    def follow() -> None:
        with suppress(OSError):  # the server has ended
            names["follow"](server.url, "r-key", cached)

    thread = threading.Thread(target=follow)
    thread.start()
    eventually(lambda: len(cached.get(0, ())) == 2)
    server.complete("b", PROMPT)
    eventually(lambda: len(cached[0]) == 4)
    assert server.ask("s", "/reset_prefix_cache", b"", method="POST").status == 200
    eventually(lambda: cached[0] == set())
    server.stop()
    thread.join(100)


def test_without_keys_only_a_salt_hides_a_prompt(start: Any, read: Any) -> None:
    server = start("")
    server.complete("", PROMPT)
    server.complete("", PROMPT, cache_salt="unknown to the reader")
    seen = digests(read(server), 4)
    assert seen[:2] == chain(None)
    assert seen[2:] == chain(None, "unknown to the reader")


def test_the_right_is_needed(start: Any) -> None:
    server = start(KEYS)
    for key, status, code in (("a", 403, "missing_right"), ("s", 403, "missing_right"), ("x", 401, "invalid_api_key")):
        answer = server.ask(key, "/kv/events")
        assert (answer.status, answer.error["code"]) == (status, code)


def test_it_is_off_unless_asked_for(server: Served) -> None:
    answer = ask(server.url, "/kv/events")
    assert (answer.status, answer.error["code"]) == (404, "kv_events_off")
    assert "--enable-kv-events" in answer.error["message"]


def test_what_is_no_id_of_an_event_is_refused(start: Any) -> None:
    server = start("")
    for after in ("x", "1", "1-2-3", "1-x", "1-2,", "\xb2-2", "1-2," * 2000 + "1-2", f"1-{2**64}"):
        answer = ask(server.url, "/kv/events", headers={"Last-Event-ID": after})
        assert (answer.status, answer.error["param"]) == (400, "after")
    assert server.ask("", "/kv/events?after=1").status == 400
    assert server.ask("", "/kv/events", method="HEAD").status == 200


def test_readers_beyond_the_limit_are_refused_and_the_stream_ends_with_the_server(start: Any, read: Any) -> None:
    server = start("")
    readers = [read(server) for _ in range(16)]
    for reader in readers:
        assert reader.next()["kind"] == "cleared"
    assert server.ask("", "/kv/events").status == 429
    readers.pop().close()
    eventually(lambda: read(server).response.status == 200)  # the place of one that has gone is free
    assert server.stop() == 0
    assert not any(line.startswith(b"data: ") for line in readers[0].response)


def event(sequence: int, digest: bytes, parent: bytes | None = b"root", group: int = 0) -> BlockEvent:
    return BlockEvent(sequence, 1.5, group, digest, parent, 4 if parent else 0)


def taken(reader: EventCursor, *replies: BlockEvents) -> list[tuple[str, dict[str, Any]]]:
    found = []
    for data in reader.take(replies):
        name, line = data.decode().strip().split("\n")
        found.append((name.removeprefix("id: "), json.loads(line.removeprefix("data: "))))
    return found


class TestEventCursor:
    def test_events_of_several_replicas_have_one_id_from_which_all_go_on(self) -> None:
        reader = EventCursor(4, [])
        first = BlockEvents(10, 3, True, [event(3, b"a")], replica=0)
        second = BlockEvents(20, 5, True, [], replica=1)
        got = taken(reader, first, second)
        assert [(name, data["kind"], data["replica"]) for name, data in got] == [
            ("10-0", "cleared", 0),
            ("10-3", "stored", 0),
            ("10-3,20-0", "cleared", 1),
        ]
        assert reader.position == [10, 3, 20, 5]
        assert taken(reader, BlockEvents(10, 3, False, []), BlockEvents(20, 5, False, [], replica=1)) == []

    def test_what_a_replica_had_is_cleared_when_it_is_gone_and_once_more_when_it_is_back(self) -> None:
        reader = EventCursor(4, [])
        taken(reader, BlockEvents(10, 3, True, []), BlockEvents(20, 5, True, [], replica=1))
        [(name, data)] = taken(reader, BlockEvents(10, 3, False, []))
        assert (name, data["kind"], data["replica"]) == ("10-3", "cleared", 1)
        got = taken(reader, BlockEvents(10, 3, False, []), BlockEvents(21, 1, True, [event(1, b"b")], replica=1))
        assert [(name, data["kind"]) for name, data in got] == [("10-3,21-0", "cleared"), ("10-3,21-1", "stored")]

    def test_a_replica_that_was_replaced_between_two_reads_leaves_no_place(self) -> None:
        reader = EventCursor(4, [])
        taken(reader, BlockEvents(10, 3, True, []))
        taken(reader, BlockEvents(11, 2, True, []))
        assert reader.position == [11, 2]

    def test_blocks_that_follow_one_another_are_one_event(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(kv_events, "_MOST_DIGESTS", 3)
        events = [
            *(event(1, b"a"), event(2, b"b", b"a"), event(3, b"c", b"b"), event(4, b"d", b"c")),
            *(event(5, b"e", b"a"), event(6, b"f", b"e", group=1)),
            *(event(7, b"a", None), event(8, b"b", None), event(9, b"c", None, group=1)),
        ]
        got = [data for _, data in taken(EventCursor(4, [1, 0]), BlockEvents(1, 9, False, events))]
        digests = [[bytes.fromhex(digest) for digest in data["digests"]] for data in got]
        assert digests == [[b"a", b"b", b"c"], [b"d"], [b"e"], [b"f"], [b"a", b"b"], [b"c"]]
        assert [data["sequence"] for data in got] == [3, 4, 5, 6, 8, 9]
        assert [data.get("num_tokens", 0) for data in got] == [12, 4, 4, 4, 0, 0]
        assert got[0]["parent"] == b"root".hex()
