"""Every sampling knob once: its name, default, limits and one line of documentation.

The offline API, the server's schema and the command line derive from these fields; nothing validates them elsewhere.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import msgspec

from octavo.core.absent import remark
from octavo.core.param import Param, checked_number
from octavo.core.prompt import checked_text
from octavo.core.repetition import RepetitionDetectionParams
from octavo.core.request_limits import check_field
from octavo.core.structured_outputs import StructuredOutputsParams
from octavo.errors import InvalidRequest

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy decoding."""

MAX_N = 1024
MAX_SEED = 2**63 - 1
MAX_BIAS = 100.0
_NEVER_EMPTY = {"allowed_token_ids": "nothing could be drawn", "logprob_token_ids": "nothing is asked for"}
OF_DRAWING = ("temperature", "min_p", "top_k", "top_p")
"""Parameters of random draws, which beam search does not make: the temperature, and all filters."""


class OutputKind(enum.StrEnum):
    """What each `RequestOutput` of a stream carries."""

    CUMULATIVE = "cumulative"
    DELTA = "delta"
    FINAL_ONLY = "final_only"


RequestOutputKind = OutputKind
"""vLLM's name for it."""


class _NamesItsFields(msgspec.StructMeta):
    """Makes an unknown keyword of the class an InvalidRequest that names the nearest known one."""

    def __call__(self, *args: Any, **values: Any) -> Any:
        try:
            return super().__call__(*args, **values)
        except TypeError:
            known = self.__struct_fields__
            for name in values:
                if name not in known:
                    raise InvalidRequest(
                        f"{name} is not a sampling parameter{remark(name, known)}", field=name
                    ) from None
            raise


class SamplingParams(msgspec.Struct, kw_only=True, omit_defaults=True, metaclass=_NamesItsFields):
    """How tokens are drawn for one request, in the words of vLLM and the OpenAI API. Requests keep a copy.

    Raises InvalidRequest naming the field, its value and its limit.
    """

    n: Annotated[int, Param("Number of sequences to generate for the prompt.", ge=1, le=MAX_N)] = 1
    best_of: Annotated[
        int | None,
        Param(
            "Sequences to generate; the n with the highest cumulative log-probability are returned, best first. "
            "With beam search its width.",
            ge=1,
            le=MAX_N,
        ),
    ] = None
    use_beam_search: Annotated[bool, Param("Search for the likeliest sequences with best_of (or n) beams.")] = False
    length_penalty: Annotated[
        float,
        Param("Beam search: scores are divided by length ** this; above 0 favours long sequences.", ge=-10, le=10),
    ] = 1.0
    early_stopping: Annotated[
        bool | str,
        Param(
            "Beam search: true ends with best_of finished beams; false when the running ones are unlikely to become "
            "better; never when they cannot."
        ),
    ] = False
    temperature: Annotated[
        float, Param("Divides the logits before a token is drawn: higher is more random, 0 is greedy.", ge=0, le=100)
    ] = 1.0
    top_k: Annotated[int, Param("Keep the k most likely tokens; 0 or -1 keeps all.", ge=-1)] = 0
    top_p: Annotated[float, Param("Keep the smallest set of tokens with this total probability.", gt=0, le=1)] = 1.0
    min_p: Annotated[
        float, Param("Drop tokens whose probability is below this share of the likeliest token's.", ge=0, le=1)
    ] = 0.0
    presence_penalty: Annotated[
        float, Param("Subtracted once from the logit of each token that is in the output.", ge=-2, le=2)
    ] = 0.0
    frequency_penalty: Annotated[
        float, Param("Subtracted from the logit of a token as often as it is in the output.", ge=-2, le=2)
    ] = 0.0
    repetition_penalty: Annotated[
        float, Param("Divides positive (multiplies negative) logits of tokens in prompt or output.", ge=0.01, le=100)
    ] = 1.0
    seed: Annotated[
        int | None,
        Param("The same seed draws the same tokens, whatever else runs; -1 means none.", ge=-MAX_SEED - 1, le=MAX_SEED),
    ] = None
    stop: Annotated[tuple[str, ...], Param("Strings that end the text; they are not part of it.")] = ()
    stop_token_ids: Annotated[tuple[int, ...], Param("Token ids that end the sequence.")] = ()
    include_stop_str_in_output: Annotated[bool, Param("Keep the stop string in the text.")] = False
    ignore_eos: Annotated[bool, Param("Go on after an end-of-sequence token.")] = False
    max_tokens: Annotated[
        int | None, Param("Most tokens per sequence; None means as many as fit the context.", ge=1)
    ] = 16
    min_tokens: Annotated[int, Param("No end token and no stop string before this many tokens.", ge=0)] = 0
    repetition_detection: Annotated[
        RepetitionDetectionParams | None,
        Param(
            "Ends a sequence that repeats a pattern of min_pattern_size to max_pattern_size tokens min_count times; "
            "the finish reason is repetition."
        ),
    ] = None
    logprobs: Annotated[
        int | None,
        Param("Log-probabilities of this many likeliest tokens per position, and of the drawn one; -1 for all.", ge=-1),
    ] = None
    logprob_token_ids: Annotated[
        tuple[int, ...] | None,
        Param("Log-probabilities of these token ids per position, in place of the likeliest ones."),
    ] = None
    prompt_logprobs: Annotated[
        int | None,
        Param("Log-probabilities of this many likeliest tokens at each position of the prompt; -1 for all.", ge=-1),
    ] = None
    truncate_prompt_tokens: Annotated[
        int | None,
        Param(
            "Keep only this many tokens from the end of the prompt; -1 keeps as many as fit beside max_tokens.", ge=-1
        ),
    ] = None
    logit_bias: Annotated[dict[int, float] | None, Param("Added to the logits of these token ids (-100 to 100).")] = (
        None
    )
    allowed_token_ids: Annotated[tuple[int, ...] | None, Param("The only token ids that may be drawn.")] = None
    bad_words: Annotated[tuple[str, ...], Param("Texts that may not be generated.")] = ()
    structured_outputs: Annotated[
        StructuredOutputsParams | None,
        Param("The form of the text: json, json_object, regex, choice, grammar or structural_tag."),
    ] = None
    skip_reading_prefix_cache: Annotated[
        bool | None, Param("Compute the whole prompt even where it is cached; its blocks are cached as always.")
    ] = None
    skip_special_tokens: Annotated[bool, Param("Leave special tokens out of the text.")] = True
    spaces_between_special_tokens: Annotated[bool, Param("Put spaces around special tokens that are kept.")] = True
    detokenize: Annotated[bool, Param("Decode tokens to text; False returns token ids only.")] = True
    output_kind: Annotated[
        OutputKind,
        Param(
            "What each output carries: all so far (cumulative), what is new (delta), or everything once, at the "
            "end (final_only)."
        ),
    ] = OutputKind.CUMULATIVE

    def __post_init__(self) -> None:
        if self.logprob_token_ids is not None:
            msgspec.structs.force_setattr(self, "logprobs", 0)
        for name, (annotation, param) in _FIELDS.items():
            value = getattr(self, name)
            if value is _DEFAULTS[name]:
                continue
            checked = _checked(name, value, annotation, param)
            if checked is not value:
                msgspec.structs.force_setattr(self, name, checked)
        _check_together(self)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set a field to a value that is checked alone; beside the others it is checked in each request."""
        if name not in _FIELDS:
            raise InvalidRequest(f"{name} is not a sampling parameter{remark(name, _FIELDS)}", field=name)
        super().__setattr__(name, _checked(name, value, *_FIELDS[name]))

    def __delattr__(self, name: str) -> None:
        raise InvalidRequest(f"{name} cannot be deleted; set it to its default, {_DEFAULTS.get(name)!r}", field=name)

    @classmethod
    def over_defaults(cls, defaults: Mapping[str, Any], explicit: Mapping[str, Any]) -> SamplingParams:
        """Return `explicit` values over the `defaults` of a checkpoint or a command.

        A beam search leaves out the defaults of drawing (temperature, top_k, top_p, min_p), which do not concern it. A
        default of max_tokens becomes as large as an explicit min_tokens. Raises InvalidRequest.
        """
        if explicit.get("use_beam_search", defaults.get("use_beam_search")) is True:
            defaults = {name: value for name, value in defaults.items() if name not in OF_DRAWING}
        merged = {**defaults, **explicit}
        limit, least = merged.get("max_tokens", _DEFAULTS["max_tokens"]), explicit.get("min_tokens")
        if "max_tokens" not in explicit and limit is not None and isinstance(least, int) and least > limit:
            merged["max_tokens"] = least  # the limit is only a default
        return cls(**merged)

    @property
    def width(self) -> int:
        """The number of sequences that are computed to return n of them."""
        return self.best_of or self.n

    @property
    def width_field(self) -> str:
        """The parameter that sets `width`."""
        return "n" if self.best_of is None else "best_of"

    @property
    def needs_logprobs(self) -> bool:
        """Whether the log-probabilities of drawn tokens are asked for, or needed to find the likeliest sequences."""
        return self.logprobs is not None or self.width > self.n

    @property
    def needs_whole_prompt(self) -> bool:
        """Whether every position of the prompt is computed for the request, so that it reads no cached prefix."""
        return self.prompt_logprobs is not None or bool(self.skip_reading_prefix_cache)

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW


def documented_fields() -> dict[str, Param]:
    """Return documentation and limits by field name, in the order of the class."""
    return {name: param for name, (_, param) in _FIELDS.items()}


_HINTS = get_type_hints(SamplingParams, include_extras=True)
_FIELDS: dict[str, tuple[Any, Param]] = {name: get_args(_HINTS[name]) for name in SamplingParams.__struct_fields__}
"""Annotation, and documentation with limits, by field name."""
_DEFAULTS: dict[str, Any] = {field.name: field.default for field in msgspec.structs.fields(SamplingParams)}


def _checked(name: str, value: Any, annotation: Any, limits: Param) -> Any:
    """Return `value` in the type of its field and within its limits: a list becomes a tuple, one text a tuple of one,
    a whole float the number of its field. Raises InvalidRequest."""
    members = get_args(annotation) if isinstance(annotation, UnionType) else (annotation,)
    kind = get_origin(members[0]) or members[0]
    if (value is None and NoneType in members) or (name == "seed" and value == -1):
        return None
    if name == "early_stopping":
        return _checked_early_stopping(value)
    if kind is bool:
        if not isinstance(value, bool):
            raise InvalidRequest(f"{name} is {value!r}, expected true or false", field=name)
        return value
    if kind is tuple:
        return _checked_tuple(name, value, get_args(members[0])[0])
    if kind is dict:
        return _checked_logit_bias(value)
    if kind is OutputKind:
        return _checked_output_kind(value)
    if kind is StructuredOutputsParams or kind is RepetitionDetectionParams:
        return kind.of(value, name)
    return checked_number(name, value, kind, limits)


def _checked_early_stopping(value: Any) -> Any:
    if isinstance(value, str):
        value = {"true": True, "false": False}.get(value.lower(), value)
    # no number: 1 == True, but it is not what the search asks for
    if not isinstance(value, bool) and value != "never":
        raise InvalidRequest(f"early_stopping is {value!r}; it is true, false or 'never'", field="early_stopping")
    return value


def _checked_output_kind(value: Any) -> OutputKind:
    try:
        return OutputKind(value)
    except ValueError as error:
        kinds = [kind.value for kind in OutputKind]
        raise InvalidRequest(f"output_kind is {value!r}; it is one of {kinds}", field="output_kind") from error


def _checked_tuple(name: str, value: Any, of: type) -> tuple[Any, ...]:
    """Return texts, or token ids, as a tuple. Raises InvalidRequest."""
    if value is None:
        return ()
    if of is str and isinstance(value, str):
        value = (value,)
    if not isinstance(value, Iterable) or isinstance(value, str | bytes | dict):
        raise InvalidRequest(f"{name} is {value!r}, expected a list", field=name)
    values = tuple(value)
    check_field(name, values)
    for each in values:
        if of is str and (not isinstance(each, str) or not each):
            raise InvalidRequest(f"{name} contains {each!r}; its entries are non-empty strings", field=name)
        if of is str:
            checked_text(each, name)
        elif isinstance(each, bool) or not isinstance(each, Integral) or each < 0:
            raise InvalidRequest(f"{name} contains {each!r}; its entries are token ids", field=name)
    if name in _NEVER_EMPTY and not values:
        raise InvalidRequest(f"{name} is empty: {_NEVER_EMPTY[name]}; leave it out", field=name)
    return values if of is str else tuple(map(int, values))


def _checked_logit_bias(value: Any) -> dict[int, float]:
    """Return the biases by token id. Raises InvalidRequest."""
    if not isinstance(value, dict):
        raise InvalidRequest(f"logit_bias is {value!r}, expected a mapping", field="logit_bias")
    check_field("logit_bias", value)
    bias: dict[int, float] = {}
    for key, each in value.items():
        try:
            token_id = int(key)
        except (TypeError, ValueError, OverflowError):
            token_id = -1
        if token_id < 0:
            raise InvalidRequest(f"logit_bias has the key {key!r}, expected a token id", field="logit_bias")
        is_number = isinstance(each, Real) and not isinstance(each, bool)
        if not is_number or not -MAX_BIAS <= each <= MAX_BIAS:
            raise InvalidRequest(
                f"logit_bias of {token_id} is {each!r}, must be from -{MAX_BIAS:g} to {MAX_BIAS:g}", field="logit_bias"
            )
        bias[token_id] = float(each)
    return bias


def _check_together(params: SamplingParams) -> None:
    if params.truncate_prompt_tokens == 0:
        raise InvalidRequest(
            "truncate_prompt_tokens is 0, which leaves no prompt; give at least 1, or -1 for what fits",
            field="truncate_prompt_tokens",
        )
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        default = " unless it is set" if params.max_tokens == _DEFAULTS["max_tokens"] else ""
        raise InvalidRequest(
            f"min_tokens is {params.min_tokens}, must be at most max_tokens, which is {params.max_tokens}{default}; "
            "raise max_tokens, or lower min_tokens",
            field="min_tokens",
        )
    if params.structured_outputs is not None and params.ignore_eos:
        raise InvalidRequest(
            "ignore_eos is true, but a text with structured_outputs ends where its form does; leave ignore_eos out",
            field="ignore_eos",
        )
    if params.stop and not params.detokenize:
        raise InvalidRequest(
            "stop needs text, but detokenize is false; use stop_token_ids, or leave detokenize on", field="stop"
        )
    if params.best_of is not None and params.best_of < params.n:
        raise InvalidRequest(
            f"best_of is {params.best_of}, must be at least n, which is {params.n}: only generated sequences can be "
            "returned",
            field="best_of",
        )
    if params.use_beam_search:
        _check_beam_search(params)
        return
    if params.is_greedy and (params.best_of or 1) > 1:
        raise InvalidRequest(
            f"best_of is {params.best_of}, but temperature is {params.temperature:g}: greedy sequences are "
            "all the same; raise temperature, leave best_of out, or set use_beam_search",
            field="best_of",
        )
    for name in ("length_penalty", "early_stopping"):
        if getattr(params, name) != _DEFAULTS[name]:
            raise InvalidRequest(f"{name} is for beam search; set use_beam_search, or leave it out", field=name)


def _check_beam_search(params: SamplingParams) -> None:
    """Refuse parameters of drawing in a beam search."""
    for name, what in (("repetition_detection", "does not end beams"), ("logprob_token_ids", "is not for beams")):
        if getattr(params, name) is not None:
            raise InvalidRequest(f"{name} {what}; leave it out, or set use_beam_search to false", field=name)
    for name in OF_DRAWING[1:]:
        if getattr(params, name) != _DEFAULTS[name]:
            raise InvalidRequest(
                f"{name} is {getattr(params, name)}, but beam search keeps the likeliest sequences and draws nothing; "
                f"leave {name} out, or set use_beam_search to false",
                field=name,
            )
    if params.temperature not in (0.0, 1.0):
        raise InvalidRequest(
            f"temperature is {params.temperature}, but beam search draws nothing; leave it out or set it to 0",
            field="temperature",
        )
