"""Outputs in which other requests look guesses up; shared where the prefix cache is."""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Final

from octavo.core.cache_key import CacheKey
from octavo.core.sequence import Sequence, SequenceGroup
from octavo.speculation.history import History

_MOST_KEYS: Final = 64
"""Cache keys whose outputs are kept; the one that was not used for longest goes first."""
_MOST_TOKENS: Final = 1 << 16
"""Tokens of outputs that are kept for one cache key."""


class SharedOutputs:
    """The last outputs of each cache key."""

    def __init__(self) -> None:
        self._by_key: OrderedDict[CacheKey, History] = OrderedDict()
        self._running: deque[tuple[SequenceGroup, Sequence]] = deque()

    def outputs(self, key: CacheKey) -> History | None:
        """Return what has ended under a cache key."""
        return self._by_key.get(key) if self._by_key else None

    def add(self, group: SequenceGroup, sequence: Sequence) -> None:
        """Keep the output of a sequence once it has ended. What has ended by now can be found from now on."""
        for _ in range(len(self._running)):
            each = self._running.popleft()
            if each[1].status.is_finished:
                self._keep(*each)
            else:
                self._running.append(each)
        self._running.append((group, sequence))

    def _keep(self, group: SequenceGroup, sequence: Sequence) -> None:
        key = group.request.cache_key
        outputs = self._by_key.setdefault(key, History())
        self._by_key.move_to_end(key)
        outputs.extend(sequence.token_ids[sequence.num_prompt_tokens :])
        outputs.drop_first(max(0, len(outputs) - _MOST_TOKENS))
        if len(self._by_key) > _MOST_KEYS:
            self._by_key.popitem(last=False)
