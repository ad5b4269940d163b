"""Prefill and decode in different cores: which prompts go to a prefill core, and one stream of what both send.

A prefill core gets a request with a single token to generate, and sends it to the client at once. When it begins, a
decode core gets the whole request with the address at which the prefill core gives KV away; it draws the first token
again, which must be the same, bit for bit. Whatever becomes of the prefill core then, the decode core has all it needs.
"""

from __future__ import annotations

import dataclasses
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Final

import msgspec

from octavo.config.schema import EngineConfig
from octavo.core.messages import (
    AbortRequests,
    AddRequests,
    EngineCoreOutput,
    EngineCoreRequest,
    SequenceDelta,
    StepOutputs,
    StopSequence,
)
from octavo.core.outputs import RequestError, RequestMetrics
from octavo.core.sampling_params import SamplingParams
from octavo.engine.cores.dispatch import Dispatch, DispatchEntry, with_wait
from octavo.engine.cores.replica import Replica
from octavo.engine.cores.router import ROUTERS, Router, SentPrefixes
from octavo.kv_cache.block_hash import extend_chain

FIRST_GUESS: Final = 256
"""Tokens from which on a prompt is handed over while no speed is known."""

_log = logging.getLogger(__name__)


class SplitRates:
    """The speeds from which it follows how long a prompt must be for a handover to pay.

    min_tokens: given instead of that. tokens_per_s: prompt tokens that a core computes per second, where it is given.
    most_tokens: handovers of longer prompts pay, whatever was measured.
    """

    def __init__(self, min_tokens: int | None = None, tokens_per_s: float | None = None, most_tokens: int = 2048):
        self._min_tokens = min_tokens
        self._tokens_per_s = tokens_per_s
        self._is_given = tokens_per_s is not None
        self._most_tokens = most_tokens
        self._handover_s: float | None = None

    @property
    def min_tokens(self) -> int:
        """Return the fewest tokens whose computing would keep a decode core busy for longer than a handover delays the
        second token of the request."""
        if self._min_tokens is not None:
            return self._min_tokens
        if self._tokens_per_s is None or self._handover_s is None:
            return min(FIRST_GUESS, self._most_tokens)
        return max(1, min(self._most_tokens, int(self._tokens_per_s * self._handover_s)))

    def note_prefill(self, num_tokens: int, seconds: float) -> None:
        """Note how long a prefill core took for so many tokens."""
        if not self._is_given and num_tokens > 0 and seconds > 0:
            rate, before = num_tokens / seconds, self._tokens_per_s
            self._tokens_per_s = rate if before is None else before + (rate - before) / 8

    def note_handover(self, seconds: float) -> None:
        """Note by how much the decode core was later than the prefill core. Short times count at once, long ones by a
        tenth: they hold the waiting of a busy core, which handovers relieve."""
        before = self._handover_s
        self._handover_s = seconds if before is None else min(seconds, before + (seconds - before) / 10)


def make_split(config: EngineConfig, prefills: Sequence[Replica], dispatch: Dispatch) -> Split:
    """Return what divides requests among `prefills` and the cores of `dispatch`, as configured."""
    transfer, scheduler, block_size = config.transfer, config.scheduler, config.cache.block_size
    return Split(
        prefills,
        dispatch,
        ROUTERS[config.replicas.router](block_size),
        block_size=block_size,
        keep_s=transfer.kv_lease_s,
        rates=SplitRates(transfer.split_min_tokens, scheduler.prefill_tokens_per_s, scheduler.max_num_batched_tokens),
    )


def with_meeting_place(config: EngineConfig, directory: str) -> EngineConfig:
    """Return the configuration of cores that meet in a private directory and prove a secret of this start."""
    transfer = dataclasses.replace(config.transfer, kv_host=directory, secret=secrets.token_hex(32))
    return msgspec.structs.replace(config, transfer=transfer)


@dataclass(slots=True, eq=False)
class _Handover:
    """A request that a prefill core and a decode core compute.

    digests: of the full blocks of its prompt. decode: the core that it is sent to when the prompt is begun, unless that
    core is not ready then. is_prefilling: the prefill core has the request. is_kept: that core may hold its KV.
    firsts: what began each sequence, from the core that was first. decoded: the sequences of which the decode core has
    sent a token. held: those to stop there once it has.
    """

    entry: DispatchEntry
    digests: Sequence[bytes]
    source: Replica
    decode: Replica
    is_prefilling: bool = True
    is_kept: bool = True
    began_at: float | None = None
    first_at: float | None = None
    metrics: RequestMetrics | None = None
    firsts: dict[int, SequenceDelta] = field(default_factory=dict)
    decoded: set[int] = field(default_factory=set)
    held: list[StopSequence] = field(default_factory=list)


class Split:
    """The prefill cores, and the requests that are computed by both kinds of cores. `dispatch` has the decode cores."""

    def __init__(
        self,
        prefills: Sequence[Replica],
        dispatch: Dispatch,
        router: Router,
        *,
        block_size: int,
        keep_s: float = 30.0,
        rates: SplitRates | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """prefills: others may be added to them. router: chooses one. keep_s: how long one keeps a prompt for
        the decode core."""
        self.rates = rates or SplitRates()
        self._prefills = prefills
        self._dispatch = dispatch
        self._router = router
        self._block_size = block_size
        self._keep_s = keep_s
        self._clock = clock
        self._known = SentPrefixes()
        self._handovers: dict[str, _Handover] = {}

    # ---- requests ----

    def begin(self, batch: Sequence[DispatchEntry], decode: Replica) -> bool:
        """Send requests that belong together to a prefill core, if that pays for all of them; `decode` gets them later.
        Returns False when `decode` is to compute them alone, or when their prompts are begun already."""
        if any(each.was_sent or each.request_id in self._handovers for each in batch):
            return False
        prompts = [self._digests(each.request, each.request.prompt_token_ids) for each in batch]
        ready = [each for each in self._prefills if each.is_ready]
        pays = (self._pays(each.request, digests, decode) for each, digests in zip(batch, prompts, strict=True))
        if not ready or not all(pays):
            for digests in prompts:
                self._known.note(digests, decode.number)
            return False
        source = self._router.choose(batch[0].request, ready)
        for each, digests in zip(batch, prompts, strict=True):
            self._handovers[each.request_id] = _Handover(each, digests, source, decode)
            source.open()
        waited = [with_wait(each.request, self._clock()) for each in batch]
        source.client.send(AddRequests([_prefill_request(each, self._keep_s) for each in waited]))
        return True

    def _digests(self, request: EngineCoreRequest, token_ids: list[int]) -> list[bytes]:
        return extend_chain([], token_ids, self._block_size, request.cache_key)

    def _pays(self, request: EngineCoreRequest, digests: Sequence[bytes], decode: Replica) -> bool:
        if request.params.needs_whole_prompt or request.resumed:
            return False
        owners = takewhile(lambda number: number == decode.number, self._known.find(digests))
        num_cached = self._block_size * sum(1 for _ in owners)
        return len(request.prompt_token_ids) - num_cached >= self.rates.min_tokens

    def for_decode(self, request: EngineCoreRequest) -> EngineCoreRequest:
        """Return a request as a decode core gets it: with the address of the core that computes its prompt."""
        handover = self._handovers.get(request.request_id)
        if handover is None:
            return request
        if request.resumed:  # it needs nothing of its prompt's core any more
            self.end(request.request_id)
            return request
        metrics = request.metrics or RequestMetrics.begin(request.arrival_time)
        metrics.note(self._clock(), f"prompt begun by core {handover.source.number}")
        transfer = handover.source.client.ready.transfer if handover.is_kept else None
        return msgspec.structs.replace(request, prefill=transfer, metrics=metrics)

    def has(self, request_id: str) -> bool:
        """Return whether a request was sent to a prefill core, and has not ended."""
        return request_id in self._handovers

    def end(self, request_id: str) -> None:
        """Forget a request; a prefill core that has it ends it."""
        handover = self._handovers.pop(request_id, None)
        if handover is not None and handover.is_prefilling:
            handover.source.close()
            if handover.source.is_ready:
                handover.source.client.send(AbortRequests([request_id]))

    def holds(self, stop: StopSequence) -> bool:
        """Keep a message until the decode core has drawn the first token of its sequence, and so has the sequence.
        Returns False, without effect, when it has."""
        handover = self._handovers.get(stop.request_id)
        if handover is None or stop.index in handover.decoded:
            return False
        handover.held.append(stop)
        return True

    def forget(self) -> None:
        """Forget which prompts are in the caches of the decode cores."""
        self._known.clear()

    def lose(self, replica: Replica) -> list[DispatchEntry]:
        """Take its requests from a prefill core that has gone; return those that it had not begun. Decode cores have
        the others, and compute what they could not fetch."""
        lost = [each for each in self._handovers.values() if each.source is replica]
        not_begun = []
        for handover in lost:
            handover.is_kept = False
            if not handover.is_prefilling:
                continue
            handover.is_prefilling = False
            replica.close()
            if handover.began_at is None:
                del self._handovers[handover.entry.request_id]
                not_begun.append(handover.entry)
            else:
                handover.entry.num_deaths += not replica.is_draining
        return not_begun

    # ---- outputs ----

    def take(self, replica: Replica, step: StepOutputs) -> None:
        """Change the outputs of a step of either kind of core into what one core would have sent."""
        if replica.role == "prefill":
            self._take_begun(replica, step.began)
            step.began = []
            step.outputs = self._taken_from_prefill(replica, step.outputs)
            return
        for output in step.outputs:
            if output.finished:
                self._note_end(output.request_id, replica)
            if (handover := self._handovers.get(output.request_id)) is not None:
                self._take_decoded(handover, output, replica)

    def _note_end(self, request_id: str, replica: Replica) -> None:
        """Note that a decode core has what was generated, with which the next prompt of a conversation begins."""
        request = self._dispatch.to_resume(request_id)
        if request is not None and request.resumed:
            known = request.prompt_token_ids + request.resumed[0].token_ids
            self._known.note(self._digests(request, known), replica.number)

    def _take_begun(self, replica: Replica, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            handover = self._handovers.get(request_id)
            if handover is not None and handover.source is replica and handover.began_at is None:
                handover.began_at = self._clock()
                replica.count(num_handovers=1)
                self._dispatch.send_to([handover.entry], handover.decode)

    def _taken_from_prefill(self, replica: Replica, outputs: Sequence[EngineCoreOutput]) -> list[EngineCoreOutput]:
        taken: list[EngineCoreOutput] = []
        refused: list[_Handover] = []
        for output in outputs:
            handover = self._handovers.get(output.request_id)
            if handover is None or handover.source is not replica or not handover.is_prefilling:
                continue  # it has ended, or goes on from what a decode core has drawn
            if output.finished:
                handover.is_prefilling = False
                replica.close()
            if output.finished and not output.deltas and output.error is None:  # a pause has aborted it
                self._abort_decode(handover)
                taken.append(output)
            elif output.error is None:
                taken += self._first_tokens(handover, output)
            elif handover.began_at is None:
                del self._handovers[output.request_id]
                refused.append(handover)
            # the decode core computes what failed here
        if refused:
            self._dispatch.send_to([each.entry for each in refused], refused[0].decode)
        return taken

    def _first_tokens(self, handover: _Handover, output: EngineCoreOutput) -> list[EngineCoreOutput]:
        """Return the output with first tokens that the client gets from the prefill core: of a beam search none."""
        params, now = handover.entry.request.params, self._clock()
        if handover.began_at is not None and handover.first_at is None:
            num_tokens = len(handover.entry.request.prompt_token_ids) - output.num_cached_tokens
            self.rates.note_prefill(num_tokens - output.num_fetched_tokens, now - handover.began_at)
        if params.use_beam_search:
            return []
        handover.first_at, handover.metrics = now, output.metrics
        deltas = []
        for delta in output.deltas:
            if params.max_tokens != 1 and delta.finish_reason == "length":
                delta.finish_reason = None  # only this core was to draw no further token
            if delta.index not in handover.decoded:
                handover.firsts[delta.index] = delta
                deltas.append(delta)
            elif self._differ(handover, handover.firsts[delta.index], delta):
                return [EngineCoreOutput.failed(output.request_id, self._failure(handover, handover.source))]
        is_over = len(deltas) == params.width and all(delta.finish_reason is not None for delta in deltas)
        if is_over:
            self._abort_decode(handover)
            output.deltas = deltas
            return [output]
        version = output.weight_version
        return [EngineCoreOutput(request_id=output.request_id, deltas=deltas, finished=False, weight_version=version)]

    def _take_decoded(self, handover: _Handover, output: EngineCoreOutput, replica: Replica) -> None:
        """Take away the first tokens that the client has, and compare them with those."""
        if output.metrics is not None and handover.metrics is not None:
            output.metrics.first_scheduled_time = handover.metrics.first_scheduled_time
            output.metrics.first_token_time = handover.metrics.first_token_time
        if not output.deltas or len(handover.decoded) == handover.entry.request.params.width:
            return
        if replica.suspect != output.request_id:
            handover.entry.num_deaths = 0  # past the prompt with which a prefill core may have died
        if not handover.decoded:
            self._known.note(handover.digests, replica.number)
            if handover.first_at is not None:
                self.rates.note_handover(self._clock() - handover.first_at)
        deltas = []
        for delta in output.deltas:
            first = delta
            if delta.token_ids and delta.index not in handover.decoded:
                handover.decoded.add(delta.index)
                for stop in handover.held:
                    if stop.index == delta.index:
                        replica.client.send(stop)
                first = handover.firsts.setdefault(delta.index, delta)
            if first is delta:
                deltas.append(delta)
                continue
            if self._differ(handover, first, delta):
                output.deltas, output.finished, output.error = [], True, self._failure(handover, replica)
                return
            rest = msgspec.structs.replace(delta, token_ids=delta.token_ids[1:], logprobs=delta.logprobs[1:])
            if rest.token_ids or (rest.finish_reason is not None and first.finish_reason is None):
                deltas.append(rest)
        output.deltas = deltas

    def _differ(self, handover: _Handover, first: SequenceDelta, second: SequenceDelta) -> bool:
        """Return whether the first tokens of a sequence, or their log-probabilities, differ between both cores."""
        if first.token_ids[0] == second.token_ids[0] and first.logprobs[:1] == second.logprobs[:1]:
            return False
        _log.error(
            "request %s: sequence %d begins with %s in the core that was first, and with %s in the other one: KV that "
            "core %d handed over, or what was computed of it, is wrong",
            *(handover.entry.request_id, first.index, _shown(first), _shown(second), handover.source.number),
        )
        return True

    def _failure(self, handover: _Handover, replica: Replica) -> RequestError:
        """End a request of which the client has a token that may be wrong; return the error of its last output."""
        replica.count(num_handover_mismatches=1)
        self.forget()  # what the decode core has may be wrong: its next use is compared, too
        self._abort_decode(handover)
        return RequestError(
            f"request {handover.entry.request_id}: prefill and decode cores drew different first tokens, and the "
            "client has one of them; send it again, and see the log of the server",
            code="handover_mismatch",
            public_message="engines that share the request drew different first tokens; send it again",
        )

    def _abort_decode(self, handover: _Handover) -> None:
        replica = handover.entry.replica
        if replica is not None and replica.is_ready:
            replica.client.send(AbortRequests([handover.entry.request_id]))


def _prefill_request(request: EngineCoreRequest, keep_s: float) -> EngineCoreRequest:
    """Return the request for the prompt and the first tokens alone. Those of a beam search are not used."""
    params = request.params
    if params.use_beam_search:
        params = SamplingParams(max_tokens=1, temperature=0.0, seed=params.seed)
    else:
        params = msgspec.structs.replace(params, max_tokens=1, min_tokens=min(1, params.min_tokens))
    return msgspec.structs.replace(request, params=params, keep_s=keep_s)


def _shown(delta: SequenceDelta) -> str:
    logprob = delta.logprobs[0].logprob if delta.logprobs else None
    return f"token {delta.token_ids[0]} (log-probability {logprob})"
