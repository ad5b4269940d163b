"""What Whisper writes about a window of a sound: its segments with their times, and where the next window begins."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import NamedTuple

from octavo.core.speech import SECONDS_PER_TIMESTAMP, SpeechTokens


class Piece(NamedTuple):
    """Text tokens, and their times in seconds from the beginning of the window."""

    start: float
    end: float
    token_ids: list[int]


def cut_pieces(token_ids: Sequence[int], tokens: SpeechTokens, seconds: float) -> tuple[list[Piece], float]:
    """Return the pieces of an output for a window of so many seconds, and after how many of them the next one begins.

    As in OpenAI's transcribe: two timestamps side by side end a piece. What follows the last of them is heard again,
    from there on, unless the output ends with one timestamp, behind which nothing is said.
    """
    begin = tokens.first_timestamp
    ids = [each for each in token_ids if each != tokens.end]
    is_stamp = [each >= begin for each in ids]
    ends = [i for i in range(1, len(ids)) if is_stamp[i - 1] and is_stamp[i]]
    ends_once = is_stamp[-2:] == [False, True]

    def text(part: Sequence[int]) -> list[int]:
        return [each for each in part if each < tokens.end]

    if not ends:
        stamps = [each for each in ids if each >= begin]
        end = (stamps[-1] - begin) * SECONDS_PER_TIMESTAMP if stamps and stamps[-1] != begin else seconds
        return [Piece(0.0, min(end, seconds), text(ids))], seconds
    pieces, first = [], 0
    for stop in [*ends, len(ids)] if ends_once else ends:
        part = ids[first:stop]
        start, end = ((each - begin) * SECONDS_PER_TIMESTAMP for each in (part[0], part[-1]))
        pieces.append(Piece(max(start, 0.0), max(start, end, 0.0), text(part)))
        first = stop
    return pieces, seconds if ends_once else (ids[first - 1] - begin) * SECONDS_PER_TIMESTAMP


def compression_ratio(text: str) -> float:
    """Return the ratio of a text's bytes to its bytes after deflate: repetition makes it larger."""
    data = text.encode()
    return len(data) / len(zlib.compress(data))
