"""Matrix product with a weight kept as the checkpoint has it."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.ops.registry import Operator


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x @ weight.T + bias`: x is [tokens, in], weight [out, in], bias [out]; the answer is [tokens, out]."""
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
