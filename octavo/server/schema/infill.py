"""The body of `POST /infill`, an endpoint of llama.cpp."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Final

from msgspec import Struct

from octavo.core.prompt import Prompt
from octavo.engine.text.fill_in import fill_in_prompt
from octavo.server.decode import Int, Refused
from octavo.server.schema.common import GenerationRequest

if TYPE_CHECKING:
    from octavo.server.preparing import Preparer

_ELSEWHERE: Final = Refused("POST /v1/completions has it", harmless=(False, 0))
_NAMES: Final = {"max_tokens": "n_predict", "n": "n_cmpl", "repetition_penalty": "repeat_penalty"}


class OtherFile(Struct, kw_only=True):
    """A piece of another file; editors also send the time at which they read it."""

    text: str
    filename: str = "tmp"


class InfillRequest(GenerationRequest, kw_only=True, forbid_unknown_fields=True):
    """`POST /infill`: what stands before the cursor (input_prefix, then prompt) and behind it, and other files."""

    if TYPE_CHECKING:
        stop_token_ids: list[int] | None

    input_prefix: str
    input_suffix: str
    prompt: str = ""
    input_extra: list[OtherFile] | None = None
    n_predict: Int | None = None
    n_cmpl: Int | None = None
    repeat_penalty: float | None = None
    return_tokens: bool | None = None
    response_fields: list[str] = []

    # sent by editors, ignored by octavo: it has no slots, caches every prompt, and has one order of samplers
    cache_prompt: bool | None = None
    id_slot: Int | None = None
    n_indent: Int | None = None
    samplers: list[str] | None = None
    t_max_predict_ms: Int | None = None
    t_max_prompt_ms: Int | None = None

    logprob_token_ids: Annotated[Any, _ELSEWHERE] = None
    n_probs: Annotated[Any, _ELSEWHERE] = None
    prompt_logprobs: Annotated[Any, _ELSEWHERE] = None
    return_cache_info: Annotated[Any, _ELSEWHERE] = None
    return_weight_versions: Annotated[Any, _ELSEWHERE] = None
    return_token_ids: Annotated[Any, Refused("ask for return_tokens", harmless=(False,))] = None
    return_tokens_as_token_ids: Annotated[Any, _ELSEWHERE] = None
    stream_options: Annotated[Any, _ELSEWHERE] = None
    truncate_prompt_tokens: Annotated[Any, Refused("it would cut off where the text begins")] = None

    @property
    def names(self) -> dict[str, str]:
        """The request's names for sampling parameters that octavo knows by another name."""
        return {ours: theirs for ours, theirs in _NAMES.items() if getattr(self, theirs) is not None}

    @property
    def most_to_fill_in(self) -> int | None:
        """Most tokens to fill in: 0 leaves the prompt in the cache alone, None is the rest of the context."""
        given = self.max_tokens if self.n_predict is None else self.n_predict
        return None if given is None or given < 0 else given

    def prompts(self, preparer: Preparer) -> list[Prompt]:
        """Return the prompt, and check the form of the text. Raises InvalidRequest, which it also does for a model that
        was not trained to fill in."""
        tools, prefix = preparer.tools, self.input_prefix + self.prompt
        tools.vectors.refuse_text()
        self.check_form()
        tools.check_text_length(prefix, "input_prefix")
        tools.check_text_length(self.input_suffix, "input_suffix")
        prompt = fill_in_prompt(
            tools.tokenizer,
            prefix,
            self.input_suffix,
            adds_special_tokens=self.add_special_tokens is not False,
            files=[(each.filename, each.text) for each in self.input_extra or ()],
            most_tokens=tools.ready.max_model_len - max(self.most_to_fill_in or 1, 1),
            fields=("input_prefix", "input_suffix"),
        )
        return [prompt]
