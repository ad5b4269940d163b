"""What Whisper may write: no tokens that are noise, and timestamps in pairs that never go back."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from octavo.core.sampling_params import SamplingParams
from octavo.core.speech import SpeechTokens
from octavo.sampling.processors.processor import ProcessedRow


class SpeechRules:
    """Bars the suppressed tokens; and in outputs with timestamps what cannot follow the tokens so far.

    Text stands between two timestamps, and the next text begins no earlier than the last one ended. Where timestamps
    together are likelier than any other token, one of them is drawn.
    """

    name = "speech"

    def __init__(self, tokens: SpeechTokens) -> None:
        self._tokens = tokens
        self._asking = tokens.asks_for_timestamps
        self._rows: Sequence[ProcessedRow] = ()

    def needs(self, params: SamplingParams) -> bool:
        return True

    def update(self, rows: Sequence[ProcessedRow]) -> None:
        self._rows = rows

    def apply(self, logits: Tensor) -> None:
        for each in self._rows:
            first = each.sequence.num_prompt_tokens
            tokens = each.sampling.tokens
            row = logits[each.row]
            row[torch.tensor(self._tokens.suppressed, dtype=torch.int64, device=row.device)] = -math.inf
            output = [int(token) for token in tokens[first:]]
            if not output:
                row[torch.tensor(self._tokens.suppressed_first, dtype=torch.int64, device=row.device)] = -math.inf
            if int(tokens[first - 1]) in self._asking and each.sequence.params.allowed_token_ids is None:
                self._bar(row, output)

    def _bar(self, row: Tensor, output: Sequence[int]) -> None:
        """Bar what cannot follow `output` in a row [vocab]."""
        tokens, begin = self._tokens, self._tokens.first_timestamp
        row[tokens.no_timestamps] = -math.inf
        stamps = [token for token in output if token >= begin]
        is_stamp = bool(output) and output[-1] >= begin
        is_pair = len(output) < 2 or output[-2] >= begin
        if is_stamp and is_pair:
            row[begin:] = -math.inf
        elif is_stamp:
            row[: tokens.end] = -math.inf
        if stamps:
            row[begin : stamps[-1] + (not is_stamp or is_pair)] = -math.inf
        if not output:
            row[:begin] = -math.inf
            if tokens.max_initial is not None:
                row[begin + tokens.max_initial + 1 :] = -math.inf
        elif torch.logsumexp(row[begin:], 0) > row[:begin].max():
            row[:begin] = -math.inf


def speech_rules(tokens: SpeechTokens | None) -> SpeechRules | None:
    """Return the rules for these tokens; None where there are none."""
    return None if tokens is None else SpeechRules(tokens)
