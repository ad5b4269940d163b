"""The form of the text that a request wants: `response_format`, `structured_outputs`, and vLLM's older names."""

from __future__ import annotations

import functools
import logging
from typing import Annotated, Any, Final

from octavo.core.structured_outputs import StructuredOutputsParams
from octavo.errors import InvalidRequest, named_by_the_caller
from octavo.logging import escaped
from octavo.server.decode import EngineBody, Refused
from octavo.server.schema.bodies import PromptBody
from octavo.structured_output.grammars import check_grammar, lenient_schema

logger = logging.getLogger(__name__)

_GUIDED: Final = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}


class FormFields(EngineBody, PromptBody, kw_only=True):
    """The fields of a request that state the form of its text. At most one of them is set."""

    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: Annotated[
        Any, Refused("set disable_any_whitespace in structured_outputs, or leave it out")
    ] = None

    def form(self) -> StructuredOutputsParams | None:
        """Return the form that the text must have; None for any text. Raises InvalidRequest."""
        name = self._form_field()
        if name is None:
            return None
        value = getattr(self, name)
        if name == "response_format":
            return _of_response_format(value)
        with named_by_the_caller(self.form_names):
            return StructuredOutputsParams.of({_GUIDED[name]: value} if name in _GUIDED else value, name)

    @property
    def form_names(self) -> dict[str, str]:
        """The request's name for the form, which the engine knows as structured_outputs."""
        name = self._form_field()
        return {} if name is None else {"structured_outputs": name}

    @property
    def may_take_long(self) -> bool:
        return super().may_take_long or self.form() is not None

    def check_form(self) -> None:
        """Raise InvalidRequest where the form cannot be used. May take seconds."""
        form = self.form()
        if form is not None:
            try:
                if left_out := check_grammar(form):
                    warn_once("texts of a schema that is not strict", " ".join(left_out))
            except InvalidRequest as error:
                name = self._form_field()
                raise InvalidRequest(f"{name}: {error}", field=name, code=error.code) from error

    def _form_field(self) -> str | None:
        names = ("response_format", "structured_outputs", *_GUIDED)
        given = [name for name in names if getattr(self, name) is not None]
        if self.response_format is not None and self.response_format.get("type") == "text":
            given.remove("response_format")
        if len(given) > 1:
            raise InvalidRequest(f"{given[0]} and {given[1]} are both set; give one of them", field=given[1])
        return given[0] if given else None


@functools.lru_cache(64)
def warn_once(what: str, left_out: str) -> None:
    """Log which keywords of lenient schemas a grammar ignores, once for each message while it is remembered."""
    logger.warning("%s may break it: %s", what, escaped(left_out)[:400])


def _of_response_format(value: dict[str, Any]) -> StructuredOutputsParams:
    field = "response_format"
    match value.get("type"):
        case "json_object":
            return StructuredOutputsParams(json_object=True)
        case "json_schema":
            described = value.get("json_schema")
            # a response without a schema is any JSON, as OpenAI has it where strict is off
            schema = described.get("schema", {}) if isinstance(described, dict) else None
            if not isinstance(described, dict) or not isinstance(schema, dict):
                raise InvalidRequest(
                    "response_format.json_schema must be an object with a schema, which is an object too", field=field
                )
            form = StructuredOutputsParams.of({"json": schema}, field)
            # OpenAI promises that a text follows any schema only where strict is set
            return form if described.get("strict") is True else StructuredOutputsParams(grammar=lenient_schema(schema))
        case "structural_tag":
            return StructuredOutputsParams.of({"structural_tag": value}, field)
        case kind:
            raise InvalidRequest(
                f"response_format.type is {kind!r:.60}; it is text, json_object, json_schema or structural_tag",
                field=field,
            )
