"""`POST /v1/load_lora_adapter` and `POST /v1/unload_lora_adapter`."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from octavo.server.context import ServerContext
from octavo.server.decode import decode, read_body
from octavo.server.errors import ApiError
from octavo.server.generation import json_response
from octavo.server.responses.adapters import AdapterLoaded, AdapterUnloaded
from octavo.server.schema.adapters import LoadAdapterRequest, UnloadAdapterRequest


async def load(context: ServerContext, request: Request) -> Response:
    """Load an adapter, for requests that name it as their model. Raises InvalidRequest or ApiError."""
    _check_allowed(context)
    asked = decode(b"".join(await read_body(request)), LoadAdapterRequest)
    adapter = await context.models.load(asked.lora_name, asked.lora_path, in_place=asked.load_inplace)
    return json_response(AdapterLoaded(adapter.lora_name, adapter.digest))


async def unload(context: ServerContext, request: Request) -> Response:
    """Forget an adapter; requests that use it go on. Raises ApiError 404 for a name that is not known."""
    _check_allowed(context)
    asked = decode(b"".join(await read_body(request)), UnloadAdapterRequest)
    context.models.unload(asked.lora_name)
    return json_response(AdapterUnloaded(asked.lora_name))


def _check_allowed(context: ServerContext) -> None:
    if not context.args.allow_runtime_lora_updating:
        raise ApiError(
            403,
            "adapters are neither loaded nor unloaded here; start the server with --allow-runtime-lora-updating and "
            "--lora-resolver-cache-dir",
            code="adapters_fixed",
        )
