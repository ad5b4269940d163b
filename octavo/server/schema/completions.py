"""The body of `POST /v1/completions`."""

from __future__ import annotations

from typing import Annotated, Any

from octavo.core.request_limits import MAX_SEQUENCES
from octavo.errors import InvalidRequest
from octavo.server.decode import Refused
from octavo.server.schema.common import GenerationRequest, Int, TokenId, listed_prompts


class CompletionRequest(GenerationRequest, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/completions`."""

    prompt: str | list[str | TokenId | list[TokenId]]
    suffix: str | None = None
    echo: bool | None = None
    logprobs: Int | None = None

    prompt_embeds: Annotated[Any, Refused("send text or token ids")] = None
    thinking_token_budget: Annotated[
        Any, Refused("give reasoning_end and reasoning_budget in structured_outputs", harmless=(-1,))
    ] = None

    def check(self) -> None:
        GenerationRequest.check(self)
        for name in ("echo", "truncate_prompt_tokens"):
            if self.suffix and getattr(self, name):
                raise InvalidRequest(f"suffix does not go with {name}; leave one out", field="suffix")
        if self.logprob_token_ids and self.logprobs is None:
            raise InvalidRequest("logprob_token_ids needs logprobs, at least 0", field="logprob_token_ids")
        if self.echo and self.truncate_prompt_tokens is not None:
            raise InvalidRequest("echo does not go with truncate_prompt_tokens; leave one out", field="echo")
        if self.echo and self.prompt_logprobs is not None:
            raise InvalidRequest("prompt_logprobs does not go with echo; ask for logprobs", field="prompt_logprobs")

    def prompts(self) -> list[str | list[int]]:
        """Return the prompts one by one. Raises InvalidRequest.

        All prompts together have at most MAX_SEQUENCES sequences (prompts times best_of or n).
        """
        prompts = listed_prompts("prompt", self.prompt)
        width = max(self.n or 1, self.best_of or 1)
        if len(prompts) > 1 and len(prompts) * width > MAX_SEQUENCES:
            raise InvalidRequest(
                f"the request asks for {len(prompts) * width:,} sequences ({len(prompts):,} prompts, {width:,} "
                f"sequences each), must ask for at most {MAX_SEQUENCES:,}; send several requests",
                field="prompt",
            )
        return prompts
