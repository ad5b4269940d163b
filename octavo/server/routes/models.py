"""`GET /v1/models` and `GET /v1/models/{id}`."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from octavo.server.context import ServerContext
from octavo.server.generation import json_response
from octavo.server.responses.models import Model, ModelList


async def list_models(context: ServerContext, request: Request) -> Response:
    """Return the model once for each of its names."""
    return json_response(ModelList(data=[_model(context, name) for name in context.model_names]))


async def get_model(context: ServerContext, request: Request) -> Response:
    """Return the model by one of its names. Raises ApiError 404."""
    return json_response(_model(context, context.served_model(request.path_params["model_id"])))


def _model(context: ServerContext, name: str) -> Model:
    return Model(
        id=name,
        created=context.created,
        root=context.model.name,
        max_model_len=context.max_model_len,
    )
