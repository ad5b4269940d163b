"""Two engines, of which one computes prompts for the other: the same tokens, whatever happens to either of them."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import msgspec
import pytest

from octavo.core.messages import EngineCoreRequest
from octavo.core.process import frames
from octavo.core.sequence import SequenceStatus
from octavo.errors import ConfigError
from octavo.kv_cache.block_hash import extend_chain
from octavo.kv_transfer import peer_server, peer_source
from octavo.kv_transfer.messages import Heartbeat, PeerHello, PeerMessage, TransferDone, TransferRefused, Want
from octavo.kv_transfer.peer_link import PeerLink, greet, listen, open_socket
from octavo.pipes.address import Address
from octavo.pipes.pipe import _bound
from tests.fakes.engine import make_request, run_alone
from tests.fakes.executor import STATE
from tests.fakes.linked_engines import SECRET, Engine, LinkedExecutor, finish, step_until


class Pair:
    """A prefill engine and a decode engine."""

    def __init__(self, host: str | Path = "127.0.0.1", window: Any = None, depth: int = 1, **options: Any) -> None:
        self.ranks: dict[bytes, LinkedExecutor] = {}
        self.options = {"sliding_window": window, "depth": depth} | options
        self.prefill = Engine(self.ranks, host=host, **self.options)
        self.decode = Engine(self.ranks, **self.options)

    def begin(self, request: EngineCoreRequest, *, num_steps: int = 1) -> None:
        """Let the prefill engine begin a prompt, and the decode engine want it."""
        self.prefill.add(first_part(request))
        for _ in range(num_steps):
            self.prefill.step()
        self.decode.add(msgspec.structs.replace(request, prefill=self.prefill.address))
        source = self.prefill.source
        assert isinstance(source, peer_server.PeerServer)
        step_until(lambda: not source._events.empty(), self.decode)

    def close(self) -> None:
        for engine in (self.prefill, self.decode):
            engine.close()


def first_part(request: EngineCoreRequest) -> EngineCoreRequest:
    params = msgspec.structs.replace(request.params, max_tokens=1)
    return msgspec.structs.replace(request, params=params, keep_s=1000.0)


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.close()


def check(pair: Pair, request: EngineCoreRequest, window: Any = None) -> None:
    alone, seen = run_alone(request, window), pair.decode.collected
    name = request.request_id
    assert seen.token_ids[name] == alone.token_ids[name]
    assert seen.logprobs[name] == alone.logprobs[name]


@pytest.mark.parametrize("window", [None, 6, (None, 6)])
@pytest.mark.parametrize(("num_tokens", "depth"), [(41, 1), (48, 2), (50, 3)])
def test_the_decode_engine_computes_one_token_of_a_prompt(window: Any, num_tokens: int, depth: int) -> None:
    pair = Pair(window=window, depth=depth)
    request = make_request("a", range(num_tokens), max_tokens=6)
    pair.begin(request)
    finish(pair.prefill, pair.decode)
    check(pair, request, window)
    assert pair.decode.collected.finals["a"].num_fetched_tokens == num_tokens - 1
    assert pair.decode.ranks.executor.num_computed_tokens == 1 + 5
    assert pair.prefill.ranks.num_fresh > 0
    # the first token of both is the same
    assert pair.prefill.collected.token_ids["a"][0] == pair.decode.collected.token_ids["a"][0][:1]
    pair.close()


@pytest.mark.parametrize("window", [(None, STATE), (6, STATE)])
@pytest.mark.parametrize(("num_tokens", "depth", "num_fetched"), [(41, 1, 40), (48, 2, 44), (50, 3, 48), (4, 1, 0)])
def test_prompts_with_states_go_on_behind_snapshots(window: Any, num_tokens: int, depth: int, num_fetched: int) -> None:
    pair = Pair(window=window, depth=depth)
    request = make_request("a", range(num_tokens), max_tokens=6)
    pair.prefill.add(first_part(request))
    pair.prefill.step()
    pair.decode.add(msgspec.structs.replace(request, prefill=pair.prefill.address))
    finish(pair.prefill, pair.decode)
    check(pair, request, window)
    assert pair.decode.collected.finals["a"].num_fetched_tokens == num_fetched
    pair.close()


@pytest.mark.parametrize(
    "params",
    [
        {"n": 3},
        {"n": 2, "best_of": 3, "use_beam_search": True},
        {"presence_penalty": 1.0, "logprobs": 2, "bad_words": ("x",)},
    ],
    ids=["n", "beams", "penalties"],
)
def test_sequences_of_one_prompt_share_what_was_fetched(pair: Pair, params: dict[str, Any]) -> None:
    request = make_request("a", range(42), max_tokens=6, **params)
    pair.begin(msgspec.structs.replace(request, params=msgspec.structs.replace(request.params)))
    finish(pair.prefill, pair.decode)
    check(pair, request)
    assert pair.decode.collected.finals["a"].num_fetched_tokens == 41


def test_engines_of_one_machine_meet_at_a_unix_socket(tmp_path: Path) -> None:
    pair, request = Pair(host=tmp_path), make_request("a", range(30))
    assert pair.prefill.address == f"{tmp_path}/control"
    pair.begin(request, num_steps=4)
    finish(pair.prefill, pair.decode)
    check(pair, request)
    assert pair.decode.collected.finals["a"].num_fetched_tokens == 29
    pair.close()
    assert not list(tmp_path.iterdir())


def test_a_folder_whose_sockets_would_have_too_long_names_is_refused_by_its_cause(tmp_path: Path) -> None:
    folder = tmp_path / ("x" * 100)
    with pytest.raises(ConfigError, match=r"no socket .*/control: its path has \d+ bytes, .* at most 107; .* TMPDIR$"):
        listen(str(folder), 0, "control")
    with pytest.raises(ConfigError, match=r"cannot be listened on: its path has \d+ bytes, .* TMPDIR$"):
        _bound(Address.parse(f"unix://{folder}/pipe", None))


def test_what_the_decode_engine_has_is_not_fetched_again(pair: Pair) -> None:
    first, second = make_request("a", range(30)), make_request("b", [*range(30), *range(20)])
    for request in (first, second, msgspec.structs.replace(second, request_id="c")):
        pair.begin(request)
        finish(pair.prefill, pair.decode)
        check(pair, request)
    fetched = [pair.decode.collected.finals[name].num_fetched_tokens for name in "abc"]
    assert fetched == [29, 49 - 28, 0]


def test_what_was_handed_over_is_kept_no_longer(pair: Pair) -> None:
    pair.begin(make_request("a", range(30)))
    pins = pair.prefill.core.scheduler.block_manager.pins
    step_until(lambda: pins.num_blocks == 8, pair.prefill)
    step_until(lambda: "a" in pair.decode.collected.finals and not len(pins), pair.prefill, pair.decode)


def test_prompts_of_another_sender_are_not_given_away(pair: Pair) -> None:
    request = make_request("a", range(30))
    other = msgspec.structs.replace(request, cache_salt="other", prefill=pair.prefill.address)
    pair.prefill.add(first_part(request))
    pair.prefill.step()
    pair.decode.add(other)
    finish(pair.prefill, pair.decode)
    check(pair, other)
    assert pair.decode.collected.finals["a"].num_fetched_tokens == 0
    assert pair.prefill.ranks.num_sent == 0


def test_an_absent_prefill_engine_is_not_tried_again_at_once(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "octavo"):
        for name in "abc":
            request = make_request(name, [ord(name), *range(30)])
            pair.decode.add(msgspec.structs.replace(request, prefill="127.0.0.1:1"))
            finish(pair.decode)
            check(pair, request)
    assert len(caplog.messages) == 1
    assert "computed here instead of fetched from 127.0.0.1:1: [Errno 111]" in caplog.text


@pytest.mark.parametrize("num_steps", [1, 2, 10])
def test_a_prefill_engine_that_ends_is_replaced_by_computing(pair: Pair, num_steps: int) -> None:
    request, later = make_request("a", range(46)), make_request("b", range(9, 50))
    pair.begin(request)
    for _ in range(num_steps):
        pair.prefill.step()
        pair.decode.step()
        time.sleep(0.002)
    port = int(pair.prefill.address.rpartition(":")[2])
    pair.prefill.close()
    del pair.ranks[pair.prefill.epoch]
    finish(pair.decode)
    check(pair, request)
    # another engine at the same address is another epoch; it has nothing of the old one's
    pair.prefill = Engine(pair.ranks, host="127.0.0.1", port=port, **pair.options)
    assert isinstance(pair.decode.source, peer_source.PeerSource)
    engine = pair.decode.source._engines[pair.prefill.address]
    step_until(lambda: engine.link is None, pair.decode)
    engine.retry_at = 0.0
    pair.begin(later)
    finish(pair.prefill, pair.decode)
    check(pair, later)
    assert pair.decode.collected.finals["b"].num_fetched_tokens == 40


def test_a_prefill_engine_that_says_nothing_more_is_replaced_by_computing() -> None:
    pair = Pair(lease_s=0.3)
    request = make_request("a", range(30))
    hello = PeerHello({"files": "a"}, "hashes", 4, os.urandom(16))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        pair.decode.add(msgspec.structs.replace(request, prefill=f"127.0.0.1:{listener.getsockname()[1]}"))
        pair.decode.step()
        connection, _ = listener.accept()
        greet(connection, SECRET, hello, is_listener=True)
        finish(pair.decode)  # as if it were stopped: the connection stays open
        connection.close()
    check(pair, request)
    pair.close()


def test_a_reset_of_the_prefill_engine_lets_the_prompt_be_computed(pair: Pair) -> None:
    request = make_request("a", range(30))
    pair.prefill.add(first_part(request))
    finish(pair.prefill)
    assert pair.prefill.core.reset_prefix_cache()
    pair.decode.add(msgspec.structs.replace(request, prefill=pair.prefill.address))
    finish(pair.prefill, pair.decode)
    check(pair, request)
    assert pair.prefill.ranks.num_sent == 0


def test_a_prompt_that_the_prefill_engine_drops_is_computed(pair: Pair) -> None:
    request = make_request("a", range(46))
    pair.begin(request)
    step_until(lambda: pair.decode.core.is_waiting and pair.prefill.ranks.num_sent > 0, pair.decode, pair.prefill)
    pair.prefill.core.abort_requests(["a"])
    finish(pair.prefill, pair.decode)
    check(pair, request)
    [decision] = [each for each in pair.decode.core.scheduler.log.entries if each.kind == "not fetched"]
    assert decision.because == "the blocks are not cached, and no request computes them; the prompt is computed"


def test_blocks_of_both_engines_are_free_when_the_request_is_aborted_while_it_fetches(pair: Pair) -> None:
    pair.begin(make_request("a", range(46)))
    step_until(lambda: bool(pair.decode.ranks.fetches), pair.decode)
    assert pair.decode.core.scheduler.groups["a"].status is SequenceStatus.FETCHING
    pair.decode.core.abort_requests(["a"])
    finish(pair.prefill, pair.decode)
    assert "a" not in pair.decode.collected.finals


def test_requests_that_are_preempted_while_another_fetches_go_on(pair: Pair) -> None:
    pair.close()
    pair = Pair(num_blocks=16, num_host_blocks=20, preemption_mode="swap")
    fetched = make_request("a", range(20), max_tokens=16)
    computed = [make_request(name, [ord(name) % 7, *range(8)], max_tokens=16) for name in "bc"]
    pair.begin(fetched, num_steps=0)
    step_until(lambda: bool(pair.decode.ranks.fetches), pair.decode)
    for request in computed:
        pair.decode.add(request)
    step_until(lambda: pair.decode.core.stats().num_preemptions > 0, pair.decode)
    assert pair.decode.core.scheduler.groups["a"].status is SequenceStatus.FETCHING
    finish(pair.prefill, pair.decode)
    for request in (fetched, *computed):
        check(pair, request)
    pair.close()


# ---- engines that are broken or hostile ----


def test_an_engine_may_be_lost_any_number_of_times(pair: Pair) -> None:
    assert isinstance(pair.decode.source, peer_source.PeerSource)
    engine = peer_source._Engine("127.0.0.1:1")
    for _ in range(1100):
        pair.decode.source._lose(engine, "it refuses")
    assert engine.retry_at - time.monotonic() < 31


def test_an_engine_that_does_not_read_is_disconnected() -> None:
    near, far = socket.socketpair()
    received: SimpleQueue[PeerMessage | None] = SimpleQueue()
    link = PeerLink(near, 100.0)
    link.start(lambda link, message: received.put(message))
    for _ in range(10_000):
        link.send(TransferRefused(b"", "x" * 1000))
    assert received.get(timeout=200) is None
    far.close()


@pytest.mark.parametrize(
    ("name", "num_good"),
    [("Timer", 0), ("octavo-kv-connect", 0), *(("octavo-kv-peer", num_good) for num_good in range(5))],
)
def test_an_engine_that_can_have_no_more_threads_computes(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, name: str, num_good: int
) -> None:
    start, left = threading.Thread.start, [None] * num_good

    def refuse(thread: threading.Thread) -> None:
        if name in (thread.name, type(thread).__name__):
            if not left:
                raise RuntimeError("can't start new thread")
            left.pop()
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    request = make_request("a", range(30))
    pair.decode.add(msgspec.structs.replace(request, prefill=pair.prefill.address))
    finish(pair.prefill, pair.decode)
    check(pair, request)


def test_messages_of_an_engine_wait_in_its_connection(pair: Pair) -> None:
    other = Other(pair.prefill)
    source = pair.prefill.source
    assert isinstance(source, peer_server.PeerServer)
    other.send(*(Want(b"%016d" % i, [b"x"]) for i in range(1000)))
    step_until(lambda: source._events.qsize() == peer_server.MOST_EVENTS)
    step_until(lambda: other.messages.qsize() == 1000, pair.prefill)
    other.close()


def test_a_message_of_any_size_is_not_read(pair: Pair) -> None:
    other = Other(pair.prefill)
    other.connection.sendall((1 << 27).to_bytes(4, "little"))
    other.reader.join(200)
    assert not other.reader.is_alive()
    other.connection.close()


class Other:
    """An engine at the other end of a prefill engine's connection, which says what a test says."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.connection = open_socket(engine.address, 5.0)
        greet(self.connection, SECRET, PeerHello({"files": "a"}, "hashes", 4, b""), is_listener=False)
        self.messages = SimpleQueue[PeerMessage]()
        self.reader = threading.Thread(target=self._read)
        self.reader.start()

    def _read(self) -> None:
        while (body := frames.read(self.connection)) is not None:
            message = msgspec.msgpack.decode(body, type=PeerMessage)
            if not isinstance(message, Heartbeat):
                self.messages.put(message)

    def send(self, *messages: PeerMessage) -> None:
        for message in messages:
            self.connection.sendall(frames.pack(message))

    def receive(self) -> PeerMessage:
        step_until(lambda: not self.messages.empty(), self.engine)
        return self.messages.get()

    def close(self) -> None:
        self.connection.shutdown(socket.SHUT_RDWR)
        self.reader.join(200)
        self.connection.close()


def name_of(number: int) -> bytes:
    return number.to_bytes(16, "little")


def test_transfers_of_an_engine_that_says_nothing_more_end_with_its_lease() -> None:
    pair = Pair()
    request = make_request("a", range(30))
    pair.prefill.add(first_part(request))
    pair.prefill.step()
    other = Other(pair.prefill)
    other.send(Want(name_of(1), extend_chain([], list(range(30)), 4, request.cache_key)))
    step_until(lambda: pair.prefill.ranks.num_sent == 7, pair.prefill)
    assert isinstance(pair.prefill.source, peer_server.PeerServer)
    for link in pair.prefill.source._links:
        link._connection.settimeout(0.1)  # the lease, from the next message on
    other.send(Heartbeat())
    finish(pair.prefill)
    other.close()
    pair.close()


def test_an_engine_cannot_take_the_pool(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_server, "MOST_TRANSFERS", 8)
    request = make_request("a", range(14 * 4))
    pair.prefill.add(first_part(request))
    finish(pair.prefill)
    digests, other = extend_chain([], request.prompt_token_ids, 4, request.cache_key), Other(pair.prefill)
    other.send(*(Want(name_of(i), digests) for i in range(4)), Want(name_of(4), digests[:1]))
    other.send(Want(name_of(1), digests), Want(name_of(2), digests), Want(b"short", digests), Want(name_of(5), []))
    for name in (name_of(1), name_of(2), b"short", name_of(5)):
        assert other.receive() == TransferRefused(
            name, "the name of the transfer is wrong or in use, or it has no blocks"
        )
    assert pair.prefill.ranks.num_sent == 28  # the others wait in their order, also one that there is room for
    other.send(TransferDone(name_of(2)), TransferDone(name_of(0)))
    step_until(lambda: pair.prefill.ranks.num_sent == 28 + 14 + 1, pair.prefill)
    assert list(pair.prefill.ranks.sent) == [name_of(1), name_of(3), name_of(4)]
    other.send(*(Want(name_of(100 + i), digests[:1]) for i in range(6)))
    refused = other.receive()
    assert isinstance(refused, TransferRefused)
    assert "8 transfers of this engine, at most 8" in refused.reason
    other.send(*(TransferDone(name_of(i)) for i in (1, 3)), Want(name_of(6), large := [*digests, *digests, *digests]))
    step_until(lambda: name_of(3) not in pair.prefill.ranks.sent, pair.prefill)
    assert name_of(6) not in pair.prefill.ranks.sent
    other.send(TransferDone(name_of(4)), *(TransferDone(name_of(100 + i)) for i in range(6)))
    step_until(lambda: sum(map(len, pair.prefill.ranks.sent.values())) == len(large), pair.prefill)  # alone it may
    # a request that has no room beside the transfers ends them
    request = make_request("b", range(7, 7 + 60 * 4), max_tokens=2)
    pair.prefill.add(request)
    step_until(lambda: "b" in pair.prefill.collected.finals, pair.prefill)
    assert pair.prefill.collected.token_ids["b"] == run_alone(request).token_ids["b"]
    other.close()
    finish(pair.prefill)


def test_what_is_fetched_does_not_wait_for_what_was_wanted_before() -> None:
    pair = Pair(num_blocks=28, max_num_seqs=1, policy="priority")
    pair.begin(make_request("before", range(100, 105)))
    finish(pair.prefill, pair.decode)
    requests = [make_request(name, range(start, start + 45)) for name, start in (("late", 0), ("soon", 50))]
    requests[0].priority = 1  # it is wanted before the other one, and admitted behind it
    for request in requests:
        pair.prefill.add(first_part(request))
    finish(pair.prefill)
    for request in requests:
        pair.decode.add(msgspec.structs.replace(request, prefill=pair.prefill.address))
    finish(pair.prefill, pair.decode)
    for request in requests:
        check(pair, request)
        assert pair.decode.collected.finals[request.request_id].num_fetched_tokens == 44
    pair.close()


def test_blocks_that_are_neither_cached_nor_computed_are_refused_at_once(pair: Pair) -> None:
    other = Other(pair.prefill)
    other.send(Want(name_of(1), [b"unknown"]), TransferDone(name_of(77)))
    assert other.receive() == TransferRefused(name_of(1), "the blocks are not cached, and no request computes them")
    other.close()


def test_an_engine_of_another_model_is_refused_with_both_values(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    decode, request = Engine(pair.ranks, identity={"files": "b"}), make_request("a", range(30))
    decode.add(msgspec.structs.replace(request, prefill=pair.prefill.address))
    with caplog.at_level(logging.WARNING, "octavo"):
        finish(decode)
        step_until(lambda: len(caplog.messages) == 2)
    assert decode.collected.token_ids == run_alone(request).token_ids
    assert "files is b here and a there" in caplog.text
    assert "files is a here and b there" in caplog.text
    decode.close()


def test_an_engine_without_the_secret_is_refused(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    decode, request = Engine(pair.ranks, secret=b"another secret.."), make_request("a", range(30))
    decode.add(msgspec.structs.replace(request, prefill=pair.prefill.address))
    with caplog.at_level(logging.WARNING, "octavo"):
        finish(decode)
    assert decode.collected.token_ids == run_alone(request).token_ids
    assert "does not know the secret" in caplog.text
    decode.close()


@pytest.mark.parametrize("mode", ["keep", "wait"])
@pytest.mark.parametrize(("num_seqs", "num_steps"), [(1, 2), (8, 2), (1, 7)])
@pytest.mark.parametrize("first", ["prefill", "decode"])
def test_a_pause_ends_transfers_whose_prompts_it_holds_back(
    mode: str, num_seqs: int, num_steps: int, first: str
) -> None:
    pair = Pair(max_num_batched_tokens=8)
    pair.decode = Engine(pair.ranks, max_num_seqs=num_seqs, **pair.options)
    requests = [make_request(name, [ord(name), *range(40)], max_tokens=6) for name in "abc"]
    for request in requests:
        pair.begin(request, num_steps=num_steps)
        pair.decode.step()
    cores = {"prefill": pair.prefill, "decode": pair.decode}
    engines = [cores.pop(first), *cores.values()]
    for engine in engines:
        engine.core.call("pause", mode, True)
        engine.step()
    step_until(lambda: {engine.core.call("pause_is_complete") for engine in engines} == {True}, *engines)
    assert [engine.num_held for engine in engines] == [0, 0]
    for engine in engines:
        engine.core.call("resume")
    finish(*engines)
    for request in requests:
        check(pair, request)
    pair.close()
