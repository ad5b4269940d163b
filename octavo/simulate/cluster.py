"""Replicas behind a router, and the loop of events that moves all of them through one time.

Events are arrivals, the ends of steps, and the arrivals of transferred keys and values. With separate pools a prompt is
computed by one replica, which makes the first token; its keys and values travel, and another makes the rest. Where a
request has several sequences, or beams, that other one draws their first tokens too, from the prompt's last token.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from octavo.core.messages import EngineCoreOutput, EngineCoreRequest
from octavo.simulate.executor import Script
from octavo.simulate.replica import Replica
from octavo.simulate.router import Router
from octavo.simulate.traces import Trace


class Disaggregation(msgspec.Struct, frozen=True, kw_only=True):
    """How many replicas compute prompts, and how keys and values get from them to the others: what one of them sends
    goes one after the other at `bytes_per_s`, and arrives `latency_s` later."""

    num_prefill: int
    bytes_per_s: float = 25e9
    latency_s: float = 1e-3


class RequestRecord(msgspec.Struct, gc=False):
    """What became of one request; times in seconds since the begin. `error` is None for those that were served.

    num_output_tokens: of all its sequences together, those that best_of drops too; of a beam search, its width times
    the length of its longest answer.
    """

    number: int
    arrival_s: float
    first_scheduled_s: float | None = None
    first_token_s: float | None = None
    finished_s: float = 0.0
    num_sequences: int = 1
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    replica: int = 0
    error: str | None = None


class Sample(msgspec.Struct, gc=False, array_like=True):
    """State at one time, added up over replicas; `kv_usage` is a sum of shares too. Those that are swapped out do not
    count as waiting."""

    time_s: float
    num_running: int
    num_waiting: int
    num_swapped: int
    kv_usage: float
    max_kv_usage: float


class Outcome(msgspec.Struct):
    """All of a simulation, for the report. num_steps and busy_s are added up over replicas. gaps: see `TokenGaps`."""

    records: list[RequestRecord]
    samples: list[Sample]
    num_replicas: int
    num_steps: int
    busy_s: float
    num_preemptions: int
    num_swapped_blocks: int
    num_recomputed_tokens: int
    gaps: dict[int, int]


class _Open(NamedTuple):
    record: RequestRecord
    script: Script
    request: EngineCoreRequest
    is_prefill: bool


MAX_SAMPLES = 512
"""When there are more, every second one is dropped, and from then on half as many are taken."""


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
        self._events: list[tuple[float, int, int, int]] = []
        self._num_events = 0
        self._open: dict[str, _Open] = {}
        self._link_free_at = [0.0] * len(self._front)
        self._places = {replica.number: place for place, replica in enumerate(self._replicas)}
        self._numbers_by_id = {trace.ids[number]: number for number in self._numbers}
        self._waking: set[int] = set()
        self._records: list[RequestRecord] = []
        self._samples: list[Sample] = []
        self._sample_every_s = max(trace.last_arrival_s, 1.0) / 128

    def run(self, progress: Callable[[float], None] | None = None) -> Outcome:
        """Until every request has ended. `progress` is called with the share of them that have."""
        for number in self._numbers:
            traced = self._trace.requests[number]
            if traced.follows is None:
                self._push(traced.arrival_s, _ARRIVAL, number)
        events = self._events
        next_sample = 0.0
        while events:
            now, kind, _, number = heapq.heappop(events)
            while next_sample <= now:
                self._sample(next_sample)
                next_sample += self._sample_every_s
            if kind == _STEP_ENDS:
                replica = self._replicas[number]
                for output in replica.end_step():
                    self._finish(replica, output, now)
                if progress is not None:
                    progress(len(self._records) / len(self._numbers))
                self._step(replica, now)
            elif kind == _WAKE:
                self._step(self._replicas[number], now)
            elif kind == _ARRIVAL:
                self._arrive(number, now)
            else:
                self._arrive_transferred(number, now)
        assert not self._open, "requests are left without an event"
        stats = [replica.scheduler.stats() for replica in self._replicas]
        return Outcome(
            records=sorted(self._records, key=lambda record: record.number),
            samples=self._samples,
            num_replicas=len(self._replicas),
            num_steps=sum(each.num_steps for each in stats),
            busy_s=sum(replica.executor.busy_s for replica in self._replicas),
            num_preemptions=sum(each.num_preemptions for each in stats),
            num_swapped_blocks=sum(each.num_swapped_blocks for each in stats),
            num_recomputed_tokens=sum(each.num_recomputed_tokens for each in stats),
            gaps=dict(sum((replica.executor.gaps.counts for replica in self._replicas), Counter[int]())),
        )

    def _push(self, at: float, kind: int, number: int) -> None:
        # at equal times arrivals come before steps, and then in the order in which they came up: the same run each time
        self._num_events += 1
        heapq.heappush(self._events, (at, kind, self._num_events, number))

    def _step(self, replica: Replica, now: float) -> None:
        self._waking.discard(replica.number)
        ends_at = replica.begin_step(now)
        if ends_at is not None:
            self._push(ends_at, _STEP_ENDS, self._places[replica.number])

    def _submit(self, replica: Replica, request: EngineCoreRequest, script: Script, now: float) -> None:
        replica.submit(request, script)
        if not replica.is_stepping and replica.number not in self._waking:
            # not at once: others may arrive at this very time
            self._waking.add(replica.number)
            self._push(now, _WAKE, self._places[replica.number])

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
        replica = self._front[self._router.choose(request, self._front)]
        self._submit(replica, request, script, now)

    def _arrive_transferred(self, number: int, now: float) -> None:
        opened = self._open[self._trace.ids[number]]
        request, script = opened.request, opened.script
        params = request.params
        assert params.max_tokens is not None, "max_tokens is resolved"
        num_prompt = len(request.prompt_token_ids)
        if params.width == 1:
            request = msgspec.structs.replace(
                request,
                prompt_token_ids=[*request.prompt_token_ids, script.token],
                params=msgspec.structs.replace(params, max_tokens=params.max_tokens - 1),
            )
            script = Script(script.output_len(0) - 1, script.token, num_prompt)
        else:
            # its sequences part at the first token, which is drawn from the last token of the prompt
            script = Script(script.output_lens, script.token, num_prompt - 1)
        assert self._decode_router is not None
        replica = self._back[self._decode_router.choose(request, self._back)]
        self._submit(replica, request, script, now)

    def _finish(self, replica: Replica, output: EngineCoreOutput, now: float) -> None:
        opened = self._open[output.request_id]
        record, metrics = opened.record, output.metrics
        if output.error is None:
            assert metrics is not None
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
            self._push(now + self._trace.requests[follower].arrival_s, _ARRIVAL, follower)

    def _transfer(self, opened: _Open, replica: Replica, now: float) -> None:
        assert self._disaggregation is not None
        place = self._places[replica.number]
        num_bytes = opened.record.num_prompt_tokens * self._kv_bytes_per_token
        sent_at = max(now, self._link_free_at[place]) + num_bytes / self._disaggregation.bytes_per_s
        self._link_free_at[place] = sent_at
        arrives_at = sent_at + self._disaggregation.latency_s
        self._open[opened.request.request_id] = opened._replace(is_prefill=False)
        self._push(arrives_at, _TRANSFERRED, opened.record.number)

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


_ARRIVAL, _TRANSFERRED, _STEP_ENDS, _WAKE = range(4)


def _num_output_tokens(opened: _Open, output: EngineCoreOutput) -> int:
    params = opened.request.params
    if params.use_beam_search:
        return params.width * max((len(delta.token_ids) for delta in output.deltas), default=0)
    return sum(opened.script.output_len(index) for index in range(params.width))
