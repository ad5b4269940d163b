"""Guesses from the output that the request predicts."""

from __future__ import annotations

from octavo.config.schema import SpeculativeConfig
from octavo.core.sequence import Sequence, SequenceGroup
from octavo.speculation.source import Guess


class PredictedOutput:
    """A `GuessSource`: the rest of the predicted output, while the output is its beginning."""

    def __init__(self, config: SpeculativeConfig) -> None:
        self._most = config.num_speculative_tokens

    def begin(self, group: SequenceGroup, sequence: Sequence) -> None:
        """Nothing is kept."""

    def guess(self, group: SequenceGroup, sequence: Sequence) -> Guess | None:
        predicted = group.request.prediction_token_ids
        if not predicted or predicted[: sequence.num_output_tokens] != sequence.token_ids[sequence.num_prompt_tokens :]:
            return None
        begun = predicted[sequence.num_output_tokens :][: self._most]
        return Guess(begun, "predicted", len(sequence.token_ids)) if begun else None
