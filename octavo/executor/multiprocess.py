"""An executor of several ranks: rank 0 in this process, each other rank in a process at the end of a connection."""

from __future__ import annotations

import selectors
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import msgspec

from octavo.core.launched import LaunchedStep
from octavo.core.messages import CoreFailed, Shutdown
from octavo.core.process import frames, processes
from octavo.core.process.processes import Process, ProcessState
from octavo.core.step import ModelRunnerOutput, SchedulerOutput
from octavo.errors import EngineDeadError, OctavoError
from octavo.executor.channel import FromRank, Note, RankCall, Start, Step, StepResult, Value
from octavo.executor.executor import OnNote, RankWorker

F = TypeVar("F", bound="Future[Any]")
T = TypeVar("T")

_NOTICE_S: Final = 0.5
"""How long a rank that has failed or died may be noticed after the calls that waited for it."""


@dataclass(frozen=True)
class Rank:
    """A rank other than 0. process: None where another program has started it, at `host`."""

    number: int
    connection: socket.socket
    process: Process | None = None
    host: str = ""
    values: deque[Future[msgspec.Raw]] = field(default_factory=deque)
    """Values that it has yet to send, in the order of calls."""

    @property
    def name(self) -> str:
        where = f"at {self.host}" if self.process is None else f"process {self.process.pid}"
        return f"rank {self.number} ({where})"

    def how_it_ended(self) -> str:
        """Return why its connection has ended, as far as can be seen from here."""
        if self.process is None:
            return f"{self.name} has closed its connection; the log of its machine says more"
        return processes.how_it_ended(f"rank {self.number}", self.process)

    @property
    def is_stopped(self) -> bool:
        """Whether a signal or a debugger has stopped its process, where that can be seen from here."""
        state = self.state
        return state is not None and state.is_stopped

    @property
    def state(self) -> ProcessState | None:
        """What its process does; None where that cannot be seen from here."""
        return None if self.process is None else ProcessState.of(self.process.pid)


class MultiprocessExecutor:
    """`Executor` of the worker of rank 0 and of the ranks at the connections. Used by one thread at a time.

    A second thread waits for messages of the ranks: results of steps where rank 0 has none, values of calls, notes,
    failures, and the end of a connection. After a failure every step and call raises an EngineDeadError that names the
    rank.
    """

    def __init__(
        self,
        ranks: Sequence[Rank],
        *,
        result_rank: int,
        timeout_s: float,
        on_death: Callable[[str], None] | None,
        on_note: OnNote | None = None,
        on_shutdown: Callable[[], None],
    ) -> None:
        """result_rank: the one that returns the results of steps. timeout_s: how long a step may wait for a rank.

        on_death: called with the failure, from any thread, as soon as a rank has failed or died. on_note: called with
        the notes of ranks, by the thread that reads.
        """
        self._result_rank = result_rank
        self._ranks = ranks
        self._worker: RankWorker | None = None
        self._timeout_s = timeout_s
        self._results: deque[Future[ModelRunnerOutput]] = deque()
        self._lock = threading.Lock()
        """Guards what is awaited, and the failure that ends all waiting."""
        self._failure: OctavoError | None = None
        self._has_failed: Future[None] = Future()
        self._is_closing = self._is_released = False
        self._on_shutdown = on_shutdown
        self._on_death = on_death
        self._on_note = on_note
        for rank in ranks:
            rank.connection.settimeout(timeout_s)
        self._reader = threading.Thread(target=self._read, name="octavo-ranks", daemon=True)
        self._reader.start()

    @property
    def sends_tokens(self) -> bool:
        """True with several stages: the first one does not draw."""
        return self._result_rank > 0

    def start(self, start: Start, open_worker: Callable[[], RankWorker]) -> None:
        """Send `start` to each rank, wait until all have joined, and open the worker of rank 0 beside theirs.

        Raises the ConfigError or CheckpointError of any rank.
        """
        joined = [self._expect(rank.values, Future()) for rank in self._ranks]
        for rank in self._ranks:
            sends_results = rank.number == self._result_rank
            message = msgspec.structs.replace(start, rank=rank.number, sends_results=sends_results)
            self._send(rank, frames.pack(message))
        for each in joined:
            self._wait(each)
        try:
            self._worker = open_worker()
        except EngineDeadError as error:
            raise self.cause(error) from error
        if self._failure is not None:
            raise self._failure

    def meet(self, open_group: Callable[[], Any]) -> Any:
        """Return the group of ranks that `open_group` opens, which waits for other ranks. Raises the failure of a rank
        at once: what waits for one that has failed would do so until its deadline, and may in a thread of its own."""
        opened: Future[Any] = Future()

        def run() -> None:
            try:
                opened.set_result(open_group())
            except BaseException as error:
                opened.set_exception(error)

        threading.Thread(target=run, name="octavo-meeting", daemon=True).start()
        wait([opened, self._has_failed], return_when=FIRST_COMPLETED)
        if self._failure is not None:
            opened.add_done_callback(lambda each: None if each.exception() else each.result().close())
            raise self._failure
        return opened.result()

    def submit(self, step: SchedulerOutput) -> Future[ModelRunnerOutput]:
        """Send the step to all ranks and run it on rank 0. The result may come later. Raises the failure of a rank."""
        if self._failure is not None:
            raise self._failure
        frame = frames.pack(Step(step))
        result = self._expect(self._results, _Awaited(self, self._timeout_s)) if self._result_rank else None
        for rank in self._ranks:
            self._send(rank, frame)
        own = self._opened.submit(step)
        if not own.done():
            return LaunchedStep(own.result, self.cause)  # rank 0 alone returns it
        error = own.exception()
        if error is None:
            return own if result is None else result
        failed: Future[ModelRunnerOutput] = Future()
        failed.set_exception(self.cause(error))
        return failed

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """Make a call of the worker on all ranks, and return their values in the order of ranks."""
        from octavo.worker.calls import CALLS, UNLIMITED, check_call

        check_call(method)
        values = [self._expect(rank.values, Future()) for rank in self._ranks]
        frame = frames.pack(RankCall(method, list(arguments)))
        for rank in self._ranks:
            self._send(rank, frame)
        try:
            own = self._opened.call(method, *arguments)
        except EngineDeadError as error:  # of what waited for another rank
            raise self.cause(error) from error
        is_limited = method not in UNLIMITED  # others go on while the process works
        found = [self._wait(each, is_limited=is_limited) for each in values]
        return own + [msgspec.msgpack.decode(each, type=CALLS[method]) for each in found]

    def overdue(self) -> OctavoError:
        """Fail because a rank has not responded in time; return the failure."""
        late = f"no response of the ranks for {self._timeout_s:g} s"
        return self._fail(
            self._stopped_ranks()
            or EngineDeadError(f"{late}; where steps take that long, raise distributed_timeout_seconds")
        )

    def shutdown(self) -> None:
        """Release the worker of rank 0 and end the processes of the others, after a failure by force. Idempotent.

        Any thread may call this, also the one that reads: the garbage collector or `on_death` may be what ends it.
        """
        if self._is_closing:
            return
        self._is_closing = True
        is_well = self._failure is None and self._worker is not None
        if self._worker is not None:
            self._worker.shutdown()
        for rank in self._ranks:
            with suppress(OSError):  # it may have ended
                if is_well:
                    rank.connection.sendall(frames.pack(Shutdown()))
                else:
                    rank.connection.shutdown(socket.SHUT_RDWR)
            if rank.process is not None and not is_well:
                rank.process.kill()
        for rank in self._ranks:
            if rank.process is not None:
                processes.end(rank.process)
        if threading.current_thread() is not self._reader:
            self._reader.join(processes.SHUTDOWN_TIMEOUT_S)
        for rank in self._ranks:
            rank.connection.close()
        self._is_released = True
        self._on_shutdown()
        self._fail(EngineDeadError("the executor is shut down"))

    @property
    def _opened(self) -> RankWorker:
        assert self._worker is not None, "steps and calls follow `start`"
        return self._worker

    def _expect(self, queue: deque[F], future: F) -> F:
        """Add a future to those that the reader completes. Raises the failure, after which it completes none."""
        with self._lock:
            if self._failure is not None:
                raise self._failure
            queue.append(future)
            return future

    def _wait(self, value: Future[msgspec.Raw], *, is_limited: bool = False) -> msgspec.Raw:
        """Return a value that a rank sends in its own time while it works, or, when `is_limited`, before its time is
        over."""
        before: dict[int, ProcessState] = {}
        while True:
            try:
                return value.result(self._timeout_s)
            except TimeoutError:
                if is_limited:
                    raise self.overdue() from None
                late = {each.number: state for each in self._ranks if each.values and (state := each.state) is not None}
                idle = [number for number, state in late.items() if _is_idle(state, before.get(number))]
                hung = f"neither responded nor used processor time for {self._timeout_s:g} s while it started"
                stuck = self._stopped_ranks() or self._failure_of(idle, hung)
                if stuck is not None:
                    raise self._fail(stuck) from None
                before = late

    def _send(self, rank: Rank, frame: bytes) -> None:
        try:
            rank.connection.sendall(frame)
        except TimeoutError:
            raise self.overdue() from None
        except OSError:
            wait([self._has_failed], _NOTICE_S)  # it may have sent why
            raise self._fail(EngineDeadError(rank.how_it_ended())) from None

    def _read(self) -> None:
        """Process the messages of all ranks until their connections have ended. An exception is a failure."""
        decoder = msgspec.msgpack.Decoder(FromRank)
        with selectors.DefaultSelector() as selector:
            for rank in self._ranks:
                selector.register(rank.connection, selectors.EVENT_READ, rank)
            while selector.get_map():
                for key, _ in selector.select():
                    rank = key.data
                    try:
                        if self._process_next(rank, decoder):
                            continue
                    except Exception as error:
                        reason = f"{type(error).__name__}: {error}"
                        self._fail(EngineDeadError(f"the connection of {rank.name} cannot be read: {reason}"))
                    selector.unregister(rank.connection)
                if self._is_released:
                    return

    def _process_next(self, rank: Rank, decoder: msgspec.msgpack.Decoder[FromRank]) -> bool:
        """Process the next message of a rank; return False at the end of its connection."""
        body = frames.read(rank.connection)
        if body is not None:
            self._take(rank, decoder.decode(body))
            return True
        if not self._is_closing and self._failure is None:
            self._fail(EngineDeadError(rank.how_it_ended()))
        return False

    def _take(self, rank: Rank, message: FromRank) -> None:
        match message:
            case StepResult(output):
                self._complete(rank, self._results, output)
            case CoreFailed():
                self._fail(self._stopped_ranks() or message.error(f"{rank.name}: "))
            case Note(payload):
                if self._on_note is not None:
                    self._on_note(rank.number, payload)
            case Value(value):
                self._complete(rank, rank.values, value)

    def _complete(self, rank: Rank, queue: deque[Future[T]], value: T) -> None:
        """Complete the future that has waited longest in the queue. After a failure nothing waits."""
        with self._lock:
            if self._failure is not None:
                return
            future = queue.popleft() if queue else None
        if future is None:
            self._fail(EngineDeadError(f"{rank.name} has sent a message that nothing waits for"))
        else:
            future.set_result(value)

    def cause(self, error: BaseException) -> BaseException:
        """Return why rank 0 has failed: what is known of another rank, else `error`. All ranks fail from then on."""
        if isinstance(error, EngineDeadError):
            wait([self._has_failed], _NOTICE_S)
        if self._failure is not None:
            return self._failure
        stopped = self._stopped_ranks()
        if isinstance(error, EngineDeadError) and stopped is not None:
            return self._fail(stopped)
        self._fail(EngineDeadError(f"rank 0 failed: {type(error).__name__}: {error}"))
        return error

    def _stopped_ranks(self) -> EngineDeadError | None:
        stopped = [rank.number for rank in self._ranks if rank.is_stopped]
        return self._failure_of(stopped, "stopped by a signal or a debugger")

    def _failure_of(self, numbers: Sequence[int], what: str) -> EngineDeadError | None:
        names = ", ".join(rank.name for rank in self._ranks if rank.number in numbers)
        return EngineDeadError(f"{names}: {what}") if names else None

    def _fail(self, failure: OctavoError) -> OctavoError:
        """Make everything that waits raise `failure`, unless there was a failure before; return the first one."""
        with self._lock:
            if self._failure is not None:
                return self._failure
            self._failure = failure
            waiting: list[Future[Any]] = [*self._results, *(each for rank in self._ranks for each in rank.values)]
            self._results.clear()
        self._has_failed.set_result(None)
        try:
            if not self._is_closing and self._worker is not None:
                self._worker.poison(str(failure))
        finally:
            for each in waiting:
                each.set_exception(failure)
        if not self._is_closing and self._on_death is not None:
            self._on_death(str(failure))
        return failure


class _Awaited(Future[ModelRunnerOutput]):
    """The result of a step that another rank returns; it is overdue after the executor's limit."""

    def __init__(self, executor: MultiprocessExecutor, timeout_s: float) -> None:
        super().__init__()
        self._executor = executor
        self._timeout_s = timeout_s

    def result(self, timeout: float | None = None) -> ModelRunnerOutput:
        try:
            return super().result(self._timeout_s if timeout is None else timeout)
        except TimeoutError:
            raise self._executor.overdue() from None


def _is_idle(state: ProcessState, before: ProcessState | None) -> bool:
    return before is not None and not state.has_worked_since(before)
