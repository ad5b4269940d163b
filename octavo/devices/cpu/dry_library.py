"""Stands for the compiled library in a dry run."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from octavo import _native

_PADDED: Final = 64
_PANEL_COLUMNS: Final = 32
_HEAD_ROWS: Final = 128
_SCORING_ROWS: Final = 16
_GROUP_BYTES: Final = 512 << 10
_NARROW_LEVELS: Final = ("avx512_bf16", "amx", "amx_emulated")
"""Levels that multiply bfloat16 without widening it."""


def _codes_per_input(format_code: int) -> int:
    """Return how many 8-bit codes an activation becomes, by the number of a format of codes."""
    return 1 + (format_code >> 6 & 1)


class DryLibrary:
    """Counts kernel calls instead of making them, and the most scratch memory that one of them works in."""

    def __init__(self, cpu: _native.Cpu) -> None:
        self._cpu = cpu
        self.num_calls = 0
        self.scratch_bytes = 0
        self.instruction_set = str(cpu.instruction_set)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.endswith("_bytes"):
            found: Callable[..., Any] = getattr(self._cpu, name)
            return found
        return self._call

    def linear(self, x: int, stride: int, rows: int, *rest: Any) -> None:
        """Count a product, whose rows of activations are rearranged."""
        width = 2 if self.instruction_set in _NARROW_LEVELS else 4
        self._use_scratch(rows, rest[3], width)

    def quantized_linear(self, x: int, stride: int, rows: int, code: int, *rest: Any) -> None:
        """Count a product whose rows of activations are quantised."""
        halves = _codes_per_input(rest[8])
        self._use_scratch(rows, rest[7], 2 * halves, 3 * halves)

    def linear_by_head(self, x: int, stride: int, rows: int, *rest: Any) -> None:
        """Count a product by heads, some rows of one head at a time on each thread."""
        self._call()
        width = 2 if self.instruction_set in _NARROW_LEVELS else 4
        row_bytes = (rest[3] + _PADDED) * width + _PANEL_COLUMNS * 4
        self.scratch_bytes = max(self.scratch_bytes, int(self._cpu.threads) * _HEAD_ROWS * row_bytes)

    def expert_linear(self, x: int, stride: int, per_token: int, pairs: int, *rest: Any) -> None:
        """Count a product with experts, whose rows are brought together and rearranged."""
        self.linear(x, stride, pairs, *(0, 0, 0), 2 * rest[7] + _PADDED)

    def expert_quantized(self, x: int, stride: int, per_token: int, pairs: int, *rest: Any) -> None:
        """Count a product with quantised experts, whose rows are brought together and quantised."""
        halves = _codes_per_input(rest[9])
        self._use_scratch(pairs, rest[8], 4 + 4 * halves, 3 * halves)

    def choose_windows(self, *arguments: int) -> None:
        """Count a choice, of which each thread has the queries of some tokens and the keys of a tile."""
        self._call()
        heads, size = arguments[12:14]
        own_bytes = -(-4 * _SCORING_ROWS * (heads + 1) * size // _PADDED) * _PADDED
        self.scratch_bytes = max(self.scratch_bytes, int(self._cpu.threads) * own_bytes)

    def _use_scratch(self, rows: int, inputs: int, width: int, sums_of_column: int = 1) -> None:
        self._call()
        row_bytes = (inputs + _PADDED) * width
        group_rows = min(rows, _GROUP_BYTES // row_bytes + 32)
        sums = int(self._cpu.threads) * group_rows * _PANEL_COLUMNS * 4 * sums_of_column
        self.scratch_bytes = max(self.scratch_bytes, rows * row_bytes + sums)

    def _call(self, *_: Any) -> None:
        self.num_calls += 1
