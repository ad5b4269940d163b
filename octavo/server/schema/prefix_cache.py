"""The bodies of `POST /pin_prefix` and `POST /unpin_prefix`."""

from __future__ import annotations

from octavo.server.schema.common import TokenId
from octavo.server.schema.tokens import TextRequest


class PrefixRequest(TextRequest, kw_only=True, forbid_unknown_fields=True):
    """`POST /unpin_prefix`: text, token ids, or the first messages of conversations."""

    prompt: str | list[TokenId] | None = None
    cache_salt: str | None = None


class PinPrefixRequest(PrefixRequest, kw_only=True, forbid_unknown_fields=True):
    """`POST /pin_prefix`: the same, and for how many seconds it stays."""

    ttl_s: float
