"""Requests are made of prompts a few at a time, so that one call with many prompts does not block the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Final

from octavo.config.schema import ModelConfig
from octavo.core.adapter import LoRARequest
from octavo.core.messages import EngineCoreRequest
from octavo.core.pooling import PoolingParams
from octavo.core.prompt import Prompt
from octavo.core.request_limits import check_logprob_entries, check_pooled_values
from octavo.core.request_options import RequestOptions
from octavo.core.sampling_params import SamplingParams
from octavo.engine.input.input_processor import InputProcessor, PrefixLike, open_tokenizer
from octavo.engine.text.chat_template import ChatTemplate
from octavo.engine.text.tokenizer import LONG_TEXT_CHARS, Tokenizer
from octavo.errors import of_prompt

PROMPTS_OF_TURN: Final = 16
"""Prompts of one request that are processed before whatever else waits for the loop."""


class InputTurns:
    """Calls of an `InputProcessor` on one event loop, which take turns."""

    def __init__(self, processor: InputProcessor) -> None:
        self._input = processor
        self._turn = asyncio.Lock()

    async def requests(
        self,
        prompts: Sequence[tuple[str, Prompt]],
        params: SamplingParams | PoolingParams,
        options: RequestOptions | None,
    ) -> list[EngineCoreRequest]:
        """Make the requests of prompts and their ids, whose answers together are within the limits: in a thread where
        it takes long to tokenise some. Raises InvalidRequest, which says of several prompts which one it is about."""

        def process(turn: Sequence[tuple[str, Prompt]], first: int) -> list[EngineCoreRequest]:
            made = []
            for index, (request_id, prompt) in enumerate(turn, first):
                with of_prompt(index) if len(prompts) > 1 else nullcontext():
                    made.append(self._input.process(request_id, prompt, params, options))
            return made

        requests: list[EngineCoreRequest] = []
        for start in range(0, len(prompts), PROMPTS_OF_TURN):
            turn = prompts[start : start + PROMPTS_OF_TURN]
            if sum(len(each.text or "") for _, each in turn if each.token_ids is None) >= LONG_TEXT_CHARS:
                requests += await asyncio.to_thread(process, turn, start)
                continue
            async with self._turn:
                if start:
                    await asyncio.sleep(0)
                requests += process(turn, start)
        num_listed = requests[0].params.prompt_logprobs if requests else None
        check_logprob_entries(sum(len(request.prompt_token_ids) for request in requests), num_listed)
        if (pooling := self._input.vectors.config) is not None:
            vectors = [(each.pooled.params, len(each.prompt_token_ids)) for each in requests if each.pooled]
            check_pooled_values(sum(pooling.num_values(*each) for each in vectors))
        return requests

    async def prefix(
        self, prompt: PrefixLike, cache_salt: str | None, adapter: LoRARequest | None
    ) -> tuple[list[int], str | None, str | None, str | None]:
        """Return `InputProcessor.process_prefix`, for a long text from a thread. Raises InvalidRequest."""
        read = self._input.read_prefix(prompt)
        if read.text is not None and len(read.text) >= LONG_TEXT_CHARS:
            return await asyncio.to_thread(self._input.process_prefix, read, cache_salt, adapter)
        return self._input.process_prefix(read, cache_salt, adapter)


def open_compiled(model: ModelConfig) -> tuple[Tokenizer, ChatTemplate | None]:
    """Return the tokenizer and the chat template, compiled, so that the first chat does not block the event loop."""
    tokenizer, chat_template = open_tokenizer(model)
    if chat_template is not None:
        chat_template.compile()
    return tokenizer, chat_template
