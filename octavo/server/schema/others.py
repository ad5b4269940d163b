"""Fields that other servers have and this one does not: each is refused by name, with what to send instead.

A field that is accepted stands in its request. A value that means the same as leaving the field out is accepted.
"""

from __future__ import annotations

from importlib.resources import files
from typing import Annotated, Any, Final

import msgspec
from msgspec import defstruct

from octavo.server.decode import Refused
from octavo.server.forms import FormFields

_FIELDS: Final[dict[str, dict[str, tuple[Any, ...]]]] = msgspec.json.decode(
    (files("octavo") / "server" / "schema" / "others.json").read_bytes(), type=dict[str, dict[str, tuple[Any, ...]]]
)
"""By the reason: the fields, and the values of each that mean the same as none."""


class WithoutEffect(FormFields, kw_only=True):
    """Fields that are accepted and change nothing: requests are neither stored nor billed, prefixes are cached without
    marks, and llguidance alone reads grammars."""

    cache_control: dict[str, Any] | None = None
    guided_decoding_backend: str | None = None
    metadata: dict[str, Any] | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    session_id: str | None = None
    store: bool | None = None


OfOthers: Final = defstruct(
    "OfOthers",
    [
        (name, Annotated[Any, Refused(because, harmless)], None)
        for because, names in _FIELDS.items()
        for name, harmless in names.items()
    ],
    bases=(WithoutEffect,),
    kw_only=True,
)
"""The base of requests for generated text."""
