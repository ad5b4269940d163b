"""The body of `POST /v1/completions`."""

from __future__ import annotations

from typing import Annotated, Any

from octavo.core.request_limits import MAX_REQUEST_TOKENS, MAX_SEQUENCES, REQUEST_LIMITS, check_entries, check_texts
from octavo.errors import InvalidRequest
from octavo.server.decode import Refused
from octavo.server.schema.common import GenerationRequest, Int, TokenId


class CompletionRequest(GenerationRequest, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/completions`."""

    prompt: str | list[str | TokenId | list[TokenId]]
    echo: bool | None = None
    logprobs: Int | None = None

    suffix: Annotated[Any, Refused("filling in before a suffix is not there yet", harmless=("",))] = None
    prompt_embeds: Annotated[Any, Refused("send text or token ids")] = None

    def check(self) -> None:
        GenerationRequest.check(self)
        if self.echo and self.truncate_prompt_tokens is not None:
            raise InvalidRequest("echo does not go with truncate_prompt_tokens; leave one out", field="echo")
        if self.echo and self.prompt_logprobs is not None:
            raise InvalidRequest("prompt_logprobs does not go with echo; ask for logprobs", field="prompt_logprobs")

    def prompts(self) -> list[str | list[int]]:
        """Return the prompts one by one. Raises InvalidRequest for a list of several kinds, and for too many or too
        long ones.

        All prompts together have at most MAX_SEQUENCES sequences (prompts times best_of or n).
        """
        prompts = self._listed_prompts()
        if not isinstance(self.prompt, str):
            check_texts("prompt", prompts, REQUEST_LIMITS["prompt"])
        num_tokens = sum(len(prompt) for prompt in prompts if not isinstance(prompt, str))
        if num_tokens > MAX_REQUEST_TOKENS:
            raise InvalidRequest(
                f"prompt has {num_tokens:,} token ids together, must have at most {MAX_REQUEST_TOKENS:,}; send several "
                "requests",
                field="prompt",
            )
        width = max(self.n or 1, self.best_of or 1)
        if len(prompts) > 1 and len(prompts) * width > MAX_SEQUENCES:
            raise InvalidRequest(
                f"the request asks for {len(prompts) * width:,} sequences ({len(prompts):,} prompts, {width:,} "
                f"sequences each), must ask for at most {MAX_SEQUENCES:,}; send several requests",
                field="prompt",
            )
        return prompts

    def _listed_prompts(self) -> list[str | list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not self.prompt:
            raise InvalidRequest("prompt is an empty list; give text or token ids", field="prompt")
        kinds = {type(item) for item in self.prompt}
        if len(kinds) > 1:
            raise InvalidRequest(
                "prompt mixes kinds; it is text, a list of texts, a list of token ids, or a list of such lists",
                field="prompt",
            )
        prompts: list[Any] = [self.prompt] if kinds == {int} else self.prompt
        check_entries("prompt", len(prompts), REQUEST_LIMITS["prompt"].entries)
        return prompts
