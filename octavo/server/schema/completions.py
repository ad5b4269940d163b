"""The body of `POST /v1/completions`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Final, Self

from msgspec import Meta, structs

from octavo.core.prompt import Prompt
from octavo.core.prompt_embeds import decoded_embeds
from octavo.core.request_limits import MAX_SEQUENCES, REQUEST_LIMITS, check_entries
from octavo.engine.text.fill_in import fill_in_prompt
from octavo.errors import InvalidRequest
from octavo.server.decode import Int, Refused, TokenId
from octavo.server.schema.common import GenerationRequest, listed_prompts, prompt_of

if TYPE_CHECKING:
    from octavo.server.preparing import Preparer

_EMBEDS: Final = "Vectors in place of tokens, [tokens, width]: each a file of numpy (.npy) in Base64."


class CompletionRequest(GenerationRequest, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/completions`."""

    prompt: str | list[str | TokenId | list[TokenId]] | None = None
    suffix: str | None = None
    echo: bool | None = None
    logprobs: Int | None = None

    prompt_embeds: Annotated[str | list[str], Meta(description=_EMBEDS)] | None = None
    thinking_token_budget: Annotated[
        Any, Refused("give reasoning_end and reasoning_budget in structured_outputs", harmless=(-1,))
    ] = None

    def check(self) -> None:
        GenerationRequest.check(self)
        if self.prompt is None and self.prompt_embeds is None:
            raise InvalidRequest("prompt is missing", field="prompt", code="missing_required_parameter")
        for name in ("prompt", "suffix", "echo"):
            if self.prompt_embeds is not None and getattr(self, name):
                raise InvalidRequest(f"prompt_embeds cannot be combined with {name}; leave one out", field=name)
        for name in ("echo", "truncate_prompt_tokens"):
            if self.suffix and getattr(self, name):
                raise InvalidRequest(f"suffix cannot be combined with {name}; leave one out", field="suffix")
        if self.logprob_token_ids and self.logprobs is None:
            raise InvalidRequest("logprob_token_ids needs logprobs, at least 0", field="logprob_token_ids")
        if self.echo and self.truncate_prompt_tokens is not None:
            raise InvalidRequest("echo cannot be combined with truncate_prompt_tokens; leave one out", field="echo")
        if self.echo and self.prompt_logprobs is not None:
            raise InvalidRequest(
                "prompt_logprobs cannot be combined with echo; ask for logprobs", field="prompt_logprobs"
            )

    def prompts(self, preparer: Preparer) -> list[Prompt]:
        preparer.tools.vectors.refuse_text()
        self.check_form()
        if self.suffix:
            return [self._filled_in(preparer, each, self.suffix) for each in self.listed()]
        return [prompt_of(each, self.add_special_tokens) for each in self.listed()]

    def without_text(self) -> Self:
        kept = super().without_text()
        if self.suffix:  # that there is one says at which tokens an output ends
            return structs.replace(kept, suffix=self.suffix[0])
        return kept if self.prompt_embeds is None else structs.replace(kept, prompt="", prompt_embeds=None)

    def _filled_in(self, preparer: Preparer, prompt: str | list[int] | Prompt, suffix: str) -> Prompt:
        if not isinstance(prompt, str):
            raise InvalidRequest("suffix needs a prompt of text, not of token ids", field="suffix")
        preparer.tools.check_text_length(prompt, "prompt")
        preparer.tools.check_text_length(suffix, "suffix")
        adds_special_tokens = self.add_special_tokens is not False
        return fill_in_prompt(preparer.tools.tokenizer, prompt, suffix, adds_special_tokens=adds_special_tokens)

    def listed(self) -> list[str | list[int] | Prompt]:
        """Return the prompts one by one. Raises InvalidRequest.

        All prompts together have at most MAX_SEQUENCES sequences (prompts times best_of or n).
        """
        given = "" if self.prompt is None else self.prompt
        prompts = listed_prompts("prompt", given) if self.prompt_embeds is None else self._vectors()
        width = max(self.n or 1, self.best_of or 1)
        if len(prompts) > 1 and len(prompts) * width > MAX_SEQUENCES:
            raise InvalidRequest(
                f"the request asks for {len(prompts) * width:,} sequences ({len(prompts):,} prompts, {width:,} "
                f"sequences each), must ask for at most {MAX_SEQUENCES:,}; send several requests",
                field="prompt",
            )
        return prompts

    def _vectors(self) -> list[Any]:
        given = [self.prompt_embeds] if isinstance(self.prompt_embeds, str) else self.prompt_embeds or []
        if not given:
            raise InvalidRequest("prompt_embeds is an empty list; give vectors", field="prompt_embeds")
        check_entries("prompt_embeds", len(given), REQUEST_LIMITS["prompt_embeds"].entries)
        return [Prompt.of_embeds(decoded_embeds(each)) for each in given]
