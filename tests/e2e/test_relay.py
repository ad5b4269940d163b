"""The relay that damages transfers: what comes out of it is what its script says."""

from __future__ import annotations

import socket
from contextlib import closing
from typing import Any

import msgspec
import pytest

from octavo.core import frames
from octavo.core.authentication import authenticate
from octavo.kv_transfer.messages import Hello, PeerRank
from tests.fakes.relay import Fault, PeerRelay, Relay
from tests.pipes.ends import Running

SENT = bytes(range(200))


@pytest.mark.parametrize(
    ("faults", "received"),
    [
        ([], SENT),
        ([Fault("corrupt", 7)], SENT[:7] + bytes([6]) + SENT[8:]),
        ([Fault("half_close", 100)], SENT[:100]),
        ([Fault("swap")], SENT[100:] + SENT[:100]),
        ([Fault("repeat")], SENT + SENT),
        ([Fault("delay", 0, 0.05), Fault("corrupt", 7)], SENT[:7] + bytes([6]) + SENT[8:]),
        ([Fault("cut", 100)], None),
        ([Fault("stall", 100)], SENT[:100]),
    ],
    ids=lambda value: " ".join(each.kind for each in value) if isinstance(value, list) else "",
)
def test_bytes_pass_as_the_script_says(faults: list[Fault], received: bytes | None) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, closing(Relay(server.getsockname(), faults)) as relay:
        near = socket.create_connection(relay.address)
        far, _ = server.accept()
        with near, far:
            near.sendall(SENT)
            near.shutdown(socket.SHUT_WR)
            far.settimeout(0.3 if Fault("stall", 100) in faults else 30.0)
            found = b""
            try:
                while chunk := far.recv(1000):
                    found += chunk
            except ConnectionResetError:
                found = b""
            except TimeoutError:
                assert faults[0].kind == "stall"
        assert (found == received) if received is not None else len(found) <= 100
        assert relay.num_hits == len(faults)


def test_the_addresses_of_ranks_become_those_of_relays() -> None:
    secret = b"a secret of these tests"
    ranks = [PeerRank(host="127.0.0.1", port=port, layers=(0, 1), heads=[(0, 1)]) for port in (5, 6)]
    hello = Hello(identity={"build": "x" * 300}, layout="", block_size=16, epoch=b"e" * 16, ranks=ranks)
    with socket.create_server(("127.0.0.1", 0)) as server, closing(PeerRelay(server.getsockname())) as relay:
        near = socket.create_connection(relay.cores.address)
        far, _ = server.accept()

        def greet() -> Any:
            assert authenticate(far, secret, is_listener=True)
            frame = frames.pack(hello)
            far.sendall(frame[:100])
            far.sendall(frame[100:] + b"more")

        with near, far:
            greeting = Running(greet)
            assert authenticate(near, secret, is_listener=False)
            body = frames.read(near)
            assert body is not None
            found = msgspec.msgpack.decode(body, type=Hello)
            greeting.result()
            assert near.recv(100) == b"more"
        assert [(each.host, each.port) for each in found.ranks] == [each.address for each in relay.ranks.values()]
        assert list(relay.ranks) == [("127.0.0.1", 5), ("127.0.0.1", 6)]
