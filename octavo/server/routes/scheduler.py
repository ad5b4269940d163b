"""`GET /scheduler/decisions`: why requests were, or were not, part of the last steps."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from octavo.core.messages import Decision
from octavo.server.context import ServerContext
from octavo.server.generation import json_response
from octavo.server.responses import DecisionList


def routes(context: ServerContext) -> list[Route]:
    async def decisions(request: Request) -> Response:
        entries = msgspec.convert(await context.llm.call("decisions"), list[Decision])
        request_id = request.query_params.get("request_id")
        if request_id is not None:
            # the engine's own ids begin with what the client was told
            entries = [entry for entry in entries if entry.request_id.startswith(request_id)]
        return json_response(DecisionList(entries))

    return [Route("/scheduler/decisions", decisions, methods=["GET"])]
