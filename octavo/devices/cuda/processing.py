"""Logits processors on CUDA. Those that need only parameters of requests, and masks, are launched without waiting."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from torch import Tensor

from octavo.devices.cuda.draws import BLOCK
from octavo.devices.cuda.runtime import Launcher, power_of_2, to_device
from octavo.sampling.processors import (
    AllowedTokenIds,
    BadWords,
    LogitBias,
    LogitsProcessor,
    MaskingProcessor,
    MinTokens,
    Penalties,
    ProcessedRow,
)

LAUNCHED: Final = (AllowedTokenIds, LogitBias, MinTokens, BadWords, Penalties)
"""The processors that do not wait for the device."""


def apply(processor: LogitsProcessor, rows: Sequence[ProcessedRow], logits: Tensor, launch: Launcher) -> None:
    """Apply a processor to those rows of `logits`, float32 [all rows, vocab], that need it.

    Penalties have the roundings of the CPU: torch on CUDA multiplies by a reciprocal instead of dividing. The tokens
    before a row's position are those of the store on the device.
    """
    if isinstance(processor, BadWords):
        _bar_words(rows, logits, launch)
    elif isinstance(processor, Penalties):
        _penalise(rows, logits, launch)
    elif isinstance(processor, MaskingProcessor):
        processor.update(rows)
        _mask(processor, rows, logits, launch)
    else:
        processor.update(rows)
        processor.apply(logits)


def _bar_words(rows: Sequence[ProcessedRow], logits: Tensor, launch: Launcher) -> None:
    tokens, starts = _stored(rows)
    lines: list[list[int]] = []
    for each, start in zip(rows, starts, strict=True):
        for word in each.sequence.bad_words_token_ids:
            first = each.sampling.position - len(word) + 1
            # words of the prompt are not barred
            if word and first >= each.sequence.num_prompt_tokens:
                lines.append([each.row, start + first, len(word) - 1, word[-1], *word[:-1]])
    if not lines:
        return
    width = power_of_2(max(map(len, lines)) - 4)
    words = np.zeros((len(lines), 4 + width), dtype=np.int64)
    for place, line in enumerate(lines):
        words[place, : len(line)] = line
    given = logits, tokens, to_device(words, logits.device), logits.stride(0)
    launch("processors.bar_words", (len(lines),), *given, WIDTH=width)


def _penalise(rows: Sequence[ProcessedRow], logits: Tensor, launch: Launcher) -> None:
    tokens, starts = _stored(rows)
    asked = np.zeros((len(rows), 7), dtype=np.float64)
    for line, each, start in zip(asked, rows, starts, strict=True):
        params = each.sequence.params
        line[:4] = each.row, start, each.sequence.num_prompt_tokens, each.sampling.position
        line[4:] = params.repetition_penalty, params.frequency_penalty, params.presence_penalty
    there, num_columns = to_device(asked, logits.device), logits.shape[1]
    counts = torch.zeros((len(rows), num_columns), dtype=torch.int32, device=logits.device)
    num_blocks, of_columns = (-(-int(size) // BLOCK) for size in (asked[:, 3].max(), num_columns))
    launch("processors.count", (len(rows), num_blocks), tokens, there, counts, num_columns, BLOCK=BLOCK)
    launch(
        "processors.penalise",
        (len(rows), of_columns),
        *(logits, there, counts, num_columns, logits.stride(0)),
        BLOCK=BLOCK,
        enable_fp_fusion=False,
    )


def _mask(processor: MaskingProcessor, rows: Sequence[ProcessedRow], logits: Tensor, launch: Launcher) -> None:
    found = [(each.row, mask) for each in rows if (mask := processor.mask(each.sampling)) is not None]
    if not found:
        return
    masks, places = np.stack([mask for _, mask in found]), np.array([place for place, _ in found])
    (num_rows, num_words), num_columns = masks.shape, logits.shape[1]
    sizes = num_columns, num_words, logits.stride(0)
    grid = num_rows, -(-num_columns // BLOCK)
    tensors = logits, *(to_device(each, logits.device) for each in (masks.view(np.int32), places))
    launch("processors.bar_unset", grid, *tensors, *sizes, BLOCK=BLOCK)


def _stored(rows: Sequence[ProcessedRow]) -> tuple[Tensor, list[int]]:
    """Return the token store on the device, and the place in it where the line of each row begins."""
    lines = [each.sequence.line for each in rows]
    tokens = rows[0].sequence.stored_tokens()
    return tokens, [line * tokens.stride(0) for line in lines]
