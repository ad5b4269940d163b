"""JSONSchemaBench under octavo's masks: how many schemas are accepted, whether texts are valid, µs of masks.

`python -m benchmarks.structured_output CORPUS --tokenizer tokenizer.json` reads every `*.json` below CORPUS as a schema
(`--every K`: one of K), compiles those that are not refused, and draws a text of each under the masks without a model:
a random token, at times one of those that close a part. It ends with an end token or at `--max-tokens`. The others are
checked by `jsonschema`, formats included. `--beside xgrammar` does the same with xgrammar on the same schemas.

The corpus: `git clone --depth 1 https://github.com/guidance-ai/jsonschemabench`, then CORPUS is its `data`. jsonschema
(and xgrammar): `pip install --target DIRECTORY jsonschema`, and DIRECTORY in PYTHONPATH.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from importlib import import_module
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer

from octavo.cli.report import report
from octavo.core.structured_outputs import StructuredOutputsParams
from octavo.errors import InvalidRequest
from octavo.structured_output.grammars import check_grammar
from octavo.structured_output.matchers import Matchers

_CLOSING: Final = ('"', "}", "]", "0", "1", '"}', '"]', '":', ",", '","', "true", "null", "e", "a", "-", ":", ".", "Z")
_MOST_SHOWN: Final = 20


class Text(Protocol):
    """A text that is being drawn."""

    def mask(self) -> NDArray[np.uint32]: ...

    def take(self, token_id: int) -> None: ...


class Engine(Protocol):
    """Reads grammars. `open` raises InvalidRequest for a schema that is refused."""

    def open(self, schema: str) -> Text: ...


class OctavoText:
    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def mask(self) -> NDArray[np.uint32]:
        mask = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint32)
        if self._matcher.is_error():
            raise InvalidRequest(f"takes too much work: {self._matcher.get_error()}", field="schema")
        return mask

    def take(self, token_id: int) -> None:
        self._matcher.consume_token(token_id)


class Octavo:
    def __init__(self, tokenizer: Path, vocab_size: int, end_token_id: int) -> None:
        self._matchers = Matchers(tokenizer, vocab_size, [end_token_id])

    def open(self, schema: str) -> Text:
        params = StructuredOutputsParams(json=schema)
        check_grammar(params)
        compiled = self._matchers.compile(params).result().matcher
        assert compiled is not None
        matcher = compiled.deep_copy()
        return OctavoText(matcher)


class XgrammarText:
    def __init__(self, xgrammar: Any, compiled: Any, vocab_size: int) -> None:
        self._matcher = xgrammar.GrammarMatcher(compiled)
        self._mask = xgrammar.allocate_token_bitmask(1, vocab_size)

    def mask(self) -> NDArray[np.uint32]:
        self._matcher.fill_next_token_bitmask(self._mask)
        words: NDArray[np.uint32] = self._mask[0].numpy().view(np.uint32)
        return words

    def take(self, token_id: int) -> None:
        if not self._matcher.accept_token(token_id):
            raise InvalidRequest("a token of the mask is not taken", field="schema")


class Xgrammar:
    def __init__(self, tokenizer: Path, vocab_size: int, end_token_id: int) -> None:
        self._xgrammar: Any = import_module("xgrammar")
        vocabulary = Tokenizer.from_file(str(tokenizer)).get_vocab()
        names = [""] * vocab_size
        for name, token_id in vocabulary.items():
            names[token_id] = name
        info = self._xgrammar.TokenizerInfo(
            names, self._xgrammar.VocabType.BYTE_LEVEL, vocab_size=vocab_size, stop_token_ids=[end_token_id]
        )
        self._compiler = self._xgrammar.GrammarCompiler(info, max_threads=1)
        self._vocab_size = vocab_size

    def open(self, schema: str) -> Text:
        try:
            compiled = self._compiler.compile_json_schema(schema)
        except Exception as error:  # of whatever type it raises
            raise InvalidRequest(str(error), field="schema") from None
        return XgrammarText(self._xgrammar, compiled, self._vocab_size)


ENGINES: Final[dict[str, Callable[[Path, int, int], Engine]]] = {"octavo": Octavo, "xgrammar": Xgrammar}


@dataclass
class Figures:
    """What is found of an engine."""

    outcomes: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    invalid: list[str] = field(default_factory=list)
    mask_us: list[float] = field(default_factory=list)
    compile_ms: list[float] = field(default_factory=list)
    slowest: dict[str, float] = field(default_factory=dict)

    def result(self) -> dict[str, Any]:
        total = sum(self.outcomes.values())
        accepted = total - self.outcomes["refused"]
        return {
            "schemas": total,
            "accepted_share": accepted / max(total, 1),
            "outcomes": dict(self.outcomes),
            "refused_because": dict(self.refused.most_common(_MOST_SHOWN)),
            "invalid": self.invalid[:_MOST_SHOWN],
            "slowest_mask_us": dict(sorted(self.slowest.items(), key=lambda item: -item[1])[:_MOST_SHOWN]),
            "mask_us": _spread(self.mask_us),
            "compile_ms": _spread(self.compile_ms),
        }


class Draws:
    """Draws texts without a model."""

    def __init__(self, tokenizer: Path, end_token_id: int, max_tokens: int) -> None:
        self._tokenizer = Tokenizer.from_file(str(tokenizer))
        self._end, self._max_tokens = end_token_id, max_tokens
        encoded = (self._tokenizer.encode(text, add_special_tokens=False).ids for text in _CLOSING)
        self._closing = [end_token_id, *(ids[0] for ids in encoded if len(ids) == 1)]

    def text(self, text: Text, source: random.Random, mask_us: list[float]) -> str | None:
        """Return a text that the masks admit; None for one that is cut. Adds the µs of each mask to `mask_us`."""
        drawn: list[int] = []
        while len(drawn) < self._max_tokens:
            began = time.perf_counter()
            try:
                mask = text.mask()
            finally:
                mask_us.append((time.perf_counter() - began) * 1e6)
            token_id = self._choose(mask, source, len(drawn))
            if token_id == self._end:
                return self._tokenizer.decode(drawn, skip_special_tokens=False)
            drawn.append(token_id)
            text.take(token_id)
        return None

    def _choose(self, mask: NDArray[np.uint32], source: random.Random, num_drawn: int) -> int:
        closing = [each for each in self._closing if mask[each // 32] >> (each % 32) & 1]
        if closing and (num_drawn > self._max_tokens // 2 or source.random() < 0.5):
            # the end and the ends of parts come before others once the text is long
            return closing[0] if num_drawn > self._max_tokens // 2 and source.random() < 0.5 else source.choice(closing)
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        if not len(allowed):
            raise InvalidRequest("no token is admitted", field="schema")
        return int(allowed[source.randrange(len(allowed))])


def measure(engine: Engine, draws: Draws, schema: Path, seed: str, figures: Figures, limit_s: int) -> None:
    """Compile one schema, draw a text of it and check it."""
    text = schema.read_text(encoding="utf-8")
    began = time.perf_counter()
    try:
        with _at_most(limit_s):
            opened = engine.open(text)
            figures.compile_ms.append((time.perf_counter() - began) * 1e3)
    except (InvalidRequest, TimeoutError) as error:
        figures.outcomes["refused"] += 1
        figures.refused[_reason(str(error))] += 1
        return
    mask_us: list[float] = []
    try:
        with _at_most(limit_s):
            drawn = draws.text(opened, random.Random(seed), mask_us)
            if drawn is None:
                figures.outcomes["cut"] += 1
                return
            outcome, why = _checked(drawn, json.loads(text, parse_float=_number))
    except (InvalidRequest, TimeoutError) as error:
        outcome, why = "stopped", str(error)
    finally:
        figures.mask_us += mask_us
        figures.slowest[f"{schema.parent.name}/{schema.name}"] = max(mask_us, default=0.0)
    figures.outcomes[outcome] += 1
    if outcome in ("invalid", "stopped"):
        print(f"{outcome}: {schema}: {why:.300}", file=sys.stderr)
    if outcome == "invalid":
        figures.invalid.append(f"{schema.parent.name}/{schema.name}: {why:.200}")


def _checked(drawn: str, schema: Any) -> tuple[str, str]:
    """Return what jsonschema says of a text: valid, invalid, or unchecked where it cannot read the schema.

    Both have decimal numbers: as floats, 5.1 is no multiple of 0.01.
    """
    jsonschema = import_module("jsonschema")
    try:
        value = json.loads(drawn, parse_float=_number)
    except (ValueError, RecursionError) as error:
        return "invalid", f"{error}: {drawn!r:.300}"
    checker = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    try:
        errors = checker(schema, format_checker=checker.FORMAT_CHECKER).iter_errors(value)
        # RFC 3339 has the year 0, Python's dates do not
        found = next((each for each in errors if each.validator != "format" or "0000-" not in each.instance), None)
    except TimeoutError:
        return "unchecked", "takes too long"
    except Exception as error:  # of the schema, of whatever type
        return "unchecked", str(error)
    return ("valid", "") if found is None else ("invalid", f"{found.message:.150} in {drawn!r:.150}")


def _number(text: str) -> Decimal | float:
    """Return a number of JSON; infinity for one whose exponent no decimal has."""
    try:
        return Decimal(text)
    except InvalidOperation:
        return float(text)


def _reason(message: str) -> str:
    """Return a message without what differs from schema to schema."""
    for start in ("Unimplemented keys:", "Unimplemented format:"):
        if start in message:
            return f"{start}{message.split(start)[1]:.60}"
    return message.replace("json cannot be used: ", "")[:60]


def _spread(values: list[float]) -> dict[str, float]:
    if not values:
        return {}
    p50, p99 = np.percentile(values, [50, 99])
    return {"mean": float(np.mean(values)), "p50": float(p50), "p99": float(p99), "max": max(values)}


@contextmanager
def _at_most(seconds: int) -> Iterator[None]:
    """Raise TimeoutError in the body when it takes longer, at the next time it runs Python."""

    def end(*_: object) -> None:
        raise TimeoutError("takes too long")

    signal.signal(signal.SIGALRM, end)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("--tokenizer", type=Path, required=True, help="a tokenizer.json")
    parser.add_argument("--vocab-size", type=int, help="of the model, when it is larger than the tokenizer's")
    parser.add_argument("--end-token", default="<|endoftext|>")
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--max-tokens", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit-s", type=int, default=30, help="for compiling a schema, and for its text")
    parser.add_argument("--beside", nargs="*", choices=[name for name in ENGINES if name != "octavo"], default=[])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer = Tokenizer.from_file(str(arguments.tokenizer))
    end = tokenizer.token_to_id(arguments.end_token)
    vocab_size = arguments.vocab_size or tokenizer.get_vocab_size()
    engines = {name: ENGINES[name](arguments.tokenizer, vocab_size, end) for name in ("octavo", *arguments.beside)}
    draws = Draws(arguments.tokenizer, end, arguments.max_tokens)
    figures = {name: Figures() for name in engines}
    for engine in engines.values():
        engine.open('{"type": "null"}')  # reads the vocabulary
    for number, schema in enumerate(sorted(arguments.corpus.rglob("*.json"))[:: arguments.every]):
        for name, engine in engines.items():
            measure(engine, draws, schema, f"{arguments.seed}/{number}", figures[name], arguments.limit_s)
    workload = {"arguments": {name: str(value) for name, value in vars(arguments).items()}, "vocab_size": vocab_size}
    report("structured_output", workload, {name: each.result() for name, each in figures.items()})


if __name__ == "__main__":
    main()
