"""Why nothing could be drawn for a row, in words for its request."""

from __future__ import annotations

import math

from octavo.core.sampling_params import SamplingParams
from octavo.sampling.processors import default_processors


def refusal(position: int, params: SamplingParams, model_largest: float, largest: float) -> str | None:
    """The sentence for a row, None when it is sound.

    model_largest, largest: the row's largest logit before and after the processors; NaN where one is among them.
    """
    if not math.isfinite(model_largest):
        return not_finite(position)
    if largest == -math.inf:
        return (
            f"no token may be drawn for position {position}: {_processors_of(params)} bar every token; loosen one of "
            "them"
        )
    if not math.isfinite(largest):
        return f"the logits for position {position} overflow under {_processors_of(params)}"
    return None


def not_finite(position: int) -> str:
    """The sentence for a row whose logits are not numbers."""
    return (
        f"the model's logits for position {position} hold NaN or infinity; the checkpoint is damaged, "
        "or its numbers need a wider dtype (try float32)"
    )


def _processors_of(params: SamplingParams) -> str:
    return " and ".join(each.name for each in default_processors() if each.needs(params)) or "its logits processors"
