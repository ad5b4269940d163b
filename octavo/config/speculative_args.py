"""What a person may set about speculative decoding; a part of `args`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

import msgspec

from octavo.config.fields import Arg
from octavo.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class SpeculativeArgs:
    """Where guesses of the next tokens come from."""

    heading: ClassVar = "Speculative decoding"

    speculative_config: Annotated[
        dict[str, Any],
        Arg(
            'JSON such as {"method": "ngram", "num_speculative_tokens": 8}: guesses of the next tokens, of which one '
            "step computes several where that pays. Results stay the same, bit by bit."
        ),
    ] = field(default_factory=dict)


class SpeculativeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The value of `speculative_config`, with vLLM's names.

    method: ngram looks the last tokens up in the prompt and the output of the request, suffix also in outputs of other
    requests that share its prefix cache. grammar guesses what structured output leaves no choice of, and nothing else;
    the others guess that too.
    num_speculative_tokens: most guesses for a sequence in a step. How many there are follows from measured costs.
    prompt_lookup_max, prompt_lookup_min: how many last tokens are looked up, the longest match first.
    """

    method: Literal["ngram", "suffix", "grammar"]
    num_speculative_tokens: Annotated[int, msgspec.Meta(ge=1, le=64)] = 16
    prompt_lookup_max: Annotated[int, msgspec.Meta(ge=1, le=64)] = 8
    prompt_lookup_min: Annotated[int, msgspec.Meta(ge=1, le=64)] = 2


def speculative_config(args: SpeculativeArgs) -> SpeculativeConfig | None:
    """Return what `args` ask for; None for no speculation. Raises ConfigError."""
    if not args.speculative_config:
        return None
    try:
        config = msgspec.convert(args.speculative_config, SpeculativeConfig)
    except msgspec.ValidationError as error:
        known = ", ".join(SpeculativeConfig.__struct_fields__)
        raise ConfigError(f"speculative_config: {error}; its fields are {known}") from error
    if config.prompt_lookup_min > config.prompt_lookup_max:
        raise ConfigError(
            f"speculative_config: prompt_lookup_min is {config.prompt_lookup_min}, must be at most prompt_lookup_max, "
            f"which is {config.prompt_lookup_max}"
        )
    return config
