"""Replicas behind a router, and the loop of events that moves all of them through one time.

Events are arrivals, the ends of steps, and the arrivals of transferred keys and values. With separate pools a prompt is
computed by one replica, which makes the first token; its keys and values travel, and another makes the rest. Where a
request has several sequences, or beams, that other one draws their first tokens too, from the prompt's last token.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Final

import msgspec

from octavo.core.messages import EngineCoreOutput, EngineCoreRequest
from octavo.engine.router import Router
from octavo.simulate.executor import Script
from octavo.simulate.outcome import Outcome, RequestRecord, Sample, Totals
from octavo.simulate.replica import Replica
from octavo.simulate.traces import Trace

MAX_SAMPLES: Final = 512
"""When there are more, every second one is dropped, and from then on half as many are taken."""
_ARRIVAL, _TRANSFERRED, _STEP_ENDS, _WAKE = range(4)
"""The order of events at the same time."""


class Disaggregation(msgspec.Struct, frozen=True, kw_only=True):
    """The number of replicas that compute prompts, and how keys and values get from them to the others.

    A replica sends one prompt after the other at `bytes_per_s`; each arrives `latency_s` later.
    """

    num_prefill: int
    bytes_per_s: float = 25e9
    latency_s: float = 1e-3


@dataclass(slots=True)
class _Open:
    """A request that has not ended. `is_prefill`: a replica computes its prompt alone."""

    record: RequestRecord
    script: Script
    request: EngineCoreRequest
    is_prefill: bool


class Cluster:
    """One simulation of a trace, or of the requests `numbers` of it. `run` may be called once."""

    def __init__(
        self,
        trace: Trace,
        replicas: Sequence[Replica],
        router: Router,
        *,
        numbers: Sequence[int] | None = None,
        disaggregation: Disaggregation | None = None,
        decode_router: Router | None = None,
        kv_bytes_per_token: float = 0.0,
    ) -> None:
        assert (disaggregation is None) == (decode_router is None), "decode pools have a router of their own"
        self._trace = trace
        self._numbers = range(len(trace)) if numbers is None else numbers
        self._replicas = list(replicas)
        self._router = router
        self._disaggregation = disaggregation
        self._decode_router = decode_router
        self._kv_bytes_per_token = kv_bytes_per_token
        num_prefill = disaggregation.num_prefill if disaggregation is not None else len(self._replicas)
        self._front, self._back = self._replicas[:num_prefill], self._replicas[num_prefill:]
        self._events: list[tuple[float, int, int, Callable[[float], None]]] = []
        self._event_numbers = count()
        self._open: dict[str, _Open] = {}
        self._link_free_at = {replica.number: 0.0 for replica in self._front}
        self._waking: set[int] = set()
        self._records: list[RequestRecord] = []
        self._samples: list[Sample] = []
        self._sample_every_s = max(trace.last_arrival_s, 1.0) / 128
        self._next_sample_s = 0.0
        self._on_finish: Callable[[float], None] = lambda share: None

    def run(self, progress: Callable[[float], None] | None = None) -> Outcome:
        """Run until every request has ended. `progress` is called with the share of them that have."""
        self._on_finish = progress or self._on_finish
        for number in self._numbers:
            traced = self._trace.requests[number]
            if traced.follows is None:
                self._push_arrival(traced.arrival_s, number)
        while self._events:
            now, _, _, happen = heapq.heappop(self._events)
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
        # among events of one kind and time the first comes first: every run is the same
        heapq.heappush(self._events, (at, kind, next(self._event_numbers), event))

    def _push_arrival(self, at: float, number: int) -> None:
        self._push(at, _ARRIVAL, lambda now: self._arrive(number, now))

    def _step(self, replica: Replica, now: float) -> None:
        self._waking.discard(replica.number)
        ends_at = replica.begin_step(now)
        if ends_at is not None:
            self._push(ends_at, _STEP_ENDS, lambda now: self._end_step(replica, now))

    def _end_step(self, replica: Replica, now: float) -> None:
        for output in replica.end_step():
            self._finish(replica, output, now)
        self._on_finish(len(self._records) / len(self._numbers))
        self._step(replica, now)

    def _submit(self, replica: Replica, request: EngineCoreRequest, script: Script, now: float) -> None:
        replica.submit(request, script)
        if not replica.is_stepping and replica.number not in self._waking:
            # not at once: others may arrive at this very time
            self._waking.add(replica.number)
            self._push(now, _WAKE, lambda now: self._step(replica, now))

    def _arrive(self, number: int, now: float) -> None:
        request, script = self._trace.request(number, now)
        record = RequestRecord(
            number=number,
            arrival_s=now,
            num_sequences=request.params.width,
            num_prompt_tokens=len(request.prompt_token_ids),
        )
        self._open[request.request_id] = _Open(record, script, request, self._disaggregation is not None)
        if self._disaggregation is not None:
            # the prompt's replica makes the first token; more only if that ends it
            params = msgspec.structs.replace(request.params, max_tokens=1, n=1, best_of=None, use_beam_search=False)
            request = msgspec.structs.replace(request, params=params)
        self._submit(self._router.choose(request, self._front), request, script, now)

    def _arrive_transferred(self, opened: _Open, now: float) -> None:
        request, script, params = opened.request, opened.script, opened.request.params
        assert params.max_tokens is not None, "max_tokens is resolved"
        assert self._decode_router is not None, "only pools transfer"
        num_prompt = len(request.prompt_token_ids)
        if params.width == 1:
            request = msgspec.structs.replace(
                request,
                prompt_token_ids=[*request.prompt_token_ids, script.token],
                params=msgspec.structs.replace(params, max_tokens=params.max_tokens - 1),
            )
            script = Script([script.output_len(0) - 1], script.token, num_prompt)
        else:
            # its sequences part at the first token, which is drawn from the last token of the prompt
            script = Script(script.output_lens, script.token, num_prompt - 1)
        self._submit(self._decode_router.choose(request, self._back), request, script, now)

    def _finish(self, replica: Replica, output: EngineCoreOutput, now: float) -> None:
        opened = self._open[output.request_id]
        record, metrics = opened.record, output.metrics
        if output.error is None:
            assert metrics is not None, "a served request has its times"
            record.num_preemptions += metrics.num_preemptions
            if record.first_token_s is None:
                record.first_scheduled_s, record.first_token_s = metrics.first_scheduled_time, metrics.first_token_time
                record.num_cached_tokens = output.num_cached_tokens
            if opened.is_prefill and max(opened.script.output_lens) > 1:
                self._transfer(opened, replica, now)
                return
            record.num_output_tokens = _num_output_tokens(opened, output)
        else:
            record.error = output.error.message
        del self._open[output.request_id]
        self._records.append(record)
        record.finished_s, record.replica = now, replica.number
        for follower in self._trace.followers.get(record.number, ()):
            self._push_arrival(now + self._trace.requests[follower].arrival_s, follower)

    def _transfer(self, opened: _Open, replica: Replica, now: float) -> None:
        assert self._disaggregation is not None, "only pools transfer"
        num_bytes = opened.record.num_prompt_tokens * self._kv_bytes_per_token
        begins_at = max(now, self._link_free_at[replica.number])
        self._link_free_at[replica.number] = sent_at = begins_at + num_bytes / self._disaggregation.bytes_per_s
        opened.is_prefill = False
        arrives_at = sent_at + self._disaggregation.latency_s
        self._push(arrives_at, _TRANSFERRED, lambda now: self._arrive_transferred(opened, now))

    def _sample(self, now: float) -> None:
        usages = [replica.kv_usage for replica in self._replicas]
        self._samples.append(
            Sample(
                now,
                sum(replica.num_running for replica in self._replicas),
                sum(replica.num_waiting for replica in self._replicas),
                sum(replica.num_swapped for replica in self._replicas),
                sum(usages),
                max(usages),
            )
        )
        if len(self._samples) > MAX_SAMPLES:
            del self._samples[1::2]
            self._sample_every_s *= 2


def _num_output_tokens(opened: _Open, output: EngineCoreOutput) -> int:
    params = opened.request.params
    if params.use_beam_search:
        return params.width * max((len(delta.token_ids) for delta in output.deltas), default=0)
    return sum(opened.script.output_len(index) for index in range(params.width))
