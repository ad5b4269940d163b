"""Matrix product with a weight kept as the checkpoint has it: the arithmetic of the references."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x @ weight.T + bias`: x is [tokens, in], weight [out, in], bias [out]; the answer is [tokens, out].

    A row has the same bits whatever its neighbours are. In float32 on a CPU that takes four rows for each thread: with
    fewer, the product is made by another routine, which sums in another order.
    """
    tokens = x.shape[0]
    missing = -tokens % (4 * torch.get_num_threads()) if x.dtype is torch.float32 and x.device.type == "cpu" else 0
    if missing:
        return F.linear(F.pad(x, (0, 0, 0, missing)), weight, bias)[:tokens]
    return F.linear(x, weight, bias)
