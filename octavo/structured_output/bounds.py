"""What a grammar may cost: bounds that are checked before llguidance reads it.

llguidance limits neither the stack that references take, whose overflow ends the process, nor the time of
intersections, of residues (`multipleOf`) and of many parts. Within these bounds grammars took less than 2 s of a core.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from octavo.structured_output.schema_costs import Cost, cost_of, folded, highest, multiple_of, parts_of

MAX_GBNF_CHARS: Final = 65_536
MAX_GBNF_STEPS: Final = 2_000_000
"""The conversion looks at all symbols again for each rule of a chain."""

MAX_TAGS: Final = 1_024
MAX_SYMBOLS: Final = 20_000
"""Names, texts and operators of a grammar: those of 10,000 alternatives."""

MAX_RECURSION: Final = 1_000
"""Rules, parentheses and schemas inside each other, through references: 8 MiB of stack hold about 2,000."""

MAX_PROPERTIES: Final = 2_048
MAX_TOTAL_PROPERTIES: Final = 8_192
MAX_PATTERN_PROPERTIES: Final = 100
MAX_NAME_STEPS: Final = 50_000
MAX_INTERSECTED: Final = 8
"""Patterns that a text has to match at once: each may double the time."""

MAX_MULTIPLE: Final = 100_000
"""Product of the numbers that a value has to be a multiple of at once, and sum of all: each residue is a state."""

_LARK: Final = re.compile(r"(?m)^[^\S\n]*(?:%llguidance\b|start\s*:)")
_SYMBOL: Final = re.compile(
    r"(?P<skipped>(?://|\#)[^\n]*|->[^\S\n]*[\w-]+)"
    r'|(?P<text>"(?:[^"\\\n]|\\.)*"?|/(?:[^/\\\n]|\\.)+/?)'
    r"|(?P<schema>%json\s*)|(?P<rule>(?m:^)[^\S\n]*[?!]?[a-zA-Z_][\w-]*)|(?P<name>[a-zA-Z_][\w-]*)|(?P<operator>[()|&~?*+])"
)

Excess = tuple[str, int, int]
"""What exceeds its bound, how much there is, and the bound."""


def is_lark(grammar: str) -> bool:
    """Return whether a grammar is in Lark's notation; else it is GBNF."""
    return _LARK.search(grammar) is not None


def excess_of_lark(grammar: str) -> Excess | None:
    """Return what a grammar has too much of; None where it is within the bounds. Raises ValueError for broken JSON."""
    rules: dict[str, list[tuple[str, int]]] = {"start": []}
    inner: list[tuple[str, int]] = []
    schemas: list[Any] = []
    num_intersected = depth = 0
    symbols = list(_symbols(grammar, schemas))
    for kind, symbol in symbols[: MAX_SYMBOLS + 1]:
        if kind == "rule":
            inner, depth = rules.setdefault(symbol.lstrip(" \t\r?!"), []), 0
        elif kind == "name":
            inner.append((symbol, depth + 1))
        elif kind == "operator":
            depth += (symbol == "(") - (symbol == ")")
            num_intersected += symbol == "&"

    def height(rule: list[tuple[str, int]], known: Callable[[list[tuple[str, int]]], int]) -> int:
        return max((extra + known(rules[name]) for name, extra in rule if name in rules), default=0)

    heights = folded(rules["start"], lambda rule: [rules[name] for name, _ in rule if name in rules], height, 0)
    return _first_excess(
        ("symbols", len(symbols), MAX_SYMBOLS),
        ("operators &", num_intersected, MAX_INTERSECTED - 1),
        ("rules and parentheses inside each other", max(heights), MAX_RECURSION),
    ) or excess_of_schemas(schemas)


def excess_of_gbnf(grammar: str) -> Excess | None:
    """Return what makes the conversion of a grammar to Lark's notation too slow; None where it is within the bounds."""
    if len(grammar) > MAX_GBNF_CHARS:
        return "characters", len(grammar), MAX_GBNF_CHARS
    num_symbols = sum(1 for _ in _symbols(grammar, []))
    return _first_excess(
        ("symbols", num_symbols, MAX_SYMBOLS),
        ("symbols times rules", num_symbols * grammar.count("::="), MAX_GBNF_STEPS),
    )


def excess_of_tags(tags: Sequence[Mapping[str, Any]]) -> Excess | None:
    """Return what the regions of a structural tag have too much of; None where they are within the bounds."""
    excess = _first_excess(("structures", len(tags), MAX_TAGS))
    return excess or excess_of_schemas(each["grammar"] for each in tags)


def _symbols(grammar: str, schemas: list[Any]) -> Iterator[tuple[str, str]]:
    """Yield kinds and texts of the symbols of a grammar, and append its JSON schemas."""
    position, decoder = 0, json.JSONDecoder()
    while found := _SYMBOL.search(grammar, position):
        position, kind = found.end(), found.lastgroup or ""
        if kind == "schema":
            schema, position = decoder.raw_decode(grammar, position)
            schemas.append(schema)
        if kind != "skipped":
            yield kind, found[0]


def excess_of_schemas(schemas: Iterable[Any]) -> Excess | None:
    """Return what the JSON schemas of one grammar have too much of; None where they are within the bounds."""
    parts: list[dict[str, Any]] = []
    costs: list[Cost] = []
    for schema in schemas:
        inside = list(parts_of(schema))
        named = [each for each in inside if not {"$id", "$anchor"}.isdisjoint(each)]
        num_steps = len(named) * sum("$ref" in each for each in inside)
        if num_steps > MAX_NAME_STEPS:
            return "pairs of a $ref and a part with $id or $anchor", num_steps, MAX_NAME_STEPS
        if any("$ref" in each or "allOf" in each for each in inside):
            costs.append(cost_of(schema, named))
        parts += inside
    most = highest(costs)
    sizes, pattern_sizes = _sizes(parts, "properties"), _sizes(parts, "patternProperties")
    return _first_excess(
        ("schemas inside each other", most.depth, MAX_RECURSION),
        ("properties in one object", max(most.num_properties, *sizes), MAX_PROPERTIES),
        ("properties", sum(sizes), MAX_TOTAL_PROPERTIES),
        ("patternProperties in one object", max(pattern_sizes), MAX_PATTERN_PROPERTIES),
        ("patterns and formats for one value", max(most.burden.num_patterns), MAX_INTERSECTED),
        ("residues of the multipleOf for one value", max(most.burden.multiples), MAX_MULTIPLE),
        ("residues of all multipleOf", sum({multiple_of(each) for each in parts}), MAX_MULTIPLE),
    )


def _sizes(parts: list[dict[str, Any]], key: str) -> list[int]:
    return [0, *(len(each[key]) for each in parts if isinstance(each.get(key), dict))]


def _first_excess(*counts: Excess) -> Excess | None:
    return next((each for each in counts if each[1] > each[2]), None)
