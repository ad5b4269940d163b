"""What JSON schemas cost that llguidance does not limit: the stack of references, and the time of intersections."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
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
_MOST_NAMES: Final = 32
"""Properties that are told apart where parts are satisfied at once; their number times that of parts is time."""
_AT_ONCE: Final = frozenset({"allOf", "$ref"})


class Burden(NamedTuple):
    """What one value has to satisfy at once, by how deep it lies below a part; the last is that of all deeper ones.

    num_patterns: with formats. multiples: products of `multipleOf`.
    """

    num_patterns: tuple[int, ...] = (0,) * _DEPTHS
    multiples: tuple[int, ...] = (1,) * _DEPTHS

    def below(self) -> Burden:
        """Return what values have one level deeper."""
        *upper, before, last = self.num_patterns
        *upper_multiples, before_multiple, last_multiple = self.multiples
        return Burden((0, *upper, max(before, last)), (1, *upper_multiples, max(before_multiple, last_multiple)))


class Cost(NamedTuple):
    """What a part of a schema costs with all that it refers to, too high rather than too low.

    depth: objects inside each other. of_named: what the part asks of the values of its properties by name, and
    burden: of all others, and of the value itself. num_properties: of one object.
    """

    depth: int = 0
    burden: Burden = Burden()
    of_named: Mapping[str, Burden] = {}
    num_properties: int = 0

    @property
    def highest(self) -> Burden:
        """The highest burdens of any value."""
        return _highest([self.burden, *self.of_named.values()])


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
        own = Burden(
            _at_top(sum(isinstance(part.get(key), str) for key in ("pattern", "format")), 0),
            _at_top(multiple_of(part), 1),
        )
        if not nodes:
            return Cost(1, own, num_properties=len(names) if isinstance(names, dict) else 0)
        by_name = names if isinstance(names, dict) else {}
        of_named = {
            name: known(each).highest.below() for name, each in by_name.items() if isinstance(each, dict | list)
        }
        below = [known(each).highest.below() for key, each in part.items() if key in _BELOW and key != "properties"]
        others = [known(each) for key, each in part.items() if key not in _BELOW | _AT_ONCE]
        at_once = [
            Cost(
                0, _together([own, _highest(below)]), {name: _together([own, each]) for name, each in of_named.items()}
            ),
            *map(known, every if isinstance(every, list) else ()),
            *map(known, _referred(part.get("$ref"), bases)),
            Cost(0, *_joined(others, _highest)),
        ]
        return Cost(
            1 + max(known(each).depth for each in nodes),
            *_joined(at_once, _together),
            len(by_name) + sum(each.num_properties for each in at_once[1:-1]) + highest(others).num_properties,
        )

    return highest(folded(schema, inner, combine, Cost())) if isinstance(schema, dict | list) else Cost()


def highest(costs: Iterable[Cost]) -> Cost:
    """Return the highest of each cost."""
    found = [Cost(), *costs]
    burden = _highest([each.highest for each in found])
    return Cost(max(each.depth for each in found), burden, {}, max(each.num_properties for each in found))


def _joined(costs: Sequence[Cost], join: Callable[[Sequence[Burden]], Burden]) -> tuple[Burden, Mapping[str, Burden]]:
    """Return the joined burdens of values with no name of their own, and of those of properties by name."""
    names = {name for each in costs for name in each.of_named}
    if len(names) > _MOST_NAMES:
        return join([each.highest for each in costs]), {}
    of_named = {name: join([each.of_named.get(name, each.burden) for each in costs]) for name in names}
    return join([each.burden for each in costs]), of_named


def _together(burdens: Sequence[Burden]) -> Burden:
    """Return the burden of what has to satisfy all."""
    patterns, multiples = zip(Burden(), *burdens, strict=True)
    products = (min(_MOST, math.prod(each)) for each in zip(*multiples, strict=True))
    return Burden(tuple(map(sum, zip(*patterns, strict=True))), tuple(products))


def _highest(burdens: Sequence[Burden]) -> Burden:
    patterns, multiples = zip(Burden(), *burdens, strict=True)
    return Burden(tuple(map(max, zip(*patterns, strict=True))), tuple(map(max, zip(*multiples, strict=True))))


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
        if isinstance(value, list) and key.isdecimal() and len(key) < 10 and int(key) < len(value):
            value = value[int(key)]
        elif isinstance(value, dict) and key in value:
            value = value[key]
        else:
            return None
    return value
