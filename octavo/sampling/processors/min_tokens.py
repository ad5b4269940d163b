"""`min_tokens`: no end token before that many tokens."""

from __future__ import annotations

from collections.abc import Sequence

from octavo.core.sampling_params import SamplingParams
from octavo.sampling.metadata import SamplingRow
from octavo.sampling.processors.processor import BarringProcessor


class MinTokens(BarringProcessor):
    """Bars the end tokens of sequences whose output is still too short."""

    name = "min_tokens"

    def needs(self, params: SamplingParams) -> bool:
        return params.min_tokens > 0

    @staticmethod
    def barred(row: SamplingRow) -> Sequence[int]:
        sequence = row.sequence
        num_output_tokens = row.position - sequence.num_prompt_tokens
        return sequence.end_token_ids if num_output_tokens < sequence.params.min_tokens else ()
