"""Finds work of a step on the host that a repetition without Python would leave out."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch.overrides import TorchFunctionMode

from octavo.attention.metadata import ModelInput


class Watch(TorchFunctionMode):
    """Notes the first obstacle that is met while it is entered. Devices derive what they look for in calls of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.obstacle: str | None = None

    def meet(self, obstacle: str) -> None:
        """Note an obstacle: work that a repetition would leave out."""
        self.obstacle = self.obstacle or obstacle


def watched(
    batch: ModelInput, meet: Callable[[str], None], derived: Sequence[Mapping[Hashable, Any]] | None = None
) -> ModelInput:
    """Return the batch with lengths that call `meet` when one is read. derived: what is known of each cache group, in
    the place of what was computed for another run; nothing by default."""
    attention = [
        replace(each, lengths=_Lengths(each.lengths, meet), derived=dict(derived[number]) if derived else {})
        for number, each in enumerate(batch.attention)
    ]
    return replace(batch, attention=attention)


class _Lengths(Sequence[int]):
    """Lengths of sequences, which differ from step to step."""

    def __init__(self, lengths: Sequence[int], meet: Callable[[str], None]) -> None:
        self._lengths = lengths
        self._meet = meet

    def __len__(self) -> int:
        return len(self._lengths)

    def __getitem__(self, index: Any) -> Any:
        self._note()
        return self._lengths[index]

    def __iter__(self) -> Iterator[int]:
        self._note()
        return iter(self._lengths)

    def _note(self) -> None:
        self._meet("what reads the lengths of sequences on the host")
