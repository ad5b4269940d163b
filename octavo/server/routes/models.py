"""`GET /v1/models` and `GET /v1/models/{id}`."""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, Struct, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from octavo.core.adapter import LoRARequest
from octavo.server.context import ServerContext
from octavo.server.generation import json_response
from octavo.server.keys import Right, caller_of


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


async def list_models(context: ServerContext, request: Request) -> Response:
    """Return the model once for each of its names, and the adapters that are known."""
    data = [_model(context, name, context.model.name) for name in context.model.served_model_names]
    data += [_adapter(context, request, each) for each in context.adapters]
    return json_response(ModelList(data=data))


async def get_model(context: ServerContext, request: Request) -> Response:
    """Return the model by one of its names, or an adapter. Raises ApiError 404."""
    asked = request.path_params["model_id"]
    if asked in context.model.served_model_names:
        return json_response(_model(context, asked, context.model.name))
    adapter = await context.models.adapter(asked)
    assert adapter is not None, "other names are of adapters"
    return json_response(_adapter(context, request, adapter))


def _model(context: ServerContext, name: str, root: str, parent: str | None = None) -> Model:
    return Model(
        id=name,
        created=context.created,
        root=root,
        parent=parent,
        max_model_len=context.max_model_len,
        reads_images=context.reads_images,
    )


def _adapter(context: ServerContext, request: Request, adapter: LoRARequest) -> Model:
    """Return an adapter as a model; its folder is for those who operate the server."""
    root = adapter.lora_path if caller_of(request).may(Right.OPERATE) else adapter.lora_name
    return _model(context, adapter.lora_name, root, context.model.served_model_names[0])
