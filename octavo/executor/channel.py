"""What crosses the connection between the executor and the process of a rank, as frames of MessagePack."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from octavo.core.messages import CoreFailed, Shutdown
from octavo.core.process.rendezvous import Rendezvous
from octavo.core.step import ModelRunnerOutput, SchedulerOutput
from octavo.worker.start.identity import Identity

SEEN_GPUS: Final = "CUDA_VISIBLE_DEVICES"
ORPHANED: Final = 3
"""Exit code of a rank whose executor has gone without Shutdown."""


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """The first message to a rank. `identity` is that of rank 0; what follows is decoded when the rank's is equal.

    sends_results: whether the results of steps come from this rank.
    config: the EngineConfig. rendezvous: where the ranks meet; ranks of another machine have other memory.
    gpus: for each rank the only one that its process is to see, as CUDA_VISIBLE_DEVICES of its machine names it; empty
    where all see what their processes have been given.
    """

    identity: Identity
    config: msgspec.Raw
    rendezvous: Rendezvous
    rank: int = 0
    sends_results: bool = False
    gpus: list[str] = []


class Here(msgspec.Struct, frozen=True):
    """What a rank has from its own machine.

    channel: the descriptor of the connection to the executor. memory: that of the memory of `shared_ranks`, the first
    and how many. model_path: where the model is; None where it is as on the first machine.
    """

    channel: int
    memory: int
    shared_ranks: tuple[int, int]
    model_path: str | None = None


class Step(msgspec.Struct, frozen=True, tag="step"):
    """A step for every rank; those that send results return a `StepResult`."""

    step: SchedulerOutput


class RankCall(msgspec.Struct, frozen=True, tag="call"):
    """A call of the worker. Its `Value` comes in the order of calls."""

    method: str
    arguments: list[Any]


ToRank = Step | RankCall | Shutdown


class Value(msgspec.Struct, frozen=True, tag="value"):
    """The value of a call; the first one comes without a call when the rank has joined."""

    value: msgspec.Raw = msgspec.Raw(b"\xc0")


class StepResult(msgspec.Struct, frozen=True, tag="result"):
    """The result of the oldest step that has none yet."""

    output: ModelRunnerOutput


class Note(msgspec.Struct, frozen=True, tag="note"):
    """What the workers' half of a KV connector sends at any time."""

    payload: bytes


FromRank = Value | StepResult | Note | CoreFailed
