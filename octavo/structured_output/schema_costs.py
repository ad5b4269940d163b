"""What JSON schemas cost that llguidance does not limit: the stack of references, and the time of intersections."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator
from decimal import Decimal
from typing import Any, Final, NamedTuple, TypeVar
from urllib.parse import unquote

Node = TypeVar("Node")
Value = TypeVar("Value")

_DEPTHS: Final = 6
_MOST: Final = 1 << 60
_BELOW: Final = frozenset(
    {"properties", "patternProperties", "additionalProperties", "items", "prefixItems", "$defs", "definitions"}
)
_AT_ONCE: Final = frozenset({"allOf", "$ref"})


class Cost(NamedTuple):
    """Of a part of a schema with all that it refers to, too high rather than too low.

    depth: objects inside each other. The others are what one value has to satisfy at once: `num_patterns`, with
    formats, and `multiples`, the products of its `multipleOf`, both by how deep the value lies below this part, the
    last entry for all that lie deeper; and the properties of one object.
    """

    depth: int = 0
    num_patterns: tuple[int, ...] = (0,) * _DEPTHS
    multiples: tuple[int, ...] = (1,) * _DEPTHS
    num_properties: int = 0

    def below(self) -> Cost:
        """Return the cost that values one level deeper have."""
        *upper, before, last = self.num_patterns
        *upper_multiples, before_multiple, last_multiple = self.multiples
        return self._replace(
            num_patterns=(0, *upper, max(before, last)),
            multiples=(1, *upper_multiples, max(before_multiple, last_multiple)),
            num_properties=0,
        )


def parts_of(schema: Any) -> Iterator[dict[str, Any]]:
    """Yield the objects of a schema, at all depths."""
    pending = [schema]
    while pending:
        each = pending.pop()
        if isinstance(each, dict):
            yield each
            pending += each.values()
        elif isinstance(each, list):
            pending += each


def cost_of(schema: Any, named: list[dict[str, Any]]) -> Cost:
    """Return the highest costs of the parts of a schema. named: those to which references may lead by name."""
    bases = [schema, *named]

    def inner(part: Any) -> list[Any]:
        inside = [*part.values(), *_referred(part.get("$ref"), bases)] if isinstance(part, dict) else part
        return [each for each in inside if isinstance(each, dict | list)]

    def combine(part: Any, known: Callable[[Any], Cost]) -> Cost:
        nodes = inner(part)
        if not isinstance(part, dict):
            return highest(map(known, nodes)) if nodes else Cost()
        every, names = part.get("allOf"), part.get("properties")
        own = Cost(
            num_patterns=_at_top(sum(isinstance(part.get(key), str) for key in ("pattern", "format")), 0),
            multiples=_at_top(multiple_of(part), 1),
            num_properties=len(names) if isinstance(names, dict) else 0,
        )
        if not nodes:
            return own._replace(depth=1)
        at_once = [own, *map(known, every if isinstance(every, list) else ())]
        at_once += map(known, _referred(part.get("$ref"), bases))
        at_once.append(highest(known(each).below() for key, each in part.items() if key in _BELOW))
        at_once.append(highest(known(each) for key, each in part.items() if key not in _BELOW | _AT_ONCE))
        return Cost(
            depth=1 + max(known(each).depth for each in nodes),
            num_patterns=tuple(map(sum, zip(*(each.num_patterns for each in at_once), strict=True))),
            multiples=tuple(
                min(_MOST, math.prod(each)) for each in zip(*(one.multiples for one in at_once), strict=True)
            ),
            num_properties=sum(each.num_properties for each in at_once),
        )

    return highest(folded(schema, inner, combine, Cost())) if isinstance(schema, dict | list) else Cost()


def highest(costs: Iterable[Cost]) -> Cost:
    """Return the highest of each cost."""
    depths, patterns, multiples, properties = zip(Cost(), *costs, strict=True)
    return Cost(
        max(depths),
        tuple(map(max, zip(*patterns, strict=True))),
        tuple(map(max, zip(*multiples, strict=True))),
        max(properties),
    )


def _at_top(value: int, elsewhere: int) -> tuple[int, ...]:
    return (value, *(elsewhere,) * (_DEPTHS - 1))


def multiple_of(part: dict[str, Any]) -> int:
    """Return `multipleOf` of a part as a whole number without the zeros at its end: 25 for 0.25; 1 without one."""
    value = part.get("multipleOf")
    if isinstance(value, bool) or not isinstance(value, int | float):
        return 1
    digits = Decimal(repr(value)).as_tuple().digits
    return int("".join(map(str, digits)).rstrip("0")[:18] or 1)


def folded(
    root: Node,
    inner: Callable[[Node], Iterable[Node]],
    combine: Callable[[Node, Callable[[Node], Value]], Value],
    of_cycle: Value,
) -> Collection[Value]:
    """Return `combine` of all nodes below a root and of the root, each of which is given the values of what is inside.

    Nodes are told apart by identity. A node that is inside of itself counts as `of_cycle` there.
    """
    values: dict[int, Value] = {}

    def known(node: Node) -> Value:
        return values.get(id(node), of_cycle)

    pending = [(root, False)]
    while pending:
        node, is_entered = pending.pop()
        if is_entered:
            values[id(node)] = combine(node, known)
        elif id(node) not in values:
            values[id(node)] = of_cycle
            pending.append((node, True))
            pending += [(each, False) for each in inner(node)]
    return values.values()


def _referred(reference: Any, bases: list[Any]) -> list[Any]:
    """Return the parts that a reference may lead to: those of a pointer in any base, else all bases."""
    if not isinstance(reference, str):
        return []
    pointer = unquote(reference.partition("#")[2])
    if not pointer.startswith("/"):
        return bases
    found = [_at(base, pointer.split("/")[1:]) for base in bases]
    return [each for each in found if each is not None]


def _at(value: Any, keys: list[str]) -> Any:
    for key in keys:
        key = key.replace("~1", "/").replace("~0", "~")
        if isinstance(value, list) and key.isdecimal() and int(key) < len(value):
            value = value[int(key)]
        elif isinstance(value, dict) and key in value:
            value = value[key]
        else:
            return None
    return value
