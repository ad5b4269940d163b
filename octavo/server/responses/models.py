"""The responses of `GET /v1/models`."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct


class Model(Struct, kw_only=True):
    """A model by a name under which it is served. parent: of an adapter, the model's first name."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "octavo"
    root: str
    parent: str | None = None
    max_model_len: int


class ModelList(Struct, kw_only=True):
    """Response of `GET /v1/models`."""

    object: Literal["list"] = "list"
    data: list[Model]
