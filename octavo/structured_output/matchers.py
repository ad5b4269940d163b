"""Compiled grammars of a worker: made in a thread, shared by equal requests."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Final

from octavo.core.structured_outputs import StructuredOutputsParams
from octavo.errors import InvalidRequest
from octavo.structured_output.grammars import grammar_of, parser_limits

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_COMPILED: Final = 128
"""Grammars that stay compiled when no sequence uses them."""


class Matchers:
    """Compiles grammars for a vocabulary, which is read when the first one is wanted."""

    def __init__(self, tokenizer: Path, vocab_size: int, end_token_ids: Sequence[int]) -> None:
        """tokenizer: a tokenizer.json, or the directory that has it."""
        self._tokenizer_file = tokenizer / "tokenizer.json" if tokenizer.is_dir() else tokenizer
        self._vocab_size = vocab_size
        self._end_token_ids = list(end_token_ids)
        self._vocabulary: LLTokenizer | None = None
        self._compiled: OrderedDict[StructuredOutputsParams, Future[LLMatcher]] = OrderedDict()
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None

    def compile(self, params: StructuredOutputsParams) -> Future[LLMatcher]:
        """Return the matcher before its first token, to be copied; it is there when the future is done.

        The future raises InvalidRequest for a grammar that cannot be compiled.
        """
        with self._lock:
            found = self._compiled.get(params)
            if found is None:
                found = self._compiled[params] = self._submit(params)
                while len(self._compiled) > MAX_COMPILED and next(iter(self._compiled.values())).done():
                    self._compiled.popitem(last=False)
            self._compiled.move_to_end(params)
            return found

    def compile_anew(self, params: StructuredOutputsParams, failed: Future[LLMatcher]) -> Future[LLMatcher]:
        """Return a matcher that no other sequence shares, and forget `failed`.

        Copies of a matcher share the tables that they build, and the limits of these: one text can use them up for all.
        """
        with self._lock:
            if self._compiled.get(params) is failed:
                del self._compiled[params]
            return self._submit(params)

    def _submit(self, params: StructuredOutputsParams) -> Future[LLMatcher]:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, "octavo-grammars")
        return self._pool.submit(self._compile, params)

    def close(self) -> None:
        """End the thread. Idempotent."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def _compile(self, params: StructuredOutputsParams) -> LLMatcher:
        from llguidance import LLMatcher, LLTokenizer

        if self._vocabulary is None:
            if not self._end_token_ids:
                raise InvalidRequest(
                    "structured_outputs need a model that has an end-of-sequence token", field="structured_outputs"
                )
            try:
                text = self._tokenizer_file.read_text(encoding="utf-8")
                self._vocabulary = LLTokenizer(text, n_vocab=self._vocab_size, eos_token=self._end_token_ids)
            except (OSError, ValueError) as error:
                raise InvalidRequest(
                    f"structured_outputs need a tokenizer.json of the model's vocabulary: {error}",
                    field="structured_outputs",
                ) from error
        matcher = LLMatcher(self._vocabulary, grammar_of(params), log_level=0, limits=parser_limits())
        if not matcher.is_error():
            matcher.deep_copy().compute_bitmask()  # the first one builds tables that later ones share
        if matcher.is_error():
            raise InvalidRequest(
                f"{params.form} cannot be used: {matcher.get_error():.400}",
                field="structured_outputs",
                code="invalid_grammar",
            )
        return matcher
