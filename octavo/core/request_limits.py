"""The limits of every list and text of a request, in one table.

The checks of requests, the reference page and a line of `octavo serve --help` derive from it. Limits that depend on the
model (the context, the vocabulary, the KV cache) are checked where the model is known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from octavo.errors import InvalidRequest


class FieldLimits(msgspec.Struct, frozen=True):
    """The most that one field of a request may hold. None: the field has no such part.

    entries: items of its list, or of its object. chars: characters of one text. total_chars: characters of all its
    texts together. values: values of free-form JSON at all depths. depth: arrays and objects inside each other, in
    free-form JSON. because: what the limit protects.
    """

    because: str
    entries: int | None = None
    chars: int | None = None
    total_chars: int | None = None
    values: int | None = None
    depth: int | None = None


MAX_PROMPTS: Final = 2048
MAX_PROMPT_CHARS: Final = 2 << 20
MAX_REQUEST_CHARS: Final = 4 << 20
MAX_REQUEST_TOKENS: Final = 1 << 20
MAX_SEQUENCES: Final = 4096
MAX_LOGPROB_ENTRIES: Final = 1 << 20
MAX_RESPONSE_LOGPROBS: Final = 1 << 21
"""Log-probabilities of one response: they take almost 1 GB while the JSON of a chat is made, and 0.2 GB afterwards."""
MAX_POOLED_VALUES: Final = 1 << 25
MAX_TTL_S: Final = 365 * 86400
"""Longest life of a pin."""
MAX_DEPTH: Final = 16
"""Arrays and objects inside each other, in free-form JSON that has no limit of its own."""

_WORDS = "each is looked for after every token"
_STEP = "every step reads it"
_LABEL = "it is a label"
_IGNORED = "it has no effect"
_TEMPLATE = "chat templates read it"
_PROMPTS = "the prompts of a request are tokenised and queued together"
_FORM = FieldLimits("it is compiled", entries=16_384, chars=1 << 20, total_chars=1 << 20, values=65_536, depth=64)
_TEXTS = FieldLimits(_PROMPTS, entries=MAX_PROMPTS, chars=MAX_PROMPT_CHARS, total_chars=MAX_REQUEST_CHARS)

_LIMITS: Final = {
    "prompt texts queries text_1 text_2 data_1 data_2 items": _TEXTS,
    "prompt_embeds": FieldLimits(_PROMPTS, entries=MAX_PROMPTS),
    "suffix input_prefix input_suffix query hotwords": FieldLimits(_PROMPTS, chars=MAX_PROMPT_CHARS),
    "input_extra": FieldLimits(
        _PROMPTS, entries=1024, chars=MAX_PROMPT_CHARS, total_chars=MAX_PROMPT_CHARS, values=65_536
    ),
    "tokens": FieldLimits("they are decoded in one piece", entries=MAX_REQUEST_TOKENS),
    "token_ids": FieldLimits("they are one prompt", entries=MAX_REQUEST_TOKENS),
    "token_offsets": FieldLimits(_IGNORED, entries=MAX_REQUEST_TOKENS, values=3 * MAX_REQUEST_TOKENS),
    "sampling_params": FieldLimits(
        "its fields have the limits of a completion", chars=1 << 20, total_chars=1 << 22, values=1 << 17, depth=64
    ),
    "messages": FieldLimits(_TEMPLATE, entries=4096, total_chars=MAX_PROMPT_CHARS),
    "messages[].content": FieldLimits(_TEMPLATE, entries=1024, chars=MAX_PROMPT_CHARS, total_chars=MAX_PROMPT_CHARS),
    "messages[].refusal messages[].reasoning_content messages[].reasoning instructions": FieldLimits(
        _TEMPLATE, chars=MAX_PROMPT_CHARS
    ),
    "messages[].tool_calls": FieldLimits(_TEMPLATE, entries=256),
    "messages[].tool_calls[].function.arguments": FieldLimits(
        _TEMPLATE, chars=MAX_PROMPT_CHARS, total_chars=MAX_PROMPT_CHARS, values=65_536, depth=64
    ),
    "tools": FieldLimits(
        "they are rendered, and their schemas are compiled",
        entries=512,
        chars=65_536,
        total_chars=1 << 20,
        values=65_536,
        depth=64,
    ),
    "tools[].function.name": FieldLimits("it is part of a grammar", chars=128),
    "chat_template": FieldLimits("it is compiled", chars=65_536),
    "chat_template_kwargs": FieldLimits(_TEMPLATE, chars=65_536, total_chars=65_536, values=1024),
    "instruction": FieldLimits("it is part of every pair", chars=65_536),
    "embedding_types": FieldLimits("each is made of every vector", entries=4),
    "documents": FieldLimits(
        _TEMPLATE, entries=1024, chars=MAX_PROMPT_CHARS, total_chars=MAX_PROMPT_CHARS, values=65_536
    ),
    "reasoning_effort verbosity language to_language early_stopping": FieldLimits("it is one word", chars=16),
    "prediction": FieldLimits("it is tokenised", chars=1 << 20, total_chars=1 << 20, values=4096),
    "stop stop_sequences": FieldLimits(_WORDS, entries=64, chars=256, total_chars=4096),
    "bad_words": FieldLimits(_STEP, entries=64, chars=128, total_chars=4096),
    "stop_token_ids logit_bias": FieldLimits(_STEP, entries=1024),
    "allowed_token_ids": FieldLimits(_STEP, entries=16_384),
    "logprob_token_ids label_token_ids": FieldLimits(_STEP, entries=128),
    "repetition_detection": FieldLimits("it has three numbers", chars=64, values=64),
    "structured_outputs response_format guided_json guided_choice": _FORM,
    "guided_regex guided_grammar structured_outputs.regex": FieldLimits("it is compiled", chars=65_536),
    "structured_outputs.grammar": FieldLimits("it is compiled", chars=1 << 20),
    "structured_outputs.triggers": FieldLimits(_WORDS, entries=16, chars=128),
    "structured_outputs.reasoning_begin structured_outputs.reasoning_end": FieldLimits(_WORDS, chars=128),
    "model": FieldLimits(_LABEL, chars=1024),
    "messages[].name messages[].tool_call_id user tenant lora_name prompt_name input_type": FieldLimits(
        _LABEL, chars=256
    ),
    "lora_path model_path weight_dir": FieldLimits("it is a path", chars=4096),
    "new_version weight_version": FieldLimits("the output of each step has it", chars=256),
    "profile_prefix": FieldLimits("it is a part of a name", chars=4096),
    "timestamp_granularities": FieldLimits("there are two", entries=2),
    "cache_salt": FieldLimits("it becomes part of the names of cached blocks", chars=1024),
    "request_id": FieldLimits("it travels in a header", chars=128),
    "request_ids": FieldLimits("each is looked for among the open requests", entries=1024, chars=256),
    "input": FieldLimits(_TEMPLATE, entries=8192),
    "questions": FieldLimits(
        _PROMPTS, entries=400, chars=MAX_PROMPT_CHARS, total_chars=MAX_PROMPT_CHARS, values=1 << 17, depth=40
    ),
    "system": FieldLimits(_TEMPLATE, entries=4096, chars=MAX_PROMPT_CHARS),
    "tool_choice": FieldLimits(_TEMPLATE, chars=1024, total_chars=65_536, values=4096),
    "response_fields": FieldLimits("each is looked up in the answer", entries=64, chars=256),
    "include samplers": FieldLimits(_IGNORED, entries=64, chars=256),
    "client_metadata": FieldLimits(_IGNORED, chars=4096, total_chars=65_536, values=1024),
    "context_management": FieldLimits(_IGNORED, chars=1024, total_chars=65_536, values=1024),
    "metadata": FieldLimits(_IGNORED, entries=16, chars=512, values=64),
    "messages[].annotations messages[].provider_specific_fields": FieldLimits(
        _IGNORED, chars=65_536, total_chars=65_536, values=1024
    ),
    "cache_control messages[].cache_control prompt_cache_options thread": FieldLimits(_IGNORED, chars=256, values=64),
    (
        "speed inference_geo user_profile_id workspace_id guided_decoding_backend service_tier "
        "safety_identifier session_id prompt_cache_key prompt_cache_retention"
    ): FieldLimits(_IGNORED, chars=256),
}
"""By fields that have the same limits, with spaces between them."""
REQUEST_LIMITS: Final[Mapping[str, FieldLimits]] = {
    name: limits for names, limits in _LIMITS.items() for name in names.split()
}
"""Limits by field; `[]` stands for every entry of a list. A prompt of token ids is limited by the context."""


def check_field(name: str, value: Any, field: str | None = None) -> None:
    """Raise InvalidRequest when `value` exceeds the limits of the field `name`, which the caller knows as `field`."""
    limits = REQUEST_LIMITS[name]
    field = name if field is None else field
    if value is None or isinstance(value, int | float):
        return
    if isinstance(value, str):
        check_chars(field, len(value), limits.chars)
        return
    check_entries(field, len(value), limits.entries)
    if limits.values is not None:
        _check_free_form(field, value, limits)
    elif limits.chars is not None:
        check_texts(field, value, limits)


def check_texts(field: str, texts: Sequence[Any], limits: FieldLimits) -> None:
    """Raise InvalidRequest when a text in a list, or all of them together, are too long. Other entries are ignored."""
    total = 0
    for index, text in enumerate(texts):
        if isinstance(text, str):
            check_chars(f"{field}[{index}]", len(text), limits.chars)
            total += len(text)
    check_chars(field, total, limits.total_chars, " together")


def check_entries(field: str, count: int, most: int | None) -> None:
    """Raise InvalidRequest for a list or object with too many entries."""
    if most is not None and count > most:
        raise InvalidRequest(f"{field} has {count:,} entries, must have at most {most:,}; send fewer", field=field)


def check_chars(field: str, count: int, most: int | None, together: str = "") -> None:
    """Raise InvalidRequest for a text with too many characters."""
    if most is not None and count > most:
        raise InvalidRequest(
            f"{field} has {count:,} characters{together}, must have at most {most:,}; shorten it", field=field
        )


def _check_free_form(field: str, value: Any, limits: FieldLimits) -> None:
    """Check JSON of any shape: the number of its values, their depth, the characters of keys and texts."""
    pending: list[tuple[Any, int]] = [(value, 1)]
    num_values = num_chars = 0
    while pending:
        each, depth = pending.pop()
        num_values += 1
        if isinstance(each, str):
            check_chars(field, len(each), limits.chars, " in one of its texts")
            num_chars += len(each)
        elif isinstance(each, Mapping | list | tuple):
            if depth > (limits.depth or MAX_DEPTH):
                raise InvalidRequest(
                    f"{field} nests arrays and objects more than {limits.depth or MAX_DEPTH} deep; flatten it",
                    field=field,
                )
            check_entries(field, num_values + len(pending) + len(each), limits.values)
            if isinstance(each, Mapping):
                pending += [(key, depth + 1) for key in each]
            pending += [(item, depth + 1) for item in (each.values() if isinstance(each, Mapping) else each)]
    check_chars(field, num_chars, limits.total_chars, " together")


def check_logprob_entries(num_prompt_tokens: int, prompt_logprobs: int | None) -> None:
    """Raise InvalidRequest when the log-probabilities of all prompts of a request would take too much memory."""
    if prompt_logprobs is None:
        return
    count = num_prompt_tokens * (prompt_logprobs + 1)
    if count > MAX_LOGPROB_ENTRIES:
        raise InvalidRequest(
            f"the log-probabilities of {num_prompt_tokens:,} prompt tokens with {prompt_logprobs + 1} entries each are "
            f"{count:,}, must be at most {MAX_LOGPROB_ENTRIES:,}; ask for fewer, or send shorter prompts",
            field="prompt_logprobs",
        )


def check_response_logprobs(count: int) -> None:
    """Raise InvalidRequest when the log-probabilities of the outputs of a response that is sent in one piece would take
    too much memory."""
    if count > MAX_RESPONSE_LOGPROBS:
        raise InvalidRequest(
            f"the response has more than {MAX_RESPONSE_LOGPROBS:,} log-probabilities; set stream to true, or ask for "
            "fewer prompts, n, max_tokens or logprobs",
            field="logprobs",
            code="response_too_large",
        )


def check_pooled_values(count: int) -> None:
    """Raise InvalidRequest when the vectors or scores of all prompts of a request would take too much memory."""
    if count > MAX_POOLED_VALUES:
        raise InvalidRequest(
            f"the vectors or scores of the request have {count:,} values together, must have at most "
            f"{MAX_POOLED_VALUES:,}; send fewer texts at once, or shorter ones where each token has a vector",
            field="prompt",
            code="request_too_large",
        )


def request_limits_in_short() -> str:
    """Return one sentence with the limits that users of other servers meet first, for the help of `octavo serve`."""
    stop, bad_words = REQUEST_LIMITS["stop"], REQUEST_LIMITS["bad_words"]
    parts = [
        f"{REQUEST_LIMITS['messages'].entries:,} messages",
        f"{MAX_PROMPTS:,} prompts of {MAX_PROMPT_CHARS:,} characters",
        f"{stop.entries} stop strings of {stop.chars}",
        f"{bad_words.entries} bad words of {bad_words.chars}",
        f"{REQUEST_LIMITS['logit_bias'].entries:,} biased and {REQUEST_LIMITS['allowed_token_ids'].entries:,} allowed "
        "token ids",
    ]
    return f"Besides, a request has at most {', '.join(parts)} (docs/reference/request-limits.md lists all limits)."


def checked_ttl_s(ttl_s: Any) -> float:
    """Return the lifetime of a pin in seconds. Raises InvalidRequest."""
    is_number = isinstance(ttl_s, int | float) and not isinstance(ttl_s, bool)
    if not is_number or not 0 < ttl_s <= MAX_TTL_S:
        raise InvalidRequest(
            f"ttl_s is {ttl_s!r}, must be a number of seconds above 0 and at most {MAX_TTL_S:,} (a year); unpin_prefix "
            "ends a pin before its time",
            field="ttl_s",
        )
    return float(ttl_s)
