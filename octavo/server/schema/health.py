"""The body of `POST /drain`."""

from __future__ import annotations

from octavo.server.decode import RequestBody


class DrainRequest(RequestBody, kw_only=True, forbid_unknown_fields=True):
    """`POST /drain`: the number of a replica, and whether it is stopped instead of started again."""

    replica: int = 0
    stop: bool = False
