"""`top_k`: the k likeliest tokens are kept."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from octavo.core.sampling_params import SamplingParams


class TopK:
    """Keeps the `top_k` likeliest tokens, and those that tie with the last of them."""

    name = "top_k"

    def needs(self, params: SamplingParams) -> bool:
        return params.top_k > 0

    def drop(self, scaled: Tensor, params: Sequence[SamplingParams]) -> None:
        counts = torch.tensor([min(each.top_k, scaled.shape[1]) for each in params], device=scaled.device)
        largest = torch.topk(scaled, int(counts.max()), dim=-1).values
        boundaries = largest.gather(1, counts.unsqueeze(1) - 1)
        scaled.masked_fill_(scaled < boundaries, -math.inf)
