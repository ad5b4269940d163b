"""KV events over ZeroMQ, read by a subscriber as routers are: frames, MessagePack, numbers, the replay."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from octavo.core.block_events import KvEventsConfig
from octavo.core.cache_key import CacheKey
from octavo.core.cache_limits import CacheLimits, GroupLimits
from octavo.errors import ConfigError
from octavo.kv_cache.block_hash import extend_chain, root_digest
from octavo.kv_cache.block_pool import Content
from octavo.kv_cache.publisher import KvPublisher, own_endpoint

zmq = pytest.importorskip("zmq", reason="pyzmq is not installed: pip install 'octavo[zmq]'")

SIZE = 4
LIMITS = CacheLimits(block_size=SIZE, groups=(GroupLimits(num_blocks=8), GroupLimits(num_blocks=8, window=8)))
CLEARED = {"type": "AllBlocksCleared"}


class Subscriber:
    """A socket that has subscribed to a topic, and the decoded messages. Everything ends within seconds."""

    def __init__(self, endpoint: str, topic: str = "") -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.SUB)
        self.socket.connect(endpoint)
        self.socket.subscribe(topic)
        self.socket.rcvtimeo = 20_000

    def receive(self) -> tuple[bytes, int, Any]:
        topic, number, payload = self.socket.recv_multipart()
        return topic, int.from_bytes(number, "big"), msgspec.msgpack.decode(payload)

    def events(self, count: int) -> list[Any]:
        found: list[Any] = []
        while len(found) < count:
            found += self.receive()[2][1]
        return found

    def close(self) -> None:
        self.context.destroy(linger=0)


def replayed(endpoint: str, start: int) -> list[tuple[int, Any]]:
    """What the replay socket sends from a batch on, without the end."""
    found = []
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger, dealer.rcvtimeo = 0, 20_000
        dealer.connect(endpoint)
        dealer.send_multipart((b"", start.to_bytes(8, "big")))
        while True:
            _, number, payload = dealer.recv_multipart()
            if number == (-1).to_bytes(8, "big", signed=True):
                assert payload == b""
                return found
            found.append((int.from_bytes(number, "big"), msgspec.msgpack.decode(payload)))


@pytest.fixture
def place(tmp_path: Path) -> Iterator[tuple[KvPublisher, Subscriber]]:
    config = KvEventsConfig(endpoint=f"ipc://{tmp_path}/e", replay_endpoint=f"ipc://{tmp_path}/r", topic="kv@a")
    publisher = KvPublisher(config, LIMITS, replica=0)
    subscriber = Subscriber(config.endpoint, "kv@")
    time.sleep(0.3)  # a message that comes before the subscription has arrived is nobody's
    yield publisher, subscriber
    subscriber.close()
    publisher.close()


def chain(count: int, key: CacheKey | None = None, first: int = 1) -> list[Content]:
    key = key or CacheKey()
    tokens = list(range(first, first + count * SIZE))
    digests = extend_chain([], tokens, SIZE, key)
    parents = [root_digest(key), *digests]
    return [
        Content(digest, parents[i], tuple(tokens[i * SIZE : (i + 1) * SIZE]), is_first=i == 0)
        for i, digest in enumerate(digests)
    ]


def hashed(digest: bytes) -> int:
    return int.from_bytes(digest[-8:], "big")


def test_a_subscriber_gets_what_vllm_would_send(place: tuple[KvPublisher, Subscriber]) -> None:
    publisher, subscriber = place
    blocks = chain(3)
    for number, content in enumerate(blocks[:2]):
        publisher.stored(0, number, content)
    topic, number, (at, events, rank) = subscriber.receive()
    assert (topic, number, rank) == (b"kv@a", 0, 0)
    assert abs(at - time.time()) < 60
    cleared, stored = events
    assert cleared == CLEARED
    assert stored == {
        "type": "BlockStored",
        "block_hashes": [hashed(blocks[0].digest), hashed(blocks[1].digest)],
        "parent_block_hash": None,
        "token_ids": list(range(1, 9)),
        "block_size": SIZE,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": [None, None],
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }
    publisher.stored(1, 3, blocks[2])
    publisher.removed(0, blocks[0].digest)
    publisher.removed(0, blocks[1].digest)
    stored, removed = subscriber.events(2)
    assert (stored["parent_block_hash"], stored["group_idx"]) == (hashed(blocks[1].digest), 1)
    assert (stored["kv_cache_spec_kind"], stored["kv_cache_spec_sliding_window"]) == ("sliding_window", 8)
    assert removed == {
        "type": "BlockRemoved",
        "block_hashes": [hashed(each.digest) for each in blocks[:2]],
        "medium": "GPU",
        "group_idx": 0,
    }


def test_prompts_that_share_nothing_are_kept_apart_and_partly_filled_blocks_are_left_out(
    place: tuple[KvPublisher, Subscriber],
) -> None:
    publisher, subscriber = place
    plain, salted = chain(1)[0], chain(1, CacheKey(cache_salt="s"))[0]
    tail = Content(b"t" * 32, plain.digest, (7, 8))
    image = Content(b"i" * 32, plain.digest, ((5, 0, b"\1" * 32), (5, 1, b"\1" * 32), 6, 7))
    for content in (tail, plain, salted, image):
        publisher.stored(0, 1, content)
    publisher.removed(0, tail.digest)
    publisher.removed(0, plain.digest)
    _, *stored, removed = subscriber.events(5)
    assert [each["extra_keys"] for each in stored] == [[None], [[salted.parent.hex()]], [["01" * 32]]]
    assert stored[2]["token_ids"] == [5, 5, 6, 7]
    assert removed["block_hashes"] == [hashed(plain.digest)]


def test_what_was_missed_is_replayed(place: tuple[KvPublisher, Subscriber], tmp_path: Path) -> None:
    publisher, subscriber = place
    batches = []
    for first in (1, 100, 200):
        publisher.stored(0, 1, chain(1, first=first)[0])
        batches.append(subscriber.receive()[1:])
    assert replayed(f"ipc://{tmp_path}/r", 0) == batches
    assert replayed(f"ipc://{tmp_path}/r", 2) == batches[2:]
    assert replayed(f"ipc://{tmp_path}/r", 9) == []


def test_memory_is_bounded_and_lost_events_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = KvEventsConfig(
        endpoint=f"ipc://{tmp_path}/e", replay_endpoint=f"ipc://{tmp_path}/r", buffer_steps=2, max_queue_size=4
    )
    monkeypatch.setattr("octavo.kv_cache.publisher.BATCH_S", 0.3)
    publisher = KvPublisher(config, LIMITS)
    subscriber = Subscriber(config.endpoint)
    time.sleep(0.3)
    first = chain(1)[0]
    publisher.stored(0, 1, first)
    assert subscriber.events(2)[0] == CLEARED
    many = [chain(1, first=number)[0] for number in range(1000, 9000, 8)]
    for content in many:
        publisher.stored(0, 1, content)
    publisher.removed(0, first.digest)
    assert publisher._queue.qsize() <= 4
    while CLEARED not in subscriber.events(1):
        pass
    time.sleep(0.7)  # what is left of them has been gathered
    while subscriber.socket.poll(0):
        subscriber.receive()
    assert "raise max_queue_size" in caplog.text
    for content in many[:3]:
        publisher.stored(0, 1, content)
        subscriber.receive()
    assert len(replayed(f"ipc://{tmp_path}/r", 0)) == 2
    subscriber.close()
    publisher.close()
    publisher.close()


def test_a_subscriber_of_a_killed_core_learns_that_no_block_is_cached(tmp_path: Path) -> None:
    config = KvEventsConfig(endpoint=f"ipc://{tmp_path}/e")
    subscriber = Subscriber(config.endpoint)
    first, second = chain(2)
    for expected in (first, second):
        publisher = KvPublisher(config, LIMITS)
        publisher.stored(0, 1, expected)
        assert [each.get("block_hashes") for each in subscriber.events(2)] == [None, [hashed(expected.digest)]]
        publisher.close()
    subscriber.close()


def test_no_batches_are_kept_where_none_are_asked_for(tmp_path: Path) -> None:
    place = f"ipc://{tmp_path}"
    config = KvEventsConfig(endpoint=f"{place}/e", replay_endpoint=f"{place}/r", buffer_steps=0, max_queue_size=1)
    publisher = KvPublisher(config, LIMITS)
    subscriber = Subscriber(config.endpoint)
    time.sleep(0.3)
    for number in range(2):
        publisher.stored(0, 1, chain(1, first=1 + number)[0])
        assert subscriber.receive()[1] == number
    assert replayed(f"{place}/r", 0) == []
    subscriber.close()
    publisher.close()


def test_what_waits_when_an_event_is_lost_is_not_published_behind_the_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A removal is lost of a block whose event waits: a subscriber that is told of it then would have it for ever."""
    config = KvEventsConfig(endpoint=f"ipc://{tmp_path}/e", max_queue_size=2)
    monkeypatch.setattr("octavo.kv_cache.publisher.BATCH_S", 0.5)
    publisher = KvPublisher(config, LIMITS)
    subscriber = Subscriber(config.endpoint)
    time.sleep(0.3)
    first, *lost = chain(3)
    publisher.stored(0, 0, first)
    while publisher._queue.qsize():
        time.sleep(0.001)  # it is in the batch that is gathered
    monkeypatch.setattr("octavo.kv_cache.publisher.MOST_EVENTS", 1)
    for content in lost:
        publisher.stored(0, 1, content)
    publisher.removed(0, lost[1].digest)
    publisher.removed(0, lost[0].digest)
    last = chain(1, first=100)[0]
    publisher.stored(0, 1, last)
    found = subscriber.events(4)
    assert [each["type"] for each in found] == ["AllBlocksCleared", "BlockStored", "AllBlocksCleared", "BlockStored"]
    assert found[3]["block_hashes"] == [hashed(last.digest)]
    subscriber.close()
    publisher.close()


def test_a_replay_waits_for_a_subscriber_that_reads_slowly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.kv_cache.publisher.BATCH_S", 0)
    monkeypatch.setattr("octavo.kv_cache.publisher.MOST_EVENTS", 1)
    config = KvEventsConfig(endpoint=f"ipc://{tmp_path}/e", replay_endpoint=f"ipc://{tmp_path}/r")
    publisher = KvPublisher(config, LIMITS)
    count, content = 6000, chain(1)[0]
    for _ in range(count):
        publisher.stored(0, 1, content)
    while publisher._queue.qsize():
        time.sleep(0.01)
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger, dealer.rcvtimeo, dealer.rcvhwm = 0, 20_000, 10
        dealer.connect(config.replay_endpoint)
        dealer.send_multipart((b"", bytes(8)))
        time.sleep(0.5)
        numbers = [int.from_bytes(dealer.recv_multipart()[1], "big", signed=True) for _ in range(count + 1)]
    assert numbers == [*range(count), -1]
    publisher.close()


def test_a_replay_gives_up_a_subscriber_that_reads_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("octavo.kv_cache.publisher.BATCH_S", 0)
    monkeypatch.setattr("octavo.kv_cache.publisher.MOST_EVENTS", 1)
    monkeypatch.setattr("octavo.kv_cache.publisher._PATIENCE_S", 0.1)
    config = KvEventsConfig(endpoint=f"ipc://{tmp_path}/e", replay_endpoint=f"ipc://{tmp_path}/r", buffer_steps=6000)
    publisher = KvPublisher(config, LIMITS)
    for _ in range(6000):
        publisher.stored(0, 1, chain(1)[0])
    while publisher._queue.qsize():
        time.sleep(0.01)
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger, dealer.rcvhwm = 0, 1
        dealer.connect(config.replay_endpoint)
        dealer.send_multipart((b"", bytes(8)))
        deadline = time.monotonic() + 20
        while "ends early" not in caplog.text:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert replayed(config.replay_endpoint or "", 9000) == []
    publisher.close()


def test_what_subscribers_send_is_bounded(
    place: tuple[KvPublisher, Subscriber], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger, dealer.rcvtimeo = 0, 20_000
        dealer.connect(f"ipc://{tmp_path}/r")
        dealer.send_multipart((b"", bytes(1 << 24)))  # ends the connection, and another one begins
        while not dealer.poll(100):
            dealer.send_multipart((b"", bytes(8)))
        assert dealer.recv_multipart()[1] == b"\xff" * 8
    assert "a replay request has" not in caplog.text  # it is not received


def test_each_replica_has_an_endpoint_of_its_own() -> None:
    assert own_endpoint("tcp://*:5557", 0) == "tcp://*:5557"
    assert own_endpoint("tcp://*:5557", 2) == "tcp://*:5559"
    assert own_endpoint("ipc:///tmp/kv", 1) == "ipc:///tmp/kv_dp1"


def test_an_endpoint_that_is_in_use_is_named(tmp_path: Path) -> None:
    config = KvEventsConfig(endpoint=f"ipc://{tmp_path}/nowhere/e")
    with pytest.raises(ConfigError, match=r"kv_events_config: the endpoint ipc://.*/nowhere/e is one where nothing"):
        KvPublisher(config, LIMITS)


def test_an_engine_publishes_what_its_prompts_leave_in_the_cache(tmp_path: Path) -> None:
    from octavo import LLM, SamplingParams

    endpoint = f"ipc://{tmp_path}/e"
    config = {"enable_kv_cache_events": True, "endpoint": endpoint, "replay_endpoint": f"ipc://{tmp_path}/r"}
    with LLM(max_model_len=256, num_gpu_blocks_override=24, kv_events_config=config) as llm:
        prompt = list(range(5, 5 + 64))
        llm.generate({"prompt_token_ids": prompt}, SamplingParams(max_tokens=1), use_tqdm=False)
        assert llm.reset_prefix_cache()
        deadline = time.monotonic() + 20
        while True:
            events = [event for _, (_, batch, _) in replayed(f"ipc://{tmp_path}/r", 0) for event in batch]
            if any(event["type"] == "BlockRemoved" for event in events):
                break
            assert time.monotonic() < deadline
        stored = [event for event in events if event["type"] == "BlockStored"]
        assert [token for event in stored for token in event["token_ids"]] == prompt
        size = stored[0]["block_size"]
        digests = extend_chain([], prompt, size, CacheKey())
        assert [each for event in stored for each in event["block_hashes"]] == [hashed(each) for each in digests]
        removed = [each for event in events if event["type"] == "BlockRemoved" for each in event["block_hashes"]]
        assert sorted(removed) == sorted(hashed(each) for each in digests)
