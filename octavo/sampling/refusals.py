"""Makes the error of a request for which nothing can be drawn; the other rows of the batch are not affected."""

from __future__ import annotations

import math

from octavo.core.outputs import RequestError
from octavo.core.sampling_params import SamplingParams
from octavo.errors import InvalidRequest
from octavo.sampling.processors import Penalties, default_processors
from octavo.sampling.processors.penalties import asked_penalties


def refusal(position: int, params: SamplingParams, model_largest: float, largest: float) -> RequestError | None:
    """Return the error of a row; None when a token can be drawn.

    model_largest, largest: the row's largest logit before and after the processors; NaN where any logit is NaN.
    """
    if not math.isfinite(model_largest):
        return not_finite(position)
    if math.isfinite(largest):
        return None
    names = [each.name for each in default_processors() if each.needs(params) and not isinstance(each, Penalties)]
    names += asked_penalties(params)
    if names and params.structured_outputs is not None:
        names.append("structured_outputs")
    by_what = " and ".join(names) or "its logits processors"
    if largest == -math.inf:
        message = f"no token may be drawn for position {position}: {by_what} bar every token; loosen one of them"
    else:
        message = f"the logits for position {position} overflow under {by_what}; choose values nearer to their defaults"
    if not names:
        return RequestError(message)
    return RequestError(message, field=names[0], code=InvalidRequest.code, is_client_error=True)


def not_finite(position: int) -> RequestError:
    """Return the error of a row whose logits are not numbers."""
    return RequestError(
        f"the model's logits for position {position} hold NaN or infinity; the checkpoint is damaged, "
        "or its numbers need a wider dtype (try float32)"
    )
