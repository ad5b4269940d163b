"""The body of `POST /v1/chat/completions/batch`, which vLLM's servers have."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, Final

from msgspec import Meta

from octavo.core.prompt import Prompt
from octavo.core.request_limits import REQUEST_LIMITS, check_entries
from octavo.errors import InvalidRequest
from octavo.server.schema.chat import ChatCompletionRequest, Message

if TYPE_CHECKING:
    from octavo.server.preparing import Preparer

_INLINE_CHATS: Final = 8
"""Most conversations that are rendered on the event loop."""
_ALONE: Final = ("stream", "tools", "use_beam_search", "prediction", "prompt_logprobs")
"""Fields that requests with one conversation alone have."""


class ChatBatchRequest(ChatCompletionRequest, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/chat/completions/batch`: several conversations; the other fields apply to each."""

    messages: Annotated[list[Annotated[list[Message], Meta(min_length=1)]], Meta(min_length=1)]  # type: ignore[assignment]

    def check(self) -> None:
        check_entries("messages", len(self.messages), REQUEST_LIMITS["prompt"].entries)
        ChatCompletionRequest.check(self)
        for name in _ALONE:
            value = getattr(self, name)
            if value is not None and value is not False and value != []:  # 0 is a number of log-probabilities
                raise self._refused(name)
        for name in ("n", "best_of"):
            if getattr(self, name) not in (None, 1):
                raise self._refused(name)

    def _refused(self, name: str) -> InvalidRequest:
        return InvalidRequest(
            f"{name} is not taken for several conversations; leave it out, or send each to /v1/chat/completions",
            field=name,
            code="unsupported_parameter",
        )

    def conversations(self) -> Mapping[str, Sequence[Message]]:
        return {_field(index): messages for index, messages in enumerate(self.messages)}

    @property
    def may_take_long(self) -> bool:
        return len(self.messages) > _INLINE_CHATS or super().may_take_long

    def prompts(self, preparer: Preparer) -> list[Prompt]:
        prompts: list[Prompt] = []
        for index in preparer.in_time(range(len(self.messages))):
            with of_conversation(index):
                prompts += self.chat(index).prompts(preparer)
        return prompts

    def echoed_messages(self, messages: Sequence[Any]) -> list[Any]:
        return [self.chat(index).echoed_messages(each) for index, each in enumerate(messages)]

    def chat(self, index: int) -> ChatCompletionRequest:
        """Return the request for one conversation alone."""
        fields = {name: getattr(self, name) for name in self.__struct_fields__}
        return ChatCompletionRequest(**{**fields, "messages": self.messages[index]})


@contextmanager
def of_conversation(index: int) -> Iterator[None]:
    """Make an InvalidRequest from inside that names `messages` name this conversation's messages."""
    try:
        yield
    except InvalidRequest as error:
        if error.field is not None and error.field.startswith("messages"):
            error.field = error.field.replace("messages", _field(index), 1)
            error.args = (str(error).replace("messages", _field(index), 1),)
        raise


def _field(index: int) -> str:
    return f"messages[{index}]"
