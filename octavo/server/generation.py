"""What completions and chat share: from a checked request to outputs of the engine, and the frame of their answers."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from time import time
from typing import Any, Final
from uuid import uuid4

import msgspec
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from octavo import __version__
from octavo.core.outputs import RequestOutput
from octavo.core.prompt import Prompt
from octavo.core.sampling_params import SamplingParams
from octavo.errors import EngineDeadError, InvalidRequest
from octavo.server.context import ServerContext
from octavo.server.errors import ApiError, ended_with_error
from octavo.server.keys import Caller, Right, caller_of
from octavo.server.large_answers import encode
from octavo.server.responses import CacheInfo, PromptTokensDetails, Usage
from octavo.server.schema import GenerationRequest


@dataclass(frozen=True)
class Frame:
    """What all chunks of one answer have in common."""

    id: str
    created: int
    model: str

    @classmethod
    def of(cls, prefix: str, request: Request, asked: GenerationRequest, context: ServerContext) -> Frame:
        """The id is the client's `request_id`, or else that of the HTTP request. Raises ApiError 404 for the model."""
        request_id = asked.request_id or request.scope["state"]["request_id"]
        return cls(f"{prefix}-{request_id}", int(time()), context.served_model(asked.model))

    def fields(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": f"octavo-{__version__}",
        }


_UNIQUE_DIGITS: Final = 12
_ENGINE_ID: Final = re.compile(rf"(?P<answer>.*)-\d+-[0-9a-f]{{{_UNIQUE_DIGITS}}}", re.DOTALL)


def engine_id(answer_id: str, index: int, unique: str) -> str:
    """What the engine calls the request for prompt `index` of an answer."""
    return f"{answer_id}-{index}-{unique}"


def is_about(request_id: str, asked: str) -> bool:
    """Does the engine's `request_id` belong to what a client asks for: an answer's id, or the engine's own?"""
    found = _ENGINE_ID.fullmatch(request_id)
    return request_id == asked or (found is not None and found["answer"] == asked)


def caller_for(request: Request, asked: GenerationRequest) -> Caller:
    """Return who is served: the caller of the key, or where there are no keys the user that the client names."""
    caller = caller_of(request)
    return caller if caller.tenant is not None else msgspec.structs.replace(caller, tenant=asked.user)


def in_namespace_of(caller: Caller, prompt: Prompt) -> Prompt:
    """Return the prompt such that it shares cached prefixes only with those of the caller's key or its group."""
    return msgspec.structs.replace(prompt, cache_namespace=caller.cache_namespace)


class TokenCounts:
    """Adds up the usage of one answer over the outputs of its prompts."""

    def __init__(self, num_prompts: int, asked: GenerationRequest) -> None:
        self._prompts = [CacheInfo(0, 0, None)] * num_prompts
        self._completions = [0] * num_prompts
        self._with_cache_info = bool(asked.return_cache_info)

    def add(self, index: int, output: RequestOutput) -> None:
        """Take the counts of prompt `index` from its latest output."""
        num_tokens = len(output.prompt_token_ids)
        self._prompts[index] = CacheInfo(num_tokens, output.num_cached_tokens, output.cache_miss_reason)
        self._completions[index] = output.num_generated_tokens

    def usage(self, *, without_completion: bool = False) -> Usage:
        details = PromptTokensDetails(
            sum(prompt.cached_tokens for prompt in self._prompts),
            list(self._prompts) if self._with_cache_info else UNSET,
        )
        num_tokens = sum(prompt.prompt_tokens for prompt in self._prompts)
        return Usage.of(num_tokens, 0 if without_completion else sum(self._completions), details)


@dataclass(frozen=True)
class Generation:
    """Prompts that were accepted for one answer.

    caller: who is served (`caller_for`).
    field_names: what the client calls a field that the engine knows by another name, for the messages of errors.
    """

    context: ServerContext
    name: str
    prompts: Sequence[Prompt]
    params: SamplingParams
    asked: GenerationRequest
    caller: Caller
    field_names: Mapping[str, str]

    async def outputs(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """Outputs of the engine with the index of their prompt. Closing it aborts what still runs.

        Raises InvalidRequest before the first output, ApiError for a request that ends with an error or is aborted.
        """
        # clients may choose their ids, and two may choose the same: the engine gets one of our own
        unique = uuid4().hex[:_UNIQUE_DIGITS]
        outputs = self.context.llm.generate_together(
            [in_namespace_of(self.caller, prompt) for prompt in self.prompts],
            self.params,
            [engine_id(self.name, index, unique) for index in range(len(self.prompts))],
            self.asked.options(self.caller.tenant),
        )
        async with aclosing(outputs):
            with named_by_the_client(self.field_names), last_words_for(self.caller):
                async for index, output in outputs:
                    if output.error is not None:
                        raise ended_with_error(output.error, may_tell_of_others=self.caller.may(Right.OBSERVE))
                    if any(completion.finish_reason == "abort" for completion in output.outputs):
                        raise ApiError(503, "the request was aborted by the engine", code="request_aborted")
                    yield index, output

    async def final_outputs(self) -> list[RequestOutput]:
        """The last output of each prompt, in the order of the prompts. Raises as `outputs` does."""
        last: dict[int, RequestOutput] = {}
        async with aclosing(self.outputs()) as stream:
            async for index, output in stream:
                last[index] = output
        return [last[index] for index in range(len(self.prompts))]


@contextmanager
def named_by_the_client(field_names: Mapping[str, str]) -> Iterator[None]:
    """Refusals from inside get the name that the client has for the field."""
    try:
        yield
    except InvalidRequest as error:
        error.field = field_names.get(error.field or "", error.field)
        raise


@contextmanager
def last_words_for(caller: Caller) -> Iterator[None]:
    """Raise errors of a dead engine without its last message to callers without `observe`: it may name a request."""
    try:
        yield
    except EngineDeadError as error:
        if caller.may(Right.OBSERVE):
            raise
        raise ApiError(503, "the engine has stopped", code="engine_dead") from error


async def answer_in_one_piece(
    context: ServerContext, outputs: Sequence[RequestOutput], build: Callable[[], msgspec.Struct]
) -> Response:
    """The response with what `build` makes of the outputs."""
    num_entries = sum(
        len(output.prompt_logprobs or ()) + sum(len(completion.token_ids) for completion in output.outputs)
        for output in outputs
    )
    body = await context.large_answers.build(lambda: encode(build()), num_entries)
    return Response(body, media_type="application/json")


def json_response(value: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
