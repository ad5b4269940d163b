"""Recurrences have the same bits however a sequence is cut, whatever runs beside it, and with any number of threads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.attention.metadata import AttentionMetadata
from octavo.ops.recurrent import convolution_examples, delta_examples, mamba2_examples, scan_examples
from octavo.ops.registry import Ops, bind
from tests.conformance.runtimes import levels_of, ops

UNITS = levels_of("recurrent")

EXAMPLES = {
    "short_convolution": convolution_examples,
    "gated_delta_rule": delta_examples,
    "mamba2_scan": mamba2_examples,
    "selective_scan": scan_examples,
}
SIZE, LENGTH = 8, 24
"""Tokens of a block, and of the sequence."""


def run(operator: Any, arguments: Sequence[Any], cuts: Sequence[int], beside: int = 0) -> tuple[Tensor, Tensor]:
    """Return the results and the states of a sequence of LENGTH tokens, computed up to each of `cuts` in turn.

    beside: tokens of another sequence in each step, which start and end there.
    """
    place = next(i for i, each in enumerate(arguments) if hasattr(each, "block_tables"))
    first = arguments[0]

    def tokens(tensor: Any, span: slice) -> Any:
        if isinstance(tensor, tuple):
            return tuple(tokens(each, span) for each in tensor)
        if not isinstance(tensor, Tensor) or tensor.dim() < 2 or tensor.shape[0] != first.shape[0]:
            return tensor
        return torch.cat((tensor[:LENGTH][span], tensor[-beside:] if beside else tensor[:0]))

    states, found, start = torch.full_like(arguments[place - 1], torch.nan), [], 0
    for end in cuts:
        counts, lengths, tables = [end - start], [end], [[1, 2, 3]]
        if beside:
            counts, lengths, tables = [*counts, beside], [*lengths, beside], [*tables, [4, 0, 0]]
        metadata = AttentionMetadata.build(counts, lengths, tables, SIZE)
        given = [tokens(each, slice(start, end)) for each in arguments]
        given[place - 1 : place + 1] = states, metadata
        found.append(operator(*given)[: end - start])
        start = end
    return torch.cat(found), states[1:4]


def sources() -> list[Any]:
    return [pytest.param(bind(), id="reference"), *(pytest.param(ops(level, 2), id=level) for level in UNITS)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("source", sources())
@pytest.mark.parametrize("name", EXAMPLES)
def test_a_cut_changes_no_bit(name: str, source: Ops, dtype: torch.dtype) -> None:
    operator = getattr(source, name)
    examples = [each for each in EXAMPLES[name](dtype) if each[0].shape[0] >= LENGTH]
    assert examples
    for arguments in examples:
        whole, states = run(operator, arguments, [LENGTH])
        assert whole.isfinite().all()
        assert states.isfinite().all()
        for cuts, beside in (([1, 5, 8, 9, 16, 23, LENGTH], 0), (range(1, LENGTH + 1), 0), ([13, LENGTH], 3)):
            found, after = run(operator, arguments, cuts, beside)
            assert torch.equal(found, whole)
            assert torch.equal(after, states)


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.parametrize("level", UNITS)
def test_threads_change_no_bit(name: str, level: str) -> None:
    for arguments in EXAMPLES[name](torch.float32):
        place = next(i for i, each in enumerate(arguments) if hasattr(each, "block_tables")) - 1
        results = []
        for threads in (1, 2):
            states = arguments[place].clone()
            given = [*arguments[:place], states, *arguments[place + 1 :]]
            results.append((getattr(ops(level, threads), name)(*given), states))
        assert torch.equal(results[0][0], results[1][0])
        assert torch.equal(results[0][1], results[1][1])
