"""A rank other than 0 in a process of its own: `python -m octavo.executor.rank_process FD [HERE]`.

The descriptor is that of the process that started this one, mostly the executor; HERE, in JSON, is a `Here`: what a
rank on another machine needs besides. The process ends with those to which it is connected, whatever it computes.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import signal
import socket
import sys
import threading
from collections import deque
from concurrent.futures import Future
from contextlib import suppress
from functools import partial

import msgspec

from octavo import __version__
from octavo.config.schema import EngineConfig
from octavo.core.messages import CoreFailed, Shutdown
from octavo.core.process import frames
from octavo.core.process.processes import end_now, end_with, report_failure, run_reporting
from octavo.core.step import ModelRunnerOutput
from octavo.errors import ConfigError
from octavo.executor.channel import (
    ORPHANED,
    SEEN_GPUS,
    FromRank,
    Here,
    Note,
    RankCall,
    Start,
    Step,
    StepResult,
    ToRank,
    Value,
)
from octavo.executor.executor import OpenWorker, import_ahead, open_rank
from octavo.logging import set_up
from octavo.worker.start.identity import Identity

_log = logging.getLogger(__name__)


def serve_rank(connection: socket.socket, open_worker: OpenWorker, here: Here | None = None) -> None:
    """Serve an executor until Shutdown or the end of the connection. Raises what the worker raises."""
    start = frames.read_as(connection, Start)
    if start is None:
        return
    config = _joined(start, None if here is None else here.model_path)
    rendezvous = start.rendezvous
    if here is not None:
        rendezvous = msgspec.structs.replace(rendezvous, memory=here.memory, shared_ranks=here.shared_ranks)
    core = f"{config.replicas.name} " if config.num_engines > 1 else ""
    set_up(config.observability.log_level, role=f"{core}rank {start.rank}")
    if start.gpus:
        os.environ[SEEN_GPUS] = start.gpus[start.rank]
    lock = threading.Lock()

    def send(message: FromRank) -> None:
        frame = frames.pack(message)
        with lock:
            connection.sendall(frame)

    def notify(payload: bytes) -> None:
        with suppress(OSError):  # the executor has gone, and this process ends
            send(Note(payload))

    send(Value())
    worker = open_worker(config, start.rank, rendezvous, notify, None)
    decoder = msgspec.msgpack.Decoder(ToRank)
    submitted: deque[Future[ModelRunnerOutput]] = deque()
    try:
        while (body := frames.read(connection)) is not None:
            message = decoder.decode(body)
            match message:
                case Step(step):
                    submitted.append(newest := worker.submit(step))
                    # as far ahead as rank 0, which has as many steps on their way; what has failed is raised at once
                    while submitted and (newest.done() or len(submitted) >= config.scheduler.max_steps_in_flight):
                        output = submitted.popleft().result()
                        if start.sends_results:
                            send(StepResult(output))
                case RankCall(method, arguments):
                    (value,) = worker.call(method, *arguments)
                    send(Value(msgspec.Raw(frames.encode(value))))
                case Shutdown():
                    return
    except Exception as error:
        # the others wait for this rank, and raise this reason
        worker.poison(f"rank {start.rank} failed: {type(error).__name__}: {error}")
        raise
    finally:
        worker.shutdown()


def _joined(start: Start, model_path: str | None) -> EngineConfig:
    """Return the configuration here. Raises ConfigError unless build and model are those of rank 0."""
    try:
        config = msgspec.msgpack.decode(start.config, type=EngineConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"octavo {__version__} cannot read the settings of {start.identity.octavo}: {error}"
        ) from error
    if model_path is not None:
        config = msgspec.structs.replace(config, model=dataclasses.replace(config.model, path=model_path))
    difference = start.identity.difference(Identity.of(config))
    if difference is not None:
        raise ConfigError(difference)
    return config


def _report(connection: socket.socket, failure: CoreFailed, *, is_elsewhere: bool) -> None:
    if is_elsewhere:  # the log of the first machine has it, too
        _log.error("%s", failure.message)
    report_failure(connection, failure)


def main(open_worker: OpenWorker) -> int:
    """Run the process of a rank. Returns the exit code: 0 after Shutdown, 1 after a failure."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the front decides what Ctrl-C means
    starter, *more = sys.argv[1:]
    here = msgspec.json.decode(more[0], type=Here) if more else None
    channel = int(starter) if here is None else here.channel
    lifeline = {int(starter), channel}, ORPHANED
    threading.Thread(target=end_with, args=lifeline, name="octavo-lifeline", daemon=True).start()
    with socket.socket(fileno=channel) as connection:
        report = partial(_report, connection, is_elsewhere=here is not None)
        return run_reporting("the rank", report, lambda: serve_rank(connection, open_worker, here))


if __name__ == "__main__":
    import_ahead()
    end_now(main(open_rank))
