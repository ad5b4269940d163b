"""Reads traces: a request per line, as JSON."""

from __future__ import annotations

import re
from os.path import expanduser
from pathlib import Path
from typing import Final

import msgspec

from octavo.errors import ConfigError, suggestion
from octavo.simulate.traces import Trace, TraceRequest

_NOUNS: Final = {
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "bool": "true or false",
    "array": "a list",
    "object": "an object with the fields of a request",
    "null": "null",
}


def read_trace(path: str | Path) -> Trace:
    """Return a trace from a file of JSON lines. Raises ConfigError with the line, the field, and what is expected."""
    try:
        lines = Path(expanduser(path)).read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"trace is {str(path)!r}, which cannot be read: {error.strerror}") from error
    decoder = msgspec.json.Decoder(TraceRequest)
    requests, places = [], []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            place = f"{path}, line {number}"
            try:
                requests.append(decoder.decode(line))
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise ConfigError(f"{place}: {_complaint(error)}") from error
            places.append(place)
    if not requests:
        raise ConfigError(f"{path} has no requests; a line of it is such as {_EXAMPLE}")
    return Trace(requests, places)


_EXAMPLE: Final = '{"arrival_s": 0.5, "num_prompt_tokens": 100, "output_len": 20}'


def _complaint(error: msgspec.DecodeError | UnicodeDecodeError) -> str:
    """Return the error text for a line."""
    is_misfit = isinstance(error, msgspec.ValidationError)
    if not is_misfit and "utf-8" in str(error).lower():  # said by Python's decoder, or since msgspec 0.23 by its own
        return "is not UTF-8 text"
    # "… - at `$.field`"
    said, _, field = str(error).partition(" - at `$.")
    names = TraceRequest.__struct_fields__
    if unknown := re.fullmatch("Object contains unknown field `(.*)`", said):
        near = suggestion(unknown[1], names) or f"; the fields are {', '.join(names)}"
        return f"{unknown[1]} is not a field of a request{near}"
    if missing := re.fullmatch("Object missing required field `(.*)`", said):
        return f"{missing[1]} is missing; a line is such as {_EXAMPLE}"
    if not is_misfit:
        return f"is not a JSON object ({said.removeprefix('JSON is malformed: ')}); a line is such as {_EXAMPLE}"
    words = re.sub("`([^`]*)`", lambda match: " or ".join(_NOUNS.get(n, n) for n in match[1].split(" | ")), said)
    words = words.replace(" >= ", " of at least ").replace(" > ", " above ").replace("Expected", "expected", 1)
    return f"{field.rstrip('`')}: {words}" if field else words
