"""The lookup buffer, in this process and over a pipe."""

from __future__ import annotations

import time
from collections.abc import Iterator

import msgspec
import pytest
import torch
from torch import Tensor

from octavo.errors import PipeClosed, PipeError
from octavo.pipes.lookup_buffer import LookupBuffer, LookupServer, RemoteLookupBuffer, _DropSelect, _Insert
from octavo.pipes.pipe import Listener, Pipe, connect
from tests.pipes.ends import SECRET, Running, fresh_address

Buffer = LookupBuffer | RemoteLookupBuffer


class Served:
    """A buffer, its server, and clients that are closed with them."""

    def __init__(self, max_bytes: int, scheme: str = "shm") -> None:
        self.buffer = LookupBuffer(max_bytes)
        self._listener = Listener(fresh_address(scheme), SECRET)
        self._server = LookupServer(self.buffer, self._listener)
        self._clients: list[RemoteLookupBuffer] = []

    def pipe(self) -> Pipe:
        return connect(self._listener.address, SECRET)

    def client(self) -> RemoteLookupBuffer:
        self._clients.append(RemoteLookupBuffer(self.pipe()))
        return self._clients[-1]

    def close(self) -> None:
        for client in self._clients:
            client.close()
        self._server.close()


@pytest.fixture
def served() -> Iterator[Served]:
    made = Served(1 << 20)
    yield made
    made.close()


@pytest.fixture(params=["here", "over a pipe"])
def buffer(request: pytest.FixtureRequest, served: Served) -> Buffer:
    return served.buffer if request.param == "here" else served.client()


def tokens(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


def text(length: int, last: int = 0) -> Tensor:
    """Tokens of which all texts have the first ones in common, up to the last."""
    return torch.cat([torch.arange(length - 1), tokens(1000 + last)])


def insert(buffer: Buffer, of: Tensor, roi: Tensor | None = None, number: int = 0) -> None:
    assert buffer.insert(of, roi, torch.full((3, 2), number), None, torch.ones(4))


def number_of(buffer: Buffer, of: Tensor | None, roi: Tensor | None = None) -> int | None:
    """Which entry is taken."""
    entry = buffer.drop_select(of, roi)
    if entry is None:
        return None
    assert entry.keys is not None
    return int(entry.keys[0, 0])


def test_what_is_inserted_comes_back_once(buffer: Buffer) -> None:
    keys, values = torch.randn(2, 5, 3, dtype=torch.bfloat16), torch.randn(2, 5, 3, dtype=torch.bfloat16)
    hidden, roi = torch.randn(1, 8), torch.tensor([True] * 4 + [False])
    assert buffer.insert(text(5), roi, keys, values, hidden)
    entry = buffer.drop_select(text(5), roi)
    assert entry is not None
    assert all(
        found is not None and torch.equal(found, sent)
        for found, sent in zip(entry, (text(5), roi, keys, values, hidden), strict=True)
    )
    assert buffer.drop_select(text(5), roi) is None


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 31, 32, 33, 100])
def test_tokens_match_as_far_as_both_go(buffer: Buffer, length: int) -> None:
    insert(buffer, text(length, last=1), number=1)
    assert number_of(buffer, text(length, last=2)) is None
    longer = torch.cat([text(length, last=1), tokens(5, 6, 7)])
    assert number_of(buffer, longer) == 1
    insert(buffer, longer, number=2)
    assert number_of(buffer, text(length, last=2)) is None
    assert number_of(buffer, text(length, last=1)) == 2


def test_the_most_common_tokens_win_and_of_equals_the_oldest(buffer: Buffer) -> None:
    for number, length in enumerate([3, 20, 50, 50, 40, 0]):
        insert(buffer, torch.arange(length), number=number)
    assert [number_of(buffer, torch.arange(60)) for _ in range(6)] == [2, 3, 4, 1, 0, None]
    assert number_of(buffer, None) == 5


def test_only_tokens_under_the_mask_count(buffer: Buffer) -> None:
    mask = torch.arange(40) < 33
    insert(buffer, text(40, last=1), mask, number=1)
    assert number_of(buffer, text(33, last=2)) is None
    assert number_of(buffer, text(40, last=2), mask.int()) == 1


def test_a_mask_that_selects_no_prefix_is_compared_token_by_token(buffer: Buffer) -> None:
    odd = torch.arange(40) % 2 == 1
    insert(buffer, torch.arange(40), odd, number=1)
    insert(buffer, torch.arange(40), number=2)
    assert number_of(buffer, torch.arange(40), ~odd) is None
    assert number_of(buffer, torch.cat([torch.arange(38), tokens(7, 39)]), odd) == 1
    # a mask of the other kind on either side
    assert number_of(buffer, torch.arange(9), torch.tensor([True] * 8 + [False])) == 2
    insert(buffer, torch.arange(40), odd, number=3)
    assert number_of(buffer, tokens(1, 3, 5)) == 3
    insert(buffer, tokens(1, 3, 5), number=4)
    assert number_of(buffer, torch.arange(40), odd) == 4


def test_without_tokens_the_oldest_entry_is_taken(buffer: Buffer) -> None:
    for number in (1, 2, 3):
        insert(buffer, text(20, last=number), number=number)
    assert [number_of(buffer, None) for _ in range(4)] == [1, 2, 3, None]


def test_a_consumer_waits_for_its_tokens(served: Served, buffer: Buffer) -> None:
    take = Running(lambda: buffer.drop_select(text(20, last=1), None, wait_s=30))
    other = served.client()
    insert(other, text(20, last=2), number=2)
    assert not take.is_done(0.05)
    insert(other, text(20, last=1), number=1)
    assert torch.equal(take.result().tokens, text(20, last=1))
    assert number_of(other, None) == 2


def test_a_producer_waits_for_room_and_is_refused_after_its_time(served: Served, buffer: Buffer) -> None:
    large = torch.zeros(600_000, dtype=torch.uint8)
    assert buffer.insert(tokens(1), None, large, None, None)
    assert not buffer.insert(tokens(2), None, large, None, None, wait_s=0.05)
    assert served.buffer.num_bytes == 600_008
    late = Running(lambda: buffer.insert(tokens(3), None, None, large, None, wait_s=30))
    assert not late.is_done(0.05)
    other = served.client()
    assert other.drop_select(tokens(1), None) is not None
    assert late.result()
    entry = other.drop_select(None, None)
    assert entry is not None
    assert entry.tokens.tolist() == [3]
    while served.buffer.num_bytes:  # until the server has the confirmation
        time.sleep(0.001)


@pytest.mark.parametrize(
    ("wrong", "roi", "message"),
    [
        (torch.zeros(3), None, "must be integers"),
        (torch.zeros(2, 2, dtype=torch.int64), None, "must be integers in one dimension"),
        (tokens(1, 2), torch.ones(3), "roi has the shape \\[3\\], tokens have \\[2\\]"),
    ],
)
def test_what_are_no_tokens_is_refused_and_the_buffer_goes_on(
    served: Served, buffer: Buffer, wrong: Tensor, roi: Tensor | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        buffer.insert(wrong, roi, None, None, None)
    with pytest.raises(ValueError, match=message):
        buffer.drop_select(wrong, roi)
    with pytest.raises(ValueError, match="larger than the buffer"):
        buffer.insert(tokens(1), None, torch.zeros(1 << 20), None, None)
    assert served.buffer.num_bytes == 0
    insert(buffer, tokens(1), number=1)
    assert number_of(buffer, tokens(1)) == 1


def test_closing_ends_who_waits(buffer: Buffer, served: Served) -> None:
    large = torch.zeros(1 << 19, dtype=torch.uint8)
    assert served.buffer.insert(tokens(9), None, large, None, None)
    producer = Running(lambda: served.buffer.insert(tokens(8), None, large, None, None))
    consumer = Running(lambda: buffer.drop_select(tokens(7), None, wait_s=30))
    assert not producer.is_done(0.05)
    assert not consumer.is_done(0.05)
    served.buffer.close()
    assert producer.result() is False
    assert consumer.result() is None
    assert served.buffer.drop_select(None, None) is None


# ---- clients that fail ----


def test_an_entry_that_does_not_arrive_is_put_back(served: Served) -> None:
    insert(served.buffer, text(20), number=1)
    before = served.buffer.num_bytes
    pipe = served.pipe()
    pipe.send_tensor(text(20), msgspec.msgpack.encode(_DropSelect(0)))
    pipe.send_tensor(None)
    pipe.recv_tensor()  # the reply, and of the entry nothing
    assert served.buffer.drop_select(text(20), None) is None
    pipe.close()
    entry = served.buffer.drop_select(text(20), None, wait_s=10)
    assert entry is not None
    assert entry.num_bytes == before
    assert served.buffer.num_bytes == 0


def test_the_room_of_a_producer_that_goes_is_free_again(served: Served) -> None:
    pipe = served.pipe()
    pipe.send_tensor(None, msgspec.msgpack.encode(_Insert(1 << 20, 0)))
    pipe.recv_tensor()
    assert not served.buffer.insert(tokens(1), None, None, None, None, wait_s=0)
    pipe.send_tensor(tokens(1))
    pipe.close()
    assert served.buffer.insert(tokens(1), None, None, None, None, wait_s=10)


def test_an_entry_of_another_size_than_announced_is_refused(served: Served) -> None:
    pipe = served.pipe()
    pipe.send_tensor(None, msgspec.msgpack.encode(_Insert(100, 0)))
    pipe.recv_tensor()
    for tensor in (tokens(1), None, torch.zeros(1000), None, None):
        pipe.send_tensor(tensor)
    _, reply = pipe.recv_tensor()
    assert b"4008 bytes, 100 were announced" in reply
    assert served.buffer.num_bytes == 0
    pipe.close()


def test_an_entry_that_no_pipe_carries_closes_the_pipe_and_takes_no_room(served: Served) -> None:
    client = served.client()
    with pytest.raises(ValueError, match="complex64"):
        client.insert(tokens(1), None, torch.zeros(2, dtype=torch.complex64), None, None)
    with pytest.raises(PipeClosed):
        client.drop_select(None, None)
    assert served.buffer.insert(tokens(2), None, torch.zeros((1 << 20) - 8, dtype=torch.uint8), None, None, wait_s=10)


@pytest.mark.parametrize("header", [b"", b"no message", msgspec.msgpack.encode(_Insert(-5, 0))])
def test_a_client_that_sends_no_request_is_disconnected(served: Served, header: bytes) -> None:
    pipe, other = served.pipe(), served.client()
    pipe.send_tensor(None, header)
    with pytest.raises(PipeClosed):
        pipe.recv_tensor(wait_s=10)
    pipe.close()
    insert(other, tokens(1))
    assert number_of(other, tokens(1)) == 0


def test_a_client_notices_that_the_server_has_gone() -> None:
    served = Served(1 << 20, "tcp")
    client = served.client()
    take = Running(lambda: client.drop_select(tokens(1), None, wait_s=30))
    assert not take.is_done(0.05)
    served.close()
    with pytest.raises(PipeError):
        take.result()
