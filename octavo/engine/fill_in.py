"""Prompts of models that fill in what stands between a prefix and a suffix (fill-in-the-middle)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from octavo.core.prompt import Prompt, checked_text
from octavo.engine.tokenizer import Tokenizer
from octavo.errors import InvalidRequest

_FAMILIES: Final = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<PRE>", "<SUF>", "<MID>"),
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
    ("[PREFIX]", "[SUFFIX]", "[MIDDLE]"),
)
_NAMES: Final = dict(zip(("prefix", "suffix", "middle"), zip(*_FAMILIES, strict=True), strict=True))
"""The texts of the tokens, by what they stand before; as in llama.cpp. A GGUF file may name others."""


@dataclass(frozen=True)
class FillTokens:
    """The ids of the tokens before the prefix, the suffix and what is filled in; the last is None where a model writes
    the suffix first and fills in behind the prefix, as Codestral does."""

    prefix: int
    suffix: int
    middle: int | None

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> FillTokens:
        """Return the tokens of a vocabulary. Raises InvalidRequest, which names those that it does not have."""
        found: dict[str, int | None] = {
            kind: next((each for name in (named, *names) if (each := tokenizer.token_id(name)) is not None), None)
            for kind, names in _NAMES.items()
            for named in [tokenizer.special_tokens.get(f"fim_{kind}_token")]
        }
        prefix, suffix, middle = found["prefix"], found["suffix"], found["middle"]
        is_suffix_first = prefix is not None and prefix == tokenizer.token_id("[PREFIX]")
        if prefix is None or suffix is None or (middle is None and not is_suffix_first):
            missing = [kind for kind in _NAMES if found[kind] is None]
            raise InvalidRequest(
                f"suffix cannot be used: the vocabulary of this model has no token for the {' and the '.join(missing)} "
                f"of a text to fill in, such as {_NAMES[missing[0]][0]}; use a model that was trained to fill in",
                field="suffix",
                code="unsupported_parameter",
            )
        return cls(prefix, suffix, None if is_suffix_first else middle)


def fill_in_prompt(tokenizer: Tokenizer, prefix: str, suffix: str, *, adds_special_tokens: bool = True) -> Prompt:
    """Return the prompt of the text between two texts, in which what spells a special token is text.

    Raises InvalidRequest for a model without the tokens for it.
    """
    tokens = FillTokens.of(tokenizer)
    before = [tokens.prefix, *_plain_ids(tokenizer, prefix, "prompt")]
    behind = [tokens.suffix, *_plain_ids(tokenizer, suffix, "suffix")]
    bos = tokenizer.bos_token_id
    starts = adds_special_tokens and bos is not None and tokenizer.encode("")[:1] == [bos]
    ids = [*before, *behind, tokens.middle] if tokens.middle is not None else [*behind, *before]
    return Prompt(token_ids=[*([bos] if starts and bos is not None else []), *ids])


def _plain_ids(tokenizer: Tokenizer, text: str, field: str) -> list[int]:
    spellings = tokenizer.special_spellings
    hidden = spellings.hide(checked_text(text, field), field)
    cut = spellings.show(hidden)
    return tokenizer.encode(cut.text, False, cut.cuts) if text else []
