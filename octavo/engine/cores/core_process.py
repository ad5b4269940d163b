"""The engine core in a process of its own: `python -m octavo.engine.cores.core_process FD`, started by `core_spawn`.

The first message on the inherited socket is the EngineConfig. One thread reads messages into a queue; the main thread
processes them, steps while there is work, and waits for the queue when there is none.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
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
    FromCore,
    Shutdown,
    StepOutputs,
    StopSequence,
    ToCore,
    Wake,
)
from octavo.core.process import frames
from octavo.core.process.processes import end_now, end_with, report_failure, run_reporting
from octavo.engine.control_calls import CHANGING, NOT_WAITED_FOR
from octavo.errors import OctavoError
from octavo.executor.executor import import_ahead
from octavo.logging import set_up

if TYPE_CHECKING:
    from octavo.engine.engine_core import EngineCore

STATS_INTERVAL_S: Final = 0.5
"""How often the state goes to the front while steps bring no output, as in a long prefill."""

RELEASE_AFTER_S: Final = 60.0
"""How long a core is idle before it releases memory that later steps would use again."""

ORPHAN_S: Final = 5.0
"""How long a core may run on when its front has gone."""

UNBUILT_S: Final = 5.0
"""How long a core whose rank has died before all were ready may go on, before its process is ended."""

HUNG_AFTER_S: Final = 60.0
HUNG_FACTOR: Final = 20.0
"""A step may take this many times as long as it should, and `HUNG_AFTER_S` on top: steps over long contexts are slower
than the measured ones, and another program may have the machine."""

_LOADING: Final = ("wake_up", "update_weights")
"""Control calls that load weights."""
_UNLIMITED: Final = (*_LOADING, "profile")
"""Control calls that take as long as the disk does, and are not looked at as steps are: a trace of some seconds of work
takes a minute to write."""

_OBJECTS_UNTIL_COLLECTION: Final = 10_000
"""New objects until the garbage collector searches them, which takes 2 ms."""
_COLLECTIONS_UNTIL_LARGER_ONE: Final = 1_000
"""Searches of new objects until the objects that survived them are searched, too."""


Message = ToCore | CoreFailed | Wake | Callable[[], None]

Inbox = SimpleQueue[Message]
"""What the core has to process: messages of its front, the death of a rank, news of KV transfers, and functions that
run between steps."""


class CoreServer:
    """A core and its inbox of messages. `send` sends a message to the front, from any thread."""

    def __init__(self, core: EngineCore, send: Callable[[FromCore], None], inbox: Inbox) -> None:
        self._core = core
        self.send = send
        self._inbox = inbox
        self._began_at: float | None = None
        """When the core began to work on messages and a step, on the monotonic clock; None while it waits."""

    def run(self) -> None:
        """Step while there is work, and wait for messages while there is none, until Shutdown. Requests that wait for
        their blocks are no work until Wake."""
        core, last_sent = self._core, time.monotonic()
        was_busy, has_memory_to_release = False, False
        while True:
            is_working = (was_busy or core.has_unfinished()) and not core.is_waiting
            wait_s = 0.0 if is_working else RELEASE_AFTER_S if has_memory_to_release else None
            messages = self._messages(wait_s)
            if wait_s and not messages:
                core.call("release_memory")
                has_memory_to_release = False
            for message in messages:
                if isinstance(message, Shutdown):
                    return
                if isinstance(message, CoreFailed):
                    raise message.error()
                if callable(message):
                    message()
                else:
                    was_busy = self._hand_over(message) or was_busy
            if core.has_unfinished() or Wake() in messages:
                was_busy = has_memory_to_release = True
                step = core.step()
                # during a sleep or a pause no other step may follow soon
                if step.outputs or core.is_still or time.monotonic() - last_sent > STATS_INTERVAL_S:
                    self.send(step)
                    last_sent = time.monotonic()
            elif was_busy:
                # the last message before it waits: nothing runs any more
                was_busy = False
                self.send(StepOutputs(outputs=[], stats=core.stats()))

    def _messages(self, wait_s: float | None) -> list[Message]:
        """Return what has arrived, after a wait of at most `wait_s` for the first message; None waits without end."""
        messages: list[Message] = []
        try:
            if wait_s != 0.0:
                self._began_at = None
                messages.append(self._inbox.get(timeout=wait_s))
            while True:
                messages.append(self._inbox.get(block=False))
        except Empty:
            return messages
        finally:
            self._began_at = time.monotonic()

    def _hand_over(self, message: ToCore | Wake) -> bool:
        """Give a message to the core; return whether the core may have work from it."""
        core = self._core
        match message:
            case AddRequests(requests):
                core.add_requests(requests)
            case AbortRequests(request_ids):
                core.abort_requests(request_ids)
            case StopSequence(request_id, index):
                core.stop_sequence(request_id, index)
            case Call(call_id, method, arguments):
                if method in _UNLIMITED:
                    self._began_at = None
                try:
                    value = core.call(method, *arguments)
                except (OctavoError, TypeError, ValueError) as error:
                    if method in _LOADING and call_id == NOT_WAITED_FOR:
                        raise  # it would compute with other weights than those before it
                    self.send(CallResult(call_id=call_id, error=str(error)))
                else:
                    if method in CHANGING:  # no step may follow soon
                        self.send(StepOutputs(outputs=[], stats=core.stats()))
                    self.send(CallResult(call_id=call_id, value=msgspec.Raw(frames.encode(value))))
                return False
        return True

    def read_messages(self, connection: socket.socket) -> None:
        """Put the messages of a front into the inbox until Shutdown or the end of the connection.

        Pings get their result at once.
        """
        decoder = msgspec.msgpack.Decoder(ToCore)
        with suppress(OSError):  # the front has gone, or the core is ending
            while (body := frames.read(connection)) is not None:
                message = decoder.decode(body)
                if isinstance(message, Shutdown):
                    return  # the connection is about to be closed, so it must not be read again
                if isinstance(message, Call) and message.method == PING:
                    self.send(CallResult(call_id=message.call_id, error=self._overdue()))
                    continue
                self._inbox.put(message)

    def _overdue(self) -> str | None:
        """Return why the step in progress counts as hung; None when it does not."""
        step_s = self._core.longest_step_s()
        began_at = self._began_at
        busy_s = 0.0 if began_at is None else time.monotonic() - began_at
        if busy_s <= HUNG_AFTER_S + HUNG_FACTOR * step_s:
            return None
        return (
            f"the engine core has been in one step for {busy_s:,.0f} s, and none should take more than {step_s:,.1f} s"
        )


def serve_core(
    core: EngineCore, connection: socket.socket, inbox: Inbox | None = None, *, announces: bool = False
) -> None:
    """Serve one front until it sends Shutdown or closes the connection. Raises what the core raises.

    A CoreFailed that another thread puts into `inbox` ends the core with this failure. announces: the front is sent
    which requests a step begins, before the step.
    """
    inbox = SimpleQueue() if inbox is None else inbox
    lock = threading.Lock()

    def send(message: FromCore) -> None:
        with lock:
            connection.sendall(frames.pack(message))

    def read() -> None:
        try:
            server.read_messages(connection)
        finally:
            inbox.put(Shutdown())

    server = CoreServer(core, send, inbox)
    if announces:
        core.announce = send
    try:
        send(core.ready)
        threading.Thread(target=read, name="octavo-front", daemon=True).start()
        server.run()
    except (BrokenPipeError, ConnectionResetError):
        return  # the front has gone; its last messages do not matter


def main() -> int:
    """Run the core process. Returns exit code 0 after Shutdown, SIGTERM or the end of the front, 1 after a failure."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches both processes; the front decides what it means
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    gc.disable()  # a start makes no garbage, and the search for it takes a tenth of a second
    import_ahead()
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        config = frames.read_as(connection, EngineConfig)
        if config is None:
            return 0
        set_up(config.observability.log_level, role=config.replicas.name)
        # it may load a model for minutes, or hang
        lifeline = [connection.fileno()], 1, ORPHAN_S
        threading.Thread(target=end_with, args=lifeline, name="octavo-lifeline", daemon=True).start()
        run_on(config.replicas.cpus)

        def serve(core: EngineCore, inbox: Inbox) -> None:
            collect_rarely()
            serve_core(core, connection, inbox, announces=config.announces_requests)

        return build_and_serve(partial(build_core, config), serve, partial(report_failure, connection))


def collect_rarely() -> None:
    """Let the garbage collector search new objects alone, but for once in a long while. No object of a request is part
    of a cycle, and to search 10,000 waiting requests takes 60 ms, for which no step would be planned."""
    gc.freeze()  # imported modules and loaded weights are never garbage
    gc.set_threshold(_OBJECTS_UNTIL_COLLECTION, _COLLECTIONS_UNTIL_LARGER_ONE)
    gc.enable()


def build_core(config: EngineConfig, on_death: Callable[[str], None], wake: Callable[[], None]) -> EngineCore:
    """Return `EngineCore.build`, imported late."""
    from octavo.engine.engine_core import EngineCore

    return EngineCore.build(config, on_death=on_death, wake=wake)


def build_and_serve(
    build: Callable[[Callable[[str], None], Callable[[], None]], EngineCore],
    serve: Callable[[EngineCore, Inbox], None],
    report: Callable[[CoreFailed], None],
) -> int:
    """Serve the core that `build` returns; return the exit code: 0 when `serve` returns, 1 after a failure.

    report: sends the front a failure. It is called before the core is released, which takes as long as its other ranks
    do to end. When a rank dies while rank 0 waits for it in `build`, which no other thread can interrupt, the process
    ends.
    """
    inbox: Inbox = SimpleQueue()
    is_built = threading.Event()
    with ExitStack() as resources:

        def fail(reason: str) -> None:
            failure = CoreFailed(message=reason)
            inbox.put(failure)
            if not is_built.is_set():
                threading.Thread(target=_end_unbuilt, args=[failure, report, is_built], daemon=True).start()

        def run() -> None:
            try:
                core = build(fail, lambda: inbox.put(Wake()))
            finally:
                is_built.set()
            resources.callback(core.shutdown)
            serve(core, inbox)

        return run_reporting("the engine core", report, run)


def _end_unbuilt(failure: CoreFailed, report: Callable[[CoreFailed], None], is_built: threading.Event) -> None:
    """Report a failure and end the process, unless `build` itself ends soon, with the failure or another."""
    if not is_built.wait(UNBUILT_S):
        report(failure)
        os._exit(1)


def run_on(cpus: Sequence[int]) -> None:
    """Bind the process, and its present threads, to these processors; an empty list stands for all of them."""
    for thread in Path("/proc/self/task").glob("*") if cpus else ():
        os.sched_setaffinity(int(thread.name), cpus)


def run() -> NoReturn:
    """Run `main` and end the process."""
    try:
        exit_code = main()
    except SystemExit:  # of SIGTERM
        exit_code = 0
    end_now(exit_code)


if __name__ == "__main__":
    run()
