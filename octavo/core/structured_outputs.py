"""What the text of a request must be: JSON of a schema, one of several texts, a regular expression, a grammar."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from octavo.core.request_limits import check_field
from octavo.errors import InvalidRequest

FORMS: Final = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")
_IN_JSON: Final = ("json", "structural_tag")


class StructuredOutputsParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The form of a text, in the words of vLLM; exactly one of `FORMS` is set. Raises InvalidRequest.

    json: a JSON schema, as text or as an object. json_object: any JSON object. regex: the text matches it as a whole.
    choice: one of these texts. grammar: in Lark's or llama.cpp's (GBNF) notation. structural_tag: free text in which
    regions between tags have schemas. disable_any_whitespace: JSON without white space between its parts.
    """

    json: str | None = None
    json_object: bool = False
    regex: str | None = None
    choice: tuple[str, ...] = ()
    grammar: str | None = None
    structural_tag: str | None = None
    disable_any_whitespace: bool = False

    @classmethod
    def of(cls, value: Any, field: str = "structured_outputs") -> StructuredOutputsParams:
        """Return the form that an object of a request describes; nested JSON may stand as text or as it is."""
        if isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            raise InvalidRequest(f"{field} is {value!r:.60}, expected an object with one of {_listed()}", field=field)
        unknown = [name for name in value if name not in cls.__struct_fields__]
        if unknown:
            raise InvalidRequest(f"{field} has the field {unknown[0]!r:.60}; known are {_listed()}", field=field)
        given = {name: each for name, each in value.items() if each is not None}
        for name in _IN_JSON:
            if isinstance(given.get(name), dict | list):
                check_field("structured_outputs", given[name], field)
                given[name] = json.dumps(given[name], ensure_ascii=False, separators=(",", ":"))
        try:
            return msgspec.convert(given, cls)
        except msgspec.ValidationError as error:
            if isinstance(error.__cause__, InvalidRequest):
                raise error.__cause__ from None
            raise InvalidRequest(f"{field}: {error}", field=field) from None

    def __post_init__(self) -> None:
        given = [name for name in FORMS if getattr(self, name)]
        if len(given) != 1:
            have = f"has {' and '.join(given)}" if given else "is empty"
            raise InvalidRequest(
                f"structured_outputs {have}; give exactly one of {_listed()}", field="structured_outputs"
            )
        check_field("structured_outputs", list(self.choice) or getattr(self, given[0]))
        check_field("structured_outputs.regex", self.regex)
        check_field("structured_outputs.grammar", self.grammar)

    @property
    def form(self) -> str:
        """The one of `FORMS` that is set."""
        return next(name for name in FORMS if getattr(self, name))


def _listed() -> str:
    return ", ".join(FORMS)
