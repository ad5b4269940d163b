"""Where chat templates run: jinja2's immutable sandbox, with a budget for what one rendering may cost.

Templates are programs from the internet. jinja2's sandbox keeps them from reaching the machine; the budget keeps them
from occupying it. A step is an iteration, a call, a filter or an operation; 64 characters or entries that one of them
works on count as a further step.
"""

from __future__ import annotations

import functools
import json
import operator
import re
import threading
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Mapping, Sequence, ValuesView
from datetime import datetime
from typing import Any, Final

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.runtime import Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from octavo.engine.text.template_budget import SIZE_OF_STEP, RenderBudget, RenderLimitReached, RenderLimits
from octavo.engine.text.template_meter import Meter

_MOST_BITS: Final = 4096
_MOST_WIDTH: Final = 1000
_MOST_STRIPPED: Final = 64
_REFUSED_METHODS: Final = frozenset(
    {"translate", "maketrans", "to_bytes", "from_bytes", "expandtabs", "encode", "decode", "striptags"}
)
_REMOVED_FILTERS: Final = ("batch", "pprint", "random", "slice", "striptags", "urlize", "wordwrap", "xmlattr")
_SHALLOW_FILTERS: Final = frozenset(
    ("abs", "attr", "count", "d", "default", "first", "items", "last", "length", "list", "map", "reject", "rejectattr")
) | {"reverse", "select", "selectattr"}
"""Filters that read the entries of their arguments, but not what is in them."""
_COMPARING_FILTERS: Final = frozenset({"dictsort", "groupby", "max", "min", "sort", "unique"})
_COMPARISONS_OF_ENTRY: Final = 16
_ATTRIBUTE_FILTERS: Final = frozenset({"map", "rejectattr", "selectattr", "sum"}) | _COMPARING_FILTERS
_MOST_ATTRIBUTE_CHARS: Final = 100
_COMPARISONS: Final[Mapping[str, Callable[[Any, Any], Any]]] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "gt": operator.gt,
    "gteq": operator.ge,
    "lt": operator.lt,
    "lteq": operator.le,
    "in": lambda left, right: left in right,
    "notin": lambda left, right: left not in right,
}
_COMPARING_TESTS: Final = frozenset(
    ["==", "!=", ">", ">=", "<", "<=", "eq", "equalto", "ne", "gt", "greaterthan", "ge", "lt", "lessthan", "le", "in"]
)
_NUMBER: Final = re.compile(r"\d+")
_NESTED_FORMAT: Final = re.compile(r"%[-+ #0]*(?:\*|\d*\.\*)|\{[^{}]*:[^{}]*\{")


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
        tests: Mapping[str, Any] = self.tests
        self.tests = {name: self._metered_test(name, function) for name, function in tests.items()}
        del self.globals["lipsum"]
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda form: datetime.now().strftime(str(form)[:_MOST_WIDTH])

    @property
    def budget(self) -> RenderBudget:
        """Return the budget of the rendering on this thread."""
        found: RenderBudget | None = getattr(self._local, "budget", None)
        return self.begin(RenderLimits()) if found is None else found

    def begin(self, limits: RenderLimits) -> RenderBudget:
        """Start a rendering on this thread with these limits."""
        self._local.budget = budget = RenderBudget(limits)
        return budget

    def compiled(self, source: str) -> jinja2.Template:
        """Return the template with its loops, macros and concatenations metered. Raises jinja2.TemplateSyntaxError."""
        tree = Meter().visit(self.parse(source))
        return self.from_string(tree)

    def spend(self, steps: int) -> bool:
        """Charge an iteration of a metered loop, or a call of a macro."""
        return self.budget.spend(steps)

    def concatenated(self, *values: Any) -> str:
        """Compute `a ~ b`."""
        texts = [self._text(value) for value in values]
        self.budget.take(sum(map(len, texts)))
        return "".join(texts)

    def compared(self, left: Any, *others: Any) -> Any:
        """Compute `a < b`, or `a < b in c` as (a, "lt", b, "in", c)."""
        result: Any = True
        for name, right in zip(others[::2], others[1::2], strict=True):
            self._check_comparison(name, left, right)
            result = _COMPARISONS[name](left, right)
            if not result:
                break
            left = right
        return result

    def keyed(self, key: Any) -> Any:
        """Charge and return a key of a mapping; a tuple is hashed with all that is in it."""
        if isinstance(key, tuple):
            self.budget.take(self._written_size(key))
        return key

    def made(self, value: Any) -> Any:
        """Charge and return `a[1:]`."""
        self.budget.take(_size(value))
        return value

    def getitem(self, obj: Any, argument: Any) -> Any:
        return super().getitem(obj, self.keyed(argument))

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
            sizes = [self._text_size(value) for value in _listed(right)]
            written = max(sizes, default=0) * left.count("%") if isinstance(right, Mapping) else sum(sizes)
            budget.take(len(left) + written)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        owner = getattr(__obj, "__self__", None)
        if owner is __self:
            return __obj(*args)  # what `Meter` has put in
        if isinstance(owner, str | bytes | int) and hasattr(__obj, "__name__"):
            args = __self._checked_arguments(owner, __obj.__name__, args, kwargs)
        sizes = map(_size if isinstance(__obj, Macro | LoopContext) else __self._nested_size, (*args, *kwargs.values()))
        # lists compare all their entries
        own_size = __self._nested_size(owner) if isinstance(owner, list | tuple) and args else _size(owner)
        __self.budget.spend(1 + (own_size + sum(sizes)) // SIZE_OF_STEP)
        result = super().call(__context, __obj, *args, **kwargs)
        __self._take_result(result)
        return result

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        formatted = super().wrap_str_format(value)
        if formatted is not None:
            _check_format(value.__self__)
        return formatted

    def _checked_arguments(
        self, owner: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Any, ...]:
        """Return the arguments of a method of text, bytes or numbers. Raises RenderLimitReached where its result would
        be too large."""
        if name in _REFUSED_METHODS:
            raise RenderLimitReached(f"it calls {name}, which templates may not")
        if name in ("ljust", "rjust", "center", "zfill"):
            self.budget.take(max((arg for arg in args if isinstance(arg, int)), default=0))
        elif name == "join" and args:
            args = ([*self._counted(args[0])], *args[1:])
            self.budget.take(sum(map(_size, args[0])) + len(args[0]) * len(owner))
        elif name == "replace":
            self._check_replacement(owner, *args)
        elif name in ("strip", "lstrip", "rstrip"):
            _check_stripped(args)
        elif name in ("format", "format_map"):
            sizes = [self._text_size(value) for value in (*args, *kwargs.values())]
            self.budget.take(len(owner) + owner.count("{") * max(sizes, default=0))
        return args

    def _check_replacement(self, text: Any, old: Any = "", new: Any = "", *others: Any) -> None:
        if isinstance(text, str) and isinstance(old, str) and isinstance(new, str):
            self.budget.take(len(text) + text.count(old) * len(new))

    def _metered(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a filter that charges its arguments and its result."""

        @functools.wraps(function)  # also copies the mark of filters that want the environment or the context
        def metered(*args: Any, **kwargs: Any) -> Any:
            args = tuple(self._counted(arg) if isinstance(arg, Iterator) else arg for arg in args)
            if name in _COMPARING_FILTERS:
                args = tuple([*arg] if isinstance(arg, Iterator) else arg for arg in args)
            self._check_filter(name, args, kwargs)
            self.budget.spend(1 + sum(map(_size, args)) // SIZE_OF_STEP)
            result = function(*args, **kwargs)
            if isinstance(result, Iterator):
                return self._counted(result)
            self._take_result(result)
            return result

        return metered

    def _metered_test(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a test that charges what it compares."""

        @functools.wraps(function)
        def metered(*args: Any, **kwargs: Any) -> Any:
            if name in _COMPARING_TESTS and len(args) == 2:
                self._check_comparison(name, *args)
            elif name in ("lower", "upper"):
                self.budget.take(sum(map(self._text_size, args)))
            self.budget.spend()
            return function(*args, **kwargs)

        return metered

    def _check_comparison(self, name: str, left: Any, right: Any) -> None:
        if isinstance(left, bool | int | float | None) and name not in ("in", "notin"):
            return
        if name in ("in", "notin") and isinstance(left, str | bool | int | float | None):
            others = 1 if isinstance(right, str) else _size(right)
            self.budget.spend(1 + (_size(right) + _size(left) * others) // SIZE_OF_STEP)
            return
        self.budget.spend(1 + (self._nested_size(left) + self._nested_size(right)) // SIZE_OF_STEP)

    def _take_result(self, result: Any) -> None:
        if isinstance(result, int):
            _check_bits(result.bit_length())
        self.budget.take(_size(result))

    def _nested_size(self, value: Any) -> int:
        """Charge and return the characters or entries of a value with all that is in it."""
        if isinstance(value, str) or not _parts(value):
            return _size(value)
        size = self._written_size(value)
        self.budget.take(size)
        return size

    def _text_size(self, value: Any) -> int:
        """Return at least as many characters as `str(value)` has."""
        return len(value) if isinstance(value, str) else self._written_size(value)

    def _check_filter(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        values = [*args, *kwargs.values()]
        options = values[2:] if len(args) > 1 else values[1:]  # filters that take an attribute get a context first
        if name in ("center", "indent", "tojson", "round", "truncate"):
            for value in values[1:]:
                if _size(value) > _MOST_WIDTH or (isinstance(value, int) and value > (1 << 20)):
                    raise RenderLimitReached(f"it calls the filter {name} with a width that is too large")
        if name == "sum" and not all(isinstance(value, int | float | str | None) for value in options):
            raise RenderLimitReached("it sums up what are no numbers")
        self._charge_written(name, args[0] if args else None, values)
        if name in _ATTRIBUTE_FILTERS and any(
            len(value) > _MOST_ATTRIBUTE_CHARS for value in options if isinstance(value, str)
        ):
            raise RenderLimitReached(f"it gives the filter {name} a long name")
        if name not in _SHALLOW_FILTERS:
            size = sum(map(self._nested_size, values))
            self.budget.take(size)
            if name in _COMPARING_FILTERS:
                self.budget.spend(_COMPARISONS_OF_ENTRY * size // SIZE_OF_STEP)

    def _charge_written(self, name: str, first: Any, values: Sequence[Any]) -> None:
        """Charge what a filter writes beyond what it reads. first: its first argument; values: all of them."""
        most = max((value for value in values[1:] if isinstance(value, int)), default=0)
        match name:
            case "indent" if isinstance(first, str):
                widths = [value if isinstance(value, int) else _size(value) for value in values[1:]]
                self.budget.take((first.count("\n") + 1) * max(widths, default=4))
            case "center":
                self.budget.take(most)
            case "tojson":
                self.budget.take(self._written_size(first, most))
            case "replace":
                self._check_replacement(*values[-3:] if len(values) < 5 else values[-4:-1])
            case "format" if isinstance(first, str):
                _check_format(first)
                self.budget.take(first.count("%") * max(map(self._text_size, values[1:]), default=0))
            case "trim":
                _check_stripped(values[1:])
            case "join":
                length = sum(len(value) for value in values if isinstance(value, str))
                self.budget.take(length * sum(_size(value) for value in values if not isinstance(value, str)))

    def _counted(self, values: Iterable[Any]) -> Iterator[Any]:
        for value in values:
            self.budget.spend()
            yield value

    def _written(self, value: Any) -> Any:
        """Charge and return what `{{ value }}` writes."""
        self.budget.take(self._text_size(value))
        return value

    def _text(self, value: Any) -> str:
        if isinstance(value, str):
            return value
        self.budget.take(self._written_size(value))
        return str(value)

    def _written_size(self, value: Any, indent: int = 0) -> int:
        """Return about how many characters a value has when it is written; shared parts of it count each time."""
        size = 0
        pending: list[tuple[Any, int]] = [(value, 1)]
        while pending:
            each, depth = pending.pop()
            self.budget.spend()
            size += _size(each) + 8 + indent * depth
            if size > self.budget.limits.value_size or len(pending) > self.budget.limits.value_size:
                break
            pending += [(part, depth + 1) for part in _parts(each)]
        return size


class _Generation(Extension):
    """`{% generation %}` marks the assistant's text for training; here its body is just rendered."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _size(value: Any) -> int:
    """Return how many characters or entries a value has, 0 for others. Nothing of the template runs for it."""
    return len(value) if isinstance(value, str | bytes | list | tuple | dict | set | range) else 0


def _parts(value: Any) -> Iterable[Any]:
    """Return what is written, compared or hashed with a value. Nothing of the template runs for it."""
    if isinstance(value, Mapping):
        return [*value, *value.values()]
    if isinstance(value, list | tuple | set | frozenset | KeysView | ValuesView | ItemsView):
        return value
    if type(value) is Namespace:
        return [object.__getattribute__(value, "_Namespace__attrs")]
    return ()


def _listed(value: Any) -> Iterable[Any]:
    return value if isinstance(value, tuple) else value.values() if isinstance(value, dict) else (value,)


def _check_bits(count: int) -> None:
    if count > _MOST_BITS:
        raise RenderLimitReached(f"it makes a number of more than {_MOST_BITS:,} bits")


def _check_stripped(args: Iterable[Any]) -> None:
    if any(_size(arg) > _MOST_STRIPPED for arg in args):
        raise RenderLimitReached(f"it strips more than {_MOST_STRIPPED} different characters")


def _check_format(form: str) -> None:
    """Raise RenderLimitReached for large widths in `%` and `str.format`, which make long texts of short ones."""
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
