"""`POST /tokenize` and `POST /detokenize`."""

from __future__ import annotations

import asyncio

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from octavo.core.prompt import Prompt
from octavo.errors import InvalidRequest
from octavo.server.context import ServerContext
from octavo.server.conversation import render
from octavo.server.decode import read_json
from octavo.server.generation import json_response
from octavo.server.responses import DetokenizeResponse, TokenizeResponse
from octavo.server.schema import DetokenizeRequest, TokenizeRequest


def routes(context: ServerContext) -> list[Route]:
    tokenizer = context.llm.tokenizer

    async def tokenize(request: Request) -> Response:
        asked = await read_json(request, TokenizeRequest)
        context.served_model(asked.model)
        prompt = _prompt(context, asked)
        # a long text takes a while, in which streams would stand still
        tokens = await asyncio.to_thread(tokenizer.encode, prompt.text or "", prompt.add_special_tokens)
        texts = [tokenizer.token_text(token_id) for token_id in tokens] if asked.return_token_strs else None
        return json_response(
            TokenizeResponse(
                count=len(tokens), max_model_len=context.llm.ready.max_model_len, tokens=tokens, token_strs=texts
            )
        )

    async def detokenize(request: Request) -> Response:
        asked = await read_json(request, DetokenizeRequest)
        context.served_model(asked.model)
        vocab_size = context.llm.ready.vocab_size
        for position, token_id in enumerate(asked.tokens):
            if token_id >= vocab_size:
                raise InvalidRequest(
                    f"tokens[{position}] is {token_id}; the model's token ids go from 0 to {vocab_size - 1}",
                    field=f"tokens[{position}]",
                )
        text = await asyncio.to_thread(tokenizer.decode, asked.tokens, asked.skip_special_tokens)
        return json_response(DetokenizeResponse(prompt=text))

    return [
        Route("/tokenize", tokenize, methods=["POST"]),
        Route("/detokenize", detokenize, methods=["POST"]),
    ]


def _prompt(context: ServerContext, asked: TokenizeRequest) -> Prompt:
    if (asked.prompt is None) == (asked.messages is None):
        raise InvalidRequest("give either prompt or messages", field="prompt")
    prompt = render(context, asked) if asked.messages is not None else Prompt(text=asked.prompt)
    if asked.add_special_tokens is None:
        return prompt
    return msgspec.structs.replace(prompt, add_special_tokens=asked.add_special_tokens)
