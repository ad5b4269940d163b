"""A turn of a conversation for any API: its sampling parameters, and what the model has written as events."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import msgspec
from starlette.requests import Request

from octavo.core.outputs import CompletionOutput, RequestOutput
from octavo.core.prompt import Prompt
from octavo.core.sampling_params import SamplingParams
from octavo.errors import InvalidRequest, named_by_the_caller
from octavo.server.context import ServerContext
from octavo.server.formats.events import OutputEvent, TextDelta
from octavo.server.formats.reading import OutputReader
from octavo.server.generation import Generation
from octavo.server.logprobs import ChatLogprobs
from octavo.server.schema.chat import ChatCompletionRequest
from octavo.server.schema.shim import ShimRequest
from octavo.server.sending import StreamEvent

S = TypeVar("S", bound=ShimRequest)


class Turn(Generation):
    """The next turn of a conversation."""

    asked: ChatCompletionRequest
    reader: OutputReader | None = None
    """Reads reasoning and calls; None if the text is not parsed."""

    def sampling_params(self) -> SamplingParams:
        asked, model = self.asked, self.context.llm.config.model
        if 0 <= model.max_logprobs < (asked.top_logprobs or 0):
            raise InvalidRequest(
                f"top_logprobs is {asked.top_logprobs}, must be at most {model.max_logprobs}", field="top_logprobs"
            )
        # a conversation goes on until the model ends its turn, unless the request or the checkpoint sets a limit
        is_left_to_checkpoint = asked.token_limit is None and model.generation_defaults.get("max_tokens") is not None
        limit = {} if is_left_to_checkpoint else {"max_tokens": asked.token_limit}
        self.field_names = {"prompt": "messages", "prompt_token_ids": "messages", "logprobs": "top_logprobs"}
        self.field_names |= asked.form_names
        if asked.max_completion_tokens is not None:
            self.field_names["max_tokens"] = "max_completion_tokens"
        with named_by_the_caller(self.field_names):
            logprobs = (asked.top_logprobs or 0) if asked.logprobs else None
            given = asked.given_sampling(**limit, logprobs=logprobs)
            return self.context.llm.default_sampling_params(**{**given, **self._reading_params()})

    def _reading_params(self) -> dict[str, Any]:
        """Return the sampling parameters with the changes that reading calls and reasoning needs."""
        model = self.context.texts.format
        self.reader = model.reader(self.asked)
        form, *others = (model.form(self.asked, opened) for opened in {*map(model.opened_by, self.prompts)})
        if any(each != form for each in others):
            raise InvalidRequest(
                "some conversations end within reasoning and some do not, so that the form of the answers begins at "
                "different places; send them in two requests",
                field="messages",
            )
        changes: dict[str, Any] = {} if form is None else {"structured_outputs": form}
        shows_special = self.reader is not None and self.reader.shows_special
        return {**changes, "skip_special_tokens": False} if shows_special else changes

    def events(self, output: RequestOutput, completion: CompletionOutput) -> Sequence[OutputEvent]:
        """Return the events of a choice since its last output."""
        if self.reader is None:
            return [TextDelta(completion.text)] if completion.text else []
        return self.reader.events(output, completion)

    def finish_reason(self, completion: CompletionOutput) -> str | None:
        """Return why a choice has ended: `tool_calls` where the turn ended behind a call, not within one."""
        if completion.finish_reason == "stop" and self.reader is not None and self.reader.has_called(completion.index):
            return "tool_calls"
        return completion.finish_reason

    def reasoning_tokens(self) -> int | None:
        return None if self.reader is None else self.reader.num_reasoning_tokens

    def logprobs(self, completion: CompletionOutput) -> ChatLogprobs | None:
        """Return the log-probabilities of the tokens of a choice where the request asks for them."""
        if not self.asked.logprobs or not completion.token_ids:
            return None
        return self.described(completion, self.asked.top_logprobs or 0)


class ShimTurn(Turn, Generic[S]):
    """A turn for an API that is served as a chat. shim: the request of that API."""

    def __init__(self, context: ServerContext, request: Request, shim: S, prompts: Sequence[Prompt]) -> None:
        self.shim = shim
        with shim.named():
            super().__init__(context, request, shim.as_chat(), prompts)
        names = shim.names
        self.field_names = names | {name: names.get(other, other) for name, other in self.field_names.items()}
        self.begin()

    @abstractmethod
    def begin(self) -> None:
        """Initialise the state from which the response is made, before any output."""

    def event(self, encoder: msgspec.json.Encoder, chunk: StreamEvent) -> bytes:
        """Return a chunk as an event with the name of its type."""
        return b"event: %b\ndata: %b\n\n" % (chunk["type"].encode(), encoder.encode(chunk))
