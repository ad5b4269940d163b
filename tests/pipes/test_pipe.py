"""What every pipe promises, over every carrier, also when the other end fails or lies."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import torch

from octavo.core.process.authentication import authenticate
from octavo.errors import ConfigError, PipeClosed, PipeError
from octavo.pipes import address
from octavo.pipes.address import Address, Scheme
from octavo.pipes.metadata import DTYPES, MAX_HEADER_BYTES
from octavo.pipes.pipe import Listener, Pipe, connect
from octavo.pipes.socket_pipe import SocketCarrier
from tests.pipes.ends import SCHEMES, SECRET, WAIT_S, Ends, Running, fresh_address

MB = 1 << 20


@pytest.fixture(params=SCHEMES)
def scheme(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def ends(scheme: str) -> Iterator[Ends]:
    both = Ends(scheme)
    yield both
    both.close()


@pytest.fixture
def hurried(scheme: str) -> Iterator[Ends]:
    """Pipes whose messages have 0.2 s."""
    both = Ends(scheme, deadline_s=0.2)
    yield both
    both.close()


def head(dtype: object, shape: object, header: object = b"") -> bytes:
    """The bytes before a tensor, as a pipe sends them, with whatever is put into them."""
    metadata = msgspec.msgpack.encode([dtype, shape, header])
    return len(metadata).to_bytes(4, "little") + metadata


class Liar:
    """The other end of an accepted pipe, which sends what no pipe sends."""

    def __init__(self, scheme: str, **limits: Any) -> None:
        self._listener = Listener(fresh_address(scheme), SECRET, **limits)
        self._carrier = connect(self._listener.address, SECRET, WAIT_S)._carrier
        self.pipe = self._listener.accept(WAIT_S)

    def send(self, head: bytes, body: bytes = b"") -> None:
        self._carrier.send(head, memoryview(body), time.monotonic() + WAIT_S)

    def cut(self) -> None:
        self._carrier.interrupt()

    def close(self) -> None:
        self._carrier.close()
        self.pipe.close()
        self._listener.close()


@pytest.fixture
def liar(scheme: str) -> Iterator[Liar]:
    made = Liar(scheme, max_bytes=8 * MB, deadline_s=WAIT_S)
    yield made
    made.close()


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def tensor_of(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Any bits, not-a-number among them."""
    if dtype == torch.bool:
        return torch.rand(shape) < 0.5
    num_bytes = dtype.itemsize * shape[-1]
    return torch.randint(0, 256, (*shape[:-1], num_bytes), dtype=torch.uint8).view(dtype)


@pytest.mark.parametrize("name", DTYPES)
def test_tensors_arrive_bit_for_bit_with_their_type_shape_and_header(ends: Ends, name: str) -> None:
    sent = tensor_of(DTYPES[name], 3, 5, 7)
    ends.near.send_tensor(sent, b"layer 3")
    received, header = ends.far.recv_tensor()
    assert received is not None
    assert (received.dtype, received.shape, bits(received), header) == (sent.dtype, sent.shape, bits(sent), b"layer 3")


def test_none_scalars_and_tensors_without_elements_arrive(ends: Ends) -> None:
    ends.near.send_tensor(None, b"nothing")
    ends.near.send_tensor(torch.tensor(2.5, dtype=torch.bfloat16))
    ends.near.send_tensor(torch.empty(0))
    ends.near.send_tensor(torch.empty(4, 0, 3, dtype=torch.int64), b"empty")
    assert ends.far.recv_tensor() == (None, b"nothing")
    scalar, _ = ends.far.recv_tensor()
    assert scalar is not None
    assert (scalar.shape, scalar.item()) == (torch.Size([]), 2.5)
    empty, _ = ends.far.recv_tensor()
    assert empty is not None
    assert empty.shape == (0,)
    empty, header = ends.far.recv_tensor()
    assert empty is not None
    assert (empty.shape, empty.dtype, header) == ((4, 0, 3), torch.int64, b"empty")


@pytest.mark.parametrize(
    "of",
    [
        lambda whole: whole.t(),
        lambda whole: whole[::2, 1:],
        lambda whole: whole[0].expand(5, -1),
        lambda whole: whole.requires_grad_(),
    ],
    ids=["transposed", "sliced", "expanded", "with gradient"],
)
def test_tensors_of_any_strides_arrive_contiguous(ends: Ends, of: Any) -> None:
    sent = of(torch.randn(300, 200))
    send = Running(lambda: ends.near.send_tensor(sent))
    received, _ = ends.far.recv_tensor()
    send.result()
    assert received is not None
    assert received.is_contiguous()
    assert torch.equal(received, sent)


@pytest.mark.parametrize("num_bytes", [MB - 1, MB, MB + 1, 5 * MB + 3])
def test_large_tensors_go_both_ways_at_once(ends: Ends, num_bytes: int) -> None:
    there, back = tensor_of(torch.uint8, num_bytes), tensor_of(torch.uint8, num_bytes)
    sends = [Running(lambda: ends.near.send_tensor(there)), Running(lambda: ends.far.send_tensor(back))]
    receives = [Running(ends.far.recv_tensor), Running(ends.near.recv_tensor)]
    for send in sends:
        send.result()
    for receive, sent in zip(receives, (there, back), strict=True):
        received, _ = receive.result()
        assert torch.equal(received, sent)


def test_messages_arrive_in_their_order(ends: Ends) -> None:
    sizes = [0, 1, 70_000, 3, 400_000, 0, 100_000]
    sender = Running(lambda: [ends.near.send_tensor(torch.full((size,), i), b"%d" % i) for i, size in enumerate(sizes)])
    for i, size in enumerate(sizes):
        received, header = ends.far.recv_tensor()
        assert received is not None
        assert (header, received.tolist()) == (b"%d" % i, [i] * size)
    sender.result()


def test_a_sender_waits_for_the_reader(ends: Ends) -> None:
    sent = [tensor_of(torch.uint8, 4 * MB) for _ in range(8)]
    sender = Running(lambda: [ends.near.send_tensor(each) for each in sent])
    assert not sender.is_done(0.1), "as much as nobody reads is not kept"
    for each in sent:
        received, _ = ends.far.recv_tensor()
        assert received is not None
        assert torch.equal(received, each)
    sender.result()


def test_messages_of_two_writers_are_not_mixed(ends: Ends) -> None:
    def write(value: int) -> None:
        for _ in range(20):
            ends.near.send_tensor(torch.full((50_000,), value), bytes([value]))

    writers = [Running(lambda value=value: write(value)) for value in (1, 2)]  # type: ignore[misc]
    seen = []
    for _ in range(40):
        received, header = ends.far.recv_tensor()
        assert received is not None
        assert received.unique().tolist() == [header[0]]
        seen.append(header[0])
    for writer in writers:
        writer.result()
    assert sorted(seen) == [1] * 20 + [2] * 20


# ---- what is not sent ----


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.zeros(2, dtype=torch.complex64), "complex64"),
        (torch.zeros([1] * 9), "9 dimensions"),
        (torch.zeros(2, 2).to_sparse(), "sparse"),
    ],
)
def test_what_no_pipe_carries_is_refused_and_the_pipe_goes_on(ends: Ends, tensor: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ends.near.send_tensor(tensor)
    with pytest.raises(ValueError, match="header"):
        ends.near.send_tensor(None, bytes(MAX_HEADER_BYTES + 1))
    ends.near.send_tensor(None, b"next")
    assert ends.far.recv_tensor() == (None, b"next")


def test_a_tensor_above_the_limit_is_not_sent(scheme: str) -> None:
    ends = Ends(scheme, max_bytes=1000)
    with pytest.raises(ValueError, match="1001 bytes, at most 1000"):
        ends.near.send_tensor(torch.zeros(1001, dtype=torch.uint8))
    ends.close()


# ---- an end that goes ----


def test_closing_ends_the_other_end_after_what_was_sent(ends: Ends) -> None:
    ends.near.send_tensor(torch.arange(9), b"last")
    ends.near.close()
    received, header = ends.far.recv_tensor()
    assert received is not None
    assert (received.tolist(), header) == (list(range(9)), b"last")
    with pytest.raises(PipeClosed, match="the other end"):
        ends.far.recv_tensor()
    with pytest.raises(PipeClosed, match="the other end"):
        ends.far.send_tensor(torch.zeros(32 * MB))


def test_a_closed_pipe_refuses_and_may_be_closed_again(ends: Ends) -> None:
    ends.near.close()
    ends.near.close()
    with pytest.raises(PipeClosed, match="this end"):
        ends.near.send_tensor(None)
    with pytest.raises(PipeClosed, match="this end"):
        ends.near.recv_tensor()


@pytest.mark.parametrize(("sends", "closes"), [(False, "near"), (True, "near"), (True, "far")])
def test_closing_either_end_ends_who_waits_in_another_thread(ends: Ends, sends: bool, closes: str) -> None:
    waits = Running((lambda: ends.near.send_tensor(torch.zeros(8 * MB))) if sends else ends.near.recv_tensor)
    assert not waits.is_done(0.05)
    getattr(ends, closes).close()
    with pytest.raises(PipeClosed, match="this end" if closes == "near" else "the other end"):
        waits.result()
    with pytest.raises(PipeError):
        ends.far.recv_tensor()


def test_a_listener_that_closes_ends_accept(scheme: str) -> None:
    listener = Listener(fresh_address(scheme), SECRET)
    with pytest.raises(PipeError, match="no process has connected"):
        listener.accept(wait_s=0.01)
    accept = Running(listener.accept)
    assert not accept.is_done(0.05)
    listener.close()
    listener.close()
    for _ in range(2):
        with pytest.raises(PipeClosed):
            accept.result()
        accept = Running(listener.accept)
    with pytest.raises(PipeError, match="cannot be reached"):
        connect(listener.address, SECRET, deadline_s=1)


# ---- an end that is late ----


def test_a_reader_waits_for_a_message_without_limit_or_for_as_long_as_it_says(hurried: Ends) -> None:
    receive = Running(hurried.far.recv_tensor)
    assert not receive.is_done(0.4), "the deadline is that of a message that has begun"
    hurried.near.send_tensor(None, b"late")
    assert receive.result() == (None, b"late")
    with pytest.raises(PipeError, match="sent nothing within the deadline"):
        hurried.far.recv_tensor(wait_s=0.01)
    with pytest.raises(PipeError, match="has failed"):
        hurried.far.recv_tensor()


def test_a_sender_gives_up_when_the_other_end_does_not_read(hurried: Ends) -> None:
    with pytest.raises(PipeError, match="read nothing within the deadline"):
        hurried.near.send_tensor(torch.zeros(8 * MB))
    with pytest.raises(PipeError, match="has failed"):
        hurried.near.send_tensor(None)
    with pytest.raises(PipeError):
        hurried.far.recv_tensor()


@pytest.mark.parametrize("num_bytes", [2, 10, len(head("float32", [MB]))])
def test_a_message_that_stops_is_late(scheme: str, num_bytes: int) -> None:
    liar = Liar(scheme, deadline_s=0.1)
    liar.send(head("float32", [MB])[:num_bytes])
    with pytest.raises(PipeError, match="sent nothing within the deadline"):
        liar.pipe.recv_tensor()
    liar.close()


# ---- an end that sends half, or lies ----


@pytest.mark.parametrize("num_bytes", [1, 3, 4, 10])
def test_a_cut_in_the_metadata_is_no_end(liar: Liar, num_bytes: int) -> None:
    liar.send(head("float32", [4])[:num_bytes])
    liar.cut()
    with pytest.raises(PipeError, match="cut") as raised:
        liar.pipe.recv_tensor()
    assert not isinstance(raised.value, PipeClosed)


@pytest.mark.parametrize("num_bytes", [0, 100, 100_000])
def test_half_a_tensor_is_no_tensor(liar: Liar, num_bytes: int) -> None:
    send = Running(lambda: liar.send(head("uint8", [5_000_000]), bytes(num_bytes)))
    send.is_done(0.2)  # or waits until it is read
    liar.cut()
    with pytest.raises(PipeError, match="cut|no mark of a filled slot") as raised:
        liar.pipe.recv_tensor()
    assert not isinstance(raised.value, PipeClosed)


@pytest.mark.parametrize(
    ("lie", "message"),
    [
        (head("complex128", [4]), "'complex128'"),
        (head("__class__", [4]), "'__class__'"),
        (head(7, [4]), "not the metadata"),
        (head("float32", 4), "not the metadata"),
        (head("float32", [-1]), "not the metadata"),
        (head("float32", [1.5]), "not the metadata"),
        (head("float32", [1] * 9), "not the metadata"),
        (head("float32", [4], "text"), "not the metadata"),
        (head("float32", [4])[:-2] + b"\xff\xff", "not the metadata"),
        (b"\5\0\0\0hello", "not the metadata"),
        (b"GET / HTTP/1.1\r\n\r\n", "bytes of metadata"),
        (b"\xff\xff\xff\xff", "4294967295 bytes of metadata"),
        (head("float32", [2 * MB + 1]), "8388612 bytes is announced, at most 8388608"),
        (head("float32", [1 << 40]), "is announced"),
        (head("float32", [1 << 62] * 4), "is announced"),
        (head("float32", [0, 1 << 62, 1 << 62]), "is announced"),
    ],
)
def test_metadata_is_not_believed(liar: Liar, lie: bytes, message: str) -> None:
    liar.send(lie)
    with pytest.raises(PipeError, match=message):
        liar.pipe.recv_tensor()
    with pytest.raises(PipeError, match="has failed"):
        liar.pipe.recv_tensor()


def test_a_bool_is_zero_or_one(liar: Liar) -> None:
    liar.send(head("bool", [3]), b"\0\1\2")
    with pytest.raises(PipeError, match="bool"):
        liar.pipe.recv_tensor()


# ---- who connects ----


def test_a_peer_without_the_secret_is_refused(scheme: str) -> None:
    listener = Listener(fresh_address(scheme), SECRET)
    with pytest.raises(PipeError, match="does not know the secret"):
        connect(listener.address, b"another secret here", deadline_s=WAIT_S)
    with pytest.raises(PipeError, match="no process has connected"):
        listener.accept(wait_s=0.05)
    listener.close()


def test_a_connection_that_proves_nothing_delays_no_other(scheme: str) -> None:
    listener = Listener(fresh_address(scheme), SECRET)
    parsed = Address.parse(listener.address, SECRET)
    silent = [socket.socket(parsed.family) for _ in range(3)]
    for each in silent:
        each.connect(parsed.place)
    pipe = connect(listener.address, SECRET, deadline_s=WAIT_S)
    far = listener.accept(WAIT_S)
    pipe.send_tensor(None, b"here")
    assert far.recv_tensor() == (None, b"here")
    for each in (*silent, pipe, far, listener):
        each.close()


def test_a_peer_that_is_started_again_takes_the_same_address(scheme: str) -> None:
    """The new one is reached at the address of the old, of which nothing is left."""
    old = Ends(scheme)
    address = old.listener.address
    old.near.send_tensor(torch.zeros(10), b"never read")
    old.far.close()
    old.listener.close()
    listener = Listener(address, SECRET)
    with pytest.raises(PipeClosed):
        old.near.recv_tensor()
    pipe = connect(address, SECRET, deadline_s=WAIT_S)
    far = listener.accept(WAIT_S)
    pipe.send_tensor(torch.ones(2))
    received, header = far.recv_tensor()
    assert received is not None
    assert (received.tolist(), header) == ([1, 1], b"")
    for each in (pipe, far, listener, old.near):
        each.close()


def test_an_address_in_use_is_refused(ends: Ends) -> None:
    with pytest.raises(ConfigError, match="cannot be listened on"):
        Listener(ends.listener.address, SECRET)
    ends.near.send_tensor(None)
    assert ends.far.recv_tensor() == (None, b"")


def test_tcp_needs_a_secret() -> None:
    for call in (Listener, connect):
        with pytest.raises(ConfigError, match="needs a secret"):
            call("tcp://127.0.0.1:0", None)


def test_a_unix_socket_belongs_to_its_user_and_replaces_a_dead_one(tmp_path: Any) -> None:
    path = tmp_path / "pipe"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    listener = Listener(f"unix://{path}", None)
    assert path.stat().st_mode & 0o777 == 0o600
    pipe: Pipe = connect(f"unix://{path}", None)
    far = listener.accept(WAIT_S)
    for each in (pipe, far, listener):
        each.close()
    assert not os.path.exists(path)
    path.write_text("a file of somebody")
    with pytest.raises(ConfigError, match="cannot be listened on"):
        Listener(f"unix://{path}", None)
    assert path.read_text() == "a file of somebody"


@pytest.mark.parametrize(
    "address", ["", "tcp://", "tcp://host", "tcp://host:70000", "unix://host/path", "unix:path", "http://127.0.0.1:80"]
)
def test_what_is_no_address_is_named(address: str) -> None:
    with pytest.raises(ConfigError, match="is no address of a pipe"):
        Listener(address, SECRET)


class FlippedCarrier(SocketCarrier):
    """Sends every bit of a body flipped."""

    def send(self, head: bytes, body: memoryview, deadline: float) -> None:
        super().send(head, memoryview(bytes(255 - each for each in body)), deadline)

    def receive_body(self, into: memoryview, deadline: float) -> None:
        super().receive_body(into, deadline)
        into[:] = bytes(255 - each for each in into)


def open_flipped(connection: socket.socket, *, is_listener: bool) -> FlippedCarrier:
    return FlippedCarrier(connection)


def test_another_carrier_is_a_function_and_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """As "How to add a pipe" in CONTRIBUTING.md says."""
    monkeypatch.setitem(address.SCHEMES, "flipped", Scheme(f"{__name__}:open_flipped", is_local=True))
    ends = Ends("flipped")
    ends.near.send_tensor(torch.arange(5), b"header")
    found, header = ends.far.recv_tensor(WAIT_S)
    assert found is not None
    assert (found.tolist(), header) == ([0, 1, 2, 3, 4], b"header")
    ends.close()
    with pytest.raises(ConfigError, match="flipped:///path"):
        Listener("flipped://host:1", SECRET)


def test_a_closed_listener_gives_no_pipe_to_a_process_that_was_proving_the_secret() -> None:
    listener = Listener("tcp://127.0.0.1:0", SECRET)
    with socket.create_connection(Address.parse(listener.address, SECRET).place, timeout=WAIT_S) as raw:
        assert raw.recv(1, socket.MSG_PEEK)  # it is being greeted
        listener.close()
        assert authenticate(raw, SECRET, is_listener=False)
        assert raw.recv(1) == b""
    for _ in range(3):
        with pytest.raises(PipeClosed):
            listener.accept(WAIT_S)


def test_a_secret_of_the_cluster_is_proved_first() -> None:
    """The proof is that of all connections of a cluster."""
    listener = Listener("tcp://127.0.0.1:0", SECRET)
    with socket.create_connection(Address.parse(listener.address, SECRET).place, timeout=WAIT_S) as raw:
        assert authenticate(raw, SECRET, is_listener=False)
        listener.accept(WAIT_S).close()
    listener.close()
