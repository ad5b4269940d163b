"""`bad_words`: token sequences that may not come about in the output."""

from __future__ import annotations

from collections.abc import Sequence

from octavo.core.sampling_params import SamplingParams
from octavo.sampling.metadata import SamplingRow
from octavo.sampling.processors.processor import BarringProcessor


class BadWords(BarringProcessor):
    """Bars the last token of every bad word whose other tokens are the end of the output."""

    name = "bad_words"

    def needs(self, params: SamplingParams) -> bool:
        return bool(params.bad_words)

    @staticmethod
    def barred(row: SamplingRow) -> Sequence[int]:
        words = [word for word in row.sequence.bad_words_token_ids if word]
        longest = max((len(word) for word in words), default=1)
        # tokens of the prompt do not count as the beginning of a bad word
        first = max(row.sequence.num_prompt_tokens, row.position - longest + 1)
        tail = row.tokens[first:].tolist()
        return [word[-1] for word in words if _ends_with(tail, word[:-1])]


def _ends_with(tail: list[int], start: Sequence[int]) -> bool:
    return not start or tail[-len(start) :] == list(start)
