"""The responses of `POST /infill`, with llama.cpp's names."""

from __future__ import annotations

from msgspec import UNSET, Struct, UnsetType

from octavo.server.responses.common import Timings


class InfillChunk(Struct, kw_only=True):
    """What is new of a text in a stream."""

    index: int
    content: str
    tokens: list[int]
    stop: bool = False


class InfillResponse(InfillChunk, kw_only=True):
    """Response of `POST /infill`, an array of them for several texts, and the last chunk of a text in a stream.

    stop_type: `eos`, `limit` or `word`. tokens_cached: tokens of the prompt, of which there are tokens_evaluated, that
    had their KV already.
    """

    stop: bool = True
    model: str
    tokens_predicted: int
    tokens_evaluated: int
    tokens_cached: int
    truncated: bool = False
    stop_type: str
    stopping_word: str
    timings: Timings | UnsetType = UNSET
