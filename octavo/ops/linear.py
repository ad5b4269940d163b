"""Matrix product with a weight kept as the checkpoint has it."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.ops.registry import Operator


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


def examples(dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
    """One token, a few, more than a tile; widths that are no multiple of anything; with and without bias."""
    generator = torch.Generator().manual_seed(0)
    for tokens, inputs, outputs in ((1, 64, 96), (3, 40, 17), (33, 128, 160)):
        x, weight = (torch.randn(shape, generator=generator) for shape in ((tokens, inputs), (outputs, inputs)))
        weight /= inputs**0.5
        yield x.to(dtype), weight.to(dtype), None
        yield x.to(dtype), weight.to(dtype), torch.randn(outputs, generator=generator).to(dtype)


OPERATORS = (Operator("linear", linear, examples),)
