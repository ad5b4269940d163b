"""What a person may set about speculative decoding; a part of `args`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, get_args

import msgspec

from octavo.config.fields import ArgumentGroup, arg
from octavo.config.section import Section
from octavo.errors import ConfigError, suggestion

Quantization = Literal["int8", "int4"]
SampleMethod = Literal["greedy", "same_key"]
ASSISTANT: Final = "Gemma4AssistantForCausalLM"
"""The architecture of models that guess for Gemma 4 from its own keys and values."""


@dataclass(frozen=True)
class ModelMethod:
    """How the workers guess.

    head: the class in octavo.models of a head with a checkpoint of its own; None for the class of its
    architecture.
    architecture: of such checkpoints, where that alone tells the method (others: `draft_method.py`).
    most: how many tokens the head of a checkpoint guesses; None for as many as are asked for.
    catches_up: whether it can guess behind tokens that were computed without it.
    """

    head: str | None = None
    architecture: str | None = None
    most: Callable[[Section], int] | None = None
    catches_up: bool = False


def _most_of_dspark(c: Section) -> int:
    """Return the tokens of a block; the last known one gives a guess, too, unless the library says otherwise."""
    size = c.optional_positive("block_size") or c.positive("dspark_block_size", 16)
    return max(1, size - (not c.bool("sample_from_anchor", c.values.get("speculators_model_type") is None)))


MODEL_METHODS: Final[Mapping[str, ModelMethod]] = {
    "draft_model": ModelMethod(catches_up=True),
    "eagle": ModelMethod("draft_heads.EagleHead"),
    "eagle3": ModelMethod("draft_heads.Eagle3Head"),
    "dflash": ModelMethod("block_heads.BlockHead", most=lambda c: max(1, c.positive("block_size", 16) - 1)),
    "dspark": ModelMethod("block_heads.MarkovHead", most=_most_of_dspark),
    "medusa": ModelMethod(
        "state_heads.MedusaHead", "MedusaModel", most=lambda c: c.positive("num_heads"), catches_up=True
    ),
    "mlp_speculator": ModelMethod(
        "state_heads.SpeculatorHead",
        "MLPSpeculatorPreTrainedModel",
        most=lambda c: c.positive("n_predict"),
        catches_up=True,
    ),
    "mtp": ModelMethod("gemma4.Gemma4Assistant", ASSISTANT),
}
"""Methods whose guesses the workers make."""
METHODS: Final = ("ngram", "suffix", "grammar", *MODEL_METHODS)

_CHOICES: Final[Mapping[str, tuple[Any, ...]]] = {
    "method": METHODS,
    "quantization": get_args(Quantization),
    "draft_sample_method": get_args(SampleMethod),
    "draft_tensor_parallel_size": (1,),
    "rejection_sample_method": ("standard",),
}
"""What fields may be that take a few values."""
_MOST_TOKENS: Final = 1 << 20
_MOST_MS: Final = 1_000_000


class SpeculativeArgs(ArgumentGroup, heading="Speculative decoding"):
    """Where guesses of the next tokens come from."""

    speculative_config: dict[str, Any] | None = arg(
        None,
        'JSON such as {"method": "ngram", "num_speculative_tokens": 8}: guesses of the next tokens, of which one '
        "step computes several where that pays. Results stay the same, bit by bit. The method is one of "
        f"{', '.join(METHODS)}.",
    )


class SpeculativeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The value of `speculative_config`, with vLLM's names.

    method: ngram looks the last tokens up in the prompt and the output of the request, suffix also in outputs of other
    requests that share its prefix cache. grammar guesses what structured output leaves no choice of, and nothing else;
    the others guess that too. draft_model runs a second model beside the first, eagle, eagle3, dflash, dspark, medusa
    and mlp_speculator a head that was trained for its hidden states, and mtp the layer of its own checkpoint for that.
    Where model is set it may be left out, and follows from that checkpoint.
    num_speculative_tokens: most guesses for a sequence in a step. How many there are follows from measured costs.
    prompt_lookup_max, prompt_lookup_min: how many last tokens are looked up, the longest match first.
    model, revision: the checkpoint of the draft model or head: a directory, a name on a hub, or octavo-tiny. mtp reads
    the model's own, or the assistant of Gemma 4 that is named.
    quantization: how its weights are kept: int8 or int4; in the model's dtype where it is None.
    step_ms: [tokens, milliseconds] of steps, which octavo bench calibrate has measured; what steps take here replaces
    it.
    draft_sample_method: greedy guesses the likeliest token; same_key draws it with the request's parameters and with
    the random numbers that the model's own token at that position is drawn with.
    parallel_drafting: whether a draft model guesses all tokens in one pass, with masks; as its checkpoint says where it
    is None. draft_tensor_parallel_size: 1, for each rank has all of what guesses. rejection_sample_method: standard,
    for guesses never change the results.
    """

    method: str
    num_speculative_tokens: Annotated[int, msgspec.Meta(ge=1, le=64)] = 16
    prompt_lookup_max: Annotated[int, msgspec.Meta(ge=1, le=64)] = 8
    prompt_lookup_min: Annotated[int, msgspec.Meta(ge=1, le=64)] = 2
    model: str | None = None
    revision: str | None = None
    quantization: Quantization | None = None
    draft_sample_method: SampleMethod = "greedy"
    parallel_drafting: bool | None = None
    draft_tensor_parallel_size: Literal[1] | None = None
    rejection_sample_method: Literal["standard"] | None = None
    step_ms: tuple[tuple[int, float], ...] = ()

    @property
    def catches_up(self) -> bool:
        """Return whether it can guess behind tokens that were computed without it."""
        found = MODEL_METHODS.get(self.method)
        # unlike a layer of the model's own checkpoint, the assistant of Gemma 4 can
        return found is not None and (found.catches_up or (self.method == "mtp" and self.model is not None))

    @property
    def has_model(self) -> bool:
        """Return whether the workers guess, with weights of their own for it."""
        return self.method in MODEL_METHODS


class DraftConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The model that guesses in the workers. path: its checkpoint on this machine. overrides: those of the model, where
    it is a part of that. The rest is as the user set it."""

    method: str
    path: str
    quantization: str | None = None
    activation_bits: int = 8
    sample_method: str = "greedy"
    is_parallel: bool | None = None
    overrides: dict[str, Any] = {}


def speculative_config(args: SpeculativeArgs) -> SpeculativeConfig | None:
    """Return what `args` ask for; None for no speculation. Raises ConfigError."""
    if args.speculative_config is None:
        return None
    given = dict(args.speculative_config)
    if str(given.get("method")).endswith("_mtp"):
        given["method"] = "mtp"  # as vLLM called it for each family
    config = _converted(given)
    if config.prompt_lookup_min > config.prompt_lookup_max:
        raise ConfigError(
            f"speculative_config: prompt_lookup_min is {config.prompt_lookup_min}, must be at most prompt_lookup_max, "
            f"which is {config.prompt_lookup_max}"
        )
    _check_model(config)
    tokens = [count for count, _ in config.step_ms]
    is_sound = all(1 <= count <= _MOST_TOKENS and 0 < time_ms <= _MOST_MS for count, time_ms in config.step_ms)
    if tokens != sorted(set(tokens)) or not is_sound:
        raise ConfigError(
            f"speculative_config: step_ms is {config.step_ms}, expected pairs of tokens, from 1 to {_MOST_TOKENS:,} in "
            f"rising order, and milliseconds above 0, at most {_MOST_MS:,}; take what octavo bench calibrate writes"
        )
    return config


def _converted(given: Mapping[str, Any]) -> SpeculativeConfig:
    """Return the fields with their types. Raises ConfigError with the field, its value and what it may be."""
    known = SpeculativeConfig.__struct_fields__
    for name, value in given.items():
        if name not in known:
            raise ConfigError(
                f"speculative_config has the unknown field {name!r}, expected some of {', '.join(known)}"
                f"{suggestion(str(name), known)}"
            )
        choices = [*map(str, _CHOICES.get(name, ()))]
        if choices and value is not None and value not in _CHOICES[name]:
            expected = f"{'one of ' if choices[1:] else ''}{', '.join(choices)}{suggestion(str(value), choices)}"
            raise ConfigError(f"speculative_config: {name} is {value!r:.60}, expected {expected}")
    if given.get("method") is None:
        raise ConfigError(
            f"speculative_config: method is not set; give one of {', '.join(METHODS)}, or name the checkpoint of a "
            "draft model or head as model"
        )
    try:
        return msgspec.convert(given, SpeculativeConfig)
    except msgspec.ValidationError as error:
        expected, _, place = str(error).partition(" - at `$.")
        name = re.split(r"\W", place)[0]
        raise ConfigError(
            f"speculative_config: {name} is {given[name]!r:.60}, {expected[:1].lower()}{expected[1:]}"
        ) from error


def _check_model(config: SpeculativeConfig) -> None:
    if config.has_model and (config.method != "mtp" or config.model):
        if not config.model:
            raise ConfigError(
                f"speculative_config: method is {config.method}, and model is not set; name the checkpoint of "
                "the draft model or head"
            )
        return
    own = "which runs no model of its own" if not config.has_model else "whose layer is in the model's own checkpoint"
    for name in ("model", "revision", "quantization"):
        if getattr(config, name) is not None:
            raise ConfigError(
                f"speculative_config: {name} is set, but method is {config.method}, {own}; leave it out, "
                "or take the method draft_model"
            )
