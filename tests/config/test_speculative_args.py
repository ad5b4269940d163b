"""What may be set about speculative decoding, and what is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.config.args import EngineArgs
from octavo.config.speculative_args import SpeculativeConfig, speculative_config
from octavo.errors import ConfigError


def test_without_it_nothing_speculates() -> None:
    assert speculative_config(EngineArgs()) is None


def test_a_text_of_json_is_a_mapping() -> None:
    expected = SpeculativeConfig(method="ngram", num_speculative_tokens=4)
    for value in ('{"method": "ngram", "num_speculative_tokens": 4}', {"method": "ngram", "num_speculative_tokens": 4}):
        assert speculative_config(EngineArgs(speculative_config=value)) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"method": "ngram", "num_speculative_tokens": 0}, "num_speculative_tokens"),
        ({"method": "oracle"}, "'oracle' - at `[$].method`; its fields are method"),
        ({}, None),
        ({"num_speculative_tokens": 3}, "missing required field `method`"),
        ({"method": "ngram", "k": 3}, "unknown field `k`"),
        ({"method": "ngram", "prompt_lookup_min": 9}, "prompt_lookup_min is 9, must be at most prompt_lookup_max"),
    ],
)
def test_a_wrong_value_is_named(value: dict[str, Any], message: str | None) -> None:
    if message is None:
        assert speculative_config(EngineArgs(speculative_config=value)) is None
        return
    with pytest.raises(ConfigError, match=message):
        speculative_config(EngineArgs(speculative_config=value))


@pytest.mark.parametrize("value", ["ngram", "{", 3, ["a", "b"]])
def test_what_is_no_object_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match="speculative_config is"):
        EngineArgs(speculative_config=value)
