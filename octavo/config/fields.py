"""How an argument is stated, read, checked and described. Knows no argument by name.

Keywords and YAML values arrive here typed, flags and environment variables as text. All end
in `accept`, so that a limit holds whichever way a value came.
"""

from __future__ import annotations

import json
import math
import operator
import os
import re
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from decimal import Decimal
from functools import cache, wraps
from typing import Any, ClassVar, Self, TypeVar, dataclass_transform

import msgspec

from octavo.core.absent import remark, value_remark
from octavo.devices import DEVICES
from octavo.errors import ConfigError, suggestion

T = TypeVar("T")

_TRUE, _FALSE, _NONE = ("1", "true", "yes", "on"), ("0", "false", "no", "off"), ("", "none", "null")
_BYTES = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(?:([kmgt])(i?))?b?\s*", re.IGNORECASE)


class Arg(msgspec.Struct, frozen=True):
    """The properties of an argument besides its type and default."""

    doc: str
    """One sentence."""
    group: str | None = None
    """Heading in help and reference page, where it is not the `heading` of the class."""
    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    choices: Any = None
    """The texts that it may be, or a function that returns them; None for those of its type if that is a Literal."""
    only: tuple[Any, ...] | None = None
    """The values that this version carries out; others are refused, because of `otherwise`."""
    otherwise: str = ""
    is_bytes: bool = False
    """A number of bytes that may be written with a suffix ("4GiB", "512M")."""
    is_gib: bool = False
    """A number of GiB, or a size with a suffix as of `is_bytes`."""
    is_secret: bool = False
    """No message shows the value."""


def arg(default: T, doc: str, **about: Any) -> T:
    """Return a field of an argument class with its default. about: fields of `Arg`."""
    given: dict[str, Any] = {"default_factory": dict} if default == {} else {"default": default}
    made: T = field(metadata={"arg": Arg(doc, **about)}, **given)
    return made


class Argument(msgspec.Struct, frozen=True):
    """One field of an argument class.

    kind: bool, int, float, str, tuple (of str) or dict (of str to `of`; Any stands for an object of JSON). group:
    heading in help and reference page.
    """

    name: str
    group: str
    kind: type
    of: type
    is_optional: bool
    default: Any
    arg: Arg

    @property
    def is_size(self) -> bool:
        """Whether a text with a suffix, such as "4GiB", is a value."""
        return self.arg.is_bytes or self.arg.is_gib


def arguments(cls: Any) -> types.MappingProxyType[str, Argument]:
    """Return the arguments of a class such as EngineArgs by name: its own, then those of its bases in their order.

    The group of a field is the `heading` of the class that states it.
    """
    return _arguments(cls, tuple(DEVICES))


@cache  # a start of an engine asks eight times, and annotations are texts that are compiled
def _arguments(cls: Any, devices: tuple[str, ...]) -> types.MappingProxyType[str, Argument]:
    """devices: the names there are now, which are choices: some may have been added."""
    hints, known = typing.get_type_hints(cls), {each.name: each for each in fields(cls)}
    found: dict[str, Argument] = {}
    for owner in cls.__mro__:
        for name in vars(owner).get("__annotations__", ()):
            if name in known and name not in found:
                found[name] = _argument(known[name], hints[name], owner.heading)
    return types.MappingProxyType(found)


def _argument(stated: Field[Any], annotation: Any, heading: str) -> Argument:
    about = stated.metadata["arg"]
    is_optional = typing.get_origin(annotation) in (types.UnionType, typing.Union)  # the latter of a Literal
    if is_optional:
        (annotation,) = (each for each in typing.get_args(annotation) if each is not types.NoneType)
    kind, members = typing.get_origin(annotation) or annotation, typing.get_args(annotation)
    if kind is typing.Literal:
        kind, about = str, msgspec.structs.replace(about, choices=members)
    elif callable(about.choices):
        about = msgspec.structs.replace(about, choices=about.choices())
    default = {} if stated.default is MISSING else stated.default
    of = members[1] if kind is dict else str
    return Argument(stated.name, about.group or heading, kind, of, is_optional, default, about)


@dataclass_transform(kw_only_default=True, frozen_default=True)
class ArgumentGroup:
    """Base of classes with arguments as fields: makes them frozen dataclasses whose fields are given by name.

    heading: of their own fields in help and reference page.
    """

    heading: ClassVar[str]
    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    def __init_subclass__(cls, heading: str | None = None) -> None:
        if heading is not None:
            cls.heading = heading
        dataclass(frozen=True, kw_only=True)(cls)

    @classmethod
    def of(cls, args: ArgumentGroup, **changes: Any) -> Self:
        """Return the values of the arguments among its fields, and `changes` over them."""
        stated = [name for name, each in cls.__dataclass_fields__.items() if "arg" in each.metadata]
        return cls(**{name: getattr(args, name) for name in stated} | changes)


class Arguments(ArgumentGroup):
    """Base of classes that check every field, also one that is set later, and put its value into normal form. Raises
    ConfigError: argument, value, limit and remedy, or for an unknown name the nearest known one."""

    def __init_subclass__(cls, heading: str | None = None) -> None:
        super().__init_subclass__(heading)
        initialize = cls.__init__

        @wraps(initialize)
        def __init__(self: Arguments, **values: Any) -> None:  # noqa: N807
            for name in values:
                known_argument(cls, name)
            initialize(self, **values)

        def __setattr__(self: Arguments, name: str, value: Any) -> None:  # noqa: N807
            # for programs that know it so from vLLM; octavo itself makes other arguments of changed values
            object.__setattr__(self, name, accept(known_argument(cls, name), value))

        cls.__init__ = __init__  # type: ignore[method-assign, assignment]
        cls.__setattr__ = __setattr__  # type: ignore[method-assign, assignment]

    def __post_init__(self) -> None:
        for argument in arguments(type(self)).values():
            object.__setattr__(self, argument.name, accept(argument, getattr(self, argument.name)))


def known_argument(cls: type, name: str) -> Argument:
    """Return an argument of a class by its name. Raises ConfigError, which names the nearest one."""
    known = arguments(cls)
    if name not in known:
        raise ConfigError(f"{name} is not an argument of {cls.__name__}{remark(name, known)}")
    return known[name]


def values_of(instance: Any, cls: type) -> dict[str, Any]:
    """Return the values that an instance has in the fields of an argument class, by name."""
    return {field.name: getattr(instance, field.name) for field in fields(cls)}


def accept(argument: Argument, value: Any) -> Any:
    """Return `value` in its argument's type, within its limits. Raises ConfigError: argument, value, limit, remedy."""
    name, arg = argument.name, argument.arg
    value = _typed(argument, value)
    if arg.choices is not None and value is not None and value not in arg.choices:
        said = value_remark(name, str(value))
        hint = f"; {said}" if said is not None else suggestion(str(value), arg.choices)
        raise ConfigError(f"{name} is {value!r}, must be one of {', '.join(arg.choices)}{hint}")
    if arg.only is not None and value is not None and value not in arg.only:
        raise ConfigError(f"{name}={value!r} is refused: {arg.otherwise}")
    unit = " GiB" if arg.is_gib else ""
    if isinstance(value, int | float) and not isinstance(value, bool):
        if not math.isfinite(value):
            raise ConfigError(f"{name} is {value}, must be a finite number")
        if arg.ge is not None and value < arg.ge:
            raise ConfigError(f"{name} is {value}, must be at least {arg.ge}{unit}")
        if arg.gt is not None and value <= arg.gt:
            raise ConfigError(f"{name} is {value}, must be greater than {arg.gt}{unit}")
        if arg.le is not None and value > arg.le:
            raise ConfigError(f"{name} is {value}, must be at most {arg.le}{unit}")
    return value


def _typed(argument: Argument, value: Any) -> Any:
    name, kind = argument.name, argument.kind
    if value is None and (argument.is_optional or kind in (tuple, dict)):
        return None if argument.is_optional else kind()
    if argument.arg.is_bytes and isinstance(value, str):
        return parse_bytes(name, value)
    if argument.arg.is_gib and isinstance(value, str):
        return _gib(name, value)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if kind is int and isinstance(value, str) and _COUNT.fullmatch(value):
        return whole_number(value)
    if kind is str and isinstance(value, os.PathLike):
        return os.fspath(value)
    if kind is tuple:
        return _strings(argument, value)
    if kind is dict:
        return _pairs(argument, value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ConfigError(f"{name} is {value!r}, expected {_NOUN[kind]}")
    return value


_NOUN = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


def _strings(argument: Argument, value: Any) -> tuple[str, ...]:
    items = (value,) if isinstance(value, str) else value
    if isinstance(items, list | tuple) and len(items) == 1 and str(items[0]).startswith("["):
        items = _json_list(items[0])
    if not isinstance(items, list | tuple) or not all(isinstance(item, str) and item.strip() for item in items):
        shown = "blank, or no text" if argument.arg.is_secret else repr(value)
        raise ConfigError(f"{argument.name} is {shown}, expected text or a list of texts, none of them empty")
    return tuple(items)


def _json_list(text: str) -> Any:
    """Return the list that a text such as '["a", "b"]' is, as users of vLLM write it; else the text in a list."""
    try:
        return json.loads(text)
    except ValueError:
        return [text]


def _pairs(argument: Argument, value: Any) -> dict[str, Any]:
    """Return the pairs of a mapping, of a text such as "rms_norm=reference,linear=torch", or of a list of texts."""
    name = argument.name
    text = value[0] if isinstance(value, list | tuple) and len(value) == 1 else value
    if isinstance(text, str) and text.lstrip().startswith("{"):
        value = _json_object(name, text)
    if argument.of is Any:
        if isinstance(value, Mapping):
            return dict(value)
        raise ConfigError(f"{name} is {value!r}, expected an object of JSON")
    pairs = _split_pairs(value)
    if not all(
        isinstance(key, str) and isinstance(item, str | int | float) and key and item != "" for key, item in pairs
    ):
        raise ConfigError(f"{name} is {value!r}, expected pairs such as rms_norm=reference, separated by commas")
    if argument.of is str:
        return {key: str(item) for key, item in pairs}
    if argument.of is int:
        return {key: _count(f"{name} of {key}", item) for key, item in pairs}
    return {key: _weight(f"{name} of {key}", item) for key, item in pairs}


def _split_pairs(value: Any) -> list[tuple[Any, Any]]:
    """Return the pairs of a mapping, of a text or of texts; of anything else an empty pair, which is refused."""
    if isinstance(value, Mapping):
        return list(value.items())
    if not isinstance(value, str | list | tuple):
        return [("", "")]
    texts = value.split(",") if isinstance(value, str) else value
    split = [str(text).partition("=") for text in texts if str(text).strip()]
    return [(key.strip(), item.strip()) for key, _, item in split]


def _json_object(name: str, text: str) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{name} is {text!r}, which is no JSON: {error}") from error
    return found


def _count(what: str, text: str | float) -> int:
    """Return a whole number. Raises ConfigError."""
    try:
        return operator.index(int(text) if isinstance(text, str) else text)  # type: ignore[arg-type]  # of a float it raises
    except (TypeError, ValueError):
        raise ConfigError(f"{what} is {text}, must be a whole number") from None


def _weight(what: str, text: str | float) -> float:
    """Return a number above 0. Raises ConfigError."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise ConfigError(f"{what} is {text}, must be a number above 0")
    return value


def parse_bytes(name: str, text: str) -> int:
    """Return the bytes that "4GiB", "512M" or "1000" stands for; k, M, G, T are powers of 1000, with i of 1024."""
    match = _BYTES.fullmatch(text)
    if match is None:
        raise ConfigError(f"{name} is {text!r}, expected a number of bytes such as 4GiB, 512M or 1000000")
    number, unit, binary = match.groups()
    return int(float(number) * (1024 if binary else 1000) ** ("kmgt".index(unit.lower()) + 1 if unit else 0))


def _gib(name: str, text: str) -> float:
    """Return the GiB that "4" or "4GiB" or "512M" stands for. Raises ConfigError."""
    try:
        return float(text)
    except ValueError:
        if _BYTES.fullmatch(text) is None:
            raise ConfigError(f"{name} is {text!r}, expected a number of GiB, or a size such as 4GiB or 512M") from None
        return parse_bytes(name, text) / (1 << 30)


def from_text(argument: Argument, text: str, where: str) -> Any:
    """Return the value that `text`, found at `where` (a variable's or flag's name), stands for. Raises ConfigError."""
    kind = argument.kind
    if argument.is_optional and text.strip().lower() in _NONE:
        return None
    if kind is bool:
        word = text.strip().lower()
        if word not in _TRUE + _FALSE:
            raise ConfigError(f"{where}={text!r} is neither true nor false")
        return word in _TRUE
    if kind is tuple:
        parts = tuple(part.strip() for part in text.split(",") if part.strip())
        if argument.arg.is_secret and not parts:  # a secret that was not filled in would leave the server open
            raise ConfigError(f"{where} is set and empty; give a key, or unset it")
        return parts
    if kind in (int, float) and not argument.is_size:
        try:
            return whole_number(text) if kind is int else kind(text)
        except ValueError as error:
            raise ConfigError(f"{where}={text!r} is not {_NOUN[kind]}") from error
    return text


_COUNT = re.compile(r"(\d+(?:\.\d+)?)([kmgKMG])")


def whole_number(text: str) -> int:
    """Return the number that "8192", "8k" (thousands) or "8K" (of 1,024 each) stands for, as in vLLM. Raises
    ValueError."""
    match = _COUNT.fullmatch(text.strip())
    if match is None:
        return int(text)
    number, suffix = match.groups()
    value = Decimal(number) * (1000 if suffix.islower() else 1024) ** ("kmg".index(suffix.lower()) + 1)
    return int(value) if value == value.to_integral_value() else int(text)


def describe_bounds(limits: Any) -> str:
    """Return ", at least 0, at most 9" for the limits of an `Arg`, or of a sampling parameter; nothing for none."""
    words = (("ge", "at least"), ("gt", "more than"), ("le", "at most"))
    return "".join(f", {text} {limit:,}" for name, text in words if (limit := getattr(limits, name)) is not None)


_BYTE_UNITS = {"GiB": 1 << 30, "MiB": 1 << 20, "KiB": 1 << 10, "B": 1}
"""Units of default numbers of bytes in help: the largest unit that divides the number is shown."""


def describe_default(argument: Argument) -> str:
    """Return the default of an argument as help and reference pages show it."""
    if argument.arg.is_bytes and isinstance(argument.default, int):
        unit, size = next((unit, size) for unit, size in _BYTE_UNITS.items() if argument.default % size == 0)
        return f"{argument.default // size}{unit}"
    return shown(argument.default)


def shown(value: object) -> str:
    """Return a value of an argument as help and reference pages show it."""
    if value is None or value in ((), {}, ""):
        return "none"
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)
