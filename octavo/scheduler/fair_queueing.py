"""API requests take turns: start-time fair queueing (Goyal et al. 1996, doi:10.1109/90.649569) over prompts.

Prompts of one API request are added together. Each has a virtual start, which policies use as its place of arrival.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate
from typing import Final

from octavo.core.messages import EngineCoreRequest
from octavo.core.sequence import SequenceGroup

_LEAST_SHARE: Final = 1 / 16
"""Share of the admitted prompt tokens that a request with many prompts gets at least, however many others come."""


class VirtualTime:
    """In prompt tokens: it is the largest start of the admitted prompts, and grows with every admission,
    so that no prompt is passed for ever."""

    def __init__(self) -> None:
        self._now = 0.0

    def starts(self, requests: Iterable[EngineCoreRequest]) -> list[float]:
        """Return the virtual starts of prompts that are added together: the first starts now, each other one after the
        tokens of the prompts before it.
        """
        lengths = [len(request.prompt_token_ids) for request in requests]
        return list(accumulate(lengths[:-1], initial=self._now))

    def note_admitted(self, group: SequenceGroup) -> None:
        """Advance virtual time: the group is admitted for the first time."""
        self._now = max(self._now, group.virtual_start) + _LEAST_SHARE * group.num_prompt_tokens
