"""Prompts of models that fill in what stands between a prefix and a suffix (fill-in-the-middle)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Final

from octavo.core.prompt import Prompt, checked_text
from octavo.engine.text.tokenizer import Tokenizer
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
_NEEDED: Final = dict(zip(("prefix", "suffix", "middle"), zip(*_FAMILIES, strict=True), strict=True))
_NAMES: Final = _NEEDED | {
    "repository": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "file": ("<|file_sep|>",),
    "padding": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>"),
}
"""The texts of the tokens, by what they stand before; as in llama.cpp. A GGUF file may name others."""
_BETWEEN_FILES: Final = "\n\n--- snippet ---\n\n"
"""Stands before each other file where the vocabulary has no token for it."""


@dataclass(frozen=True)
class FillTokens:
    """The ids of the tokens before the prefix, the suffix and what is filled in; the last is None where a model writes
    the suffix first and fills in behind the prefix, as Codestral does. repository, file: those before the name of a
    repository and of a file; None where the vocabulary has none."""

    prefix: int
    suffix: int
    middle: int | None
    repository: int | None
    file: int | None

    @classmethod
    def of(cls, tokenizer: Tokenizer, field: str = "suffix") -> FillTokens:
        """Return the tokens of a vocabulary. field: what the client calls the suffix. Raises InvalidRequest, which
        names those that it does not have."""
        found = _found(tokenizer)
        prefix, suffix, middle = found["prefix"], found["suffix"], found["middle"]
        is_suffix_first = prefix is not None and prefix == tokenizer.token_id("[PREFIX]")
        if prefix is None or suffix is None or (middle is None and not is_suffix_first):
            missing = [kind for kind in _NEEDED if found[kind] is None]
            raise InvalidRequest(
                f"{field} cannot be used: the vocabulary of this model has no token for the "
                f"{' and the '.join(missing)} of a text to fill in, such as {_NAMES[missing[0]][0]}; use a model that "
                "was trained to fill in",
                field=field,
                code="unsupported_parameter",
            )
        return cls(prefix, suffix, None if is_suffix_first else middle, found["repository"], found["file"])


def _found(tokenizer: Tokenizer) -> dict[str, int | None]:
    return {
        kind: next((each for name in (named, *names) if (each := tokenizer.token_id(name)) is not None), None)
        for kind, names in _NAMES.items()
        for named in [tokenizer.special_tokens.get(f"fim_{kind}_token")]
    }


def ends_of_filling_in(tokenizer: Tokenizer) -> list[int]:
    """Return the tokens that end what is filled in besides the end of a text: another file begins, or padding."""
    found = _found(tokenizer)
    return [each for kind in ("padding", "repository", "file") if (each := found[kind]) is not None]


def fill_in_prompt(
    tokenizer: Tokenizer,
    prefix: str,
    suffix: str,
    *,
    adds_special_tokens: bool = True,
    files: Sequence[tuple[str, str]] = (),
    most_tokens: int = 0,
    fields: tuple[str, str] = ("prompt", "suffix"),
) -> Prompt:
    """Return the prompt of the text between two texts, in which what spells a special token is text.

    files: names and texts of other files, which stand before it; the first ones are left out where the prompt would
    have more than most_tokens. fields: what the client calls prefix and suffix. Raises InvalidRequest for a model
    without the tokens for it.
    """
    tokens = FillTokens.of(tokenizer, fields[1])
    before = [tokens.prefix, *_plain_ids(tokenizer, fields[0], prefix)]
    behind = [tokens.suffix, *_plain_ids(tokenizer, fields[1], suffix)]
    bos = tokenizer.bos_token_id
    starts = adds_special_tokens and bos is not None and tokenizer.encode("")[:1] == [bos]
    ids = [*before, *behind, tokens.middle] if tokens.middle is not None else [*behind, *before]
    start = [bos] if starts and bos is not None else []
    others = _other_files(tokenizer, tokens, files, most_tokens - len(start) - len(ids))
    return Prompt(token_ids=[*start, *others, *ids])


def _other_files(tokenizer: Tokenizer, tokens: FillTokens, files: Sequence[tuple[str, str]], room: int) -> list[int]:
    """Return the ids of the last of the files that fit into so many, with the names that llama.cpp writes for the
    repository and the file to fill in."""
    plain = partial(_plain_ids, tokenizer, "input_extra")
    first = [] if tokens.repository is None else [tokens.repository, *plain("myproject\n")]
    last = [] if tokens.file is None else [tokens.file, *plain("filename\n")]
    room -= len(first) + len(last)
    pieces: list[list[int]] = []
    for name, text in reversed(files):
        if tokenizer.has_more_tokens(text, room):
            break
        head = plain(_BETWEEN_FILES) if tokens.file is None else [tokens.file, *plain(f"{name}\n")]
        piece = [*head, *plain(text)]
        room -= len(piece)
        if room < 0:
            break
        pieces.append(piece)
    return [*first, *chain.from_iterable(reversed(pieces)), *last] if pieces else []


def _plain_ids(tokenizer: Tokenizer, field: str, text: str) -> list[int]:
    spellings = tokenizer.special_spellings
    hidden = spellings.hide(checked_text(text, field), field)
    cut = spellings.show(hidden)
    return tokenizer.encode(cut.text, False, cut.cuts) if text else []
