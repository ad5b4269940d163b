"""The requests of a simulation: traces, and a generator of them.

Prompts are given by lengths: a prompt is a sequence of named prefixes and a rest of its own. Requests that name the
same prefix have the same tokens there, so the prefix cache has the hits of the real prompts.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from hashlib import sha256
from typing import Annotated, Final, Literal

import msgspec

from octavo.config.fields import Arguments, arg
from octavo.core.cache_key import Placeholder
from octavo.core.messages import EngineCoreRequest
from octavo.core.sampling_params import SamplingParams
from octavo.errors import ConfigError, InvalidRequest
from octavo.simulate.executor import END_TOKEN, Script

_STREAM: Final = 1 << 16
"""Distance of the token ids of two streams: those of siblings and of candidates of beams lie in between."""

Positive = Annotated[int, msgspec.Meta(ge=1)]
Seconds = Annotated[float, msgspec.Meta(ge=0)]


class TraceRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One line of a trace.

    arrival_s: seconds since the begin, or with `follows` since the end of the request with that id.
    num_prompt_tokens: length of the prompt. prefixes: names and lengths of its leading parts; the rest belongs to this
    request alone. prompt_token_ids: the prompt itself, instead of lengths.
    output_len: number of tokens after which a sequence ends by itself, unless max_tokens ends it earlier. output_lens:
    these numbers by sequence, if they differ; output_len is the longest. output_token_ids: the tokens of each sequence,
    if a later prompt_token_ids begins with them.
    first_token_deadline_s: seconds after its arrival in which its first token is due.
    conversation: name of a stream of tokens that the output and the rest of the prompt belong to, so that a later turn
    with a longer prompt begins with all of them.
    cache_namespace, cache_salt, adapter: prompts share nothing where these differ. placeholders: runs of prompt tokens
    that stand for other content, such as images: offset, length, and a name that is the same where the content is.
    """

    request_id: str = ""
    arrival_s: Seconds = 0.0
    follows: str | None = None
    num_prompt_tokens: Positive | None = None
    prefixes: list[tuple[str, Positive]] = []
    prompt_token_ids: Annotated[list[int], msgspec.Meta(min_length=1)] | None = None
    conversation: str | None = None
    output_len: Positive
    output_lens: list[Positive] = []
    output_token_ids: list[list[int]] = []
    max_tokens: Positive | None = None
    n: Positive = 1
    best_of: Positive | None = None
    use_beam_search: bool = False
    priority: int = 0
    tenant: str | None = None
    first_token_deadline_s: Annotated[float, msgspec.Meta(gt=0)] | None = None
    cache_namespace: str | None = None
    cache_salt: str | None = None
    adapter: str | None = None
    placeholders: list[tuple[Annotated[int, msgspec.Meta(ge=0)], Positive, str]] = []

    def __post_init__(self) -> None:
        if (self.num_prompt_tokens is None) == (self.prompt_token_ids is None):
            raise ValueError("a request has either num_prompt_tokens or prompt_token_ids")
        if self.prompt_token_ids is not None and (self.prefixes or self.conversation):
            raise ValueError("prefixes and conversation go with num_prompt_tokens, not with prompt_token_ids")
        lengths = self.output_lens or [self.output_len] * self.width
        if len(lengths) != self.width or max(lengths) != self.output_len:
            raise ValueError("output_lens has a length for each sequence, of which output_len is the longest")
        if self.output_token_ids and [len(each) for each in self.output_token_ids] != lengths:
            raise ValueError("output_token_ids has as many tokens for each sequence as output_len or output_lens")
        if sum(length for _, length in self.prefixes) > self.prompt_len:
            raise ValueError("its prefixes are longer than num_prompt_tokens")
        end = 0
        for offset, length, name in self.placeholders:
            if offset < end or offset + length > self.prompt_len:
                raise ValueError(
                    f"the placeholder {name!r} is at [{offset}, {offset + length}), must lie behind the one before it "
                    f"and within the {self.prompt_len} tokens of the prompt"
                )
            end = offset + length

    @property
    def prompt_len(self) -> int:
        """Return the number of prompt tokens."""
        return len(self.prompt_token_ids) if self.prompt_token_ids is not None else self.num_prompt_tokens or 0

    @property
    def width(self) -> int:
        """Return the number of sequences that are computed."""
        return self.best_of or self.n

    @property
    def final_len(self) -> int:
        """Return the number of tokens of the longest output."""
        return min(self.output_len, self.max_tokens or self.output_len)


class Trace:
    """Trace requests in the order of their lines, and the scheduler's requests made from them. Raises ConfigError.

    places: the origin of each request, for error messages.
    """

    def __init__(self, requests: Sequence[TraceRequest], places: Sequence[str] | None = None) -> None:
        if not requests:
            raise ConfigError("the trace has no requests")
        self.requests = requests
        self.ids = [request.request_id or str(number) for number, request in enumerate(requests)]
        self.followers: dict[int, list[int]] = {}
        """Number of a request → numbers of those that follow it."""
        self._streams: dict[str, int] = {}
        numbers: dict[str, int] = {}
        for number, name in enumerate(self.ids):
            try:
                self._add(number, name, numbers)
            except (ValueError, InvalidRequest) as error:
                place = f"request {number + 1} of the trace" if places is None else places[number]
                raise ConfigError(f"{place}: {error}") from error
        # every name is numbered before the first request is made, so that token ids depend on the trace alone
        for request in requests:
            for name, _ in request.prefixes:
                self._stream(f"prefix {name}")
            if request.conversation is not None:
                self._stream(f"conversation {request.conversation}")

    def _add(self, number: int, name: str, numbers: dict[str, int]) -> None:
        """Check a request against the earlier ones, whose numbers by id are in `numbers`."""
        request = self.requests[number]
        if name in numbers:
            raise ValueError(f"request_id is {name!r}, which an earlier request has")
        if request.follows is not None:
            if request.follows not in numbers:
                raise ValueError(f"follows is {request.follows!r}, which is no earlier request")
            self.followers.setdefault(numbers[request.follows], []).append(number)
        if request.width > 1 or request.best_of is not None or request.use_beam_search:
            self._params(number)
        numbers[name] = number

    def __len__(self) -> int:
        return len(self.requests)

    def request(self, number: int, arrival_time: float) -> tuple[EngineCoreRequest, Script]:
        """Return request `number` for a scheduler, and its script for the executor. Its seed is its number."""
        traced = self.requests[number]
        token = END_TOKEN + _STREAM * (len(self._streams) + 1 + number)
        if traced.conversation is not None:
            token = self._stream(f"conversation {traced.conversation}")
        if traced.prompt_token_ids is not None:
            prompt = traced.prompt_token_ids
        else:
            prompt = []
            for name, length in traced.prefixes:
                prompt += [self._stream(f"prefix {name}")] * length
            prompt += [token] * (traced.prompt_len - len(prompt))
        request = EngineCoreRequest(
            request_id=self.ids[number],
            prompt_token_ids=prompt,
            params=self._params(number),
            arrival_time=arrival_time,
            end_token_ids=() if traced.use_beam_search else (END_TOKEN,),
            priority=traced.priority,
            tenant=traced.tenant,
            first_token_deadline_s=traced.first_token_deadline_s,
            cache_namespace=traced.cache_namespace,
            cache_salt=traced.cache_salt,
            adapter=traced.adapter,
            placeholders=tuple(
                Placeholder(offset, length, sha256(name.encode()).digest())
                for offset, length, name in traced.placeholders
            ),
        )
        output_len = traced.final_len
        lengths = [min(each, output_len) for each in traced.output_lens] or [output_len]
        return request, Script(lengths, token, output_token_ids=traced.output_token_ids)

    def _params(self, number: int) -> SamplingParams:
        traced = self.requests[number]
        return SamplingParams(
            # nothing ends a beam but its length
            max_tokens=traced.final_len if traced.use_beam_search else traced.max_tokens or traced.output_len,
            n=traced.n,
            best_of=traced.best_of,
            use_beam_search=traced.use_beam_search,
            seed=number,
        )

    def _stream(self, name: str) -> int:
        number = self._streams.setdefault(name, len(self._streams))
        return END_TOKEN + _STREAM * (number + 1)


# ---- generators ----


class Workload(Arguments, heading="Workload"):
    """The parameters of `generate`; the fields are flags of `octavo simulate`. Lengths are tokens.

    Lengths are log-normal with the given means. `max_len` bounds prompt and output together. Raises ConfigError.
    """

    arrivals: Literal["poisson", "gamma", "on-off", "at-once"] = arg("poisson", "How requests arrive.")
    num_requests: int = arg(1000, "Requests.", ge=1)
    request_rate: float = arg(1.0, "Requests (conversations) a second.", gt=0)
    burstiness: float = arg(3.0, "With gamma: coefficient of variation of the gaps; with poisson it is 1.", gt=0)
    on_s: float = arg(10.0, "With on-off: seconds with arrivals.", gt=0)
    off_s: float = arg(30.0, "With on-off: seconds without arrivals.", ge=0)
    input_len: float = arg(256.0, "Mean tokens of a prompt.", ge=1)
    output_len: float = arg(128.0, "Mean tokens of an output.", ge=1)
    length_spread: float = arg(0.8, "Standard deviation of the logarithm of lengths; 0 makes all lengths equal.", ge=0)
    max_len: int = arg(4096, "Most tokens of a request.", ge=2)
    shared_prefix_len: int = arg(0, "Tokens of the prefix that prompts share.", ge=0)
    num_shared_prefixes: int = arg(1, "Number of different shared prefixes.", ge=1)
    turns: int = arg(1, "Requests of a conversation.", ge=1)
    think_s: float = arg(
        10.0, "Mean seconds from an answer to the next turn of a conversation, exponentially distributed.", ge=0
    )
    n: int = arg(1, "Sequences per request.", ge=1)
    best_of: int | None = arg(None, "Sequences of which the best n are kept.")
    beam_search: bool = arg(False, "Search with n beams.")
    num_tenants: int = arg(1, "Number of tenants; the k-th sends requests in proportion to 1/k.", ge=1)
    num_priorities: int = arg(1, "Number of different priorities, from 0 on, equally frequent.", ge=1)
    first_token_deadline_s: float | None = arg(
        None, "Deadline of a request's first token, in seconds after the arrival.", gt=0
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shared_prefix_len + 2 > self.max_len:
            raise ConfigError(
                f"shared_prefix_len is {self.shared_prefix_len}, must be at most {self.max_len - 2}: with a token of "
                f"its own and one of output a request may have {self.max_len} tokens"
            )


def generate(workload: Workload, seed: int) -> list[TraceRequest]:
    """Return the requests of a workload. The same seed makes the same ones."""
    source = random.Random(seed)
    # one random source per purpose: with more tenants the lengths stay the same
    lengths, gaps, senders = (random.Random(source.random()) for _ in range(3))
    requests: list[TraceRequest] = []
    arrivals = _arrivals(workload, gaps)
    shares = [1 / (place + 1) for place in range(workload.num_tenants)]
    for conversation, arrival_s in enumerate(arrivals):
        turns = min(workload.turns, workload.num_requests - len(requests))
        (tenant,) = senders.choices(range(workload.num_tenants), shares)
        priority = senders.randrange(workload.num_priorities)
        for request in _conversation(workload, lengths, conversation, arrival_s, turns):
            requests.append(
                msgspec.structs.replace(
                    request,
                    tenant=f"tenant-{tenant}" if workload.num_tenants > 1 else None,
                    priority=priority,
                    first_token_deadline_s=workload.first_token_deadline_s,
                )
            )
        if len(requests) >= workload.num_requests:
            break
    return requests


def _arrivals(workload: Workload, source: random.Random) -> Iterator[float]:
    now = 0.0
    mean = 1 / workload.request_rate
    shape = 1.0 if workload.arrivals != "gamma" else workload.burstiness**-2
    cycle = workload.on_s + workload.off_s
    while True:
        match workload.arrivals:
            case "at-once":
                yield 0.0
            case "on-off":
                # this clock runs only in the on-phases, and faster, so that the mean rate is the given one
                now += source.expovariate(1 / mean) * workload.on_s / cycle
                yield now // workload.on_s * cycle + now % workload.on_s
            case _:
                now += source.gammavariate(shape, mean / shape)
                yield now


def _conversation(
    workload: Workload, source: random.Random, number: int, arrival_s: float, turns: int
) -> list[TraceRequest]:
    prefixes = []
    if workload.shared_prefix_len:
        prefixes = [(f"system-{source.randrange(workload.num_shared_prefixes)}", workload.shared_prefix_len)]
    prompt_len = workload.shared_prefix_len
    requests: list[TraceRequest] = []
    for turn in range(turns):
        room = workload.max_len - prompt_len
        if room < 2:
            break
        prompt_len += min(_length(workload.input_len, workload.length_spread, source), room - 1)
        num_lengths = 1 if workload.beam_search else workload.best_of or workload.n
        output_lens = [
            min(_length(workload.output_len, workload.length_spread, source), workload.max_len - prompt_len)
            for _ in range(num_lengths)
        ]
        output_len = max(output_lens)
        requests.append(
            TraceRequest(
                request_id=f"{number}-{turn}" if workload.turns > 1 else str(number),
                arrival_s=arrival_s if turn == 0 else source.expovariate(1.0) * workload.think_s,
                follows=None if turn == 0 else f"{number}-{turn - 1}",
                num_prompt_tokens=prompt_len,
                prefixes=prefixes,
                conversation=str(number) if workload.turns > 1 else None,
                output_len=output_len,
                output_lens=output_lens if num_lengths > 1 else [],
                n=workload.n,
                best_of=workload.best_of,
                use_beam_search=workload.beam_search,
            )
        )
        prompt_len += output_lens[0]
    return requests


def _length(mean: float, spread: float, source: random.Random) -> int:
    """Draw a log-normal length with this mean, at least 1."""
    return max(1, round(mean * math.exp(source.gauss(0.0, 1.0) * spread - spread * spread / 2)))
