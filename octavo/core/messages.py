"""The messages between the front (text, HTTP) and the engine core (tokens, blocks).

In one process the structs are passed as they are, between processes as MessagePack. Those that are sent once per token
omit fields with default values: half the bytes, and a fifth less time.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import zip_longest
from typing import Final

import msgspec

from octavo import errors
from octavo.core.arithmetic import num_blocks_for
from octavo.core.cache_key import CacheKey, Placeholder
from octavo.core.cache_limits import CacheLimits
from octavo.core.media import MediaInput, views_of
from octavo.core.outputs import RequestError, RequestMetrics
from octavo.core.pooling import PooledPrompt
from octavo.core.request_options import RequestOptions
from octavo.core.resume import ResumedSequence
from octavo.core.sampling_params import SamplingParams
from octavo.core.step import PromptLogprobs, SchedulerOutput, TokenLogprobs
from octavo.core.step_times import PartTime


class EngineCoreRequest(RequestOptions, kw_only=True):
    """An accepted request with its options: everything is resolved and within limits.

    params: `max_tokens` and `seed` are set.
    end_token_ids: end-of-sequence ids of the model (empty when `ignore_eos`); `params.stop_token_ids` come on top.
    bad_words_token_ids: the token sequences that `params.bad_words` stand for.
    arrival_time: seconds on the monotonic clock. waited_s: seconds after it in which no core was ready.
    placeholders: runs of prompt tokens that stand for other content, such as images, in order and without overlap.
    media: that content, for the workers.
    cache_namespace, adapter: as in `CacheKey`; adapter is the key of `lora_request`.
    resumed: all its sequences in order, when tokens of it were drawn before: the core goes on as if it had drawn them,
        and its outputs hold only what is new. The log-probabilities of its prompt are not computed again.
    metrics: of a request that another core has accepted before: this one does not refuse it for its load.
    num_cached_tokens: of its prompt, where that was computed before.
    keep_s: seconds for which the KV of its prompt stays in the cache after its end, for another engine.
    pooled: of a request for a vector, which ends with its prompt: its `max_tokens` is 1.
    prediction_token_ids: what its output probably is.
    prefill: where that engine gives KV blocks away that this one fetches: host:port, or the path of a Unix socket.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    arrival_time: float
    end_token_ids: tuple[int, ...] = ()
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    adapter: str | None = None
    placeholders: tuple[Placeholder, ...] = ()
    media: tuple[MediaInput, ...] = ()
    cache_namespace: str | None = None
    resumed: tuple[ResumedSequence, ...] = ()
    metrics: RequestMetrics | None = None
    num_cached_tokens: int = 0
    waited_s: float = 0.0
    keep_s: float = 0.0
    prediction_token_ids: list[int] = []
    prefill: str | None = None
    pooled: PooledPrompt | None = None

    @property
    def first_token_deadline(self) -> float | None:
        """When the first token is due, on the clock of `arrival_time`."""
        return None if self.first_token_deadline_s is None else self.arrival_time + self.first_token_deadline_s

    @property
    def cache_key(self) -> CacheKey:
        """Return what decides, besides the tokens, which requests share KV blocks."""
        return CacheKey(self.cache_salt, self.adapter, self.placeholders, self.cache_namespace)

    def num_encoded_blocks(self, block_size: int) -> int:
        """Return the blocks that encoders' outputs take which layers read through caches."""
        views = views_of(self.media, block_size)
        return num_blocks_for(views[-1].end, block_size) if views else 0

    def continued(
        self, sequences: Iterable[ResumedSequence], metrics: RequestMetrics, num_cached_tokens: int, now: float
    ) -> EngineCoreRequest:
        """Return the request with what its sequences have produced, for another core."""
        metrics = metrics.copy()
        metrics.note(now, "resumed")
        resumed = tuple(sequences)
        has_tokens = any(each.token_ids for each in resumed)
        return msgspec.structs.replace(
            self, resumed=resumed if has_tokens else (), metrics=metrics, num_cached_tokens=num_cached_tokens
        )


def id_in_use(request_id: str) -> errors.InvalidRequest:
    """Return the error of a request whose id another open one has."""
    return errors.InvalidRequest(
        f"request id {request_id!r} is in use; give another", field="request_id", code="duplicate_id"
    )


class AddRequests(msgspec.Struct, frozen=True, tag="add"):
    """Requests of which the core accepts all or refuses all."""

    requests: list[EngineCoreRequest]


class AbortRequests(msgspec.Struct, frozen=True, tag="abort"):
    """Ends these requests. No output follows for them."""

    request_ids: list[str]


class StopSequence(msgspec.Struct, frozen=True, tag="stop"):
    """Ends one sequence, in whose text a stop string was found; its siblings go on."""

    request_id: str
    index: int


class Call(msgspec.Struct, frozen=True, tag="call"):
    """A named control call."""

    call_id: int
    """Its `CallResult` has the same id."""
    method: str
    """`stats`, `reset_prefix_cache`, …."""
    arguments: list[str | int | float | bool | list[int] | None] = []


PING: Final = "ping"
"""The call to which the core process responds as soon as it reads it, whatever the core computes."""


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """Ends the core process; running requests are dropped."""


class Wake(msgspec.Struct, frozen=True, tag="wake"):
    """Ends a wait of the core: a KV transfer has news. The core's own threads send it."""


ToCore = AddRequests | AbortRequests | StopSequence | Call | Shutdown


class SequenceDelta(msgspec.Struct, kw_only=True, omit_defaults=True, gc=False):
    """What one step added to one sequence. finish_reason: as in `CompletionOutput`."""

    index: int
    token_ids: list[int]
    logprobs: list[TokenLogprobs]
    finish_reason: str | None = None
    stop_reason: int | None = None


class EngineCoreOutput(msgspec.Struct, kw_only=True, omit_defaults=True, gc=False):
    """What one step produced for one request. `finished` is True in exactly one output of every accepted request.

    `metrics` come with the last output, and before it whenever something has happened since they last came: the front
    may end the request by a stop string before the core does. With them comes `cache_miss_reason`: why not more of the
    prompt was in the prefix cache, empty when nothing more could be.
    num_fetched_tokens: of the prompt, those whose KV came from another engine or a tier, beside the cached ones.
    pooled: the values of the vector, float32.
    weight_version: the label of the weights that drew its tokens; None before a label is given.
    """

    request_id: str
    deltas: list[SequenceDelta]
    finished: bool
    prompt_logprobs: PromptLogprobs | None = None
    num_cached_tokens: int = 0
    num_fetched_tokens: int = 0
    cache_miss_reason: str = ""
    error: RequestError | None = None
    metrics: RequestMetrics | None = None
    pooled: bytes | None = None
    weight_version: str | None = None

    @classmethod
    def failed(cls, request_id: str, error: RequestError, metrics: RequestMetrics | None = None) -> EngineCoreOutput:
        """Return the last output of a request that ended with an error."""
        return cls(request_id=request_id, deltas=[], finished=True, error=error, metrics=metrics)


MOST_ADAPTER_NAMES: Final = 64
"""Names of adapters that a report of a step has at most of those that wait, of which there may be thousands."""


class SchedulerStats(msgspec.Struct, kw_only=True):
    """The state of the engine after a step. The fields from `num_steps` on are totals since the start, those before it
    are current values. Of several replicas it is the sum.

    num_ready: cores that work; the front counts them. num_paused, num_sleeping: cores that are paused, or asleep.
    num_restarts: times that a core was started again after its
    death, num_resumed: requests that went on after one, num_handovers: prompts that prefill cores began to compute for
    decode cores, and num_handover_mismatches: those whose first tokens differed; the front counts these too.
    num_drafts: rows that verified guesses, num_draft_tokens: those guesses, num_accepted_tokens: the right ones among
    them, and accepted_per_position: how many of these were the first of their row, the second, and so on.
    max_adapters: slots for adapters, 0 where the engine takes none; running_adapters and waiting_adapters: the names of
    those that requests with blocks on the device have, and of the first of the num_waiting_adapters that others wait
    with (`MOST_ADAPTER_NAMES`).
    """

    num_ready: int = 1
    num_paused: int = 0
    num_sleeping: int = 0
    num_running: int = 0
    num_waiting: int = 0
    num_swapped: int = 0
    num_blocks: int = 0
    num_used_blocks: int = 0
    num_pinned_blocks: int = 0
    num_host_blocks: int = 0
    num_used_host_blocks: int = 0
    max_adapters: int = 0
    num_waiting_adapters: int = 0
    running_adapters: tuple[str, ...] = ()
    waiting_adapters: tuple[str, ...] = ()
    num_steps: int = 0
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    num_cached_tokens: int = 0
    num_queried_tokens: int = 0
    num_fetched_tokens: int = 0
    num_preemptions: int = 0
    num_preemptions_by_swap: int = 0
    num_swapped_out_blocks: int = 0
    num_swapped_in_blocks: int = 0
    num_recomputed_tokens: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_per_position: tuple[int, ...] = ()
    num_restarts: int = 0
    num_resumed: int = 0
    num_handovers: int = 0
    num_handover_mismatches: int = 0

    def totals(self) -> SchedulerStats:
        """Return the totals alone, as of an engine that has ended."""
        fields = self.__struct_fields__
        return SchedulerStats(
            num_ready=0, **{name: getattr(self, name) for name in fields[fields.index("num_steps") :]}
        )

    def __add__(self, other: SchedulerStats) -> SchedulerStats:
        sums = {name: getattr(self, name) + getattr(other, name) for name in _NUMBERS}
        both = zip_longest(self.accepted_per_position, other.accepted_per_position, fillvalue=0)
        return SchedulerStats(
            **sums,
            accepted_per_position=tuple(map(sum, both)),
            running_adapters=tuple(sorted({*self.running_adapters, *other.running_adapters})),
            waiting_adapters=tuple(sorted({*self.waiting_adapters, *other.waiting_adapters})),
        )

    def note_drafts(self, num_drafts: int, num_accepted: int) -> None:
        """Count guesses that a row has verified, of which the first `num_accepted` were right."""
        self.num_drafts += 1
        self.num_draft_tokens += num_drafts
        self.num_accepted_tokens += num_accepted
        if num_accepted:
            pairs = zip_longest(self.accepted_per_position, (1,) * num_accepted, fillvalue=0)
            self.accepted_per_position = tuple(map(sum, pairs))

    @property
    def num_preemptions_by_recompute(self) -> int:
        return self.num_preemptions - self.num_preemptions_by_swap

    @property
    def num_swapped_blocks(self) -> int:
        """Return the number of blocks moved between device and host, both ways."""
        return self.num_swapped_out_blocks + self.num_swapped_in_blocks

    @property
    def kv_cache_usage(self) -> float:
        return self.num_used_blocks / self.num_blocks if self.num_blocks else 0.0

    @property
    def host_cache_usage(self) -> float:
        return self.num_used_host_blocks / self.num_host_blocks if self.num_host_blocks else 0.0


_NUMBERS: Final = tuple(
    name
    for name in SchedulerStats.__struct_fields__
    if name not in ("accepted_per_position", "running_adapters", "waiting_adapters")
)


class Decision(msgspec.Struct, kw_only=True):
    """One decision of the scheduler. `kind`: in a word, such as blocked, admitted, preempted or refused.

    A group that is blocked, or passed, step after step is one entry: from `step` to `last_step`, with the last reason.
    """

    step: int
    last_step: int
    time: float
    kind: str
    request_id: str
    because: str
    tenant: str | None = None
    replica: int | None = None
    """Where there are several, the number of the replica; the front sets it."""


class RequestTimeline(msgspec.Struct, kw_only=True):
    """The timeline of a request that has ended (`RequestMetrics.timeline`), with its end."""

    request_id: str
    num_prompt_tokens: int
    num_cached_tokens: int
    num_generated_tokens: int
    num_preemptions: int
    events: list[tuple[float, str]]
    tenant: str | None = None
    replica: int | None = None
    """Where there are several, the number of the replica; the front sets it."""


class StepTimes(msgspec.Struct):
    """What one call of `EngineCore.step` planned, and how long its parts took.

    began_ns: when it began, on the clock of `time.perf_counter_ns`. planned: the steps that it planned, mostly one.
    parts: by name (`step_times.PARTS`); those on the device are of the step whose results came back.
    """

    began_ns: int = 0
    planned: list[SchedulerOutput] = []
    parts: dict[str, PartTime] = {}


class StepOutputs(msgspec.Struct, kw_only=True, omit_defaults=True, tag="outputs"):
    """All outputs of one step, and the state after it. `times` is set while `time_steps` is on.

    began: requests that the step which is about to run computes for the first time, in a message without outputs that
    is sent before it: the front knows from it which requests a core had in hand when it died.
    """

    outputs: list[EngineCoreOutput]
    stats: SchedulerStats
    times: StepTimes | None = None
    began: list[str] = []


class CallResult(msgspec.Struct, kw_only=True, tag="result"):
    """The result of a `Call`; `error` is None when it succeeded."""

    call_id: int
    value: msgspec.Raw = msgspec.Raw(b"\xc0")
    error: str | None = None


class CoreReady(msgspec.Struct, kw_only=True, tag="ready"):
    """The core is ready for requests. Its limits were measured at the start, so they are not configuration."""

    cache: CacheLimits
    max_model_len: int
    vocab_size: int
    plan: str
    """The memory plan as text, for the log of the front."""
    plan_summary: str = ""
    """The memory plan in one line."""
    plan_bar: str = ""
    """The memory plan as a bar, with a line that says what its parts are."""
    transfer: str | None = None
    """Where this core gives KV blocks away, host:port or the path of a Unix socket; None where it gives none."""
    takes_embeds: bool = False
    """Whether prompts may be vectors."""


class CoreFailed(msgspec.Struct, kw_only=True, tag="failed"):
    """The core, or one of its ranks, could not start or has died; `message` is one line for a person. `kind` is the
    name of the error's class. is_on_request: it did not fail, but was ended by its operator."""

    message: str
    kind: str = "EngineDeadError"
    is_on_request: bool = False

    def error(self, where: str = "") -> errors.OctavoError:
        """Return the error in its own class. where: put before the message."""
        kind = getattr(errors, self.kind, errors.EngineDeadError)
        is_ours = isinstance(kind, type) and issubclass(kind, errors.OctavoError)
        return (kind if is_ours else errors.EngineDeadError)(where + self.message)


FromCore = StepOutputs | CallResult | CoreReady | CoreFailed
