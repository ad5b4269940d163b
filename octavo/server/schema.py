"""The bodies of requests: each struct is type, validator and documentation of one.

The structs list every field of the OpenAI API and of vLLM's extensions that is known. A field that is not supported is
annotated `Refused` with the reason, so that it is refused by name; a name that is not here at all is refused with the
nearest one that is. Limits of numbers are checked by SamplingParams alone, those of lists and texts come from
core/request_limits.py.
"""

from __future__ import annotations

from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal, Union, get_args, get_type_hints

from msgspec import Meta, Struct, defstruct

from octavo.core.request_limits import (
    MAX_REQUEST_TOKENS,
    MAX_SEQUENCES,
    REQUEST_LIMITS,
    check_entries,
    check_field,
    check_texts,
)
from octavo.core.sampling_params import OutputKind, SamplingParams, documented_fields
from octavo.errors import InvalidRequest
from octavo.server.decode import Refused, RequestBody, refuse_unsupported
from octavo.server.forms import FormFields

Int = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
RequestId = Annotated[str, Meta(pattern=r"^[!-~]{1,128}$")]
"""1 to 128 visible ASCII characters: it travels in a header too."""

_TOOLS = Refused("tool calls are not there yet", harmless=([],))
_NO_TOOLS = Refused("tool calls are not there yet", harmless=("none",))
# as in SGLang without a parser of reasoning: there is none to separate
_REASONING = Refused("reasoning is not separated from the text yet", harmless=(True, False))
_MEDIA = Refused("the server reads and writes text only")


_SAMPLING_PARAMETERS: Final = {
    name: param
    for name, param in documented_fields().items()
    # what requests do not have, or each API in a way of its own
    if name not in ("logprobs", "max_tokens", "detokenize", "output_kind", "structured_outputs")
}


def _json_type(name: str, annotation: Any, description: str) -> Any:
    """Return the type that a sampling parameter has in a request, where null stands for its default.

    Limits of numbers are left to SamplingParams, whose messages are better.
    """
    members = get_args(annotation) if isinstance(annotation, UnionType) else (annotation,)
    kinds = {tuple[str, ...]: list[str], tuple[int, ...]: list[TokenId], dict[int, float]: dict[TokenId, float]}
    given = [kinds.get(member, member) for member in members if member is not NoneType]
    if name == "stop":
        given.append(str)
    bounds: dict[str, Any] = {"ge": -(2**63), "le": 2**63 - 1} if given == [int] else {}
    return Annotated[Union[tuple(given)], Meta(description=description, **bounds)] | None  # noqa: UP007


if TYPE_CHECKING:
    _SamplingFields = FormFields
else:
    _HINTS = get_type_hints(SamplingParams)
    _SamplingFields = defstruct(
        "_SamplingFields",
        [(name, _json_type(name, _HINTS[name], param.doc), None) for name, param in _SAMPLING_PARAMETERS.items()],
        bases=(FormFields,),
        kw_only=True,
    )


class StreamOptions(Struct, kw_only=True, forbid_unknown_fields=True):
    """include_usage: a last chunk with the token counts. continuous_usage_stats: counts in every chunk."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class GenerationRequest(_SamplingFields, kw_only=True, forbid_unknown_fields=True):
    """What completions and chat have in common: the sampling parameters, and the fields below."""

    if TYPE_CHECKING:
        n: int | None
        best_of: int | None
        prompt_logprobs: int | None

    model: str | None = None
    max_tokens: Int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    add_special_tokens: bool | None = None
    return_cache_info: bool | None = None
    cache_salt: str | None = None
    priority: Int | None = None
    first_token_deadline_s: float | None = None
    request_id: RequestId | None = None
    user: str | None = None

    logits_processors: Annotated[Any, Refused("code from requests is never run")] = None
    truncate_prompt_tokens: Annotated[Any, Refused("shorten the prompt before sending it")] = None
    return_tokens_as_token_ids: Annotated[Any, Refused("ask for return_token_ids", harmless=(False,))] = None
    mm_processor_kwargs: Annotated[Any, _MEDIA] = None
    kv_transfer_params: Annotated[Any, Refused("the server chooses where KV goes; leave it out")] = None
    vllm_xargs: Annotated[Any, Refused("octavo has no such extensions", harmless=({},))] = None

    # SGLang's fields, which its router and vLLM's write into every request
    no_stop_trim: Annotated[Any, Refused("ask for include_stop_str_in_output", harmless=(False,))] = None
    return_hidden_states: Annotated[Any, Refused("no endpoint returns hidden states", harmless=(False,))] = None

    def given_sampling(self, **others: Any) -> dict[str, Any]:
        """Return the sampling parameters that the request sets, and `others`: what goes over the model's defaults."""
        given = {name: value for name in _SAMPLING_PARAMETERS if (value := getattr(self, name)) is not None}
        if (form := self.form()) is not None:
            given["structured_outputs"] = form
        return {**given, **others, "output_kind": OutputKind.DELTA if self.stream else OutputKind.FINAL_ONLY}

    @property
    def wants_usage_chunk(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def wants_usage_always(self) -> bool:
        return self.wants_usage_chunk and bool(self.stream_options and self.stream_options.continuous_usage_stats)

    def check(self) -> None:
        """Raise InvalidRequest for fields that are too long or contradict each other."""
        RequestBody.check(self)
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options needs stream to be true", field="stream_options")
        if self.stream and self.prompt_logprobs is not None:
            raise InvalidRequest("prompt_logprobs come only when stream is false", field="prompt_logprobs")


class CompletionRequest(GenerationRequest, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/completions`."""

    prompt: str | list[str | TokenId | list[TokenId]]
    echo: bool | None = None
    logprobs: Int | None = None

    suffix: Annotated[Any, Refused("filling in before a suffix is not there yet", harmless=("",))] = None
    prompt_embeds: Annotated[Any, Refused("send text or token ids")] = None

    def check(self) -> None:
        GenerationRequest.check(self)
        if self.echo and self.prompt_logprobs is not None:
            raise InvalidRequest("prompt_logprobs does not go with echo; ask for logprobs", field="prompt_logprobs")

    def prompts(self) -> list[str | list[int]]:
        """Return the prompts one by one. Raises InvalidRequest for a list of several kinds, and for too many or too
        long ones.

        All prompts together have at most MAX_SEQUENCES sequences (prompts times best_of or n).
        """
        prompts = self._listed_prompts()
        if not isinstance(self.prompt, str):
            check_texts("prompt", prompts, REQUEST_LIMITS["prompt"])
        num_tokens = sum(len(prompt) for prompt in prompts if not isinstance(prompt, str))
        if num_tokens > MAX_REQUEST_TOKENS:
            raise InvalidRequest(
                f"prompt has {num_tokens:,} token ids together, must have at most {MAX_REQUEST_TOKENS:,}; send several "
                "requests",
                field="prompt",
            )
        width = max(self.n or 1, self.best_of or 1)
        if len(prompts) > 1 and len(prompts) * width > MAX_SEQUENCES:
            raise InvalidRequest(
                f"the request asks for {len(prompts) * width:,} sequences ({len(prompts):,} prompts, {width:,} "
                f"sequences each), must ask for at most {MAX_SEQUENCES:,}; send several requests",
                field="prompt",
            )
        return prompts

    def _listed_prompts(self) -> list[str | list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not self.prompt:
            raise InvalidRequest("prompt is an empty list; give text or token ids", field="prompt")
        kinds = {type(item) for item in self.prompt}
        if len(kinds) > 1:
            raise InvalidRequest(
                "prompt mixes kinds; it is text, a list of texts, a list of token ids, or a list of such lists",
                field="prompt",
            )
        prompts: list[Any] = [self.prompt] if kinds == {int} else self.prompt
        check_entries("prompt", len(prompts), REQUEST_LIMITS["prompt"].entries)
        return prompts


class TextPart(Struct, tag_field="type", tag="text", forbid_unknown_fields=True):
    """A piece of text in a message."""

    text: str


class RefusalPart(Struct, tag_field="type", tag="refusal", forbid_unknown_fields=True):
    """An assistant's refusal in an earlier turn; it is text like any other."""

    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


class _MediaPart(Struct, tag_field="type"):
    """Something that is not text."""

    text: ClassVar[str] = ""


if TYPE_CHECKING:
    ContentPart = TextPart | RefusalPart | _MediaPart
else:
    _MEDIA_PARTS = {
        "ImagePart": "image_url",
        "AudioPart": "input_audio",
        "AudioUrlPart": "audio_url",
        "VideoPart": "video_url",
        "FilePart": "file",
    }
    _media_parts = [defstruct(name, [], bases=(_MediaPart,), tag=tag) for name, tag in _MEDIA_PARTS.items()]
    ContentPart = Union[(TextPart, RefusalPart, *_media_parts)]


class Message(Struct, kw_only=True, forbid_unknown_fields=True):
    """One turn of a conversation: a role and its text."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None

    tool_calls: Annotated[Any, _TOOLS] = None
    function_call: Annotated[Any, _TOOLS] = None
    audio: Annotated[Any, _MEDIA] = None

    def check(self, field: str) -> int:
        """Return the number of its characters. Raises InvalidRequest, which names `field`, when a part is too long."""
        parts = self.content if isinstance(self.content, list) else []
        check_entries(f"{field}.content", len(parts), REQUEST_LIMITS["messages[].content"].entries)
        if self.annotations is not None:
            check_field("messages[].annotations", self.annotations, f"{field}.annotations")
        num_chars = sum(len(part.text) for part in parts)
        for name in ("content", "refusal", "reasoning_content", "name", "tool_call_id"):
            text = getattr(self, name)
            if isinstance(text, str):
                check_field(f"messages[].{name}", text, f"{field}.{name}")
                num_chars += len(text)
        return num_chars

    def as_dict(self, field: str) -> dict[str, Any]:
        """Return the message as a chat template reads it. Raises InvalidRequest, which names `field`."""
        refuse_unsupported(self, f"{field}.")
        # developer is the newer word for system; templates know the older one
        message: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role}
        message["content"] = self._text(f"{field}.content")
        for name in ("name", "tool_call_id", "reasoning_content"):
            if (value := getattr(self, name)) is not None:
                message[name] = value
        return message

    def _text(self, field: str) -> str:
        if isinstance(self.content, str):
            return self.content
        if self.content is None:
            if self.refusal is not None:
                return self.refusal
            raise InvalidRequest(f"{field} is missing; give text", field=field, code="missing_required_parameter")
        texts = []
        for index, part in enumerate(self.content):
            if isinstance(part, _MediaPart):
                kind = part.__struct_config__.tag
                raise InvalidRequest(
                    f"{field}[{index}] is of type {kind}: {_MEDIA.because}",
                    field=f"{field}[{index}]",
                    code="unsupported_content_type",
                )
            texts.append(part.text)
        return "\n".join(texts)


class ChatCompletionRequest(GenerationRequest, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: Int | None = None
    logprobs: bool | None = None
    top_logprobs: Int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    parallel_tool_calls: bool | None = None

    tools: Annotated[Any, _TOOLS] = None
    tool_choice: Annotated[Any, _NO_TOOLS] = None
    functions: Annotated[Any, _TOOLS] = None
    function_call: Annotated[Any, _NO_TOOLS] = None
    audio: Annotated[Any, _MEDIA] = None
    modalities: Annotated[Any, Refused(_MEDIA.because, harmless=(["text"],))] = None
    store: Annotated[Any, Refused("nothing is stored", harmless=(False,))] = None
    prediction: Annotated[Any, Refused("predicted output is not there yet")] = None
    reasoning_effort: Annotated[Any, Refused("use chat_template_kwargs, where the model's template knows it")] = None
    verbosity: Annotated[Any, Refused("the models served here do not know it")] = None
    web_search_options: Annotated[Any, Refused("the server does not search the web")] = None
    documents: Annotated[Any, Refused("put the text of documents into a message", harmless=([],))] = None
    include_reasoning: Annotated[Any, Refused("reasoning is not separated from the text yet", harmless=(True,))] = None
    separate_reasoning: Annotated[Any, _REASONING] = None
    stream_reasoning: Annotated[Any, _REASONING] = None
    echo: Annotated[Any, Refused("completions have it; a chat answer has no prompt text", harmless=(False,))] = None

    def check(self) -> None:
        GenerationRequest.check(self)
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs to be true", field="top_logprobs")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise InvalidRequest(
                f"max_tokens is {self.max_tokens} and max_completion_tokens is {self.max_completion_tokens}; give one",
                field="max_tokens",
            )

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class TextRequest(RequestBody, kw_only=True, forbid_unknown_fields=True):
    """What requests about a text or a conversation have in common."""

    model: str | None = None
    messages: Annotated[list[Message], Meta(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class TokenizeRequest(TextRequest, kw_only=True, forbid_unknown_fields=True):
    """`POST /tokenize`: text, or a conversation."""

    prompt: str | None = None
    return_token_strs: bool | None = None


class PrefixRequest(TextRequest, kw_only=True, forbid_unknown_fields=True):
    """`POST /unpin_prefix`: text, token ids, or the first messages of conversations."""

    prompt: str | list[TokenId] | None = None
    cache_salt: str | None = None


class PinPrefixRequest(PrefixRequest, kw_only=True, forbid_unknown_fields=True):
    """`POST /pin_prefix`: the same, and for how many seconds it stays."""

    ttl_s: float


class DrainRequest(RequestBody, kw_only=True, forbid_unknown_fields=True):
    """`POST /drain`: the number of a replica, and whether it is stopped instead of started again."""

    replica: int = 0
    stop: bool = False


class DetokenizeRequest(RequestBody, kw_only=True, forbid_unknown_fields=True):
    """`POST /detokenize`."""

    model: str | None = None
    tokens: list[TokenId]
    skip_special_tokens: bool = False
