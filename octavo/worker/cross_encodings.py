"""Encodes the sounds of new sequences; layers keep the keys and values of the results in caches of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from octavo.core.media import MediaInput, TypedArray
from octavo.worker.input_batch import BatchRow
from octavo.worker.sequence_state import SequenceState

Encode = Callable[[str, Mapping[str, Tensor]], Tensor]
"""Makes [vectors, width] of one input of a kind from its arrays by name."""


class CrossEncodings:
    """Encodes one input at a time, so that the bits of none depend on others. Equal ones of a step are encoded once."""

    def __init__(self, encode: Encode, num_encoded: int, device: torch.device) -> None:
        self.num_encoded = num_encoded
        self._encode = encode
        self._device = device

    def read(
        self, rows: Sequence[BatchRow], unfinished: Callable[[], Iterable[MediaInput]]
    ) -> tuple[list[tuple[SequenceState, Tensor]], None]:
        """Return the sequences of rows whose sounds are encoded in this step, and the results [vectors, width]."""
        made: dict[bytes, Tensor] = {}
        outputs = []
        for _, state in rows:
            for each in state.media:
                if each.digest not in made:
                    made[each.digest] = self._encode(each.kind, as_tensors(each.arrays, self._device))
                outputs.append((state, made[each.digest]))
            state.media = ()
        return outputs, None


def as_tensors(arrays: Mapping[str, TypedArray], device: torch.device) -> dict[str, Tensor]:
    """Return tensors with the content of arrays, by the same names."""
    return {
        name: torch.frombuffer(bytearray(array.data), dtype=getattr(torch, array.dtype)).view(array.shape).to(device)
        for name, array in arrays.items()
    }
