"""Guesses by prompt lookup: what followed the last tokens where they stood before."""

from __future__ import annotations

from octavo.config.schema import SpeculativeConfig
from octavo.core.sequence import Sequence, SequenceGroup
from octavo.speculation.history import History
from octavo.speculation.shared_outputs import SharedOutputs
from octavo.speculation.source import Guess


class PromptLookup:
    """A `GuessSource`: looks in the sequence, behind its predicted output; and, where more tokens agree, in outputs of
    others. The `History` of a sequence is attached to it."""

    def __init__(self, config: SpeculativeConfig, shared: SharedOutputs | None = None) -> None:
        self._config = config
        self._shared = shared

    def begin(self, group: SequenceGroup, sequence: Sequence) -> None:
        sequence.attach(History(group.request.prediction_token_ids))
        if self._shared is not None:
            self._shared.add(group, sequence)

    def guess(self, group: SequenceGroup, sequence: Sequence) -> Guess | None:
        config, history, num_known = self._config, sequence.attached(History), len(sequence.token_ids)
        assert history is not None, "`begin` comes first"
        num_new = num_known - len(history) + len(group.request.prediction_token_ids)
        history.extend(sequence.token_ids[-num_new:] if num_new else ())
        tail, most = history.last(config.prompt_lookup_max), config.num_speculative_tokens
        shared = None if self._shared is None else self._shared.outputs(group.request.cache_key)
        own = history.find(tail, config.prompt_lookup_min, is_own=True)
        others = None if shared is None else shared.find(tail, config.prompt_lookup_min)
        if shared is not None and others is not None and (own is None or others.length > own.length):
            return Guess(shared.after(others.end, most), ("shared", others.length), num_known)
        return None if own is None else Guess(history.after(own.end, most), ("own", own.length), num_known)
