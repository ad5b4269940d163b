"""The responses of the server: the objects of the OpenAI API, with vLLM's extensions where a request asks for them.

A field that is UNSET is left out; a field that is None is `null`, as in the OpenAI API.
"""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

from octavo.core.outputs import Logprob


class CacheInfo(Struct, frozen=True):
    """The tokens of one prompt that were in the prefix cache. `miss_reason`: why not more; None if all were.
    `fetched_tokens`: those whose KV came from another engine or from where it is kept; the rest was computed."""

    prompt_tokens: int
    cached_tokens: int
    miss_reason: str | None
    fetched_tokens: int = 0


class PromptTokensDetails(Struct, frozen=True):
    """Prompt tokens by where their KV came from, which add up; with `return_cache_info` also by prompt."""

    cached_tokens: int
    fetched_tokens: int
    computed_tokens: int
    cache_info: list[CacheInfo] | UnsetType = UNSET


class Usage(Struct, frozen=True):
    """Token counts of a request: each prompt once, the outputs of all choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails

    @classmethod
    def of(cls, prompt_tokens: int, completion_tokens: int, details: PromptTokensDetails) -> Usage:
        return cls(prompt_tokens, completion_tokens, prompt_tokens + completion_tokens, details)


class TokenLogprob(Struct, frozen=True, gc=False):
    """A token of a chat response. `bytes` is None for a token whose bytes are not a character by themselves.

    A response may have hundreds of thousands: the garbage collector visits neither them nor tuples of numbers.
    """

    token: str
    logprob: float
    bytes: tuple[int, ...] | None


class ContentLogprob(TokenLogprob, frozen=True, gc=False):
    """A token that was drawn, and the likeliest ones at its place."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobs(Struct, frozen=True):
    """Log-probabilities of a chat choice."""

    content: list[ContentLogprob]
    refusal: None = None


class CompletionLogprobs(Struct, frozen=True):
    """Log-probabilities of a completion choice; with echo the prompt's come first, its first token has none."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


PromptLogprobsField = list[dict[int, Logprob] | None] | UnsetType


class _Generated(Struct, kw_only=True):
    """What every response with generated text, and every chunk of its stream, has."""

    id: str
    created: int
    model: str
    system_fingerprint: str


class CompletionChoice(Struct, kw_only=True):
    """One completion, or what is new of it in a chunk of a stream."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_logprobs: PromptLogprobsField = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class CompletionResponse(_Generated, kw_only=True):
    """Response of `POST /v1/completions`, and each chunk of its stream."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET


class ChatMessage(Struct, kw_only=True):
    """What the model said."""

    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(Struct, kw_only=True):
    """One of the responses of the model."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletionResponse(_Generated, kw_only=True):
    """Response of `POST /v1/chat/completions`."""

    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobsField = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class Delta(Struct, kw_only=True):
    """What is new in a chunk: the role, or text, or nothing."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChunkChoice(Struct, kw_only=True):
    """What is new of one of the responses of the model."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletionChunk(_Generated, kw_only=True):
    """A chunk of the stream of `POST /v1/chat/completions`."""

    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class Model(Struct, kw_only=True):
    """A model by a name under which it is served."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "octavo"
    root: str
    parent: None = None
    max_model_len: int


class ModelList(Struct, kw_only=True):
    """Response of `GET /v1/models`."""

    object: Literal["list"] = "list"
    data: list[Model]


class TokenizeResponse(Struct, kw_only=True):
    """Response of `POST /tokenize`."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeResponse(Struct, kw_only=True):
    """Response of `POST /detokenize`."""

    prompt: str


class CacheReset(Struct, frozen=True):
    """Response of `POST /reset_prefix_cache`: the cache is empty."""

    reset: bool = True


class PinPrefixResponse(Struct, frozen=True):
    """Response of `POST /pin_prefix`: leading tokens that are pinned, those of them that are cached already, and why it
    is not the whole prefix (empty when it is)."""

    pinned_tokens: int
    cached_tokens: int
    because: str


class UnpinPrefixResponse(Struct, frozen=True):
    """Response of `POST /unpin_prefix`: whether exactly this prefix was pinned."""

    unpinned: bool


class Drained(Struct, frozen=True):
    """Response of `POST /drain`: the number of open requests that go on elsewhere, or once the replica is ready."""

    moved_requests: int


class KvEvent(Struct, frozen=True, omit_defaults=True):
    """Data of an event of `GET /kv/events`. `stored` and `removed` name blocks of one cache group by their digests;
    `cleared` begins what is sent of a replica: nothing that was sent of it before holds.

    sequence: the number of the event in its replica; of several blocks it is that of the last. time: Unix seconds.
    parent: the digest of the block before the first one, or the root of its chain; the blocks follow one another.
    num_tokens: of all the blocks; the last block of a prompt may be partly filled.
    """

    kind: Literal["stored", "removed", "cleared"]
    sequence: int
    time: float
    replica: int
    cache_group: int | None = None
    digests: list[str] = []
    parent: str | None = None
    block_size: int | None = None
    num_tokens: int = 0


class EngineState(Struct, frozen=True):
    """The state of an engine core: "ready", "starting" (which on another machine includes that it cannot be connected
    to) or "stopped"."""

    replica: int
    role: str | None
    state: Literal["ready", "starting", "stopped"]


class Health(Struct, frozen=True):
    """Response of `GET /health`."""

    engines: list[EngineState]


class Version(Struct):
    """Response of `GET /version`."""

    version: str


class Index(Struct):
    """Response of `GET /`: the endpoints."""

    name: str
    version: str
    model: str
    endpoints: dict[str, Any]


class DecisionEntry(Struct, frozen=True, kw_only=True):
    """A decision. `time` is in seconds on the engine's monotonic clock, `wall_time` is the same in Unix seconds.

    Without the right `observe` steps are null, and `because` is empty where it depends on other requests.
    """

    step: int | None
    last_step: int | None
    time: float
    wall_time: float
    kind: str
    request_id: str
    because: str
    tenant: str | None
    replica: int | None


class DecisionList(Struct, frozen=True):
    """Response of `GET /scheduler/decisions`: the last ones, oldest first."""

    decisions: list[DecisionEntry]


class TimelineEvent(Struct, frozen=True, kw_only=True):
    """What happened to a request, in words, and when; the times are as in `DecisionEntry`."""

    time: float
    wall_time: float
    event: str


class Timeline(Struct, frozen=True, kw_only=True):
    """What happened to a request that has ended."""

    request_id: str
    tenant: str | None
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    preemptions: int
    events: list[TimelineEvent]
    replica: int | None


class TimelineList(Struct, frozen=True):
    """Response of `GET /scheduler/timelines`: the requests that ended last, oldest first."""

    timelines: list[Timeline]
