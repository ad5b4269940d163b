"""What crosses the connection between the executor and the process of a rank, as frames of MessagePack."""

from __future__ import annotations

from typing import Any

import msgspec

from octavo.core.messages import CoreFailed, Shutdown
from octavo.core.step import ModelRunnerOutput, SchedulerOutput
from octavo.worker.identity import Identity


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """The first message to a rank. `identity` is that of rank 0; what follows is decoded when the rank's is equal.

    sends_results: whether the results of steps come from this rank.
    config: the EngineConfig. rendezvous: where the ranks of its groups meet.
    """

    identity: Identity
    rank: int
    sends_results: bool
    config: msgspec.Raw
    rendezvous: msgspec.Raw


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


FromRank = Value | StepResult | CoreFailed
