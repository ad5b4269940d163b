"""The model and its adapters: they are listed, loaded and unloaded."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Literal

from msgspec import UNSET, Struct, UnsetType
from starlette.requests import Request

from octavo.core.adapter import LoRARequest
from octavo.server.context import ServerContext
from octavo.server.decode import RequestBody, read_json
from octavo.server.errors import ApiError, conflicts
from octavo.server.keys import Right, caller_of


class Model(Struct, kw_only=True):
    """A model by a name under which it is served. parent: of an adapter, the model's first name. reads_images: whether
    chats may have images; left out while the model loads. type, display_name and created_at (RFC 3339) are what
    Anthropic's API has."""

    id: str
    object: Literal["model"] = "model"
    type: Literal["model"] = "model"
    display_name: str
    created: int
    created_at: str
    owned_by: str = "octavo"
    root: str
    parent: str | None = None
    max_model_len: int
    reads_images: bool | UnsetType = UNSET


class ModelList(Struct, kw_only=True):
    """Response of `GET /v1/models`. first_id, last_id and has_more are those of Anthropic's pages: there is one."""

    object: Literal["list"] = "list"
    data: list[Model]
    first_id: str
    last_id: str
    has_more: bool = False


class LoadAdapterRequest(RequestBody, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/load_lora_adapter`: a name, a folder, and whether it may take the place of an adapter of this name.
    is_3d_lora_weight is accepted from clients of vLLM, and not read: the files show how they store experts."""

    lora_name: str
    lora_path: str
    load_inplace: bool = False
    is_3d_lora_weight: bool = False


class UnloadAdapterRequest(RequestBody, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/unload_lora_adapter`: the name. lora_int_id is accepted from clients of vLLM, and not read."""

    lora_name: str
    lora_int_id: int | None = None


class AdapterLoaded(Struct, frozen=True):
    """Response of `POST /v1/load_lora_adapter`. digest: SHA-256 of the adapter's files in hexadecimal digits."""

    lora_name: str
    digest: str


class AdapterUnloaded(Struct, frozen=True):
    """Response of `POST /v1/unload_lora_adapter`."""

    lora_name: str
    unloaded: bool = True


async def list_models(context: ServerContext, request: Request) -> ModelList:
    """Return the model once for each of its names, and the adapters that are known."""
    data = [_model(context, name, context.model.name) for name in context.model.served_model_names]
    data += [_adapter(context, request, each) for each in context.adapters]
    return ModelList(data=data, first_id=data[0].id, last_id=data[-1].id)


async def get_model(context: ServerContext, request: Request) -> Model:
    """Return the model by one of its names, or an adapter. Raises ApiError 404."""
    asked = request.path_params["model_id"]
    if asked in context.model.served_model_names:
        return _model(context, asked, context.model.name)
    adapter = await context.models.adapter(asked)
    assert adapter is not None, "other names are of adapters"
    return _adapter(context, request, adapter)


def _model(context: ServerContext, name: str, root: str, parent: str | None = None) -> Model:
    return Model(
        id=name,
        display_name=name,
        created=context.created,
        created_at=datetime.fromtimestamp(context.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        root=root,
        parent=parent,
        max_model_len=context.max_model_len,
        reads_images=context.reads_images,
    )


def _adapter(context: ServerContext, request: Request, adapter: LoRARequest) -> Model:
    """Return an adapter as a model; its folder is for those who operate the server."""
    root = adapter.lora_path if caller_of(request).may(Right.OPERATE) else adapter.lora_name
    return _model(context, adapter.lora_name, root, context.model.served_model_names[0])


async def load_adapter(context: ServerContext, request: Request) -> AdapterLoaded:
    """Load an adapter, for requests that name it as their model. Raises InvalidRequest or ApiError."""
    _check_allowed(context)
    asked = await read_json(request, LoadAdapterRequest)
    with conflicts("asleep"):
        adapter = await context.models.load(asked.lora_name, asked.lora_path, in_place=asked.load_inplace)
    return AdapterLoaded(adapter.lora_name, adapter.digest)


async def unload_adapter(context: ServerContext, request: Request) -> AdapterUnloaded:
    """Forget an adapter; requests that use it go on. Raises ApiError 404 for a name that is not known."""
    _check_allowed(context)
    asked = await read_json(request, UnloadAdapterRequest)
    context.models.unload(asked.lora_name)
    return AdapterUnloaded(asked.lora_name)


def _check_allowed(context: ServerContext) -> None:
    if not context.args.allow_runtime_lora_updating:
        raise ApiError(
            403,
            "adapters are neither loaded nor unloaded here; start the server with --allow-runtime-lora-updating and "
            "--lora-resolver-cache-dir",
            code="adapters_fixed",
        )
