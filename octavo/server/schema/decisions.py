"""The body of `POST /v1/decisions`, OpenAI's API for questions about an input."""

from __future__ import annotations

import string
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final

import msgspec
from msgspec import Meta, Struct, structs

from octavo.core.prompt import Prompt
from octavo.core.request_limits import MAX_REQUEST_CHARS, check_chars
from octavo.errors import InvalidRequest
from octavo.server.decode import EngineBody, RequestBody, converted
from octavo.server.schema.bodies import PromptBody
from octavo.server.schema.chat import REASONING_SWITCHES, Message
from octavo.server.schema.responses import ResponsesRequest

if TYPE_CHECKING:
    from octavo.server.preparing import Preparer

LABELS: Final = string.ascii_uppercase
"""The letters by which a model names the options of a question."""


class _Text(Struct, tag_field="type", tag="input_text", forbid_unknown_fields=True):
    text: str


class _Json(Struct, tag_field="type", tag="input_json", forbid_unknown_fields=True):
    data: Any

    @property
    def text(self) -> str:
        return _as_json(self.data)


class _Question(Struct, tag_field="type", kw_only=True, forbid_unknown_fields=True):
    """instructions: what is asked of the input. name: stands in the answer."""

    instructions: str | list[_Text | _Json]
    name: str | None = None

    def options(self) -> list[str]:
        """Return the answers that the model chooses from, in their order."""
        raise NotImplementedError

    def text(self) -> str:
        """Return the question for the model."""
        asked = self.instructions
        if not isinstance(asked, str):
            asked = "\n".join(part.text for part in asked)
        lines = (f"{label}: {option}" for label, option in zip(LABELS, self.options(), strict=False))
        return "\n".join((f"Question: {asked}", *lines, "Answer with the letter of one option only."))


class Predicate(_Question, tag="predicate", kw_only=True):
    """How probable it is that a statement about the input is true."""

    def options(self) -> list[str]:
        return ["true", "false"]


class _Option(Struct, forbid_unknown_fields=True):
    value: str | bool
    description: str = ""


class Choice(_Question, tag="choice", kw_only=True):
    """Which option fits the input."""

    choices: Annotated[list[_Option], Meta(min_length=2, max_length=len(LABELS))]

    def options(self) -> list[str]:
        return [_described(_as_json(each.value), each.description) for each in self.choices]


class _Level(Struct, forbid_unknown_fields=True):
    label: str
    description: str = ""


class Scale(_Question, tag="score", kw_only=True):
    """Where the input stands on a scale, whose levels count from 0."""

    levels: Annotated[list[_Level], Meta(min_length=2, max_length=10)]

    def options(self) -> list[str]:
        return [_described(each.label, each.description) for each in self.levels]


class DecisionRequest(EngineBody, PromptBody, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/decisions`: questions about a text or a conversation, each answered for itself.

    The fields after `chat_template_kwargs` have no effect: prefixes are cached without marks.
    """

    texts_field: ClassVar[str] = "questions"

    input: str | list[dict[str, Any]]
    questions: Annotated[list[Predicate | Choice | Scale], Meta(min_length=1)]
    chat_template_kwargs: dict[str, Any] | None = None

    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    safety_identifier: str | None = None

    def check(self) -> None:
        """Raise InvalidRequest for fields that are too long, and for options of one value."""
        RequestBody.check(self)
        for index, each in enumerate(self.questions):
            if isinstance(each, Choice) and len({_as_json(one.value) for one in each.choices}) < len(each.choices):
                raise InvalidRequest(
                    f"questions[{index}].choices has one value twice; each must be unique",
                    field=f"questions[{index}].choices",
                )

    def prompts(self, preparer: Preparer) -> list[Prompt]:
        """Return the prompt of each question: the input, and behind it the question. Raises InvalidRequest."""
        preparer.tools.vectors.refuse_text()
        # a label has to be the first token of the answer
        values = {**dict.fromkeys(REASONING_SWITCHES, False), **(self.chat_template_kwargs or {})}
        asked = converted({"input": _with_texts(self.input), "chat_template_kwargs": values}, ResponsesRequest)
        chat, turns = asked.as_chat(), [turn for _, turn in asked.turns()]
        prompts, num_chars = [], 0
        for question in preparer.in_time(self.questions):
            *before, last = [*turns] if turns[-1]["role"] == "user" else [*turns, {"role": "user", "content": ""}]
            own = converted({**last, "content": _followed(last["content"], question.text())}, Message)
            with asked.named():
                messages = [*chat.messages[: len(before)], own]
                prompts.append(preparer.rendered(structs.replace(chat, messages=messages)))
            num_chars += len(prompts[-1].text or "")
            check_chars("questions", num_chars, MAX_REQUEST_CHARS, " together with the input of each")
        return prompts


def _with_texts(given: str | list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Return an input with texts in place of its parts of JSON."""
    if isinstance(given, str):
        return given
    return [
        {**item, "content": [_as_text(part) for part in item["content"]]}
        if isinstance(item.get("content"), list)
        else item
        for item in given
    ]


def _as_text(part: Any) -> Any:
    if not isinstance(part, dict) or part.get("type") != "input_json" or "data" not in part:
        return part
    return {"type": "input_text", "text": _as_json(part["data"])}


def _followed(content: str | list[dict[str, Any]], text: str) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return f"{content}\n\n{text}" if content else text
    return [*content, {"type": "text", "text": text}]


def _described(option: str, description: str) -> str:
    return f"{option} ({description})" if description else option


def _as_json(value: Any) -> str:
    return msgspec.json.encode(value).decode()
