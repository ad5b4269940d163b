"""A relay between two ends of TCP connections that damages what passes through it, by a script."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Literal, NamedTuple

import msgspec

from octavo.core.process import frames
from octavo.kv_transfer.messages import PeerHello, PeerMessage

_READ_BYTES = 1 << 16
_PROOF_BYTES = 64
"""A nonce and a proof: what a listener sends before anything else (`core/process/authentication.py`)."""
_LENGTH = struct.Struct("<I")


class Fault(NamedTuple):
    """What happens when as many bytes have passed in one direction of a connection.

    cut: both ends are reset. half_close: the reader sees the end, the writer nothing. stall: nothing passes any more.
    delay: each later chunk waits for `seconds`. corrupt: the next byte is changed. swap: the halves of the next chunk
    change places. repeat: the next chunk comes twice.
    """

    kind: Literal["cut", "half_close", "stall", "delay", "corrupt", "swap", "repeat"]
    after: int = 0
    seconds: float = 0.0


Edit = Callable[[bytes], bytes]
"""Returns what is sent instead of a chunk."""


class Relay:
    """Passes connections on to `target`, with faults on the way to the target or back. It listens at `address`.

    num_hits: faults that have happened. num_faulty: how many connections have the faults; later ones have none.
    """

    def __init__(
        self,
        target: tuple[str, int],
        outward: Sequence[Fault] = (),
        inward: Sequence[Fault] = (),
        *,
        edit: Callable[[], Edit] | None = None,
    ) -> None:
        """outward: towards the target. edit: makes the editor of what one connection sends back."""
        self.num_hits = self.num_bytes = self.num_connections = 0
        self.outward, self.inward = outward, inward
        self._target = target
        self.num_faulty = 1 << 30
        self._edit = edit
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self._open: list[socket.socket] = []
        self._is_closed = threading.Event()
        self._threads: list[threading.Thread] = []
        self._begin(self._accept)

    def cut_all(self) -> None:
        """Reset all connections that are open."""
        for each in self._open:
            _reset(each)

    def close(self) -> None:
        self._is_closed.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self.cut_all()
        for thread in self._threads:
            thread.join(100)
        for each in (self._listener, *self._open):
            each.close()

    def _begin(self, work: Callable[..., None], *arguments: Any) -> None:
        self._threads.append(threading.Thread(target=work, args=arguments, daemon=True))
        self._threads[-1].start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                try:
                    far = socket.create_connection(self._target, timeout=100)
                except OSError:
                    near.close()
                    continue
                far.settimeout(None)
                self._open += [near, far]
                self.num_connections += 1
                is_faulty = self.num_faulty > 0
                self.num_faulty -= 1
                edit = None if self._edit is None else self._edit()
                for source, target, faults, change in (
                    (near, far, self.outward, None),
                    (far, near, self.inward, edit),
                ):
                    self._begin(self._pass_on, source, target, list(faults) if is_faulty else [], change)

    def _pass_on(self, source: socket.socket, target: socket.socket, faults: list[Fault], edit: Edit | None) -> None:
        passed, delay_s = 0, 0.0
        with suppress(OSError):
            while chunk := source.recv(_READ_BYTES):
                self.num_bytes += len(chunk)
                chunk = chunk if edit is None else edit(chunk)
                while faults and passed + len(chunk) > faults[0].after:
                    fault = faults.pop(0)
                    self.num_hits += 1
                    place = max(0, fault.after - passed)
                    match fault.kind:
                        case "cut":
                            target.sendall(chunk[:place])
                            _reset(source)
                            _reset(target)
                            return
                        case "half_close":
                            target.sendall(chunk[:place])
                            target.shutdown(socket.SHUT_WR)
                            while source.recv(_READ_BYTES):
                                pass
                            return
                        case "stall":
                            target.sendall(chunk[:place])
                            self._is_closed.wait()
                            return
                        case "delay":
                            delay_s = fault.seconds
                        case "corrupt":
                            chunk = chunk[:place] + bytes([chunk[place] ^ 1]) + chunk[place + 1 :]
                        case "repeat":
                            chunk += chunk
                        case "swap":
                            middle = len(chunk) // 2
                            chunk = chunk[middle:] + chunk[:middle]
                passed += len(chunk)
                time.sleep(delay_s)
                target.sendall(chunk)
            target.shutdown(socket.SHUT_WR)


def _reset(connection: socket.socket) -> None:
    """End a connection as the death of a machine does: what was sent and not read is lost."""
    with suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.shutdown(socket.SHUT_RDWR)


class PeerRelay:
    """Relays between a decode core and a prefill core: the connection of the cores, and those of their ranks.

    `ranks` has the faults of the latter. The relay of the cores changes the addresses that the prefill core sends.
    """

    def __init__(self, target: tuple[str, int], outward: Sequence[Fault] = (), inward: Sequence[Fault] = ()) -> None:
        """outward, inward: faults of the connections of ranks, towards the prefill core and back."""
        self.ranks: dict[tuple[str, int], Relay] = {}
        self._script: tuple[Sequence[Fault], Sequence[Fault]] = outward, inward
        self._is_for_one = False
        self.cores = Relay(target, edit=self._editor)

    @property
    def num_hits(self) -> int:
        return self.cores.num_hits + sum(each.num_hits for each in self.ranks.values())

    @property
    def num_bytes(self) -> int:
        """Bytes between ranks."""
        return sum(each.num_bytes for each in self.ranks.values())

    def damage_next(self, outward: Sequence[Fault], inward: Sequence[Fault]) -> None:
        """Cut the connections of ranks, damage the next one of each, and count hits anew."""
        self._script, self._is_for_one, self.cores.num_hits = (outward, inward), True, 0
        for each in self.ranks.values():
            each.outward, each.inward = self._script
            each.num_hits, each.num_faulty = 0, 1
            each.cut_all()

    def close(self) -> None:
        for each in (self.cores, *self.ranks.values()):
            each.close()

    def _editor(self) -> Edit:
        """Return an editor that holds back bytes until the frame of the first message is whole, and changes that."""
        seen = bytearray()
        is_done = False

        def edit(chunk: bytes) -> bytes:
            nonlocal is_done
            if is_done:
                return chunk
            seen.extend(chunk)
            if len(seen) <= _PROOF_BYTES:
                return chunk
            before = len(seen) - len(chunk)
            if len(seen) < _PROOF_BYTES + 4:
                return self._held(before, seen)
            (size,) = _LENGTH.unpack_from(seen, _PROOF_BYTES)
            end = _PROOF_BYTES + 4 + size
            if len(seen) < end:
                return self._held(before, seen)
            is_done = True
            message = msgspec.msgpack.decode(seen[_PROOF_BYTES + 4 : end], type=PeerMessage)
            changed = frames.pack(self._relayed(message) if isinstance(message, PeerHello) else message)
            return bytes(seen[min(before, _PROOF_BYTES) : _PROOF_BYTES]) + changed + bytes(seen[end:])

        return edit

    @staticmethod
    def _held(before: int, seen: bytearray) -> bytes:
        return bytes(seen[before:_PROOF_BYTES])

    def _relayed(self, hello: PeerHello) -> PeerHello:
        ranks = []
        for rank in hello.ranks:
            place = (rank.host, rank.port)
            if place not in self.ranks:
                self.ranks[place] = Relay(place, *self._script)
                if self._is_for_one:
                    self.ranks[place].num_faulty = 1
            host, port = self.ranks[place].address
            ranks.append(msgspec.structs.replace(rank, host=host, port=port))
        return msgspec.structs.replace(hello, ranks=ranks)
