"""`min_p`: tokens below a share of the likeliest one are dropped."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from octavo.core.sampling_params import SamplingParams


class MinP:
    """Keeps the tokens whose probability is at least `min_p` times the largest."""

    name = "min_p"

    def needs(self, params: SamplingParams) -> bool:
        return params.min_p > 0.0

    def drop(self, scaled: Tensor, params: Sequence[SamplingParams]) -> None:
        # the largest of a row of `scaled` is 0
        boundaries = torch.tensor([math.log(each.min_p) for each in params], dtype=torch.float32, device=scaled.device)
        scaled.masked_fill_(scaled < boundaries.unsqueeze(1), -math.inf)
