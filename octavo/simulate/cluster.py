"""Simulates replicas behind a router with an event loop over one simulated clock.

Events are arrivals of requests, ends of steps, and arrivals of keys and values. With separate pools the `Split` of
a server's front sends prompts to some replicas first, and others fetch their blocks (`link.py`).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Final, cast

import msgspec

from octavo.core.messages import AddRequests, EngineCoreOutput, EngineCoreRequest, SchedulerStats, StepOutputs
from octavo.core.resume import ResumedSequence
from octavo.engine.cores.dispatch import DispatchEntry
from octavo.engine.cores.router import Router
from octavo.simulate.executor import Script
from octavo.simulate.outcome import Outcome, RequestRecord, Sample, Totals
from octavo.simulate.replica import SimulatedReplica
from octavo.simulate.traces import Trace

if TYPE_CHECKING:
    from octavo.engine.cores.dispatch import Dispatch
    from octavo.engine.cores.replica import Replica
    from octavo.engine.cores.split import Split

MAX_SAMPLES: Final = 512
"""Most samples: beyond it every second one is dropped, and from then on half as many are taken."""
_ARRIVAL, _STEP_ENDS, _WAKE = range(3)
"""The order of events at the same time."""
_UNKNOWN: Final = SchedulerStats()


@dataclass(slots=True)
class _Open:
    """A request that has not ended."""

    record: RequestRecord
    script: Script
    entry: DispatchEntry


class Cluster:
    """One simulation of a trace, or of the requests `numbers` of it. `run` may be called once.

    router: chooses one of the replicas without a link, which are all except those that compute prompts for others.
    make_split: makes the `Split` that sends prompts to the latter, from the `Dispatch` to the former and a clock.
    """

    def __init__(
        self,
        trace: Trace,
        replicas: Sequence[SimulatedReplica],
        router: Router,
        *,
        numbers: Sequence[int] | None = None,
        make_split: Callable[[Dispatch, Callable[[], float]], Split] | None = None,
    ) -> None:
        self._trace = trace
        self._numbers = range(len(trace)) if numbers is None else numbers
        self._replicas = list(replicas)
        self._router = router
        self._decoding = [each for each in replicas if each.link is None]
        self._now = 0.0
        self._split = None if make_split is None else make_split(cast("Dispatch", self), lambda: self._now)
        for replica in replicas:
            replica.script_of = lambda request_id: self._open[request_id].script
            replica.wake = partial(self._wake, replica)
        self._events: list[tuple[float, int, int, Callable[[float], None]]] = []
        self._event_numbers = count()
        self._open: dict[str, _Open] = {}
        self._records: list[RequestRecord] = []
        self._samples: list[Sample] = []
        last_arrival_s = max(request.arrival_s for request in trace.requests if request.follows is None)
        self._sample_every_s = max(last_arrival_s, 1.0) / 128
        self._next_sample_s = 0.0
        self._on_finish: Callable[[float], None] = lambda share: None

    def run(self, progress: Callable[[float], None] | None = None) -> Outcome:
        """Run until every request has ended. `progress` is called with the share of ended requests, 0 to 1."""
        self._on_finish = progress or self._on_finish
        for number in self._numbers:
            traced = self._trace.requests[number]
            if traced.follows is None:
                self._push_arrival(traced.arrival_s, number)
        while self._events:
            now, _, _, happen = heapq.heappop(self._events)
            self._now = now
            while self._next_sample_s <= now:
                self._sample(self._next_sample_s)
                self._next_sample_s += self._sample_every_s
            happen(now)
        assert not self._open, "requests are left without an event"
        return Outcome(
            records=sorted(self._records, key=lambda record: record.number),
            samples=self._samples,
            num_replicas=len(self._replicas),
            totals=Totals.sum([replica.totals() for replica in self._replicas]),
        )

    def _push(self, at: float, kind: int, event: Callable[[float], None]) -> None:
        # events of the same kind and time are handled in order of creation, so every run is the same
        heapq.heappush(self._events, (at, kind, next(self._event_numbers), event))

    def _push_arrival(self, at: float, number: int) -> None:
        self._push(at, _ARRIVAL, lambda now: self._arrive(number, now))

    def _step(self, replica: SimulatedReplica, now: float) -> None:
        if replica.is_stepping:
            return
        ends_at = replica.begin_step(now)
        if self._split is not None and (began := replica.take_began()):
            self._split.take(_served(replica), StepOutputs(outputs=[], stats=_UNKNOWN, began=began))
        if ends_at is not None:
            self._push(ends_at, _STEP_ENDS, lambda now: self._end_step(replica, now))

    def _end_step(self, replica: SimulatedReplica, now: float) -> None:
        outputs = replica.end_step()
        if self._split is not None:
            step = StepOutputs(outputs=outputs, stats=_UNKNOWN)
            self._split.take(_served(replica), step)
            outputs = step.outputs
        for output in outputs:
            if output.finished:
                self._finish(replica, output, now)
        self._on_finish(len(self._records) / len(self._numbers))
        self._step(replica, now)

    def _wake(self, replica: SimulatedReplica, at: float | None = None) -> None:
        # not at once: other requests may arrive at the same time
        self._push(self._now if at is None else at, _WAKE, lambda now: self._step(replica, now))

    def _arrive(self, number: int, now: float) -> None:
        request, script = self._trace.request(number, now)
        record = RequestRecord(
            number=number,
            arrival_s=now,
            num_sequences=request.params.width,
            num_prompt_tokens=len(request.prompt_token_ids),
        )
        entry = DispatchEntry(request)
        self._open[request.request_id] = _Open(record, script, entry)
        replica = _served(self._router.choose(request, self._decoding))
        if self._split is None or not self._split.begin([entry], replica):
            self.send_to([entry], replica)

    # ---- the methods of the front's `Dispatch` that `Split` uses ----

    def send_to(self, batch: Sequence[DispatchEntry], replica: Replica) -> None:
        """Send requests to a replica that decodes."""
        for entry in batch:
            entry.replica = replica
            request = entry.request if self._split is None else self._split.for_decode(entry.request)
            replica.client.send(AddRequests([request]))

    def to_resume(self, request_id: str) -> EngineCoreRequest | None:
        """Return an open request together with the tokens that it will generate; None if it is not open."""
        if (opened := self._open.get(request_id)) is None:
            return None
        script = opened.script
        token_ids = [script.output_token(0, place) for place in range(script.output_len(0) - 1)]
        resumed = ResumedSequence(index=0, token_ids=token_ids)
        return msgspec.structs.replace(opened.entry.request, resumed=(resumed,))

    def _finish(self, replica: SimulatedReplica, output: EngineCoreOutput, now: float) -> None:
        opened = self._open.pop(output.request_id, None)
        if opened is None:
            return  # its first token was its last, and it is being aborted where it would have been decoded
        if self._split is not None:
            self._split.end(output.request_id)
        record, metrics = opened.record, output.metrics
        if output.error is None:
            assert metrics is not None, "a served request has its times"
            record.num_preemptions, record.num_cached_tokens = metrics.num_preemptions, output.num_cached_tokens
            record.first_scheduled_s, record.first_token_s = metrics.first_scheduled_time, metrics.first_token_time
            record.num_output_tokens = _num_output_tokens(opened, output)
        else:
            record.error = output.error.message
        self._records.append(record)
        record.finished_s, record.replica = now, replica.number
        for follower in self._trace.followers.get(record.number, ()):
            self._push_arrival(now + self._trace.requests[follower].arrival_s, follower)

    def _sample(self, now: float) -> None:
        self._samples.append(Sample.sum(now, [replica.sample(now) for replica in self._replicas]))
        if len(self._samples) > MAX_SAMPLES:
            del self._samples[1::2]
            self._sample_every_s *= 2


def _served(replica: SimulatedReplica) -> Replica:
    """Return a replica with the type that `Split` expects: it has the members that `Split` uses."""
    return cast("Replica", replica)


def _num_output_tokens(opened: _Open, output: EngineCoreOutput) -> int:
    params = opened.entry.request.params
    if params.use_beam_search:
        return params.width * max((len(delta.token_ids) for delta in output.deltas), default=0)
    return sum(opened.script.output_len(index) for index in range(params.width))
