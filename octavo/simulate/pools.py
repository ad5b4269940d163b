"""Separate pools in simulated time: what the front of a server does with them, over replicas that are simulated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, cast

import msgspec

from octavo.core.messages import (
    AddRequests,
    EngineCoreOutput,
    EngineCoreRequest,
    SchedulerStats,
    StepOutputs,
    ToCore,
)
from octavo.core.resume import ResumedSequence
from octavo.engine.dispatch import Sent
from octavo.engine.router import Router
from octavo.engine.split import Split, SplitRates
from octavo.scheduler.build import SchedulerSettings
from octavo.simulate.executor import Script
from octavo.simulate.link import Disaggregation
from octavo.simulate.replica import Replica

if TYPE_CHECKING:
    from octavo.engine.dispatch import Dispatch
    from octavo.engine.replica import Replica as ServedReplica

_UNKNOWN = SchedulerStats()


class _Face:
    """A replica as `Split` sees it: the replica and the client of its core in one."""

    is_ready = True
    is_draining = False
    suspect = None

    def __init__(self, replica: Replica, send: Callable[[Replica, ToCore], None]) -> None:
        self.number = replica.number
        self.role = "decode" if replica.link is None else "prefill"
        self.ready = replica.core.ready
        self._replica = replica
        self._send = send

    @property
    def client(self) -> _Face:
        return self

    @property
    def num_open(self) -> int:
        return self._replica.num_open

    def send(self, message: ToCore) -> None:
        self._send(self._replica, message)

    def open(self) -> None:
        """The replica itself counts what it is sent."""

    def close(self) -> None:
        """The replica itself counts what has ended."""

    def count(self, **counts: int) -> None:
        """Nothing reads these counts."""


class Pools:
    """Gives requests to replicas with a link, which compute prompts, and to others, which decode, and makes one answer
    of their outputs.

    send: gives a message to a replica. router, decode_router: choose one of those that compute prompts and of the
    others.
    """

    def __init__(
        self,
        replicas: Sequence[Replica],
        send: Callable[[Replica, ToCore], None],
        clock: Callable[[], float],
        *,
        router: Router,
        decode_router: Router,
        settings: SchedulerSettings,
        disaggregation: Disaggregation,
    ) -> None:
        self._faces = [cast("ServedReplica", _Face(replica, send)) for replica in replicas]
        self._decoding = [each for each in self._faces if each.role == "decode"]
        self._decode_router = decode_router
        self._open: dict[str, tuple[EngineCoreRequest, Script]] = {}
        limits = settings.scheduler
        self._split = Split(
            [each for each in self._faces if each.role == "prefill"],
            cast("Dispatch", self),
            router,
            block_size=settings.cache.block_size,
            keep_s=disaggregation.keep_s,
            rates=SplitRates(disaggregation.min_tokens, limits.prefill_tokens_per_s, limits.max_num_batched_tokens),
            clock=clock,
        )

    def arrive(self, request: EngineCoreRequest, script: Script) -> None:
        """Send a request to the replica, or the first of the two replicas, that gets it."""
        self._open[request.request_id] = request, script
        sent, decode = Sent(request), self._decode_router.choose(request, self._decoding)
        if not self._split.begin([sent], decode):
            self.send_to([sent], decode)

    def send_to(self, batch: Sequence[Sent], replica: ServedReplica) -> None:
        """Send requests to a replica that decodes (`Dispatch.send_to`)."""
        for sent in batch:
            sent.replica = replica
            replica.client.send(AddRequests([self._split.for_decode(sent.request)]))

    def to_resume(self, request_id: str) -> EngineCoreRequest | None:
        """Return an open request with what it generates (`Dispatch.to_resume`)."""
        if request_id not in self._open:
            return None
        request, script = self._open[request_id]
        token_ids = [script.output_token(0, place) for place in range(script.output_len(0) - 1)]
        return msgspec.structs.replace(request, resumed=(ResumedSequence(index=0, token_ids=token_ids),))

    def take(
        self, replica: Replica, outputs: Sequence[EngineCoreOutput] = (), began: Sequence[str] = ()
    ) -> list[EngineCoreOutput]:
        """Return the outputs of a step of one replica as those of requests that one replica computes."""
        step = StepOutputs(outputs=list(outputs), stats=_UNKNOWN, began=list(began))
        self._split.take(self._faces[replica.number], step)
        return step.outputs

    def end(self, request_id: str) -> None:
        """Note that a request has ended."""
        del self._open[request_id]
        self._split.end(request_id)
