"""The form that a request's text must have: JSON of a schema, one of several texts, a regular expression, a grammar."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from octavo.core.request_limits import check_field
from octavo.errors import InvalidRequest

FORMS: Final = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")
_FALLBACK: Final = "disable_fallback"
_CLOSED: Final = "disable_additional_properties"
_IN_JSON: Final = ("json", "structural_tag")


class StructuredOutputsParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The form of a text, in the words of vLLM; exactly one of `FORMS` is set. Raises InvalidRequest.

    json: a JSON schema, as text or as an object. json_object: any JSON object. regex: the text matches it as a whole.
    choice: one of these texts. grammar: in Lark's or llama.cpp's (GBNF) notation. structural_tag: free text in which
    regions between tags have schemas. disable_any_whitespace: JSON without white space between its parts.
    disable_additional_properties: objects of schemas that list their properties have no others, unless they say so;
    vLLM's default, xgrammar, reads schemas so.

    The other fields set where the form begins. A special token's name in their texts stands for that token.

    reasoning_end: the text begins with reasoning, which is free; the form holds behind this end mark of it.
    reasoning_begin: only a text that begins with this mark has reasoning; the prompt has not opened it.
    reasoning_budget: number of tokens after which the end mark is forced; it needs no form. triggers: the text is free,
    and the form applies after each of these texts until it is complete; no further token may be possible after its last
    one.
    at_least_one: the text does not end before one such region. stop_after_first: the text ends behind the first one.
    """

    json: str | None = None
    json_object: bool = False
    regex: str | None = None
    choice: tuple[str, ...] = ()
    grammar: str | None = None
    structural_tag: str | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = True
    reasoning_begin: str = ""
    reasoning_end: str = ""
    reasoning_budget: int | None = None
    triggers: tuple[str, ...] = ()
    at_least_one: bool = False
    stop_after_first: bool = False

    @classmethod
    def of(cls, value: Any, field: str = "structured_outputs") -> StructuredOutputsParams:
        """Return the form that an object of a request describes; nested JSON may be given as text or as an object."""
        if isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            raise InvalidRequest(f"{field} is {value!r:.60}, expected an object with one of {_listed()}", field=field)
        # a dump of vLLM's parameters contains all options, also disabled ones; octavo has no fallback
        given = {
            name: each
            for name, each in value.items()
            if each is not None and (each is not False or name == _CLOSED) and name != _FALLBACK
        }
        unknown = [name for name in given if name not in cls.__struct_fields__]
        if unknown:
            raise InvalidRequest(f"{field} has the field {unknown[0]!r:.60}; known are {_listed()}", field=field)
        for name in _IN_JSON:
            if isinstance(given.get(name), dict | list):
                given[name] = _as_json(given[name], field)
        try:
            return msgspec.convert(given, cls)
        except msgspec.ValidationError as error:
            if isinstance(error.__cause__, InvalidRequest):
                raise error.__cause__ from None
            raise InvalidRequest(f"{field}: {error}", field=field) from None

    def __post_init__(self) -> None:
        for name in _IN_JSON:
            if isinstance(value := getattr(self, name), dict | list):
                msgspec.structs.force_setattr(self, name, _as_json(value, f"structured_outputs.{name}"))
        for name in ("choice", "triggers"):
            value = getattr(self, name) or ()
            if not isinstance(value, list | tuple) or not all(isinstance(each, str) for each in value):
                field = f"structured_outputs.{name}"
                raise InvalidRequest(f"{field} is {value!r:.60}, expected a list of texts", field=field)
            msgspec.structs.force_setattr(self, name, tuple(value))
        given = [name for name in FORMS if getattr(self, name)]
        self._check_regions(has_form=bool(given))
        if len(given) != 1 and (given or self.reasoning_budget is None):
            have = f"has {' and '.join(given)}" if given else "is empty"
            raise InvalidRequest(
                f"structured_outputs {have}; give exactly one of {_listed()}", field="structured_outputs"
            )
        if given:
            check_field("structured_outputs", list(self.choice) or getattr(self, given[0]))
        check_field("structured_outputs.regex", self.regex)
        check_field("structured_outputs.grammar", self.grammar)

    def _check_regions(self, *, has_form: bool) -> None:
        """Raise InvalidRequest for a field that sets where the form begins, and has no effect or is too large."""
        is_region = has_form and all(self.triggers) and not self.structural_tag
        needs: dict[str, tuple[str, object]] = {
            "reasoning_begin": ("reasoning_end", self.reasoning_end),
            "reasoning_budget": ("reasoning_end", self.reasoning_end),
            "triggers": ("texts and a form other than structural_tag", is_region),
            "at_least_one": ("triggers", self.triggers),
            "stop_after_first": ("triggers", self.triggers),
        }
        for name, (needed, is_met) in needs.items():
            if getattr(self, name) not in ("", (), None, False) and not is_met:
                raise InvalidRequest(
                    f"structured_outputs.{name} is set without {needed}; set that too, or leave {name} out",
                    field="structured_outputs",
                )
        if self.reasoning_budget is not None and self.reasoning_budget < 0:
            raise InvalidRequest(
                f"structured_outputs.reasoning_budget is {self.reasoning_budget}, must be at least 0",
                field="structured_outputs",
            )
        check_field("structured_outputs.triggers", list(self.triggers))
        check_field("structured_outputs.reasoning_begin", self.reasoning_begin)
        check_field("structured_outputs.reasoning_end", self.reasoning_end)

    @property
    def form(self) -> str | None:
        """The field of `FORMS` that is set; None where only the length of reasoning is limited."""
        return next((name for name in FORMS if getattr(self, name)), None)


def _as_json(value: Any, field: str) -> str:
    """Return the text of nested JSON. Raises InvalidRequest where it is too large, or no JSON."""
    check_field("structured_outputs", value, field)
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"{field} is no JSON: {error}", field=field) from error


def _listed() -> str:
    return ", ".join(FORMS)
