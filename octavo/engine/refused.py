"""The outputs of requests that an offline engine refuses."""

from __future__ import annotations

from octavo.core.outputs import CompletionOutput, RequestError, RequestOutput
from octavo.errors import InvalidRequest, RequestTooLarge


def refused_output(request_id: str, prompt: str | None, n: int, error: InvalidRequest) -> RequestOutput:
    """Return the final output of a request that never reached the core."""
    return RequestOutput(
        request_id=request_id,
        prompt=prompt,
        prompt_token_ids=[],
        outputs=[CompletionOutput(index=index, text="", token_ids=[], finish_reason="error") for index in range(n)],
        finished=True,
        error=RequestError.of(error),
    )


def about_width(error: InvalidRequest, width_name: str) -> InvalidRequest:
    """Return the error with `width_name` in place of best_of."""
    if error.field != "best_of" and not isinstance(error, RequestTooLarge):
        return error
    field = width_name if error.field == "best_of" else error.field
    return type(error)(str(error).replace("best_of", width_name), field=field, code=error.code)
