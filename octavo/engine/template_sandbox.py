"""Where chat templates run: jinja2's immutable sandbox, with a budget for what one rendering may cost.

Templates are programs from the internet. jinja2's sandbox keeps them from reaching the machine; the budget keeps them
from occupying it. A step is an iteration, a call, a filter or an operation; 64 characters or entries that one of them
works on count as a further step.
"""

from __future__ import annotations

import functools
import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any, Final, NamedTuple

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

_SIZE_OF_STEP: Final = 64
_STEPS_BETWEEN_CLOCKS: Final = 64
_MOST_BITS: Final = 4096
_MOST_WIDTH: Final = 1000
_REFUSED_METHODS: Final = frozenset({"translate", "maketrans", "to_bytes", "from_bytes", "expandtabs"})
_REMOVED_FILTERS: Final = ("batch", "pprint", "random", "slice", "striptags", "urlize", "wordwrap", "xmlattr")
_NUMBER: Final = re.compile(r"\d+")
_NESTED_FORMAT: Final = re.compile(r"%[-+ #0]*(?:\*|\d*\.\*)|\{[^{}]*:[^{}]*\{")


class RenderLimits(NamedTuple):
    """What one rendering may cost. value_size: characters or entries of any one value, the rendered text included."""

    steps: int = 1_000_000
    seconds: float = 5.0
    value_size: int = 4 << 20


class RenderLimitReached(Exception):
    """A rendering has cost more than it may; the message says of what."""


class Budget:
    """What is left of the limits of one rendering."""

    def __init__(self, limits: RenderLimits) -> None:
        self.limits = limits
        self._steps = limits.steps
        self._next_look = limits.steps - _STEPS_BETWEEN_CLOCKS
        self._end = time.perf_counter() + limits.seconds

    def spend(self, steps: int = 1) -> bool:
        """Take steps off, and return True. Raises RenderLimitReached."""
        self._steps -= steps
        if self._steps < self._next_look:
            self._next_look = self._steps - _STEPS_BETWEEN_CLOCKS
            if self._steps < 0:
                raise RenderLimitReached(f"it takes more than {self.limits.steps:,} steps")
            if time.perf_counter() > self._end:
                raise RenderLimitReached(f"it takes longer than {self.limits.seconds:g} s")
        return True

    def take(self, size: int) -> None:
        """Pay for a value with this many characters or entries, before it is made where that can be known."""
        if size > self.limits.value_size:
            raise RenderLimitReached(f"it makes a value of more than {self.limits.value_size:,} characters or entries")
        self.spend(1 + size // _SIZE_OF_STEP)


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """A jinja2 environment as checkpoints' templates expect it, which charges a budget for all that they do."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, loopcontrols],
            finalize=self._written,
            optimized=False,
        )
        self._local = threading.local()
        for name in _REMOVED_FILTERS:
            self.filters.pop(name, None)
        self.filters["tojson"] = _tojson
        self.filters = {name: self._metered(name, function) for name, function in self.filters.items()}
        del self.globals["lipsum"]
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda form: datetime.now().strftime(str(form)[:_MOST_WIDTH])

    @property
    def budget(self) -> Budget:
        """Return the budget of the rendering on this thread."""
        found: Budget | None = getattr(self._local, "budget", None)
        return self.begin(RenderLimits()) if found is None else found

    def begin(self, limits: RenderLimits) -> Budget:
        """Start a rendering on this thread with these limits."""
        self._local.budget = budget = Budget(limits)
        return budget

    def compiled(self, source: str) -> jinja2.Template:
        """Return the template with its loops, macros and concatenations metered. Raises jinja2.TemplateSyntaxError."""
        tree = _Meter().visit(self.parse(source))
        return self.from_string(tree)

    def spend(self, steps: int) -> bool:
        """What metered loops and macros call in each iteration."""
        return self.budget.spend(steps)

    def concatenated(self, *values: Any) -> str:
        """Compute `a ~ b`."""
        texts = [self._text(value) for value in values]
        self.budget.take(sum(map(len, texts)))
        return "".join(texts)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        budget = self.budget
        if operator == "+":
            budget.take(_size(left) + _size(right))
        elif operator == "*" and isinstance(left, int) and isinstance(right, int):
            _check_bits(left.bit_length() + right.bit_length())
        elif operator == "*":
            count = left if isinstance(left, int) else right
            budget.take((_size(left) + _size(right)) * max(count, 0) if isinstance(count, int) else 0)
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            _check_bits(left.bit_length() * max(right, 0))
        elif operator == "%" and isinstance(left, str):
            _check_format(left)
            budget.take(len(left) + sum(len(self._text(value)) for value in _listed(right)))
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        if __obj == __self.spend:
            return __self.budget.spend(*args)
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str | bytes | int) and hasattr(__obj, "__name__"):
            args = __self._checked_arguments(owner, __obj.__name__, args)
        __self.budget.spend(1 + sum(map(_size, args)) // _SIZE_OF_STEP)
        result = super().call(__context, __obj, *args, **kwargs)
        __self.budget.take(_size(result))
        return result

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        formatted = super().wrap_str_format(value)
        if formatted is not None:
            _check_format(value.__self__)
        return formatted

    def _checked_arguments(self, owner: Any, name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments of a method of text, bytes or numbers; those whose result would be too large are refused."""
        if name in _REFUSED_METHODS:
            raise RenderLimitReached(f"it calls {name}, which templates may not")
        if name in ("ljust", "rjust", "center", "zfill"):
            self.budget.take(max((arg for arg in args if isinstance(arg, int)), default=0))
        elif name == "join" and args:
            args = ([*self._counted(args[0])], *args[1:])
            self.budget.take(sum(map(_size, args[0])) + len(args[0]) * len(owner))
        elif name == "replace":
            self._check_replacement(owner, *args)
        return args

    def _check_replacement(self, text: Any, old: Any = "", new: Any = "", *others: Any) -> None:
        if isinstance(text, str) and isinstance(old, str) and isinstance(new, str):
            self.budget.take(len(text) + text.count(old) * len(new))

    def _metered(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """A filter that pays for what it is given and for what it makes."""

        @functools.wraps(function)  # also copies the mark of filters that want the environment or the context
        def metered(*args: Any, **kwargs: Any) -> Any:
            self._check_filter(name, args, kwargs)
            self.budget.spend(1 + sum(map(_size, args)) // _SIZE_OF_STEP)
            args = tuple(self._counted(arg) if isinstance(arg, Iterator) else arg for arg in args)
            result = function(*args, **kwargs)
            if isinstance(result, Iterator):
                return self._counted(result)
            self.budget.take(_size(result))
            return result

        return metered

    def _check_filter(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        values = [*args, *kwargs.values()]
        if name in ("center", "indent", "tojson", "round", "truncate"):
            for value in values[1:]:
                if _size(value) > _MOST_WIDTH or (isinstance(value, int) and value > (1 << 20)):
                    raise RenderLimitReached(f"it calls the filter {name} with a width that is too large")
        if name == "indent" and isinstance(args[0], str):
            widths = [value if isinstance(value, int) else _size(value) for value in values[1:]]
            self.budget.take((args[0].count("\n") + 1) * max(widths, default=4))
        elif name == "center":
            self.budget.take(max((value for value in values[1:] if isinstance(value, int)), default=0))
        elif name == "tojson":
            indent = max((value for value in values[1:] if isinstance(value, int)), default=0)
            self.budget.take(self._written_size(args[0], indent))
        elif name == "replace":
            self._check_replacement(*values[-3:] if len(values) < 5 else values[-4:-1])
        elif name == "format" and isinstance(args[0], str):
            _check_format(args[0])
        elif name in ("string", "join", "escape", "e", "forceescape", "upper", "lower", "trim", "title", "capitalize"):
            for value in values:
                if not isinstance(value, str | Iterator):
                    self.budget.take(self._written_size(value))
            if name == "join":
                texts = [value for value in values if isinstance(value, str)]
                lists = [value for value in values if isinstance(value, list | tuple | dict)]
                self.budget.take(sum(map(len, texts)) * sum(map(len, lists)))

    def _counted(self, values: Iterable[Any]) -> Iterator[Any]:
        for value in values:
            self.budget.spend()
            yield value

    def _written(self, value: Any) -> Any:
        """What `{{ value }}` writes."""
        if not isinstance(value, str):
            self.budget.take(self._written_size(value))
        else:
            self.budget.take(len(value))
        return value

    def _text(self, value: Any) -> str:
        if isinstance(value, str):
            return value
        self.budget.take(self._written_size(value))
        return str(value)

    def _written_size(self, value: Any, indent: int = 0) -> int:
        """About how many characters a value has when it is written: shared parts of it count each time."""
        size = 0
        pending: list[tuple[Any, int]] = [(value, 1)]
        while pending:
            each, depth = pending.pop()
            self.budget.spend()
            size += _size(each) + 8 + indent * depth
            if size > self.budget.limits.value_size or len(pending) > self.budget.limits.value_size:
                break
            if isinstance(each, Mapping):
                pending += [(key, depth + 1) for key in each]
                pending += [(item, depth + 1) for item in each.values()]
            elif isinstance(each, list | tuple | set):
                pending += [(item, depth + 1) for item in each]
        return size


class _Meter(NodeTransformer):
    """Puts a call into each iteration and each macro, and calls a method in place of `~`."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        if node.test is not None:
            node.test = nodes.And(_spend(1, node.lineno), node.test, lineno=node.lineno)
        return _metered_body(node)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _metered_body(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _metered_body(node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        method = nodes.EnvironmentAttribute("concatenated", lineno=node.lineno)
        return nodes.Call(method, node.nodes, [], None, None, lineno=node.lineno)


class _Generation(Extension):
    """`{% generation %}` marks the assistant's text for training; here its body is just rendered."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _metered_body(node: Any) -> nodes.Node:
    written = sum(len(data.data) for part in node.body for data in part.find_all(nodes.TemplateData))
    steps = 1 + written // _SIZE_OF_STEP
    node.body.insert(0, nodes.ExprStmt(_spend(steps, node.lineno), lineno=node.lineno))
    assert isinstance(node, nodes.Node)
    return node


def _spend(steps: int, line: int) -> nodes.Expr:
    method = nodes.EnvironmentAttribute("spend", lineno=line)
    return nodes.Call(method, [nodes.Const(steps, lineno=line)], [], None, None, lineno=line)


def _size(value: Any) -> int:
    """Return how many characters or entries a value has, 0 for others. Nothing of the template runs for it."""
    return len(value) if isinstance(value, str | bytes | list | tuple | dict | set | range) else 0


def _listed(value: Any) -> Iterable[Any]:
    return value if isinstance(value, tuple) else value.values() if isinstance(value, dict) else (value,)


def _check_bits(count: int) -> None:
    if count > _MOST_BITS:
        raise RenderLimitReached(f"it makes a number of more than {_MOST_BITS:,} bits")


def _check_format(form: str) -> None:
    """Widths in `%` and `str.format` make long texts of short ones."""
    if _NESTED_FORMAT.search(form) or any(int(number[:9]) > _MOST_WIDTH for number in _NUMBER.findall(form)):
        raise RenderLimitReached(f"it formats with a width of more than {_MOST_WIDTH:,}, or with one that it computes")


def _raise_exception(message: Any) -> None:
    raise jinja2.TemplateError(str(message))


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
