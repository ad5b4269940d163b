"""Logits processors in Triton. Those that read a sequence's tokens find them in the store on the device.

tokens: the store, int32. Logits are float32; those of a row stand at its place.
"""

from __future__ import annotations

import triton
import triton.language as tl

_OF_WORD = tl.constexpr(4)
_OF_ROW = tl.constexpr(7)
_SEEN = tl.constexpr(1 << 30)
"""Marks a token of the prompt; below it is the number of its occurrences in the output."""


@triton.jit
def bar_words(logits, tokens, words, row_stride, WIDTH: tl.constexpr):
    """Write -inf to the last token of each word whose others stand in the store.

    words: int64 [words, 4 + WIDTH]: place, where in the store the others would begin, how many they are, the last
    token, and the others.
    """
    words += tl.program_id(0) * (_OF_WORD + WIDTH)
    first, count = tl.load(words + 1), tl.load(words + 2)
    offsets = tl.arange(0, WIDTH)
    stored = tl.load(tokens + first + offsets, mask=offsets < count, other=0)
    differs = stored != tl.load(words + _OF_WORD + offsets, mask=offsets < count, other=0)
    if tl.sum(differs.to(tl.int32), 0) == 0:
        tl.store(logits + tl.load(words) * row_stride + tl.load(words + 3), -float("inf"))


@triton.jit(do_not_specialize=["num_words"])
def bar_unset(logits, masks, places, num_columns, num_words, row_stride, BLOCK: tl.constexpr):
    """Write -inf to the columns of a block whose bits are not set.

    masks: int32 [rows, words], bit i of word t for column 32 t + i. places: of the rows of logits, int64 [rows].
    """
    row = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    word = columns >> 5
    found = tl.load(masks + row * num_words + word, mask=word < num_words, other=0)
    is_barred = ((found >> (columns & 31)) & 1) == 0
    targets = logits + tl.load(places + row) * row_stride + columns
    tl.store(targets, -float("inf"), mask=is_barred & (columns < num_columns))


@triton.jit
def count(tokens, asked, counts, num_columns, BLOCK: tl.constexpr):
    """Count a block of a sequence's tokens, in any order.

    asked: float64 [rows, 7]: place, where in the store the line begins, tokens of the prompt, all tokens, and the three
    penalties. counts: int32 [rows, columns], 0 before.
    """
    row = tl.program_id(0)
    offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    asked += row * _OF_ROW
    first = tl.load(asked + 1).to(tl.int64)
    num_prompt, num_known = tl.load(asked + 2).to(tl.int32), tl.load(asked + 3).to(tl.int32)
    token = tl.load(tokens + first + offsets, mask=offsets < num_known, other=-1)
    here = (token >= 0) & (token < num_columns)
    is_output = offsets >= num_prompt
    # no program reads what another one writes: the order of memory is that of launches
    targets = counts + row.to(tl.int64) * num_columns + token
    tl.atomic_add(targets, is_output.to(tl.int32), mask=here & is_output, sem="relaxed")
    tl.atomic_or(targets, tl.where(is_output, 0, _SEEN), mask=here & (offsets < num_prompt), sem="relaxed")


@triton.jit
def penalise(logits, asked, counts, num_columns, row_stride, BLOCK: tl.constexpr):
    """Apply penalties to a block of columns, with the roundings of `octavo.sampling.processors.Penalties`."""
    row = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    found = tl.load(counts + row.to(tl.int64) * num_columns + columns, mask=columns < num_columns, other=0)
    asked += row * _OF_ROW
    repetition = tl.load(asked + 4).to(tl.float32)
    frequency, presence = tl.load(asked + 5).to(tl.float32), tl.load(asked + 6).to(tl.float32)
    targets = logits + tl.load(asked).to(tl.int64) * row_stride + columns
    values = tl.load(targets, mask=found != 0, other=0.0)
    values = tl.where(values > 0.0, tl.div_rn(values, repetition), values * repetition)
    of_output = found & (_SEEN - 1)
    values -= of_output.to(tl.float32) * frequency
    values -= tl.where(of_output > 0, presence, 0.0)
    tl.store(targets, values, mask=found != 0)
