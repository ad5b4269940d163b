"""Finds stop strings in beams. The front gets no text before a search ends, so the core makes it.

The candidates that complete a stop string are marked in a step's results before the scheduler applies them: what it
decides follows from requests and results alone, and can be replayed without a tokenizer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import msgspec

from octavo.core.messages import EngineCoreRequest
from octavo.core.sequence import Sequence, SequenceGroup
from octavo.core.step import ModelRunnerOutput, RowOutput
from octavo.engine.text.detokenizer import SequenceText
from octavo.engine.text.tokenizer import Tokenizer
from octavo.errors import ConfigError

Find = Callable[[int], tuple[SequenceGroup | None, Sequence | None]]
"""Returns the group and the sequence of an id; None, None when it is gone."""


class _Known(NamedTuple):
    """The text of a beam's first output tokens, which is shared with the beam's forks and never changed."""

    num_tokens: int
    text: SequenceText

    def fork(self) -> _Known:
        return self


class BeamTexts:
    """Marks the candidates whose text contains a stop string. The first request that needs the tokenizer opens it."""

    def __init__(self, open_tokenizer: Callable[[], Tokenizer] | None) -> None:
        self._open_tokenizer = open_tokenizer
        self._tokenizer: Tokenizer | None = None
        self._request_ids: set[str] = set()

    def add(self, request: EngineCoreRequest) -> None:
        """Watch a request if needed. Raises CheckpointError, or ConfigError where there is no tokenizer."""
        if not (request.params.use_beam_search and request.params.stop):
            return
        if self._tokenizer is None:
            if self._open_tokenizer is None:
                raise ConfigError("stop strings cannot end beams here: this core has no tokenizer; use stop_token_ids")
            self._tokenizer = self._open_tokenizer()
        self._request_ids.add(request.request_id)

    def mark(self, output: ModelRunnerOutput, find: Find, open_ids: dict[str, SequenceGroup]) -> ModelRunnerOutput:
        """Return the results of a step with `stop_places` where beams of the open requests need them."""
        if not self._request_ids:
            return output
        self._request_ids &= open_ids.keys()
        rows = [row if row.candidates is None else self._marked(row, find) for row in output.rows]
        return msgspec.structs.replace(output, rows=rows)

    def _marked(self, row: RowOutput, find: Find) -> RowOutput:
        group, beam = find(row.seq_id)
        if group is None or beam is None or group.beams is None or row.candidates is None or beam.epoch != row.epoch:
            return row
        if group.request_id not in self._request_ids:
            return row
        text = self._text_of(group, beam)
        candidates = row.candidates.top_ids[: group.beams.num_candidates]
        places = tuple(
            place
            for place, token_id in enumerate(candidates)
            if token_id not in group.end_token_ids and text.completes_stop(token_id)
        )
        return msgspec.structs.replace(row, candidates=msgspec.structs.replace(row.candidates, stop_places=places))

    def _text_of(self, group: SequenceGroup, beam: Sequence) -> SequenceText:
        """Return the text of a beam's known tokens."""
        assert self._tokenizer is not None
        known = beam.attached(_Known)
        if known is None:
            request = group.request
            known = _Known(0, SequenceText(self._tokenizer, request.prompt_token_ids, request.params))
        text = known.text.fork()
        for token_id in beam.token_ids[beam.num_prompt_tokens + known.num_tokens :]:
            text.push(token_id)
        beam.attach(_Known(beam.num_output_tokens, text))
        return text
