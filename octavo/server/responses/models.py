"""The responses of `GET /v1/models`."""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, Struct, UnsetType


class Model(Struct, kw_only=True):
    """A model by a name under which it is served. parent: of an adapter, the model's first name. reads_images: whether
    chats may have images; left out while the model loads."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "octavo"
    root: str
    parent: str | None = None
    max_model_len: int
    reads_images: bool | UnsetType = UNSET


class ModelList(Struct, kw_only=True):
    """Response of `GET /v1/models`."""

    object: Literal["list"] = "list"
    data: list[Model]
