"""Shared by completions and chat: makes engine requests from a checked request, and a response from their outputs."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from functools import partial
from time import time
from typing import Any, ClassVar, Final
from uuid import uuid4

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from octavo import __version__
from octavo.core.outputs import CompletionOutput, RequestOutput, WeightVersionSpan
from octavo.core.pooling import PoolingParams
from octavo.core.prompt import Prompt
from octavo.core.request_limits import check_response_logprobs
from octavo.core.request_options import RequestOptions
from octavo.core.sampling_params import SamplingParams
from octavo.engine.output.readers import DirectReader
from octavo.errors import EngineDeadError, named_by_the_caller
from octavo.server.checks import Fields
from octavo.server.context import ServerContext
from octavo.server.decode import EngineBody
from octavo.server.errors import ApiError, ended_with_error
from octavo.server.keys import Caller, Right, caller_of
from octavo.server.logprobs import ChatLogprobs, by_ids, chat_logprobs
from octavo.server.rate_limits import Meter
from octavo.server.schema.common import GenerationRequest, StreamOptions
from octavo.server.sending import (
    DONE,
    DirectBody,
    EventStream,
    encode,
    error_event,
    event,
    free,
    is_large,
    num_logprobs,
)
from octavo.server.usage import Usage, UsageCounts

_UNIQUE_DIGITS: Final = 12
_DIRECT_SEQUENCES: Final = 16
"""Streams with more sequences are sent by their tasks instead, which take turns."""
_ENGINE_ID: Final = re.compile(rf"(?P<response>.*)-\d+-[0-9a-f]{{{_UNIQUE_DIGITS}}}", re.DOTALL)


def names_of(request_id: str) -> set[str]:
    """Return the ids by which clients may name a request to the engine: its `request_id`, and the id of its
    response."""
    found = _ENGINE_ID.fullmatch(request_id)
    return {request_id} if found is None else {request_id, found["response"]}


class EngineRequests:
    """The requests to the engine for one request of a client.

    id: id of the response; the engine's ids begin with it. meter: counts tokens for the limits of the caller's key.
    """

    def __init__(self, context: ServerContext, request: Request, asked: EngineBody, id_prefix: str) -> None:
        state, caller = request.scope["state"], caller_of(request)
        # without API keys, the tenant is the user that the client names
        self.caller = caller if caller.tenant is not None else msgspec.structs.replace(caller, tenant=asked.user)
        self.id = f"{id_prefix}{asked.request_id or state['request_id']}"
        self.meter: Meter | None = state.get("meter")
        self._context = context
        self._asked = asked
        # clients may choose their ids, and two may choose the same: the engine gets a unique one
        self._unique = uuid4().hex[:_UNIQUE_DIGITS]
        self._num_sent = 0
        self._options: RequestOptions | None = None

    async def outputs(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | PoolingParams,
        field_names: Mapping[str, str],
        *,
        record: Callable[[RequestOutput], None] | None = None,
        direct: DirectReader | None = None,
        yields_aborted: bool = False,
    ) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """Yield outputs of the engine with the index of their prompt, except those that `direct` takes. Closing the
        generator aborts requests that still run.

        field_names: what the client calls a field that the engine knows by another name. record: gets each output, also
        of a request that ends with an error. yields_aborted: the client learns of an abort by the finish reason. Raises
        InvalidRequest before the first output, ApiError for a model that is not served and a request that ends with an
        error, or is aborted and not yielded.
        """
        if self._options is None:  # the adapter is looked up once, so that all prompts of a request have the same one
            adapter = await self._context.models.adapter(self._asked.model)
            self._options = RequestOptions.of_fields(self._asked, tenant=self.caller.tenant, lora_request=adapter)
        first, self._num_sent = self._num_sent, self._num_sent + len(prompts)
        request_ids = [f"{self.id}-{first + index}-{self._unique}" for index in range(len(prompts))]
        outputs = self._context.llm.generate_together(
            [in_namespace_of(self.caller, prompt) for prompt in prompts], params, request_ids, self._options, direct
        )
        async with aclosing(outputs):
            with (
                self._context.open_ids(request_ids),
                named_by_the_caller(field_names, lists_prompts=self._asked.lists_prompts),
                without_details_of_others(self.caller),
            ):
                async for index, output in outputs:
                    if record is not None:
                        record(output)
                    if output.error is not None:
                        raise ended_with_error(output.error, shows_others=self.caller.may(Right.OBSERVE))
                    is_aborted = output.finished and any(each.finish_reason == "abort" for each in output.outputs)
                    if is_aborted and not yields_aborted:
                        raise ApiError(503, "the request was aborted by the engine", code="request_aborted")
                    yield index, output

    async def last_outputs(
        self, prompts: Sequence[Prompt], params: SamplingParams | PoolingParams, field_names: Mapping[str, str]
    ) -> list[RequestOutput]:
        """Return the last output of each prompt, and count its tokens for the limits of the caller's key. Raises as
        `outputs` does."""
        last: dict[int, RequestOutput] = {}
        async with aclosing(self.outputs(prompts, params, field_names)) as outputs:
            async for index, output in outputs:
                last[index] = output
                if self.meter is not None and output.finished:
                    self.meter.spend(len(output.prompt_token_ids) + output.num_generated_tokens)
        return [last[index] for index in range(len(prompts))]


def in_namespace_of(caller: Caller, prompt: Prompt) -> Prompt:
    """Return the prompt in the cache namespace of the caller: it shares cached prefixes only within its key's group."""
    return msgspec.structs.replace(prompt, cache_namespace=caller.cache_namespace)


class Generated(msgspec.Struct, kw_only=True):
    """The fields of every response with generated text, and of every chunk of its stream."""

    id: str
    created: int
    model: str
    system_fingerprint: str


class Generation(ABC):
    """One request for generated text, from its prompts to its response. Each API has a subclass with its structs.

    kind: the struct of its body. id_prefix: prefix of its ids. chunk_object: the field `object` of chunks with choices.
    end_of_stream: bytes after the last chunk of a stream. field_names: what the client calls a field that the engine
    knows by another name, for the messages of errors. yields_aborted: the response of an aborted request has the output
    so far and says that it was aborted; otherwise it is an error. Raises ApiError 404 for the model, and
    InvalidRequest.
    """

    kind: ClassVar[type[GenerationRequest]]
    id_prefix: ClassVar[str]
    chunk_object: ClassVar[str]
    end_of_stream: ClassVar[bytes] = DONE
    yields_aborted: ClassVar[bool] = False

    def __init__(
        self, context: ServerContext, request: Request, asked: GenerationRequest, prompts: Sequence[Prompt]
    ) -> None:
        self.context = context
        self.asked = asked
        if context.args.enable_force_include_usage and asked.stream:
            asked.stream_options = asked.stream_options or StreamOptions()
            asked.stream_options.include_usage = True
        self.prompts = prompts
        self._requests = EngineRequests(context, request, asked, self.id_prefix)
        self.id = self._requests.id
        self.frame: dict[str, Any] = {
            "id": self.id,
            "created": int(time()),
            "model": context.models.name(asked.model),
            "system_fingerprint": f"octavo-{__version__}",
        }
        self.field_names: dict[str, str] = {}
        self._counts = UsageCounts(len(prompts), asked, speculates=context.llm.config.speculative is not None)
        self._receive = request.receive
        self._body: DirectBody | None = request.scope.get("extensions", {}).get(DirectBody.NAME)
        self._fields: Fields = request.scope["state"]["fields"]
        self.params = self.sampling_params()

    @classmethod
    async def create(cls, context: ServerContext, request: Request) -> Any:
        asked, prompts = await context.texts.read(request, cls.kind)
        return await cls(context, request, asked, prompts).respond()

    @abstractmethod
    def sampling_params(self) -> SamplingParams:
        """Return the model's default sampling parameters, replaced by those that the request sets. Raises
        InvalidRequest."""

    @abstractmethod
    def whole(self, outputs: Sequence[RequestOutput]) -> Any:
        """Return the response to a request that is not streamed: a struct, or several."""

    @abstractmethod
    def chunks(self, index: int, output: RequestOutput) -> Iterable[Any]:
        """Return the chunks of a stream for an output of prompt `index`."""

    def last_chunks(self) -> Iterable[Any]:
        """Return the chunks that follow the last output: one with the usage, where that is asked for."""
        return [self.chunk([])] if self.asked.wants_usage_chunk else []

    def chunk(self, choices: list[Any]) -> Any:
        """Return a chunk with these choices, or without any the last one, which has the usage. In streams that end with
        it the usage of other chunks is null, unless each has it."""
        usage: dict[str, Usage | None] = {"usage": None} if self.asked.wants_usage_chunk else {}
        if self.asked.wants_usage_always or not choices:
            usage = {"usage": self.usage()}
        return {**self.frame, "object": self.chunk_object, "choices": choices, **usage}

    def event(self, encoder: msgspec.json.Encoder, chunk: Any) -> bytes:
        return event(encoder, chunk)

    def failed(self, error: ApiError) -> bytes:
        return error_event(error)

    def reasoning_tokens(self) -> int | None:
        """Return how many tokens of the outputs so far are reasoning; None where reasoning is not read."""
        return None

    def usage(self, *, without_completion: bool = False) -> Usage:
        """Return the token counts so far, without those of the outputs where that is asked for."""
        return self._counts.usage(self.reasoning_tokens(), without_completion=without_completion)

    def token_ids(self, completion: CompletionOutput) -> list[int] | UnsetType:
        return completion.token_ids if self.asked.return_token_ids else UNSET

    def weight_versions(self, completion: CompletionOutput) -> list[WeightVersionSpan] | UnsetType:
        """Return which weights drew which tokens of a completion that has ended; unset where no label is known."""
        return completion.weight_versions or UNSET if self.asked.return_weight_versions else UNSET

    @property
    def shows_ids(self) -> bool:
        """Return whether tokens of log-probabilities are shown by their ids."""
        asked = self.asked.return_tokens_as_token_ids
        return self.context.args.return_tokens_as_token_ids if asked is None else asked

    def shown(self, positions: Sequence[Any]) -> Sequence[Any]:
        """Return positions of log-probabilities; their tokens have texts, or only ids if the request asks for that."""
        return by_ids(positions) if self.shows_ids else positions

    def described(self, completion: CompletionOutput, num_top: int) -> ChatLogprobs:
        """Return the log-probabilities of the tokens of a completion, each with those of the `num_top` likeliest tokens
        there."""
        num_top = -1 if self.asked.logprob_token_ids else num_top
        positions = self.shown(completion.logprobs or [])
        return chat_logprobs(completion.token_ids, positions, num_top, self.context.llm.tokenizer.token_bytes)

    async def respond(self) -> Any:
        """Return the response: whole, or as a stream of events. Raises InvalidRequest or ApiError."""
        if self.asked.stream:
            return EventStream(self._events(), self.context.open_requests, self.failed)
        async with self.context.open_requests.track(self._receive):
            last: dict[int, RequestOutput] = {}
            num_entries = 0
            async with aclosing(self._outputs()) as outputs:
                async for index, output in outputs:
                    self.count(index, output)
                    last[index] = output
                    num_entries += sum(map(num_logprobs, output.outputs))
                    check_response_logprobs(num_entries)
            final = [last[index] for index in range(len(self.prompts))]
            if not is_large(final):
                return self.whole(final)
            body = await self.context.large_responses.build(partial(self._large, final))
            return Response(body, media_type="application/json")

    def _large(self, outputs: list[RequestOutput]) -> bytes:
        whole = self.whole(outputs)
        body = encode(whole)
        free(whole)
        free(outputs)
        return body

    async def _events(self) -> AsyncGenerator[bytes, None]:
        encoder = msgspec.json.Encoder()
        direct = None
        if self._body is not None and self.params.width <= _DIRECT_SEQUENCES and self.params.prompt_logprobs is None:
            direct = _DirectStream(self, encoder, self._body)
        async with aclosing(self._outputs(direct)) as outputs:
            async for index, output in outputs:
                self.count(index, output)
                chunks = self.chunks(index, output)
                if output.prompt_logprobs and is_large([output]):
                    chunks = await self.context.large_responses.build(partial(list, chunks))
                for chunk in chunks:
                    yield self.event(encoder, chunk)
        for chunk in self.last_chunks():
            yield self.event(encoder, chunk)
        if self.end_of_stream:
            yield self.end_of_stream

    def _outputs(self, direct: DirectReader | None = None) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        return self._requests.outputs(
            self.prompts,
            self.params,
            self.field_names,
            record=self._record,
            direct=direct,
            yields_aborted=self.yields_aborted,
        )

    def _record(self, output: RequestOutput) -> None:
        if output.finished and (tracer := self.context.tracer) is not None:
            tracer.record(output, self.params, self.frame["model"], self._fields)

    def count(self, index: int, output: RequestOutput) -> None:
        """Count the tokens of an output, for the usage and for the limits of the caller's key."""
        self._counts.set(index, output)
        if self._requests.meter is not None:
            self._requests.meter.spend(self._counts.num_new())


class _DirectStream:
    """Writes the chunks of a stream where its outputs are made, once the response has begun."""

    def __init__(self, generation: Generation, encoder: msgspec.json.Encoder, body: DirectBody) -> None:
        self._generation = generation
        self._encoder = encoder
        self._body = body
        self.can_take = body.can_write

    def take(self, index: int, output: RequestOutput) -> None:
        generation = self._generation
        generation.count(index, output)
        data = b"".join([generation.event(self._encoder, chunk) for chunk in generation.chunks(index, output)])
        if data:
            self._body.write(data)


@contextmanager
def without_details_of_others(caller: Caller) -> Iterator[None]:
    """Raise the error of a dead engine without its message for callers without `observe`: it may name a request."""
    try:
        yield
    except EngineDeadError as error:
        if caller.may(Right.OBSERVE):
            raise
        raise ApiError(503, "the engine has stopped", code="engine_dead") from error
