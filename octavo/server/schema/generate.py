"""The body of `POST /inference/v1/generate`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal, Self

from msgspec import Meta, structs

from octavo.core.prompt import Prompt
from octavo.errors import InvalidRequest, named_by_the_caller
from octavo.server.decode import EngineBody, Refused, TokenId, converted
from octavo.server.schema.bodies import PromptBody
from octavo.server.schema.common import StreamOptions
from octavo.server.schema.completions import CompletionRequest

if TYPE_CHECKING:
    from octavo.server.preparing import Preparer

_PARAMS: Final = "sampling_params"
_OF_SERVER: Final = Refused("the server chooses where KV goes; leave it out", harmless=({},))
_MEDIA: Final = Refused("send images and sounds as parts of a chat's messages", harmless=([], {}))
_REASONING: Final = Refused("give reasoning_end in structured_outputs")
_OF_ENGINE: Final = ("detokenize", "output_kind", "flat_logprobs")  # how vLLM makes the same answer; not read
_NOT_HERE: Final = ("prompt", "suffix", "echo", "prompt_embeds", "stream", "stream_options")


class GenerateRequest(EngineBody, PromptBody, kw_only=True, forbid_unknown_fields=True):
    """Token ids in, token ids out, in vLLM's words. It is served as a completion.

    sampling_params: those of a completion, with its `logprobs`; without `max_tokens` as many as fit. output_mode:
    "text" adds the text, and log-probabilities with the texts of tokens. token_offsets: is not read.
    """

    texts_field: ClassVar[str] = "token_ids"

    token_ids: Annotated[list[TokenId], Meta(min_length=1)]
    sampling_params: dict[str, Any]
    output_mode: Literal["tokens", "text"] = "tokens"
    return_token_ids: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    token_offsets: Any = None

    features: Annotated[Any, _MEDIA] = None
    content_parts: Annotated[Any, _MEDIA] = None
    reasoning_ended: Annotated[Any, _REASONING] = None
    reasoning_parser_kwargs: Annotated[Any, _REASONING] = None
    kv_transfer_params: Annotated[Any, _OF_SERVER] = None
    ec_transfer_params: Annotated[Any, _OF_SERVER] = None

    def check(self) -> None:
        """Raise InvalidRequest for fields that are too long, wrong, or contradict each other."""
        super().check()
        asked = self.as_completion()
        with named_by_the_caller(self.names):
            asked.check()

    @property
    def names(self) -> dict[str, str]:
        """The request's names for fields of the completion and of the engine."""
        of_prompt = dict.fromkeys(("prompt", "prompt_token_ids", "max_tokens"), "token_ids")
        return of_prompt | {name: f"{_PARAMS}.{name}" for name in self.sampling_params}

    def as_completion(self) -> CompletionRequest:
        """Return the completion that this request is served as. Raises InvalidRequest."""
        given = {name: value for name, value in self.sampling_params.items() if name not in _OF_ENGINE}
        for name in _NOT_HERE:
            if name in given:
                field = f"{_PARAMS}.{name}"
                raise InvalidRequest(f"{field} is not a known field", field=field, code="unknown_parameter")
        asked = converted(given, CompletionRequest, _PARAMS)
        for name in ("model", "cache_salt", "priority", "first_token_deadline_s", "request_id", "user"):
            setattr(asked, name, getattr(self, name))
        asked.prompt, asked.stream, asked.stream_options = [], self.stream, self.stream_options
        return asked

    def prompts(self, preparer: Preparer) -> list[Prompt]:
        preparer.tools.vectors.refuse_text()
        self.as_completion().check_form()
        return [Prompt(token_ids=self.token_ids)]

    def without_text(self) -> Self:
        return structs.replace(self, token_ids=[0])
