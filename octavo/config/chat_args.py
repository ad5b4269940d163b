"""What a person may set about how conversations become prompts; a part of `ModelArgs`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

from octavo.config.fields import Arg


@dataclass(frozen=True, kw_only=True)
class ChatArgs:
    """What renders conversations, and with which values."""

    heading: ClassVar = "Chats"

    chat_template: Annotated[str | None, Arg("Chat template instead of the checkpoint's: a file or its text.")] = None
    default_chat_template_kwargs: Annotated[
        dict[str, Any],
        Arg(
            'Values that chat templates get unless a chat has others: an object of JSON, such as {"enable_thinking": '
            "false}."
        ),
    ] = field(default_factory=dict)
