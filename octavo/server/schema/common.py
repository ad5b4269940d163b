"""The fields that all bodies of requests for text have: the sampling parameters and others."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar, Union, get_args, get_type_hints

import msgspec
from msgspec import Meta, Struct, defstruct

from octavo.core.prompt import Prompt
from octavo.core.repetition import RepetitionDetectionParams
from octavo.core.request_limits import MAX_REQUEST_TOKENS, REQUEST_LIMITS, check_entries, check_texts
from octavo.core.sampling_params import OutputKind, SamplingParams, documented_fields
from octavo.errors import InvalidRequest
from octavo.server.decode import Int, Refused, RequestBody, TokenId
from octavo.server.forms import FormFields

T = TypeVar("T")

WRITES_TEXT = Refused("the server writes text only")

_SAMPLING_PARAMETERS: Final = {
    name: param
    for name, param in documented_fields().items()
    # fields that requests do not have, or that each API states in its own way
    if name not in ("logprobs", "max_tokens", "detokenize", "output_kind", "structured_outputs")
}


def _json_type(name: str, annotation: Any, description: str) -> Any:
    """Return the type that a sampling parameter has in a request, where null stands for its default.

    Limits of numbers are left to SamplingParams, whose messages are better.
    """
    members = get_args(annotation) if isinstance(annotation, UnionType) else (annotation,)
    kinds: dict[Any, Any] = {tuple[str, ...]: list[str], tuple[int, ...]: list[TokenId]}
    kinds[dict[int, float]], kinds[RepetitionDetectionParams] = dict[TokenId, float], dict[str, Any]
    given = [kinds.get(member, member) for member in members if member is not NoneType]
    if name == "stop":
        given.append(str)
    bounds: dict[str, Any] = {"ge": -(2**63), "le": 2**63 - 1} if given == [int] else {}
    return Annotated[Union[tuple(given)], Meta(description=description, **bounds)] | None  # noqa: UP007


_OF_OTHERS: Final[dict[str, dict[str, tuple[Any, ...]]]] = msgspec.json.decode(
    (files("octavo") / "server" / "schema" / "others.json").read_bytes(), type=dict[str, dict[str, tuple[Any, ...]]]
)
"""Fields that other servers have and this one refuses by name. Key: the reason, which says what to send instead. Value:
the fields, each with the values that are as good as absent."""


class WithoutEffect(FormFields, kw_only=True):
    """Fields that are accepted and change nothing: requests are neither stored nor billed, prefixes are cached without
    marks, and llguidance alone reads grammars."""

    cache_control: dict[str, Any] | None = None
    guided_decoding_backend: str | None = None
    metadata: dict[str, Any] | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    session_id: str | None = None
    store: bool | None = None


if TYPE_CHECKING:
    _NamedFields = WithoutEffect
else:
    _HINTS = get_type_hints(SamplingParams)
    _NamedFields = defstruct(
        "_NamedFields",
        [
            *(
                (name, Annotated[Any, Refused(because, harmless)], None)
                for because, names in _OF_OTHERS.items()
                for name, harmless in names.items()
            ),
            *((name, _json_type(name, _HINTS[name], param.doc), None) for name, param in _SAMPLING_PARAMETERS.items()),
        ],
        bases=(WithoutEffect,),
        kw_only=True,
    )


class StreamOptions(Struct, kw_only=True, forbid_unknown_fields=True):
    """include_usage: a last chunk with the token counts. continuous_usage_stats: counts in every chunk."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


_MAX_TOKENS: Final = "Most tokens of each output; by default 16 for a completion, for a chat the rest of the context."
_START_TOKEN: Final = "Add a start token to the text; the template of a chat writes its own."


class GenerationRequest(_NamedFields, kw_only=True, forbid_unknown_fields=True):
    """The fields that completions and chat share: the sampling parameters, and those below."""

    if TYPE_CHECKING:
        logprob_token_ids: list[int] | None
        n: int | None
        best_of: int | None
        prompt_logprobs: int | None
        truncate_prompt_tokens: int | None

    max_tokens: Annotated[Int, Meta(description=_MAX_TOKENS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    return_weight_versions: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    add_special_tokens: Annotated[bool, Meta(description=_START_TOKEN)] | None = None
    return_cache_info: bool | None = None
    return_timings: bool | None = None

    def given_sampling(self, **others: Any) -> dict[str, Any]:
        """Return the sampling parameters that the request sets, and `others`: they replace the model's defaults."""
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


def prompt_of(given: str | list[int] | Prompt, add_special_tokens: bool | None = None) -> Prompt:
    """Return the prompt of a text or of token ids. add_special_tokens: None means true."""
    if isinstance(given, Prompt):
        return given
    if isinstance(given, str):
        return Prompt(text=given, add_special_tokens=add_special_tokens is not False)
    return Prompt(token_ids=given)


def listed_prompts(field: str, given: str | Sequence[Any]) -> list[Any]:
    """Return the prompts of a field one by one: texts, or lists of token ids. Raises InvalidRequest for a list of
    several kinds, and for too many or too long ones."""
    prompts: list[Any] = [given] if isinstance(given, str) else list(given)
    kinds = {type(each) for each in prompts}
    if len(kinds) > 1:
        raise InvalidRequest(
            f"{field} mixes kinds; it is text, a list of texts, a list of token ids, or a list of such lists",
            field=field,
        )
    if kinds == {int}:
        prompts = [prompts]
    checked_texts(field, prompts, "text or token ids")
    num_tokens = sum(len(each) for each in prompts if not isinstance(each, str))
    if num_tokens > MAX_REQUEST_TOKENS:
        raise InvalidRequest(
            f"{field} has {num_tokens:,} token ids together, must have at most {MAX_REQUEST_TOKENS:,}; send several "
            "requests",
            field=field,
        )
    return prompts


def checked_texts(field: str, texts: list[T], kind: str = "a text") -> list[T]:
    """Return prompts that are within the limits. kind: what each of them is. Raises InvalidRequest."""
    if not texts:
        raise InvalidRequest(f"{field} is an empty list; give {kind}", field=field)
    check_entries(field, len(texts), REQUEST_LIMITS["prompt"].entries)
    check_texts(field, texts, REQUEST_LIMITS["prompt"])
    return texts
