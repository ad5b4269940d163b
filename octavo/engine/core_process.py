"""The engine core in a process of its own: `python -m octavo.engine.core_process FD WORK_FD`, started by
`core_client`.

The inherited socket brings the EngineConfig first and messages after it. One thread reads them into a queue; the main
thread takes them out, steps while there is work, and sleeps on the queue when there is none.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from types import FrameType
from typing import TYPE_CHECKING, Final, NoReturn

import msgspec

from octavo.config.schema import EngineConfig
from octavo.core.messages import (
    PING,
    AbortRequests,
    AddRequests,
    Call,
    CallResult,
    CoreFailed,
    EngineCoreRequest,
    FromCore,
    Shutdown,
    StepOutputs,
    StopSequence,
    ToCore,
)
from octavo.engine import frames
from octavo.engine.shared_work import SharedWork, longest_step_s
from octavo.errors import OctavoError
from octavo.executor.executor import import_ahead
from octavo.logging import set_up

if TYPE_CHECKING:
    from octavo.engine.core_client import Core

STATS_INTERVAL_S: Final = 0.5
"""How often the state goes to the front while steps bring no output, as in a long prefill."""

RELEASE_AFTER_S: Final = 60.0
"""How long a core is idle before it gives back memory that it may want again."""

LINGER_S: Final = 2.0
"""How long a core that has failed waits for its front to read why."""

_log = logging.getLogger(__name__)


class _Closed(msgspec.Struct, frozen=True):
    """The front has closed the connection."""


class _Outbox:
    """Sends messages to the front, from the main thread and from the one that answers pings."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    def send(self, message: FromCore) -> None:
        with self._lock:
            self._connection.sendall(frames.pack(message))


def serve_core(
    core: Core, connection: socket.socket, work: SharedWork | None = None, max_tokens_per_step: int = 0
) -> None:
    """Serve one front until it says Shutdown or goes away. Raises what the core raises.

    work: where the front reads what the core works at, and since when.
    """
    inbox: SimpleQueue[ToCore | _Closed] = SimpleQueue()
    outbox = _Outbox(connection)
    reader = threading.Thread(target=_read_messages, args=(connection, inbox, outbox), name="octavo-front", daemon=True)
    outbox.send(core.ready)
    reader.start()

    def note_work(is_working: bool) -> None:
        if work is None:
            return
        if is_working:
            work.begin(longest_step_s(max_tokens_per_step, core.tokens_per_s()))
        else:
            work.rest()

    try:
        _run(core, outbox, inbox, note_work)
    except (BrokenPipeError, ConnectionResetError):
        return  # the front has gone; its last messages do not matter


def _run(core: Core, outbox: _Outbox, inbox: SimpleQueue[ToCore | _Closed], note_work: Callable[[bool], None]) -> None:
    last_sent = time.monotonic()
    was_busy, has_memory_to_release = False, False
    while True:
        is_working = was_busy or core.has_unfinished()
        note_work(is_working)
        wait_s = 0.0 if is_working else RELEASE_AFTER_S if has_memory_to_release else None
        messages = _messages(inbox, wait_s)
        if not is_working:
            note_work(True)
        if wait_s and not messages:
            core.call("release_memory")
            has_memory_to_release = False
        for message in messages:
            if isinstance(message, Shutdown | _Closed):
                return
            if isinstance(message, Call):
                outbox.send(_answer(core, message))
            else:
                _hand_over(core, message)
                was_busy = True
        if core.has_unfinished():
            was_busy = has_memory_to_release = True
            step = core.step()
            if step.outputs or time.monotonic() - last_sent > STATS_INTERVAL_S:
                outbox.send(step)
                last_sent = time.monotonic()
        elif was_busy:
            # the last word before sleep: nothing runs any more
            was_busy = False
            outbox.send(StepOutputs(outputs=[], stats=core.stats()))


def _messages(inbox: SimpleQueue[ToCore | _Closed], wait_s: float | None) -> list[ToCore | _Closed]:
    """What has arrived, after a wait of at most `wait_s` for the first message; None waits as long as it takes."""
    messages: list[ToCore | _Closed] = []
    try:
        if wait_s != 0.0:
            messages.append(inbox.get(timeout=wait_s))
    except Empty:
        return messages
    while True:
        try:
            messages.append(inbox.get(block=False))
        except Empty:
            return messages


def _hand_over(core: Core, message: ToCore) -> None:
    match message:
        case EngineCoreRequest():
            core.add_request(message)
        case AddRequests(requests):
            core.add_requests(requests)
        case AbortRequests(request_ids):
            core.abort_requests(request_ids)
        case StopSequence(request_id, index):
            core.stop_sequence(request_id, index)


def _answer(core: Core, call: Call) -> CallResult:
    try:
        value = core.call(call.method, *call.arguments)
    except (OctavoError, TypeError, ValueError) as error:
        return CallResult(call_id=call.call_id, error=str(error))
    return CallResult(call_id=call.call_id, value=msgspec.Raw(frames.encode(value)))


def _read_messages(connection: socket.socket, inbox: SimpleQueue[ToCore | _Closed], outbox: _Outbox) -> None:
    decoder = msgspec.msgpack.Decoder(ToCore)
    try:
        while (body := frames.read(connection)) is not None:
            message = decoder.decode(body)
            if isinstance(message, Call) and message.method == PING:
                outbox.send(CallResult(call_id=message.call_id))
                continue
            inbox.put(message)
            if isinstance(message, Shutdown):
                return  # the connection is about to be closed, so it must not be read again
    except (BrokenPipeError, ConnectionResetError):
        return  # the front has gone
    finally:
        inbox.put(_Closed())


def main() -> int:
    """The core process. Exit code 0 after Shutdown, SIGTERM or the end of the front, 1 after a failure."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches both processes; the front decides what it means
    signal.signal(signal.SIGTERM, _exit)
    import_ahead()
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        body = frames.read(connection)
        if body is None:
            return 0
        config = msgspec.msgpack.decode(body, type=EngineConfig)
        set_up(config.observability.log_level, role="core")
        try:
            _build_and_serve(config, connection)
        except OctavoError as error:
            report_failure(connection, CoreFailed(message=str(error), kind=type(error).__name__))
            return 1
        except Exception as error:
            _log.exception("the engine core failed")
            message = f"the engine core failed ({type(error).__name__}: {error}); its log has the traceback"
            report_failure(connection, CoreFailed(message=message))
            return 1
    return 0


def _build_and_serve(config: EngineConfig, connection: socket.socket) -> None:
    from octavo.engine.engine_core import EngineCore

    core = EngineCore.build(config)
    try:
        serve_core(core, connection, SharedWork(int(sys.argv[2])), config.scheduler.max_num_batched_tokens)
    finally:
        core.shutdown()


def report_failure(connection: socket.socket, failure: CoreFailed) -> None:
    """Leave the last words of a core with its front, and wait a moment for it to close the connection.

    A connection that we closed with messages of the front unread would be reset, and the last words lost.
    """
    try:
        connection.sendall(frames.pack(failure))
        connection.shutdown(socket.SHUT_WR)
    except OSError:
        _log.error("%s", failure.message)  # nobody else is left to say it
        return
    connection.settimeout(LINGER_S)
    while frames.read(connection) is not None:
        pass


def _exit(signal_number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(0)


def run() -> NoReturn:
    """`main`, and the end of the process."""
    try:
        exit_code = main()
    except SystemExit:  # of SIGTERM
        exit_code = 0
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)  # all is released; taking the modules apart one by one would take another second


if __name__ == "__main__":
    run()
