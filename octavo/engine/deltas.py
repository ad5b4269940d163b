"""Several outputs of OutputKind.DELTA as one, for readers that are slower than the engine."""

from __future__ import annotations

from octavo.core.outputs import CompletionOutput, RequestOutput


def merge_deltas(earlier: RequestOutput, later: RequestOutput) -> RequestOutput:
    """One output with what two successive ones of OutputKind.DELTA hold."""
    completions = {completion.index: completion for completion in earlier.outputs}
    for new in later.outputs:
        old = completions.get(new.index)
        completions[new.index] = new if old is None else _merge_completions(old, new)
    return RequestOutput(
        request_id=later.request_id,
        prompt=later.prompt,
        prompt_token_ids=later.prompt_token_ids,
        outputs=[completions[index] for index in sorted(completions)],
        finished=later.finished,
        prompt_logprobs=earlier.prompt_logprobs or later.prompt_logprobs,
        num_cached_tokens=later.num_cached_tokens,
        cache_miss_reason=later.cache_miss_reason,
        num_generated_tokens=later.num_generated_tokens,
        metrics=later.metrics,
        error=later.error,
    )


def _merge_completions(old: CompletionOutput, new: CompletionOutput) -> CompletionOutput:
    return CompletionOutput(
        index=new.index,
        text=old.text + new.text,
        token_ids=old.token_ids + new.token_ids,
        cumulative_logprob=new.cumulative_logprob,
        logprobs=None if old.logprobs is None or new.logprobs is None else old.logprobs + new.logprobs,
        text_offsets=(
            None if old.text_offsets is None or new.text_offsets is None else old.text_offsets + new.text_offsets
        ),
        finish_reason=new.finish_reason,
        stop_reason=new.stop_reason,
    )
