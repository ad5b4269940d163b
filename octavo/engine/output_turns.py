"""The outputs of a step, cut into pieces that the event loop handles without making other requests wait for long."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Final

import msgspec

from octavo.core.messages import EngineCoreOutput
from octavo.core.step import PromptLogprobs

_POSITIONS_OF_TURN: Final = 128
"""Positions of a prompt whose log-probabilities are taken in before whatever else waits for the loop."""


def in_turns(outputs: list[EngineCoreOutput]) -> Iterator[list[EngineCoreOutput]]:
    """Yield the outputs of a step in turns, each with the log-probabilities of 128 prompt positions at most, of one
    request or of many; outputs without any come first."""
    large = [each for each in outputs if _num_positions(each)]
    if sum(map(_num_positions, large)) <= _POSITIONS_OF_TURN:
        yield outputs
        return
    turn = [each for each in outputs if not _num_positions(each)]
    room = 0
    for part in chain.from_iterable(map(_parts, large)):
        if _num_positions(part) > room:
            yield turn
            turn, room = [], _POSITIONS_OF_TURN
        turn.append(part)
        room -= _num_positions(part)
    yield turn


def _num_positions(output: EngineCoreOutput) -> int:
    return 0 if output.prompt_logprobs is None else len(output.prompt_logprobs.tokens)


def _parts(output: EngineCoreOutput) -> Iterator[EngineCoreOutput]:
    """Cut the log-probabilities of a prompt into parts for one turn each; all else is in the last part."""
    logprobs = output.prompt_logprobs
    assert logprobs is not None
    for start in range(0, len(logprobs.tokens), _POSITIONS_OF_TURN):
        tokens = logprobs.tokens[start : start + _POSITIONS_OF_TURN]
        part = PromptLogprobs(first_position=logprobs.first_position + start, tokens=tokens)
        if start + len(tokens) == len(logprobs.tokens):
            yield msgspec.structs.replace(output, prompt_logprobs=part)
        else:
            yield EngineCoreOutput(request_id=output.request_id, deltas=[], finished=False, prompt_logprobs=part)
