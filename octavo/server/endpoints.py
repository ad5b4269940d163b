"""The endpoints in one table, and `/` and `/openapi.json`, which are made from it and from the structs."""

from __future__ import annotations

import functools
import re
from collections.abc import Awaitable, Callable
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from octavo import __version__
from octavo.server.context import ServerContext
from octavo.server.decode import refused_fields
from octavo.server.errors import ErrorBody, MessagesErrorBody, error_kind
from octavo.server.generation import Generation
from octavo.server.keys import Right
from octavo.server.routes import (
    audio,
    chat,
    cohere_chat,
    completions,
    control,
    decisions,
    generate,
    health,
    infill,
    kv_events,
    live,
    messages,
    models,
    page,
    realtime,
    responses,
    scheduler,
    scoring,
    tokens,
    vectors,
)
from octavo.server.schema.audio import TranscriptionRequest
from octavo.server.schema.chat import Message
from octavo.server.schema.decisions import DecisionRequest
from octavo.server.schema.messages import CountTokensRequest, OutputConfig, TokenCount
from octavo.server.schema.pairs import RerankRequest, ScoreRequest
from octavo.server.schema.responses import InputTokens, InputTokensRequest, Reasoning, TextConfig
from octavo.server.schema.scheduler import DecisionList, TimelineList
from octavo.server.schema.scoring import GenerativeScoringRequest
from octavo.server.schema.tokens import (
    DetokenizeRequest,
    DetokenizeResponse,
    PinPrefixRequest,
    PrefixRequest,
    TokenizeRequest,
    TokenizeResponse,
)
from octavo.server.schema.vectors import (
    ClassifyRequest,
    CohereEmbedRequest,
    EmbeddingRequest,
    PoolingRequest,
    ScoreList,
)

Handler = Callable[[ServerContext, Request], Awaitable[ASGIApp | msgspec.Struct | dict[str, Any]]]
"""Returns the response, or a value whose JSON is the response. Raises InvalidRequest or ApiError."""


class NoQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The query of endpoints without parameters."""


class Index(msgspec.Struct):
    """Response of `GET /`: the endpoints."""

    name: str
    version: str
    model: str
    endpoints: dict[str, Any]


class Endpoint(msgspec.Struct, frozen=True):
    """A method and a path, their handler, and the structs of its request and its response (None: no JSON).

    is_form: the request is a form with files. is_open: no API key is needed, where there are keys. right: the right
    that a key needs. values: all values of the path's parameter, if they are known. query: the struct of the parameters
    in the URL, which refuses others; None: the URL's parameters are not read.
    """

    method: str
    path: str
    handler: Handler
    request: type[msgspec.Struct] | None = None
    response: type[msgspec.Struct] | None = None
    is_open: bool = False
    is_form: bool = False
    right: Right | None = None
    values: tuple[str, ...] = ()
    query: type[msgspec.Struct] | None = None

    @property
    def paths(self) -> list[str]:
        """Return the paths: one for each value of the path's parameter if these are known, else the path itself."""
        return [f"{self.path.partition('{')[0]}{value}" for value in self.values] or [self.path]

    @property
    def summary(self) -> str:
        """Return the first sentence of the docstring of the handler, or of its class, without the full stop."""
        described = getattr(self.handler, "__self__", self.handler)
        return re.split(r"\.(?:\s|$)", described.__doc__ or "")[0]

    @property
    def description(self) -> str:
        """Return the summary, with the right that is needed."""
        if self.right is not None:
            return f"{self.summary} (needs the right {self.right} where there are API keys)"
        return self.summary

    @property
    def is_metered(self) -> bool:
        """Return whether requests count for the rate limits of their key: those that work with a model."""
        return self.method == "POST" and self.right is None and not self.is_open

    def parameters(self, path: str) -> dict[str, str]:
        """Return the parameter of a path by its name: the rest of the path after `/v1/models/`, slashes included."""
        prefix, _, name = self.path.partition("{")
        return {name[:-1]: path.removeprefix(prefix)} if name else {}


async def index(context: ServerContext, request: Request) -> Response | Index:
    """Return the list of endpoints, or to a browser the page."""
    if (response := page.front(request)) is not None:
        return response
    endpoints = {f"{endpoint.method} {endpoint.path}": endpoint.description for endpoint in ENDPOINTS}
    return Index("octavo", __version__, context.model.served_model_names[0], endpoints)


async def openapi(context: ServerContext, request: Request) -> dict[str, Any]:
    """Return the OpenAPI document."""
    return document()


def _generation(path: str, kind: type[Generation], response: type[msgspec.Struct]) -> Endpoint:
    return Endpoint("POST", path, kind.create, kind.kind, response)


def _form(path: str, handler: Handler, request: type[msgspec.Struct], response: type[msgspec.Struct]) -> Endpoint:
    return Endpoint("POST", path, handler, request, response, is_form=True)


def _command(
    path: str,
    handler: Handler,
    request: type[msgspec.Struct] | None,
    response: type[msgspec.Struct] | None,
    right: Right = Right.OPERATE,
    query: type[msgspec.Struct] = NoQuery,
) -> Endpoint:
    """Return an endpoint that changes the engine and refuses parameters in the URL other than those of `query`."""
    return Endpoint("POST", path, handler, request, response, right=right, query=query)


def _state(
    path: str,
    handler: Handler,
    response: type[msgspec.Struct],
    query: type[msgspec.Struct] = NoQuery,
    right: Right = Right.OBSERVE,
) -> Endpoint:
    return Endpoint("GET", path, handler, None, response, right=right, query=query)


_COHERE_CHAT: Final = ("/v2/chat", "/cohere/v2/chat")
_ABORT: Final = ("/abort_requests", "/inference/v1/abort_requests")
_RERANK: Final = ("/rerank", "/v1/rerank", "/v2/rerank")

ENDPOINTS = (
    _generation("/v1/chat/completions", chat.ChatCompletion, chat.ChatCompletionResponse),
    _generation("/v1/chat/completions/batch", chat.ChatBatch, chat.ChatCompletionResponse),
    _generation("/v1/completions", completions.Completion, completions.CompletionResponse),
    _generation("/inference/v1/generate", generate.Generate, generate.GenerateResponse),
    _generation("/infill", infill.Infill, infill.InfillResponse),
    _generation("/v1/responses", responses.ModelTurn, responses.ModelResponse),
    Endpoint("POST", "/v1/responses/input_tokens", tokens.input_tokens, InputTokensRequest, InputTokens),
    *(Endpoint(method, "/v1/responses/{response_id}", responses.stored) for method in ("GET", "POST", "DELETE")),
    _generation("/v1/messages", messages.Message, messages.MessageResponse),
    *(_generation(path, cohere_chat.CohereChat, cohere_chat.CohereChatResponse) for path in _COHERE_CHAT),
    Endpoint("POST", "/v1/messages/count_tokens", tokens.count_tokens, CountTokensRequest, TokenCount),
    Endpoint("POST", "/v1/embeddings", vectors.embeddings, EmbeddingRequest, vectors.EmbeddingList),
    Endpoint("POST", "/v2/embed", vectors.cohere, CohereEmbedRequest, vectors.CohereEmbeddings),
    *(Endpoint("POST", path, vectors.rerank, RerankRequest, vectors.Reranked) for path in _RERANK),
    *(Endpoint("POST", path, vectors.score, ScoreRequest, ScoreList) for path in ("/score", "/v1/score")),
    Endpoint("POST", "/generative_scoring", scoring.generative_scoring, GenerativeScoringRequest, ScoreList),
    Endpoint("POST", "/v1/decisions", decisions.decisions, DecisionRequest, decisions.DecisionResponse),
    Endpoint("POST", "/classify", vectors.classify, ClassifyRequest, vectors.ClassificationList),
    Endpoint("POST", "/pooling", vectors.pooling, PoolingRequest, vectors.PooledList),
    _form("/v1/audio/transcriptions", audio.transcribe, TranscriptionRequest, audio.VerboseTranscription),
    _form("/v1/audio/translations", audio.translate, TranscriptionRequest, audio.VerboseTranscription),
    Endpoint("GET", "/v1/realtime", realtime.realtime),
    Endpoint("GET", "/v1/models", models.list_models, None, models.ModelList),
    Endpoint("GET", "/v1/models/{model_id}", models.get_model, None, models.Model),
    _command("/v1/load_lora_adapter", models.load_adapter, models.LoadAdapterRequest, models.AdapterLoaded),
    _command("/v1/unload_lora_adapter", models.unload_adapter, models.UnloadAdapterRequest, models.AdapterUnloaded),
    Endpoint("POST", "/tokenize", tokens.tokenize, TokenizeRequest, TokenizeResponse),
    Endpoint("POST", "/detokenize", tokens.detokenize, DetokenizeRequest, DetokenizeResponse),
    _command("/pin_prefix", tokens.pin_prefix, PinPrefixRequest, tokens.PinPrefixResponse, Right.CACHE),
    _command("/unpin_prefix", tokens.unpin_prefix, PrefixRequest, tokens.UnpinPrefixResponse, Right.CACHE),
    _command("/reset_prefix_cache", tokens.reset_prefix_cache, None, tokens.CacheReset, Right.CACHE, tokens.ResetQuery),
    _state("/is_paused", health.is_paused, health.PauseState),
    _command("/pause", health.pause, None, health.Paused, query=health.PauseQuery),
    _command("/resume", health.resume, None, health.Paused),
    _state("/is_sleeping", health.is_sleeping, health.SleepState),
    _command("/sleep", health.sleep, None, health.SleepState, query=health.SleepQuery),
    _command("/wake_up", health.wake_up, None, health.SleepState, query=health.WakeUpQuery),
    _command("/update_weights_from_disk", health.update_weights, health.UpdateWeightsRequest, health.WeightsUpdated),
    _command("/update_weights", health.update_from_folder, health.WeightFolderRequest, health.WeightsUpdated),
    _command("/update_weight_version", control.label_weights, control.WeightVersionRequest, control.WeightsLabelled),
    _command("/finish_weight_update", control.finish_update, control.FinishedUpdateRequest, health.WeightsUpdated),
    _state("/weight_info", control.weight_info, control.WeightInfo),
    *(_command(each, control.abort_requests, control.AbortRequest, control.RequestsAborted) for each in _ABORT),
    _command("/reset_mm_cache", control.reset_media, None, None, Right.CACHE),
    _command("/reset_encoder_cache", control.reset_media, None, None, Right.CACHE),
    _state("/get_world_size", control.world_size, control.WorldSize, control.WorldQuery),
    _command("/start_profile", health.start_profile, health.StartProfileRequest, health.ProfileState),
    _command("/stop_profile", health.stop_profile, None, health.ProfileState),
    _command("/drain", health.drain, health.DrainRequest, health.Drained),
    Endpoint("GET", "/health", health.health, None, health.Health, is_open=True),
    Endpoint("GET", "/ready", health.ready, None, health.Health, is_open=True),
    Endpoint("GET", "/ping", health.health, None, health.Health, is_open=True),
    Endpoint("POST", "/ping", health.health, None, health.Health, is_open=True),
    Endpoint("GET", "/load", health.load, None, health.Load, right=Right.OBSERVE),
    Endpoint("GET", "/tokenizer_info", health.tokenizer_info),
    Endpoint("GET", "/metrics", health.metrics, right=Right.OBSERVE),
    Endpoint("GET", "/scheduler/decisions", scheduler.decisions, None, DecisionList, query=scheduler.RequestIdQuery),
    Endpoint("GET", "/scheduler/timelines", scheduler.timelines, None, TimelineList, query=scheduler.RequestIdQuery),
    Endpoint("GET", "/live", live.stream, None, live.LiveEvent, right=Right.OBSERVE),
    _state("/kv/events", kv_events.stream, kv_events.KvEvent, kv_events.AfterQuery, Right.KV_EVENTS),
    Endpoint("GET", "/version", health.version, None, health.Version, is_open=True),
    Endpoint("GET", "/", index, None, Index, is_open=True),
    Endpoint("GET", "/page/{name}", page.file, is_open=True, values=page.FILES),
    Endpoint("GET", "/openapi.json", openapi, is_open=True),
)

_TEMPLATE = "#/components/schemas/{name}"


@functools.cache
def document() -> dict[str, Any]:
    """Return the OpenAPI 3.1 document, without the fields that are refused."""
    structs: list[type[msgspec.Struct]] = [ErrorBody, MessagesErrorBody]
    structs += [kind for endpoint in ENDPOINTS for kind in (endpoint.request, endpoint.response) if kind is not None]
    _, components = msgspec.json.schema_components(structs, ref_template=_TEMPLATE)
    structs += [Message, TextConfig, Reasoning, OutputConfig]
    for kind in dict.fromkeys(structs):
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
    success: dict[str, Any] = {"description": endpoint.summary}
    if endpoint.response is not None:
        success["content"] = _json(endpoint.response)
    error = error_kind(endpoint.path)
    operation: dict[str, Any] = {
        "summary": endpoint.summary,
        "responses": {"200": success, "default": {"description": "an error", "content": _json(error)}},
        # for a scheme of the type http the list names what the sender must be allowed
        "security": [] if endpoint.is_open else [{"key": [] if endpoint.right is None else [endpoint.right.value]}],
    }
    if endpoint.description != endpoint.summary:
        operation["description"] = endpoint.description
    if endpoint.request is not None:
        content = _json(endpoint.request)
        if endpoint.is_form:
            content = {"multipart/form-data": content["application/json"]}
        operation["requestBody"] = {"required": True, "content": content}
    for name in endpoint.parameters(endpoint.path):
        schema = {"type": "string", **({"enum": endpoint.values} if endpoint.values else {})}
        operation["parameters"] = [{"name": name, "in": "path", "required": True, "schema": schema}]
    if endpoint.query is not None and (query := msgspec.json.schema_components([endpoint.query])[1]):
        properties = query[endpoint.query.__name__]["properties"]
        operation["parameters"] = [{"name": name, "in": "query", "schema": each} for name, each in properties.items()]
    return operation


def _json(kind: type[msgspec.Struct]) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": _TEMPLATE.format(name=kind.__name__)}}}
