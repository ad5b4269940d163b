"""`POST /infill`: the text at a cursor, as editors with a client of llama.cpp ask for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from msgspec import UNSET, Struct, UnsetType

from octavo.core.outputs import CompletionOutput, RequestOutput
from octavo.core.sampling_params import SamplingParams
from octavo.engine.text.fill_in import ends_of_filling_in
from octavo.errors import named_by_the_caller
from octavo.server.generation import Generation
from octavo.server.schema.infill import InfillRequest
from octavo.server.usage import Timings


class InfillChunk(Struct, kw_only=True):
    """The new part of a text in a stream."""

    index: int
    content: str
    tokens: list[int]
    stop: bool = False


class InfillResponse(InfillChunk, kw_only=True):
    """Response of `POST /infill`, an array of them for several texts, and the last chunk of a text in a stream.

    stop_type: `eos`, `limit` or `word`. tokens_evaluated: tokens of the prompt. tokens_cached: those of them that had
    their KV already.
    """

    stop: bool = True
    model: str
    tokens_predicted: int
    tokens_evaluated: int
    tokens_cached: int
    truncated: bool = False
    stop_type: str
    stopping_word: str
    timings: Timings | UnsetType = UNSET


class Infill(Generation):
    """Return what stands between a prefix and a suffix, whole or as a stream.

    A stream has the text in pieces, and a last chunk of each text, which has none.
    """

    kind = InfillRequest
    id_prefix = "infill-"
    end_of_stream = b""
    asked: InfillRequest

    def sampling_params(self) -> SamplingParams:
        asked = self.asked
        self.field_names = asked.names
        self._num_sent: Counter[int] = Counter()
        limit = asked.most_to_fill_in
        others = {
            **{ours: getattr(asked, theirs) for ours, theirs in asked.names.items()},
            # the engine always draws a token
            "max_tokens": None if limit is None else max(limit, 1),
            "stop_token_ids": [*(asked.stop_token_ids or ()), *ends_of_filling_in(self.context.llm.tokenizer)],
        }
        with named_by_the_caller(self.field_names):
            return self.context.llm.default_sampling_params(**asked.given_sampling(**others))

    def whole(self, outputs: Sequence[RequestOutput]) -> Any:
        [output] = outputs
        texts = [self._last(output, each, *self._new(each)) for each in output.outputs]
        return texts[0] if len(texts) == 1 else texts

    def chunks(self, index: int, output: RequestOutput) -> Iterator[Any]:
        for completion in output.outputs:
            text, token_ids = self._new(completion)
            if text or token_ids:
                yield InfillChunk(index=completion.index, content=text, tokens=token_ids)
            self._num_sent[completion.index] += len(token_ids)
            if completion.finished:
                yield self._last(output, completion, "", [])

    def last_chunks(self) -> Sequence[Any]:
        return ()

    def _new(self, completion: CompletionOutput) -> tuple[str, list[int]]:
        return ("", []) if self.asked.most_to_fill_in == 0 else (completion.text, completion.token_ids)

    def _last(self, output: RequestOutput, completion: CompletionOutput, text: str, token_ids: list[int]) -> Any:
        """Return the last chunk of a text, or only those of its fields that the request asks for."""
        num_generated = self._num_sent[completion.index] + len(token_ids)
        word = completion.stop_reason
        response = InfillResponse(
            index=completion.index,
            content=text,
            tokens=token_ids if self.asked.return_tokens else [],
            model=self.frame["model"],
            tokens_predicted=num_generated,
            tokens_evaluated=len(output.prompt_token_ids),
            tokens_cached=output.num_cached_tokens,
            stop_type="limit" if completion.finish_reason == "length" else "word" if isinstance(word, str) else "eos",
            stopping_word=word if isinstance(word, str) else "",
        )
        if output.metrics is not None:
            response.timings = Timings.of(output, output.metrics, num_generated)
        return _picked(response, self.asked.response_fields) if self.asked.response_fields else response


def _picked(response: InfillResponse, fields: Sequence[str]) -> dict[str, Any]:
    """Return the requested fields that exist; a slash in a name leads into an object."""
    found = {}
    for field in fields:
        value: Any = msgspec.to_builtins(response)
        for step in field.split("/"):
            value = value.get(step) if isinstance(value, dict) else None
        if value is not None:
            found[field] = value
    return found
