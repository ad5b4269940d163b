"""KV of a prompt from one rank to another: `python -m benchmarks.transfer --model PATH`.

Two processes, over TCP on this machine and over a socket for processes of one machine. The rank that computes sends
the blocks of a prompt in three ways, which take turns:

    off      the step alone
    after    the step, then all blocks
    layers   each layer's blocks while the step computes the next ones

Times are medians in milliseconds: of the step, and from its begin until the other rank has verified and written all.
`idle` is the rate of a transfer of blocks that were computed before; its shares are of what a copy in memory and
`sendall` in pieces of 1 MiB over TCP reach in the same run. Processor times are of one transfer, or of one step.
`overlap` is the share of an idle transfer that sending by layers hides behind the step.
"""

from __future__ import annotations

import argparse
import multiprocessing
import socket
import statistics
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import torch

from benchmarks.channel import pair
from octavo.cli.report import report
from octavo.config.args import EngineArgs
from octavo.config.checkpoint import Checkpoint
from octavo.config.resolve import resolve
from octavo.core.model_shape import CacheGroup, KeysAndValues
from octavo.core.process import frames
from octavo.core.sampling_params import SamplingParams
from octavo.core.step import BlockOps, NewSequence, ScheduledSequence, SchedulerOutput
from octavo.kv_transfer.messages import FetchBlocks, Fetched, PeerRank, RankCommands, RankNotes, SendBlocks
from octavo.platform import Platform
from octavo.worker.transfer.block_io import BlockIO
from octavo.worker.transfer.rank_transfer import RankTransfer
from octavo.worker.worker import Worker

SECRET, EPOCH, PIECE = bytes(32), bytes(16), 1 << 20


def no_tiers() -> Any:
    raise AssertionError("there is no tier")


def fetch(channel: Connection, shape: tuple[int, ...], dtype: torch.dtype, num_layers: int, num_heads: int) -> None:
    """Be the rank that fetches: for each command return what came of it, when, and the processor time."""
    torch.set_num_threads(1)  # as in a rank
    caches = [torch.ones(shape, dtype=dtype) for _ in range(num_layers)]  # written once: their memory is there
    group = CacheGroup(tuple(range(num_layers)), KeysAndValues(num_heads, 128))
    blocks = BlockIO(caches, [group], [range(num_heads)], range(num_layers))

    def notify(payload: bytes) -> None:
        (fetched,) = msgspec.msgpack.decode(payload, type=RankNotes).fetched
        channel.send((fetched, time.perf_counter(), time.process_time()))

    transfer = RankTransfer(blocks, [], notify, no_tiers)
    transfer.open("", SECRET, EPOCH)
    while payload := channel.recv_bytes():
        with transfer.step(payload):
            pass
    transfer.close()


def drain(connection: socket.socket) -> None:
    room = bytearray(PIECE)
    while connection.recv_into(room):
        pass
    connection.sendall(b"!")


def loopback_s(num_bytes: int) -> float:
    """Return the seconds in which another process has read so many bytes."""
    here, there = pair("tcp")
    process = multiprocessing.get_context("spawn").Process(target=drain, args=[there], daemon=True)
    process.start()
    there.close()
    time.sleep(3)  # it imports
    piece = bytes(PIECE)
    began = time.perf_counter()
    for _ in range(num_bytes // PIECE):
        here.sendall(piece)
    here.shutdown(socket.SHUT_WR)
    here.recv(1)
    seconds = time.perf_counter() - began
    process.join()
    return seconds


def copy_s(num_bytes: int) -> float:
    source, target = torch.ones(num_bytes, dtype=torch.uint8), torch.ones(num_bytes, dtype=torch.uint8)
    began = time.perf_counter()
    target.copy_(source)
    return time.perf_counter() - began


class Prefill:
    """The rank that computes, and the process of the other one."""

    def __init__(self, model: str, num_tokens: int, threads: int, host: str) -> None:
        arguments = EngineArgs(
            model=model, max_num_batched_tokens=num_tokens, max_model_len=num_tokens, threads=threads, max_num_seqs=4
        )
        path = Path(model)
        config = resolve(arguments, Checkpoint.open(path), Platform.detect(), tokenizer_path=path)
        self.worker = Worker(config)
        self.worker.load(self.worker.prepare().max_model_len, [0])
        self.num_blocks = num_tokens // self.worker.plan.cache.block_size
        self.worker.allocate([self.num_blocks], [0])
        self.num_tokens, self.next_id, self.cpu_there = num_tokens, 0, 0.0
        (peer,) = self.worker.call("open_transfer", host, SECRET.hex(), EPOCH.hex())
        self.peer: PeerRank = peer
        caches = self.worker._runner.cache.caches
        context = multiprocessing.get_context("spawn")
        self.channel, there = context.Pipe()
        arguments_of_fetch = there, tuple(caches[0].shape), caches[0].dtype, len(caches), peer.heads[0][1]
        context.Process(target=fetch, args=arguments_of_fetch, daemon=True).start()

    def step(self, commands: RankCommands, num_tokens: int = 0) -> None:
        new, rows = [], []
        self.next_id += 1
        if num_tokens:
            table = list(range(1, self.num_blocks + 1))
            new = [
                NewSequence(
                    seq_id=self.next_id,
                    index=0,
                    epoch=0,
                    token_ids=[7 + each % 1000 for each in range(num_tokens)],
                    num_prompt_tokens=num_tokens,
                    block_tables=[table],
                    params=SamplingParams(),
                )
            ]
            rows = [ScheduledSequence(seq_id=self.next_id, epoch=0, start=0, num_tokens=num_tokens, num_samples=1)]
        finished = [self.next_id - 1] if self.next_id > 1 and num_tokens else []
        payload = frames.encode(commands) if commands else None
        whole = SchedulerOutput(
            step_id=1, new_sequences=new, rows=rows, finished_ids=finished, block_ops=BlockOps(), connector=payload
        )
        self.worker.submit(whole).result()

    def run(self, way: str) -> dict[str, float]:
        """Return the seconds of a step and of a transfer, and of the processors."""
        ids, transfer = [list(range(1, self.num_blocks + 1))], self.next_id.to_bytes(16, "little")
        sends = [SendBlocks(transfer, 0, ids, is_fresh=way == "layers")]
        cpu = time.process_time()
        if way != "off":
            command = FetchBlocks(self.next_id, transfer, 0, ids, [self.peer], EPOCH)
            self.channel.send_bytes(frames.encode(RankCommands(fetches=[command])))
            time.sleep(0.2)  # it has subscribed
        began = time.perf_counter()
        if way != "idle":
            self.step(RankCommands(sends=sends if way == "layers" else []), self.num_tokens)
        found = {"step_s": time.perf_counter() - began, "cpu_s": time.process_time() - cpu}
        if way == "off":
            return found
        if way != "layers":
            self.step(RankCommands(sends=sends))
        fetched, ended, cpu_there = self.channel.recv()
        assert isinstance(fetched, Fetched), fetched
        assert not fetched.error, fetched
        self.step(RankCommands(ends=[transfer]))
        self.cpu_there, since = cpu_there, self.cpu_there
        cpu_s = time.process_time() - cpu
        return found | {
            "all_s": ended - began,
            "bytes": fetched.num_bytes,
            "cpu_s": cpu_s,
            "there_s": cpu_there - since,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompt-len", type=int, default=1024)
    parser.add_argument("--threads", type=int, default=1, help="of the rank that computes")
    parser.add_argument("--repetitions", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for kind, host in (("tcp", "127.0.0.1"), ("local", folder)):
            prefill = Prefill(args.model, args.prompt_len, args.threads, host)
            rounds: dict[str, list[dict[str, float]]] = {way: [] for way in ("idle", "off", "after", "layers")}
            copies, loops = [], []
            for way in rounds:
                prefill.run(way)  # what is made once
            for _ in range(args.repetitions):
                for way, found in rounds.items():
                    found.append(prefill.run(way))
                num_bytes = int(rounds["idle"][0]["bytes"])
                copies.append(copy_s(num_bytes))
                loops.append(loopback_s(num_bytes))
            median = {
                f"{way}_{name}": statistics.median(each[name] for each in found)
                for way, found in rounds.items()
                for name in found[0]
            }
            seconds = median["idle_all_s"]
            report(
                "transfer",
                {"model": args.model, "prompt_len": args.prompt_len, "threads": args.threads, "kind": kind},
                {
                    "mbytes": num_bytes / 1e6,
                    "idle_mb_per_s": num_bytes / 1e6 / seconds,
                    "share_of_copy": statistics.median(copies) / seconds,
                    "share_of_loopback": statistics.median(loops) / seconds,
                    "step_ms": 1e3 * median["off_step_s"],
                    "after_ms": 1e3 * median["after_all_s"],
                    "layers_ms": 1e3 * median["layers_all_s"],
                    "layers_step_ms": 1e3 * median["layers_step_s"],
                    "sends_cpu_ms": 1e3 * median["idle_cpu_s"],
                    "receives_cpu_ms": 1e3 * median["idle_there_s"],
                    "step_cpu_ms": 1e3 * median["off_cpu_s"],
                    "layers_cpu_ms": 1e3 * median["layers_cpu_s"],
                    "overlap": (median["after_all_s"] - median["layers_all_s"]) / seconds,
                },
            )
            prefill.channel.send_bytes(b"")
            prefill.worker.shutdown()


if __name__ == "__main__":
    main()
