"""The body of `POST /update_weights_from_disk`."""

from __future__ import annotations

from octavo.server.decode import RequestBody


class UpdateWeightsRequest(RequestBody, kw_only=True, forbid_unknown_fields=True):
    """`POST /update_weights_from_disk`: the directory, or the file, of another checkpoint of the same model."""

    model_path: str
