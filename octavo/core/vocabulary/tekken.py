"""Mistral's tokenizer files (tekken.json) in the layout of tokenizer.json."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from octavo.core.vocabulary.byte_level import SPECIAL, byte_level_bpe
from octavo.errors import CheckpointError

TEKKEN_JSON: Final = "tekken.json"
_MOST_TOKENS: Final = 1 << 24
_SPECIAL: Final = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"),
    *("[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]"),
    *("[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"),
)
"""Special tokens of files that list none, from id 0 on."""
_TEMPLATE: Final = """\
{%- set left = namespace(tools=tools) %}{{ bos_token }}{% for message in messages %}\
{% set said %}{% if message.content %}{% for part in message.content %}\
{% if part.type == 'audio' %}[BEGIN_AUDIO][AUDIO]{% elif part.type == 'image' %}[IMG]{% else %}\
{% if loop.previtem is defined and loop.previtem.type == 'text' %}{{ '\\n\\n' }}{% endif %}{{ part.text }}\
{% endif %}{% endfor %}{% endif %}{% endset %}\
{% if message.role == 'system' %}[SYSTEM_PROMPT]{{ said }}[/SYSTEM_PROMPT]\
{% elif message.role == 'tool' %}[TOOL_RESULTS]{{ said }}[/TOOL_RESULTS]\
{% elif message.role == 'assistant' %}{{ said }}{% for call in message.tool_calls or [] %}\
[TOOL_CALLS]{{ call.function.name }}[ARGS]\
{{ call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}\
{% endfor %}{{ eos_token }}{% else %}\
{% if left.tools %}[AVAILABLE_TOOLS]{{ left.tools | tojson }}[/AVAILABLE_TOOLS]{% set left.tools = none %}{% endif %}\
[INST]{{ said }}[/INST]{% endif %}{% endfor %}"""
"""The template of version 13, which writes tools before the first message of a user and names no calls."""
_OLD_TEMPLATE: Final = """\
{%- set left = namespace(system='', last=0) %}{% for message in messages %}\
{% if message.role == 'user' %}{% set left.last = loop.index %}{% endif %}{% endfor %}\
{{ bos_token }}{% for message in messages %}\
{% set said %}{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}\
{% if part.type == 'image' %}[IMG]{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{% endset %}\
{% if message.role == 'system' %}{% set left.system = said ~ '\\n\\n' %}\
{% elif message.role == 'assistant' %}{{ said }}{{ eos_token }}\
{% elif message.role == 'user' %}[INST]{{ left.system if loop.index == left.last else '' }}{{ said }}[/INST]\
{% else %}{{ raise_exception('this template has no messages of the role ' ~ message.role) }}{% endif %}{% endfor %}"""
"""The template of version 3, without tools: the system message stands before the last message of a user."""
_TEMPLATES: Final = {"v3": _OLD_TEMPLATE, "v13": _TEMPLATE}


def read_tekken(file: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the equivalent contents of tokenizer.json and tokenizer_config.json. Raises CheckpointError."""
    try:
        tekken = json.loads(file.read_text(encoding="utf-8"))
        names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
        found = _TEMPLATES.get(str(tekken["config"].get("version")))
        template = {} if found is None else {"chat_template": found}
        return _tokenizer_of(tekken), {"add_bos_token": True, "add_eos_token": False, **names, **template}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{file}: is not a usable tokenizer ({error!r:.200}); download it again") from error


def _tokenizer_of(tekken: Mapping[str, Any]) -> dict[str, Any]:
    """Return the contents of a tokenizer.json that tokenises texts like the tekken.json. Special tokens have the first
    ids, also those without a name.
    """
    config = tekken["config"]
    num_special, vocab_size = int(config["default_num_special_tokens"]), int(config["default_vocab_size"])
    if not 0 <= num_special <= vocab_size <= min(_MOST_TOKENS, num_special + len(tekken["vocab"])):
        raise ValueError(f"default_vocab_size is {vocab_size}, default_num_special_tokens {num_special}")
    listed = tekken.get("special_tokens")
    special = [each["token_str"] for each in sorted(listed, key=lambda each: each["rank"])] if listed else [*_SPECIAL]
    special += [f"<SPECIAL_{token_id}>" for token_id in range(len(special), num_special)]
    entries = sorted(tekken["vocab"], key=lambda each: each["rank"])[: vocab_size - num_special]
    ranks = {base64.b64decode(each["token_bytes"], validate=True): rank for rank, each in enumerate(entries)}
    added = [{"id": token_id, "content": text, **SPECIAL} for token_id, text in enumerate(special)]
    return byte_level_bpe(ranks, num_special, str(config["pattern"]), added)
