"""`POST /v1/load_lora_adapter` and `POST /v1/unload_lora_adapter`."""

from __future__ import annotations

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from octavo.errors import RequestFailed
from octavo.server.context import ServerContext
from octavo.server.decode import RequestBody, decode, read_body
from octavo.server.errors import ApiError
from octavo.server.generation import json_response


class LoadAdapterRequest(RequestBody, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/load_lora_adapter`: a name, a folder, and whether it may take the place of an adapter of this name."""

    lora_name: str
    lora_path: str
    load_inplace: bool = False


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


async def load(context: ServerContext, request: Request) -> Response:
    """Load an adapter, for requests that name it as their model. Raises InvalidRequest or ApiError."""
    _check_allowed(context)
    asked = decode(b"".join(await read_body(request)), LoadAdapterRequest)
    try:
        adapter = await context.models.load(asked.lora_name, asked.lora_path, in_place=asked.load_inplace)
    except RequestFailed as error:
        raise ApiError(409, str(error), code="asleep") from error
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
