"""Frequencies of rotary position embedding, and the ways in which checkpoints stretch them to longer contexts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from octavo.ops.registry import Ops


class Scaling(Protocol):
    """Changes frequencies so that a model can use a longer context than it was trained with. It is hashable."""

    @property
    def attention_factor(self) -> float:
        """The factor of cosines and sines."""

    def bend(self, frequencies: Tensor, theta: float, max_model_len: int) -> Tensor:
        """Bend plain frequencies `theta ** (-2i / dim)`, float32 [dim / 2], for sequences of up to `max_model_len`."""


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """All frequencies are divided by `factor`. Source: https://arxiv.org/abs/2306.15595."""

    factor: float
    attention_factor: float = 1.0

    def bend(self, frequencies: Tensor, theta: float, max_model_len: int) -> Tensor:
        return frequencies / self.factor


@dataclass(frozen=True, slots=True)
class NtkScaling:
    """The base is multiplied by `factor`, and all frequencies are divided such that the slowest is plain / `factor`.
    Source: https://kexue.fm/archives/9706."""

    factor: float
    attention_factor: float = 1.0

    def bend(self, frequencies: Tensor, theta: float, max_model_len: int) -> Tensor:
        pairs = torch.arange(1, len(frequencies) + 1, dtype=torch.float32, device=frequencies.device)
        return frequencies / self.factor ** (pairs / len(frequencies))


@dataclass(frozen=True, slots=True)
class BaseScaling:
    """The base is multiplied such that the fastest frequency is kept and the slowest divided by `factor`.

    Source: Tencent's releases of Hunyuan.
    """

    factor: float
    attention_factor: float = 1.0

    def bend(self, frequencies: Tensor, theta: float, max_model_len: int) -> Tensor:
        pairs = torch.arange(len(frequencies), dtype=torch.float32, device=frequencies.device)
        return frequencies / self.factor ** (pairs / max(len(frequencies) - 1, 1))


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Slow frequencies are divided by `factor`, fast ones kept, those between blended. Source: Llama 3.1's release."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int
    attention_factor: float = 1.0

    def bend(self, frequencies: Tensor, theta: float, max_model_len: int) -> Tensor:
        wavelengths = 2 * math.pi / frequencies
        # 0 where a wave turns less than low_freq_factor times over the original context, 1 above high_freq_factor
        kept = (self.original_max_positions / wavelengths - self.low_freq_factor) / (
            self.high_freq_factor - self.low_freq_factor
        )
        kept = kept.clamp(0, 1)
        return (1 - kept) * frequencies / self.factor + kept * frequencies


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN: as Llama 3, blended evenly between two dimensions, and scores scaled. Source: https://arxiv.org/abs/2309.00071.

    The dimensions are those that turn `beta_fast` and `beta_slow` times over the original context, taken to the whole
    numbers around them where `truncate`.
    """

    factor: float
    original_max_positions: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    @staticmethod
    def default_attention_factor(factor: float, scale: float = 1.0) -> float:
        """Return `0.1 scale ln(factor) + 1`, as in the paper; scores are multiplied by it twice."""
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1.0 else 1.0

    def bend(self, frequencies: Tensor, theta: float, max_model_len: int) -> Tensor:
        pairs = len(frequencies)
        low, high = (self._pair_that_turns(times, theta, pairs) for times in (self.beta_fast, self.beta_slow))
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0.0), min(high, 2.0 * pairs - 1)
        steps = torch.arange(pairs, dtype=torch.float32, device=frequencies.device)
        slow = ((steps - low) / (high - low if high != low else 1e-3)).clamp(0, 1)
        return frequencies / self.factor * slow + frequencies * (1 - slow)

    def _pair_that_turns(self, times: float, theta: float, pairs: int) -> float:
        """Return the index (a fraction) of the pair that turns `times` times over the original context."""
        return pairs * math.log(self.original_max_positions / (times * 2 * math.pi)) / math.log(theta)


@dataclass(frozen=True, slots=True)
class LongScaling:
    """LongRoPE: each frequency is divided by a factor of its own. Source: https://arxiv.org/abs/2402.13753.

    There are factors for sequences within the original context, and others beyond. The longest sequence that the engine
    serves (`max_model_len`) decides for all of them: a sequence that grew from one kind to the other would find keys in
    the cache that were rotated by the former.
    """

    short_factors: tuple[float, ...]
    long_factors: tuple[float, ...]
    original_max_positions: int
    attention_factor: float

    def is_long(self, max_model_len: int) -> bool:
        """Return whether sequences of up to `max_model_len` tokens are rotated by the long factors."""
        return max_model_len > self.original_max_positions

    def note(self, max_model_len: int) -> str:
        """Return which factors are used, and why, in a sentence."""
        factors, relation = ("long", "above") if self.is_long(max_model_len) else ("short", "at most")
        return f"LongRoPE with its {factors} factors: max_model_len is {relation} {self.original_max_positions:,}"

    def bend(self, frequencies: Tensor, theta: float, max_model_len: int) -> Tensor:
        factors = self.long_factors if self.is_long(max_model_len) else self.short_factors
        pairs, device = len(frequencies), frequencies.device
        wavelengths = theta ** (torch.arange(pairs, dtype=torch.float32, device=device) * 2 / (2 * pairs))
        return 1.0 / (torch.tensor(factors, dtype=torch.float32, device=device) * wavelengths)


@dataclass(frozen=True, slots=True)
class QueryGrowth:
    """Queries beyond the original context are multiplied by `1 + beta ln(1 + floor((position + ahead) / original))`.

    Source: Llama 4's release.
    """

    beta: float
    original_max_positions: int
    ahead: int = 0

    def factors(self, num_positions: int, device: torch.device | str = "cpu") -> Tensor:
        """Return float32 [num_positions]."""
        positions = torch.arange(self.ahead, num_positions + self.ahead, dtype=torch.float32, device=device)
        return 1 + self.beta * torch.log(1 + torch.floor(positions / self.original_max_positions))


@dataclass(frozen=True, slots=True)
class ProportionalScaling:
    """The first `turning` pairs turn at the frequencies that they have among all, divided by `factor`; others stay."""

    turning: int
    factor: float = 1.0
    attention_factor: float = 1.0

    def bend(self, frequencies: Tensor, theta: float, num_positions: int) -> Tensor:
        bent = frequencies / self.factor
        bent[self.turning :] = 0.0
        return bent


@dataclass(frozen=True, slots=True)
class Rope:
    """Frequencies `theta ** (-2i / dim)` for the first `dim` elements of a head, bent by `scaling`."""

    dim: int
    theta: float
    scaling: Scaling | None = None
    interleaved: bool = False
    """Pairs are neighbours instead of halves."""
    query_growth: QueryGrowth | None = None
    """The factor of queries, which have a table of their own with it; whole heads turn."""
    axes: tuple[int, ...] = ()
    """The axis of each pair: time, rows, columns or the number of an image (0 to 3); () for time in all pairs."""
    second_axes: tuple[int, ...] = ()
    """The axes of the second elements of pairs, where they differ from the first; () where they do not."""

    def inverse_frequencies(self, max_model_len: int = 1, device: torch.device | str = "cpu") -> Tensor:
        """Return float32 [dim / 2]: radians per position of each pair, for sequences of up to `max_model_len`."""
        exponents = torch.arange(0, self.dim, 2, dtype=torch.float32, device=device) / self.dim
        frequencies = 1.0 / (self.theta**exponents)
        return frequencies if self.scaling is None else self.scaling.bend(frequencies, self.theta, max_model_len)

    def table(
        self,
        ops: Ops,
        num_positions: int,
        max_model_len: int = 1,
        device: torch.device | str = "cpu",
        factors: Tensor | None = None,
    ) -> Tensor:
        """Return float32 [num_positions, dim], the table of the operator `rotary`.

        factors: float32 [dim / 2], what frequencies are multiplied with; None for nothing.
        """
        factor = 1.0 if self.scaling is None else self.scaling.attention_factor
        frequencies = self.inverse_frequencies(max_model_len, device)
        return ops.rotary_table(frequencies if factors is None else frequencies * factors, num_positions, factor)

    def query_table(self, table: Tensor) -> Tensor:
        """Return the table of queries: `table` of the keys, multiplied where queries grow."""
        num_positions = len(table)
        growth = self.query_growth
        if growth is None or num_positions + growth.ahead <= growth.original_max_positions:
            return table
        return table * growth.factors(num_positions, table.device).unsqueeze(1)

    def table_of(self, table: Tensor, positions: Tensor, *, is_second: bool = False) -> Tensor:
        """Return float32 [tokens, dim], the part of `table` for tokens at positions int64 [4, tokens].

        is_second: the part that second elements of pairs turn by.
        """
        stated = self.second_axes if is_second else self.axes
        axes = torch.tensor(stated or (0,) * (self.dim // 2)).to(table.device, non_blocking=True)
        pairs = torch.arange(len(axes), device=table.device)
        rows = positions[axes].t()  # [tokens, pairs]
        return torch.cat((table[rows, pairs], table[rows, pairs + len(axes)]), 1)

    def table_bytes(self, num_positions: int) -> int:
        """Return the bytes of `table`, and of `query_table` where it is another."""
        return 4 * num_positions * self.dim * (1 if self.query_growth is None else 2)
