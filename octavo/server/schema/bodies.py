"""What is read from the bodies of requests: prompts, or an answer about tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Final, Self

from msgspec import Struct, structs

from octavo.core.prompt import Prompt
from octavo.server.decode import RequestBody

if TYPE_CHECKING:
    from octavo.server.preparing import Preparer

_TEXTS: Final = ("prompt", "input", "input_prefix", "input_suffix")
_UNREAD: Final = ("chat_template", "chat_template_kwargs", "documents", "system", "prediction", "suffix", "input_extra")


class PromptBody(RequestBody):
    """The body of a request that prompts are made of. texts_field: the field whose entries they are, if it is not one
    of those that all APIs have."""

    texts_field: ClassVar[str] = ""

    def prompts(self, preparer: Preparer) -> list[Prompt]:
        """Return the prompts, not tokenised yet, and check the form of the text. Raises InvalidRequest."""
        raise NotImplementedError

    def without_text(self) -> Self:
        """Return the request without what its prompts alone are made of: all that a response is made from."""
        changes: dict[str, Any] = {name: "" for name in _TEXTS if getattr(self, name, None) is not None}
        changes |= {name: None for name in _UNREAD if getattr(self, name, None) is not None}
        if messages := getattr(self, "messages", None):
            changes["messages"] = self.echoed_messages(messages)
        return structs.replace(self, **changes)

    def echoed_messages(self, messages: Sequence[Any]) -> list[Any]:
        """Return short messages in place of the request's own, with the text that its response repeats (`echo`)."""
        kind, text = type(messages[0]), getattr(self, "echoed_text", "")
        return [kind(role="assistant" if text else "user", content=text)]


class TokensBody(RequestBody):
    """The body of a request that is answered with tokens, or with their number."""

    if TYPE_CHECKING:
        model: str | None

    def answer(self, preparer: Preparer) -> Struct:
        """Return the response. Raises InvalidRequest."""
        raise NotImplementedError
