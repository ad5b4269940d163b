"""`/openapi.json`: the endpoints and, derived from the structs, what goes in and what comes out."""

from __future__ import annotations

import functools
from typing import Any

import msgspec

from octavo import __version__
from octavo.server.decode import refused_fields
from octavo.server.errors import ErrorBody
from octavo.server.keys import Right
from octavo.server.responses import (
    CacheReset,
    ChatCompletionResponse,
    CompletionResponse,
    DecisionList,
    DetokenizeResponse,
    Index,
    Model,
    ModelList,
    PinPrefixResponse,
    TimelineList,
    TokenizeResponse,
    UnpinPrefixResponse,
    Version,
)
from octavo.server.schema import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    Message,
    PinPrefixRequest,
    PrefixRequest,
    TokenizeRequest,
)


class Endpoint(msgspec.Struct, frozen=True):
    """A path, and the types of what goes in and comes out (None: no JSON).

    Where there are API keys: with is_open no key is needed; right is the right that a key needs; sees_more_with is the
    right that a key needs to see more than its own requests.
    """

    method: str
    path: str
    summary: str
    request: type[msgspec.Struct] | None = None
    response: type[msgspec.Struct] | None = None
    is_open: bool = False
    right: Right | None = None
    sees_more_with: Right | None = None

    @property
    def description(self) -> str:
        """Return the summary, with the right that is needed."""
        if self.right is not None:
            return f"{self.summary} (needs the right {self.right} where there are API keys)"
        if self.sees_more_with is not None:
            return f"{self.summary} (of other API keys' with the right {self.sees_more_with})"
        return self.summary


ENDPOINTS = (
    Endpoint(
        "POST", "/v1/chat/completions", "the next turn of a conversation", ChatCompletionRequest, ChatCompletionResponse
    ),
    Endpoint("POST", "/v1/completions", "text that goes on from a prompt", CompletionRequest, CompletionResponse),
    Endpoint("GET", "/v1/models", "the models served here", None, ModelList),
    Endpoint("GET", "/v1/models/{model_id}", "one of them", None, Model),
    Endpoint("POST", "/tokenize", "token ids of a text or a conversation", TokenizeRequest, TokenizeResponse),
    Endpoint("POST", "/detokenize", "the text of token ids", DetokenizeRequest, DetokenizeResponse),
    Endpoint(
        "POST",
        "/pin_prefix",
        "keep a prefix in the cache for a time",
        PinPrefixRequest,
        PinPrefixResponse,
        right=Right.CACHE,
    ),
    Endpoint("POST", "/unpin_prefix", "keep it no longer", PrefixRequest, UnpinPrefixResponse, right=Right.CACHE),
    Endpoint("POST", "/reset_prefix_cache", "forget all cached prefixes", None, CacheReset, right=Right.CACHE),
    Endpoint("GET", "/health", "200 while the engine runs", is_open=True),
    Endpoint("GET", "/metrics", "counters and gauges for Prometheus", right=Right.OBSERVE),
    Endpoint(
        "GET",
        "/scheduler/decisions",
        "why requests had to wait or were preempted",
        None,
        DecisionList,
        sees_more_with=Right.OBSERVE,
    ),
    Endpoint(
        "GET",
        "/scheduler/timelines",
        "what happened to the requests that ended last",
        None,
        TimelineList,
        sees_more_with=Right.OBSERVE,
    ),
    Endpoint("GET", "/version", "octavo's version", None, Version, is_open=True),
    Endpoint("GET", "/", "this list", None, Index, is_open=True),
    Endpoint("GET", "/openapi.json", "their schema", is_open=True),
)

_TEMPLATE = "#/components/schemas/{name}"


@functools.cache
def document() -> dict[str, Any]:
    """The OpenAPI 3.1 document. Fields that are refused are left out of it."""
    structs: list[type[msgspec.Struct]] = [ErrorBody]
    structs += [kind for endpoint in ENDPOINTS for kind in (endpoint.request, endpoint.response) if kind is not None]
    _, components = msgspec.json.schema_components(structs, ref_template=_TEMPLATE)
    structs.append(Message)
    for kind in structs:
        for name in refused_fields(kind):
            components[kind.__name__]["properties"].pop(name)
    paths: dict[str, Any] = {}
    for endpoint in ENDPOINTS:
        paths.setdefault(endpoint.path, {})[endpoint.method.lower()] = _operation(endpoint)
    return {
        "openapi": "3.1.0",
        "info": {"title": "octavo", "version": __version__},
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
    }


def _operation(endpoint: Endpoint) -> dict[str, Any]:
    answer: dict[str, Any] = {"description": endpoint.summary}
    if endpoint.response is not None:
        answer["content"] = _json(endpoint.response)
    operation: dict[str, Any] = {
        "summary": endpoint.summary,
        "responses": {"200": answer, "default": {"description": "an error", "content": _json(ErrorBody)}},
        # for a scheme of the type http the list names what the sender must be allowed
        "security": [] if endpoint.is_open else [{"key": [] if endpoint.right is None else [endpoint.right.value]}],
    }
    if endpoint.description != endpoint.summary:
        operation["description"] = endpoint.description
    if endpoint.request is not None:
        operation["requestBody"] = {"required": True, "content": _json(endpoint.request)}
    if "{model_id}" in endpoint.path:
        operation["parameters"] = [{"name": "model_id", "in": "path", "required": True, "schema": {"type": "string"}}]
    return operation


def _json(kind: type[msgspec.Struct]) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": _TEMPLATE.format(name=kind.__name__)}}}
