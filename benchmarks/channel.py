"""Microseconds that a step takes on its way to another rank and back: `python -m benchmarks.channel`.

The frames are those of the executor: a step of decode rows goes to a process over a Unix socket or over TCP, which
decodes it and returns the results of its rows. With pipeline stages results come back this way; ranks that only share
layers get the step and send nothing.
"""

from __future__ import annotations

import argparse
import multiprocessing
import socket
import statistics
import time

import msgspec

from octavo.cli.report import report
from octavo.core.process import frames
from octavo.core.step import BlockOps, ModelRunnerOutput, RowOutput, ScheduledSequence, SchedulerOutput, TokenLogprobs
from octavo.executor.channel import FromRank, Step, StepResult, ToRank


def step_of(num_rows: int) -> SchedulerOutput:
    rows = [
        ScheduledSequence(seq_id=row, epoch=0, start=1000, num_tokens=1, num_samples=1, token_ids=(row,))
        for row in range(num_rows)
    ]
    return SchedulerOutput(step_id=1, new_sequences=[], rows=rows, finished_ids=[], block_ops=BlockOps())


def results_of(num_rows: int) -> ModelRunnerOutput:
    drawn = [TokenLogprobs(token_id=row, logprob=-1.0) for row in range(num_rows)]
    rows = [RowOutput(seq_id=row, epoch=0, tokens=[each]) for row, each in enumerate(drawn)]
    return ModelRunnerOutput(step_id=1, rows=rows)


def serve(connection: socket.socket) -> None:
    decoder = msgspec.msgpack.Decoder(ToRank)
    while (body := frames.read(connection)) is not None:
        message = decoder.decode(body)
        assert isinstance(message, Step)
        connection.sendall(frames.pack(StepResult(results_of(len(message.step.rows)))))


def pair(kind: str) -> tuple[socket.socket, socket.socket]:
    if kind == "unix":
        return socket.socketpair()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        here = socket.create_connection(listener.getsockname())
        there, _ = listener.accept()
    for each in (here, there):
        each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return here, there


def measure(kind: str, num_rows: int, rounds: int) -> dict[str, float]:
    """Return microseconds: medians of making and sending a step, and until its results are decoded."""
    here, there = pair(kind)
    process = multiprocessing.get_context("spawn").Process(target=serve, args=[there], daemon=True)
    process.start()
    step, decoder = step_of(num_rows), msgspec.msgpack.Decoder(FromRank)
    sent, back = [], []
    for _ in range(rounds):
        began = time.perf_counter()
        frame = frames.pack(Step(step))
        here.sendall(frame)
        sent.append(time.perf_counter() - began)
        body = frames.read(here)
        assert body is not None
        decoder.decode(body)
        back.append(time.perf_counter() - began)
    process.terminate()
    process.join()
    here.close()
    there.close()
    micro = 1e6
    return {"send_us": micro * statistics.median(sent), "back_us": micro * statistics.median(back), "bytes": len(frame)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2000)
    rounds = parser.parse_args().rounds
    found = {
        f"{kind} {num_rows} rows": measure(kind, num_rows, rounds)
        for kind in ("unix", "tcp")
        for num_rows in (1, 64, 256)
    }
    report("channel", {"rounds": rounds}, found)


if __name__ == "__main__":
    main()
