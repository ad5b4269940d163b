"""Does torch make a row's product with the same bits whatever stands beside it, on this processor?

Ours does not promise more than the library below the reference operators: where it sums in another order for another
number of rows, tests of bits are skipped and say so. Our own kernels will not need this.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from octavo.ops.prepare_linear import linear


def _linear_is_exact(dtype: torch.dtype) -> bool:
    generator = torch.Generator().manual_seed(0)
    for inputs, outputs in ((32, 130), (64, 172), (56, 32)):
        x = torch.randn((100, inputs), generator=generator).to(dtype)
        weight = torch.randn((outputs, inputs), generator=generator).to(dtype)
        whole = linear(x, weight)
        if not all(torch.equal(linear(x[:rows], weight), whole[:rows]) for rows in (1, 2, 3, 5, 8, 16, 17, 33)):
            return False
    return True


def _attention_is_exact(dtype: torch.dtype) -> bool:
    generator = torch.Generator().manual_seed(0)
    for dim, num_keys in ((8, 32), (16, 64), (16, 160)):
        q = torch.randn((1, 2, 64, dim), generator=generator).to(dtype)
        k, v = (torch.randn((1, 2, num_keys, dim), generator=generator).to(dtype) for _ in range(2))
        mask = torch.zeros((64, num_keys), dtype=dtype)
        whole = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        for rows in (4, 8, 12, 36):
            part = F.scaled_dot_product_attention(q[:, :, :rows], k, v, attn_mask=mask[:rows])
            if not torch.equal(part, whole[:, :, :rows]):
                return False
    return True


def need_exact_products(dtype: torch.dtype) -> None:
    """Skip the test where torch's own products depend on their number of rows."""
    with torch.inference_mode():
        if not (_linear_is_exact(dtype) and _attention_is_exact(dtype)):
            pytest.skip(f"torch's {dtype} products depend on the number of rows on this processor")
