"""The common parts of the bodies of APIs that are served as chats."""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final

import msgspec
from msgspec import Struct, defstruct

from octavo.core.prompt import Prompt
from octavo.errors import InvalidRequest, renamed
from octavo.server.decode import Refused, RequestBody, converted, refused_fields
from octavo.server.schema.chat import AudioPart, ChatCompletionRequest
from octavo.server.schema.common import GenerationRequest, WithoutEffect

if TYPE_CHECKING:
    from octavo.server.preparing import Preparer

_ONE: Final = Refused("this API has one response; send several requests", harmless=(1,))
_LIKELIEST: Final = Refused("this API has no beam search; completions and chats have it", harmless=(False,))
_CHAT_ONLY: Final = Refused("completions and chats have it", harmless=(False,))


class TextBlock(Struct, tag_field="type", tag="text", forbid_unknown_fields=True):
    """A piece of text. Only the text is read: the other fields are sent back from responses, or control a cache."""

    text: str
    annotations: Any = None
    logprobs: Any = None
    prompt_cache_breakpoint: Any = None
    cache_control: Any = None
    citations: Any = None


class Unreadable(Struct, tag_field="type"):
    """Something that is not text."""


class PictureBlock(Struct, tag_field="type", kw_only=True, forbid_unknown_fields=True):
    """An image."""

    def url(self, field: str) -> str:
        """Return where the image is, as chats have it. Raises InvalidRequest, which names `field`."""
        raise NotImplementedError


def tagged(base: type[Struct], *tags: str) -> tuple[type[Struct], ...]:
    return tuple(_tagged(base, tag) for tag in tags)


@functools.cache
def _tagged(base: type[Struct], tag: str) -> type[Struct]:
    # one struct for each tag: the schema of two of one name cannot be made
    return defstruct(f"{base.__name__}_{tag}", [], bases=(base,), tag=tag)


def texts_of(content: str | Sequence[Any], field: str) -> list[str]:
    """Return the texts of a content. Raises InvalidRequest for what is not text."""
    if isinstance(content, str):
        return [content]
    return [text_of(part, f"{field}[{index}]") for index, part in enumerate(content)]


def content_of(content: str | Sequence[Any], field: str) -> str | list[dict[str, Any]]:
    """Return a content of a chat. Raises InvalidRequest for what is neither text nor image nor sound."""
    if isinstance(content, str):
        return content
    return joined([part_of(part, f"{field}[{index}]") for index, part in enumerate(content)])


def joined(parts: list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Return the parts; if all are texts, one text with a line for each."""
    has_images = any(part["type"] != "text" for part in parts)
    return parts if has_images else "\n".join(part["text"] for part in parts)


def part_of(part: Struct, field: str) -> dict[str, Any]:
    """Return a part of a content of a chat. Raises InvalidRequest for what is neither text nor image nor sound."""
    if isinstance(part, PictureBlock):
        return {"type": "image_url", "image_url": {"url": part.url(field)}}
    if isinstance(part, AudioPart):
        return part.as_dict()
    return {"type": "text", "text": text_of(part, field)}


def text_of(part: Struct, field: str) -> str:
    """Return the text of a part. Raises InvalidRequest for one that is not text."""
    text: str | None = None if isinstance(part, AudioPart) else getattr(part, "text", None)
    if text is None:
        kind = part.__struct_config__.tag
        raise InvalidRequest(
            f"{field} is of type {kind}, which is not read here; give text",
            field=field,
            code="unsupported_content_type",
        )
    return text


class ShimRequest(GenerationRequest, kw_only=True, forbid_unknown_fields=True):
    """A request that is served as the chat `as_chat()`. It may have the sampling parameters of chats, too.

    names: the client's names for the fields of the chat; `tools[].NAME` is a field of a tool.
    """

    names: ClassVar[dict[str, str]]

    chat_template_kwargs: dict[str, Any] | None = None

    n: Annotated[Any, _ONE] = None
    best_of: Annotated[Any, _ONE] = None
    use_beam_search: Annotated[Any, _LIKELIEST] = None
    length_penalty: Annotated[Any, _LIKELIEST] = None
    early_stopping: Annotated[Any, _LIKELIEST] = None
    logprob_token_ids: Annotated[Any, _CHAT_ONLY] = None
    prompt_logprobs: Annotated[Any, _CHAT_ONLY] = None
    return_token_ids: Annotated[Any, _CHAT_ONLY] = None
    return_weight_versions: Annotated[Any, _CHAT_ONLY] = None
    return_cache_info: Annotated[Any, _CHAT_ONLY] = None

    @abstractmethod
    def turns(self) -> list[tuple[str, dict[str, Any]]]:
        """Return the messages of the chat, each with the field that it comes from. Raises InvalidRequest."""

    @abstractmethod
    def chat_fields(self) -> dict[str, Any]:
        """Return the fields of the chat that this API has under other names. Raises InvalidRequest."""

    def as_chat(self) -> ChatCompletionRequest:
        """Return the chat that this request is served as. Raises InvalidRequest."""
        turns = self.turns()
        common = [name for name in _COMMON_FIELDS if name not in refused_fields(type(self))]
        fields = {name: value for name in common if (value := getattr(self, name)) is not None}
        fields |= {name: value for name, value in self.chat_fields().items() if value is not None}
        with self.named():
            chat = converted({**fields, "messages": [message for _, message in turns]}, ChatCompletionRequest)
            chat.check()
        return chat

    def prompts(self, preparer: Preparer) -> list[Prompt]:
        chat = self.as_chat()
        if chat.thinking_token_budget is not None and not preparer.format.marks_reasoning:
            chat.thinking_token_budget = None  # clients send it to every model
        with self.named():
            return chat.prompts(preparer)

    @property
    def may_take_long(self) -> bool:
        return self.as_chat().may_take_long

    @abstractmethod
    def tool_places(self) -> list[str]:
        """Return the path in this request of each tool of the chat. Raises InvalidRequest."""

    @contextmanager
    def named(self) -> Iterator[None]:
        """Make an InvalidRequest from inside name the client's field instead of the chat's."""
        try:
            yield
        except InvalidRequest as error:
            field = self._client_name(error.field or "")
            message = str(error)
            if error.field and message.startswith(error.field):
                message = field + renamed(message.removeprefix(error.field), self.names)
            else:
                message = renamed(message, self.names)
            raise InvalidRequest(message, field=field or None, code=error.code) from error

    def _client_name(self, field: str) -> str:
        if field.startswith("messages["):
            index, _, rest = field.removeprefix("messages[").partition("]")
            return self.turns()[int(index)][0] + rest
        if field.startswith("tools["):
            # a tool is flat here, a function or a custom tool within a chat's tool
            index, _, rest = field.removeprefix("tools[").partition("]")
            name, dot, rest = rest.removeprefix(".").partition(".")[2].partition(".")
            place = self.tool_places()[int(index)]
            return f"{place}.{self.names.get(f'tools[].{name}', name)}{dot}{rest}" if name else place
        name, dot, rest = field.partition(".")
        return self.names.get(field) or self.names.get(name, name) + dot + rest

    def check(self) -> None:
        """Raise InvalidRequest for fields of this API that are too long. `as_chat` checks the chat's fields that are
        made from them."""
        RequestBody.check(self)


_COMMON_FIELDS: Final = [
    name for name in GenerationRequest.__struct_fields__ if name not in WithoutEffect.__annotations__
] + ["chat_template_kwargs"]


def function(name: str, description: str | None, parameters: Any, strict: bool | None = None) -> dict[str, Any]:
    fields = {"name": name, "description": description, "parameters": parameters, "strict": strict}
    return {"type": "function", "function": {name: value for name, value in fields.items() if value is not None}}


def called(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def as_json(value: Any) -> str:
    return msgspec.json.encode(value).decode()
