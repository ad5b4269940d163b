"""Compiled grammars of a worker: made in threads, shared by equal requests."""

from __future__ import annotations

import json
import os
import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Final

from octavo.core.structured_outputs import StructuredOutputsParams
from octavo.core.vocabulary.ranked_tokens import ranked_beside, read_ranked
from octavo.errors import InvalidRequest
from octavo.structured_output.grammars import grammar_of, parser_limits, without_forcing
from octavo.structured_output.marks import Vocabulary
from octavo.structured_output.progress import CompiledForm

MAX_COMPILED: Final = 128
"""Grammars that stay compiled when no sequence uses them."""

_NUM_THREADS: Final = 2
"""A grammar that takes seconds does not hold up the others."""

_NICENESS: Final = 10
_ESCAPE: Final = re.compile(r"(?<!\\)\\+u([0-9a-fA-F]{4})")


class Matchers:
    """Compiles grammars for a vocabulary, which is read when the first one is wanted."""

    def __init__(self, tokenizer: Path, vocab_size: int, end_token_ids: Sequence[int]) -> None:
        """tokenizer: a tokenizer.json or a file in its place, or the directory that has it."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._end_token_ids = list(end_token_ids)
        self._vocabulary: Vocabulary | None = None
        self._compiled: OrderedDict[StructuredOutputsParams, Future[CompiledForm]] = OrderedDict()
        self._lock = threading.Lock()
        self._pools: tuple[ThreadPoolExecutor, ThreadPoolExecutor] | None = None

    def compile(self, params: StructuredOutputsParams) -> Future[CompiledForm]:
        """Return the compiled form; it is there when the future is done.

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

    def compile_anew(self, params: StructuredOutputsParams, failed: Future[CompiledForm]) -> Future[CompiledForm]:
        """Return a form that no other sequence shares, and forget `failed`.

        Copies of a matcher share the tables that they build, and the limits of these: one text can use them up for all.
        """
        with self._lock:
            if self._compiled.get(params) is failed:
                del self._compiled[params]
            return self._submit(params)

    def _submit(self, params: StructuredOutputsParams) -> Future[CompiledForm]:
        if self._pools is None:
            self._pools = (
                ThreadPoolExecutor(1, "octavo-grammar-texts"),
                ThreadPoolExecutor(_NUM_THREADS, "octavo-grammars", initializer=_lower_priority),
            )
        texts, grammars = self._pools
        # what holds Python's lock may not run at a low priority: the steps would wait for it
        text = texts.submit(self._prepare, params)
        return grammars.submit(lambda: self._compile(params, *text.result()))

    def close(self) -> None:
        """End the threads. Idempotent."""
        for pool in self._pools or ():
            pool.shutdown(wait=False, cancel_futures=True)

    def _prepare(self, params: StructuredOutputsParams) -> tuple[Vocabulary, str]:
        """Return the vocabulary, which is read when the first form needs it, and the grammar's text."""
        from llguidance import LLTokenizer

        if self._vocabulary is None:
            if not self._end_token_ids:
                raise InvalidRequest(
                    "structured_outputs need a model that has an end-of-sequence token", field="structured_outputs"
                )
            try:
                ranked = ranked_beside(self._tokenizer)
                file = self._tokenizer / "tokenizer.json" if self._tokenizer.is_dir() else self._tokenizer
                text = json.dumps(read_ranked(ranked)[0]) if ranked else file.read_text(encoding="utf-8")
                tokenizer = LLTokenizer(text, n_vocab=self._vocab_size, eos_token=self._end_token_ids)
            except (OSError, ValueError) as error:
                raise InvalidRequest(
                    f"structured_outputs need a tokenizer.json of the model's vocabulary: {error}",
                    field="structured_outputs",
                ) from error
            self._vocabulary = Vocabulary(tokenizer, self._end_token_ids)
        grammar = "" if params.form is None else grammar_of(params)
        plain = _ESCAPE.sub(lambda found: chr(int(found[1], 16)), grammar).replace("\\", "")
        # what these put together may spell a special token that their text does not
        is_composed = params.form in ("regex", "grammar", "structural_tag") or '"pattern"' in grammar
        has_special = is_composed or self._vocabulary.has_special_in(plain)
        return self._vocabulary, without_forcing(grammar) if has_special else grammar

    def _compile(self, params: StructuredOutputsParams, vocabulary: Vocabulary, text: str) -> CompiledForm:
        from llguidance import LLMatcher

        if params.form is None:
            return CompiledForm(params, vocabulary, None)
        matcher = LLMatcher(vocabulary.tokenizer, text, log_level=0, limits=parser_limits())
        if not matcher.is_error():
            matcher.deep_copy().compute_bitmask()  # the first one builds tables that later ones share
        if matcher.is_error():
            raise InvalidRequest(
                f"{params.form} cannot be used: {matcher.get_error():.400}",
                field="structured_outputs",
                code="invalid_grammar",
            )
        return CompiledForm(params, vocabulary, matcher)


def _lower_priority() -> None:
    if hasattr(os, "sched_getaffinity"):  # on Linux a thread has a priority of its own
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
