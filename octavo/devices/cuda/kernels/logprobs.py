"""What log-probabilities are made of, in one pass over the logits, in Triton: whole numbers, which no order changes."""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.devices.cuda.kernels.filters import masses_of
from octavo.devices.cuda.kernels.sampling import LEAST, ordered


@triton.jit(do_not_specialize=["num_groups"])
def survey(
    logits, places, largest, chosen, keys, nearest, masses, ahead, num_columns, num_groups, row_stride,
    BLOCK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Write the keys of a block of columns and the largest of each group; add the block's mass, and its logits above
    the chosen one, to those of the row.

    A key is the bits of a logit, as an integer in the order of logits, times 2^32, less the column: no two are equal.
    keys: int64 [rows, groups · GROUP]. nearest: int64 [rows, groups]. masses, ahead: int64 [rows], 0 before. places:
    int64 [rows], where a row's logits, float32, stand. largest, chosen: float32 [rows].
    """
    row, block = tl.program_id(0), tl.program_id(1)
    columns = block * BLOCK + tl.arange(0, BLOCK)
    here = columns < num_columns
    place = tl.load(places + row)
    values = tl.load(logits + place * row_stride + columns, mask=here, other=-float("inf"))
    distances = values.to(tl.float64) - tl.load(largest + row).to(tl.float64)
    # the mass of what is no number counts nothing: its row has an error
    weights = tl.exp(tl.where(distances <= 0.0, distances, -float("inf")))
    tl.atomic_add(masses + row, tl.sum(masses_of(weights), 0), sem="relaxed")
    tl.atomic_add(ahead + row, tl.sum((values > tl.load(chosen + row)).to(tl.int64), 0), sem="relaxed")
    found = tl.where(here, (ordered(values).to(tl.int64) << 32) - columns, LEAST)
    tl.store(keys + row.to(tl.int64) * num_groups * GROUP + columns, found, mask=columns < num_groups * GROUP)
    of_block: tl.constexpr = BLOCK // GROUP
    groups = block * of_block + tl.arange(0, of_block)
    tl.store(nearest + row * num_groups + groups, tl.max(tl.reshape(found, (of_block, GROUP)), 1), groups < num_groups)
