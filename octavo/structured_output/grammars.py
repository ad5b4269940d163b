"""Grammars of llguidance from what requests ask for, and the checks of them that need no tokenizer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from octavo.core.structured_outputs import StructuredOutputsParams
from octavo.errors import InvalidRequest
from octavo.structured_output.bounds import (
    Excess,
    excess_of_gbnf,
    excess_of_lark,
    excess_of_schemas,
    excess_of_tags,
    is_lark,
)
from octavo.structured_output.closed_schemas import closed

if TYPE_CHECKING:
    from llguidance import LLParserLimits

_MOST_SPACE: Final = r"\r?\n[ \t]{0,32}|[ \t]{1,4}"
"""White space between the parts of JSON, at most one line end: some models would repeat it without end."""

_MOST_MESSAGE: Final = 400
_NO_FORCING: Final = '%llguidance {"no_forcing": true}'


def grammar_of(params: StructuredOutputsParams) -> str:
    """Return the grammar in llguidance's notation. Raises InvalidRequest for text that is no grammar.

    Schemas may not change how they are read: what they use and is not supported is refused, not left out.
    """
    from llguidance import LLMatcher, StructTag

    space = {"whitespace_flexible": False} if params.disable_any_whitespace else {"whitespace_pattern": _MOST_SPACE}
    options: Any = {"lenient": False, **space}
    try:
        match params.form:
            case "json":
                schema = json.loads(params.json or "")
                _refuse(params, excess_of_schemas([schema]))
                schema = closed(schema, is_closed=params.disable_additional_properties)
                return LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=options)
            case "json_object":
                return LLMatcher.grammar_from_json_schema('{"type": "object"}', overrides=options)
            case "regex":
                return LLMatcher.grammar_from_regex(params.regex or "")
            case "choice":
                return LLMatcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, params.choice)))
            case "grammar":
                lark = _lark_of(params)
                _refuse(params, excess_of_lark(lark))
                return LLMatcher.grammar_from_lark(lark)
            case _:
                tags = _tags(params.structural_tag or "", is_closed=params.disable_additional_properties)
                _refuse(params, excess_of_tags(tags))
                return StructTag.to_grammar([StructTag(**each) for each in tags])
    except InvalidRequest:
        raise
    except Exception as error:  # the converters are third-party code and raise any error
        raise _refused(params, str(error)) from None


def lenient_schema(schema: Mapping[str, Any]) -> str:
    """Return the grammar of JSON that follows a schema, but for keywords that llguidance does not have."""
    options = {"lenient": True, "whitespace_pattern": _MOST_SPACE}
    return f"start: %json {json.dumps({**closed(schema), 'x-guidance': options})}"


def without_forcing(grammar: str) -> str:
    """Return a grammar in which the model chooses the tokens of a text that the grammar forces.

    Else llguidance encodes such a text, in which the spelling of a special token becomes that token.
    """
    if not grammar.startswith("{"):
        return f"{_NO_FORCING}\n{grammar}"
    parts = json.loads(grammar)["grammars"]
    assert len(parts) == 1, "converters make one grammar"
    lark, schema = parts[0]["lark_grammar"], parts[0]["json_schema"]
    return f"{_NO_FORCING}\n{lark or f'start: %json {json.dumps(schema)}'}"


def check_grammar(params: StructuredOutputsParams) -> list[str]:
    """Return what is left out of a grammar with a lenient schema. May take a second.

    Raises InvalidRequest for a grammar that is wrong, too large, or not supported.
    """
    if params.form is None:
        return []
    from llguidance import LLMatcher

    if params.json is not None:
        _refuse_counts(params)
    is_wrong, messages = LLMatcher.validate_grammar_with_warnings(grammar_of(params), limits=parser_limits())
    if is_wrong:
        raise _refused(params, " ".join(messages))
    return messages


def parser_limits() -> LLParserLimits:
    """Return the limits of a grammar's size, and of the work that one token may take."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=100_000,
        step_max_items=50_000,  # ordinary schemas of objects need more than 3,000
        max_items_in_row=600,  # the time of a token grows with its square
        max_lexer_states=50_000,
        max_grammar_size=200_000,
        verbose_errors=False,
    )


def _refuse_counts(params: StructuredOutputsParams) -> None:
    """Refuse minProperties that free keys have to reach: keys that are the same would count as several."""
    try:
        left = [json.loads(params.json or "")]
    except (ValueError, RecursionError) as error:
        raise _refused(params, str(error)) from None
    while left:
        value = left.pop()
        if isinstance(value, dict):
            least, required = value.get("minProperties"), value.get("required")
            num_required = len(required) if isinstance(required, list) else 0
            if isinstance(least, int) and least > num_required + 1:
                raise _refused(params, f"minProperties of {least} needs as many required keys, or one less")
        if isinstance(value, dict | list):
            left += value.values() if isinstance(value, dict) else value


def _lark_of(params: StructuredOutputsParams) -> str:
    """Return a grammar in Lark's notation; that of llama.cpp is converted."""
    grammar = params.grammar or ""
    if is_lark(grammar):
        return grammar
    from llguidance.gbnf_to_lark import gbnf_to_lark

    _refuse(params, excess_of_gbnf(grammar))
    return gbnf_to_lark(grammar)


def _refuse(params: StructuredOutputsParams, excess: Excess | None) -> None:
    if excess is not None:
        what, count, most = excess
        raise _refused(params, f"it has {count:,} {what}, must have at most {most:,}; make it smaller")


def _tags(text: str, *, is_closed: bool) -> list[dict[str, Any]]:
    """Return the regions of a structural tag: {"structures": [{"begin", "schema", "end"}], "triggers": […]}."""
    tag = json.loads(text)
    structures, triggers = tag.get("structures"), tag.get("triggers")
    if not structures or not triggers:
        raise ValueError('expected {"structures": [{"begin": …, "schema": …, "end": …}, …], "triggers": […]}')
    return [
        {
            "trigger": _trigger_of(each["begin"], triggers),
            "begin": each["begin"],
            "grammar": closed(each["schema"], is_closed=is_closed),
            "end": each["end"],
        }
        for each in structures
    ]


def _trigger_of(begin: str, triggers: list[str]) -> str:
    found = next((trigger for trigger in triggers if begin.startswith(trigger)), None)
    if found is None:
        raise ValueError(f"no trigger begins {begin!r:.60}")
    return found


def _refused(params: StructuredOutputsParams, reason: str) -> InvalidRequest:
    text = " ".join(reason.split())
    text = text if len(text) <= _MOST_MESSAGE else text[:_MOST_MESSAGE] + "…"
    return InvalidRequest(f"{params.form} cannot be used: {text}", field="structured_outputs", code="invalid_grammar")
