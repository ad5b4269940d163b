"""`GET /v1/models` and `GET /v1/models/{id}`."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from octavo.server.context import ServerContext
from octavo.server.generation import json_response
from octavo.server.responses import Model, ModelList


def routes(context: ServerContext) -> list[Route]:
    def model(name: str) -> Model:
        return Model(
            id=name,
            created=context.created,
            root=context.llm.config.model.name,
            max_model_len=context.llm.ready.max_model_len,
        )

    async def list_models(request: Request) -> Response:
        return json_response(ModelList(data=[model(name) for name in context.model_names]))

    async def get_model(request: Request) -> Response:
        return json_response(model(context.named_model(request.path_params["model_id"])))

    return [
        Route("/v1/models", list_models, methods=["GET"]),
        # hub names have a slash in them
        Route("/v1/models/{model_id:path}", get_model, methods=["GET"]),
    ]
