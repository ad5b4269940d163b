"""Flags made from fields: engine arguments, server arguments and sampling parameters.

`with_options` gives a command the flags of the field classes that it names. Flags that were not given are left out, so
that variables, the YAML file and defaults apply.
"""

from __future__ import annotations

import inspect
import json
import types
import typing
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from cyclopts import Group, Parameter, Token

from octavo.config.args import EngineArgs
from octavo.config.device_args import RankArgs
from octavo.config.fields import Argument, arguments, describe_bounds, describe_default, whole_number
from octavo.config.server_args import ServerArgs
from octavo.config.sources import gather
from octavo.core.sampling_params import SamplingParams, documented_fields
from octavo.errors import ConfigError, InvalidRequest

Args = TypeVar("Args", EngineArgs, ServerArgs, RankArgs)
Own = TypeVar("Own")
C = TypeVar("C", bound=int | None)
"""What a command returns: its exit code, or None for 0."""

_STATED = [vars(each).get("heading") for each in (*ServerArgs.__mro__, *EngineArgs.__mro__)]
_HEADINGS = [*dict.fromkeys(filter(None, _STATED)), "Configuration", "Options"]
"""Headings of the help in their order, after those of a command's own options."""

NOT_FOR_A_TERMINAL = (
    *("output_kind", "detokenize", "logprobs", "logprob_token_ids", "prompt_logprobs"),
    "spaces_between_special_tokens",
)
"""Sampling parameters that shape the output object, not the text."""

_JSON_EXAMPLES = {
    "structured_outputs": '{"choice": ["yes", "no"]}',
    "repetition_detection": '{"max_pattern_size": 20, "min_count": 3}',
}
"""Sampling parameters that are objects."""

_OF_A_SERVER = (
    *("stream_interval", "served_model_name", "disable_log_stats", "data_parallel_size", "router", "max_core_restarts"),
    *("prefill", "decode", "role", "kv_host", "kv_port", "kv_lease_s", "split_min_tokens"),
)


def heading(name: str) -> Group:
    """Return a group of options with this heading; `_HEADINGS` has their order in the help."""
    return Group(name, sort_key=_HEADINGS.index(name) if name in _HEADINGS else -1)


def whole_numbers(name: str, text: str) -> tuple[int, ...]:
    """Return (1, 64) for "1,64", the value of the option `name`. Raises ConfigError; each is at least 1."""
    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise ConfigError(f"{name} is {text!r}, expected whole numbers between commas") from error
    if min(found) < 1:
        raise ConfigError(f"{name} is {min(found)}, must be at least 1")
    return found


class Given(msgspec.Struct, frozen=True):
    """The flags that were given, by the names of their fields."""

    config: str | None
    values: dict[str, Any]

    def arguments(self, cls: type[Args]) -> Args:
        """Return arguments of `cls` from flags, variables, YAML file and defaults. Raises ConfigError."""
        return gather(cls, self.values_of(cls), config_file=self.config)

    def without(self, cls: type) -> Given:
        """Return the flags without those of one command, which may have names of other arguments."""
        mine = arguments(cls)
        return Given(self.config, {name: value for name, value in self.values.items() if name not in mine})

    def own(self, cls: type[Own]) -> Own:
        """Return the options of one command, from flags and defaults alone. Raises ConfigError."""
        return cls(**self.values_of(cls))

    def values_of(self, cls: type) -> dict[str, Any]:
        """Return the values of those flags that are arguments of `cls`."""
        mine = arguments(cls)
        return {name: value for name, value in self.values.items() if name in mine}

    def sampling(self, defaults: dict[str, Any]) -> SamplingParams:
        """Return sampling parameters: the flags over `defaults`. Raises InvalidRequest."""
        return SamplingParams.over_defaults(defaults, self.sampling_values)

    @property
    def sampling_values(self) -> dict[str, Any]:
        """The flags of sampling parameters. Raises InvalidRequest for an object that is no JSON."""
        given = {name: value for name, value in self.values.items() if name in SamplingParams.__struct_fields__}
        for name in _JSON_EXAMPLES.keys() & given.keys():
            try:
                given[name] = msgspec.json.decode(given[name])
            except msgspec.DecodeError as error:
                raise InvalidRequest(
                    f"{name} is {given[name]!r}, which is no JSON ({error}); give such as {_JSON_EXAMPLES[name]}"
                ) from error
        return given


def with_options(
    *classes: type,
    without: Iterable[str] = (),
    also: Iterable[str] = (),
    model: Literal["positional", "flag"] = "flag",
    model_help: str | None = None,
) -> Callable[[Callable[..., C]], Callable[..., C]]:
    """Return a decorator that adds the flags of `classes` to a command, which gets them as `given: Given`.

    Where two classes have a field of the same name (`seed`), the class that is named first has the flag. Engine
    arguments that only a server uses are left out where it is none, except for those in `also`. model_help: replaces
    the help of the model, where the default model is of no use.
    """
    of_server = () if ServerArgs in classes else set(_OF_A_SERVER) - set(also)

    def decorate(function: Callable[..., C]) -> Callable[..., C]:
        own = [p for p in inspect.signature(function, eval_str=True).parameters.values() if p.name != "given"]
        options: dict[str, inspect.Parameter] = {}
        for cls in classes:
            for parameter in _flags(cls):
                if parameter.name not in without and not (cls is EngineArgs and parameter.name in of_server):
                    options.setdefault(parameter.name, parameter)
        if model_help is not None:
            options["model"] = _flag("model", str, model_help, "Model")
        if model == "positional":
            options["model"] = options["model"].replace(kind=inspect.Parameter.POSITIONAL_OR_KEYWORD)
            own = sorted([*own, options.pop("model")], key=lambda parameter: parameter.kind)
        if set(classes) & {EngineArgs, ServerArgs, RankArgs}:
            options["config"] = _flag("config", str, "YAML file with arguments.", "Configuration")
        signature = inspect.Signature([*own, *options.values()], return_annotation=int)
        own_names = {parameter.name for parameter in own} - {"model"}
        positional = [p.name for p in own if p.kind is inspect.Parameter.POSITIONAL_ONLY]

        def command(*args: Any, **kwargs: Any) -> C:
            bound = signature.bind(*args, **kwargs).arguments
            config_file = bound.pop("config", None)
            mine = {name: bound.pop(name) for name in own_names if name in bound}
            given = {name: value for name, value in bound.items() if value is not None}
            first = [mine.pop(name, None) for name in positional]
            return function(*first, **mine, given=Given(config_file, given))

        command.__doc__, command.__name__ = function.__doc__, function.__name__
        command.__signature__ = signature  # type: ignore[attr-defined]
        command.__annotations__ = {p.name: p.annotation for p in signature.parameters.values()}
        return command

    return decorate


def one_value_each(words: Sequence[str], *classes: type) -> list[str]:
    """Return the words of a command line with the flag of a list before each of its values, which may follow it as in
    vLLM: `--served-model-name a b`. classes: those whose lists they are."""
    lists = {name for cls in classes for name, each in arguments(cls).items() if each.kind in (tuple, dict)}
    found: list[str] = []
    flag, has_value = "", False
    for word in words:
        if word.startswith("-"):
            is_list = word[:2] == "--" and word[2:].replace("-", "_") in lists
            flag, has_value = word if is_list else "", False
        elif flag:
            found += [flag] if has_value else []
            has_value = True
        found.append(word)
    return found


def joined_fields(words: Sequence[str], *classes: type) -> list[str]:
    """Return the words of a command line with the fields of an object in one word, which may be apart as in vLLM:
    `--speculative-config.method mtp`. classes: those whose objects they are."""
    objects = {name for cls in classes for name, each in arguments(cls).items() if each.kind is dict}
    found: list[str] = []
    joined: dict[str, dict[str, Any]] = {}
    left = iter(words)
    for word in left:
        flag, equals, value = word.partition("=")
        option, *fields = flag.split(".")
        of_object = bool(fields) and option.startswith("--") and option[2:].replace("-", "_") in objects
        if of_object and not equals:
            value = next(left, "")
        if not of_object or not value:  # what has no value is refused as it is
            found.append(word)
            continue
        inner: Any = joined.setdefault(option, {})
        for field in fields[:-1]:
            outer, inner = inner, inner.get(field)
            if not isinstance(inner, dict):
                inner = outer[field] = {}
        inner[fields[-1].replace("-", "_")] = _json_or_text(value)
    return found + [word for option, fields in joined.items() for word in (option, json.dumps(fields))]


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _flags(cls: type) -> list[inspect.Parameter]:
    if cls is SamplingParams:
        return _sampling_flags()
    return [_argument_flag(argument) for argument in arguments(cls).values()]


def _argument_flag(argument: Argument) -> inspect.Parameter:
    arg = argument.arg
    default = describe_default(argument)
    doc = arg.doc if default in ("none", "") else f"{arg.doc} [default: {default}]"
    kind: Any = argument.kind
    if argument.is_size:
        kind = str
    elif kind in (tuple, dict):
        kind = list[str]
    elif arg.choices is not None:
        kind = Literal[arg.choices]
    return _flag(argument.name, kind, doc, argument.group, describe_bounds(arg))


def _sampling_flags() -> list[inspect.Parameter]:
    hints = typing.get_type_hints(SamplingParams)
    default = SamplingParams()
    found = []
    for name, param in documented_fields().items():
        kind = _plain_kind(hints[name])
        if kind is None or name in NOT_FOR_A_TERMINAL:
            continue
        value = getattr(default, name)
        doc = param.doc if value in (None, (), False) or name == "max_tokens" else f"{param.doc} [default: {value}]"
        if name in _JSON_EXAMPLES:
            kind, doc = str, f"{doc} As JSON, such as {_JSON_EXAMPLES[name]}."
        found.append(_flag(name, kind, doc, "Sampling", describe_bounds(param)))
    return found


def _plain_kind(hint: Any) -> Any:
    """Return the type of a flag for a sampling parameter; None for mappings, which have no good flag."""
    if isinstance(hint, types.UnionType):
        members = [member for member in typing.get_args(hint) if member is not types.NoneType]
        hint = members[0] if len(members) == 1 else str  # a word that the class understands
    origin = typing.get_origin(hint)
    if origin is dict:
        return None
    return list[typing.get_args(hint)[0]] if origin is tuple else hint  # type: ignore[misc]


def _flag(name: str, kind: Any, doc: str, group: str, bounds: str = "") -> inspect.Parameter:
    is_list = typing.get_origin(kind) is list
    item = typing.get_args(kind)[0] if is_list else kind
    parameter = Parameter(
        help=doc,
        group=heading(group),
        show_default=False,
        negative=None if kind is bool else (),
        consume_multiple=False if is_list else None,
        allow_leading_hyphen=kind in (int, float),
        converter=_numbers(item, bounds, is_list=is_list) if item in (int, float) else None,
    )
    annotation = Annotated[kind | None, parameter]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _numbers(kind: type[int] | type[float], bounds: str, *, is_list: bool) -> Callable[[Any, Sequence[Token]], Any]:
    """Return what makes the value of a flag for numbers; cyclopts by itself would round 1.5. It raises ValueError with
    the flag, the text, and what is expected."""
    read, words = (whole_number, "a whole number") if kind is int else (float, "a number")

    def convert(_: Any, tokens: Sequence[Token]) -> Any:
        values: list[int | float] = []
        for token in tokens:
            try:
                values.append(read(token.value))
            except ValueError as error:
                raise ValueError(f"{token.keyword} is {token.value!r}, expected {words}{bounds}") from error
        return values if is_list else values[0]

    return convert
