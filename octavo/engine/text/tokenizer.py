"""Text to token ids and back, over a model directory's `tokenizer.json`, or files in its place."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from octavo.config.section import read_json_object
from octavo.core.prompt import checked_text
from octavo.core.vocabulary.byte_level import byte_of_char
from octavo.core.vocabulary.ranked_tokens import ranked_beside, read_ranked
from octavo.engine.text.special_spellings import SpecialSpellings
from octavo.errors import CheckpointError, InvalidRequest
from octavo.gguf.reader import is_gguf, read_gguf
from octavo.gguf.tokenizer import read_tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

TOKENIZER_JSON: Final = "tokenizer.json"
TOKENIZER_CONFIG: Final = "tokenizer_config.json"
SPECIAL_TOKENS_MAP: Final = "special_tokens_map.json"

LONG_TEXT_CHARS: Final = 4096
"""Texts from this length on are encoded without holding the interpreter lock, so other threads go on meanwhile."""

_BEFORE_A_WORD: Final = ("\n", ".", "a")
"""Texts that words are encoded behind: the first one that no token joins to the word is taken."""

_REPLACEMENT: Final = "\ufffd"
_BYTE_PIECE: Final = re.compile("<0x([0-9A-Fa-f]{2})>")
"""How vocabularies of the sentencepiece kind write the token of one byte."""

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class Tokenizer:
    """A tokenizer with the conventions of its model: which special tokens are added to a text, and which are left out.

    Safe to use from several threads.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        special_tokens: dict[str, str] | None = None,
        add_bos: bool | None = None,
        add_eos: bool | None = None,
        config: dict[str, Any] | None = None,
    ) -> None:
        """special_tokens: texts by name (`bos_token`, `eos_token`, …). add_bos, add_eos: whether encoding adds them;
        None leaves it to the backend's post-processor. config: all of tokenizer_config.json.

        `releases_lock` may be set to False where no other thread waits for the interpreter lock."""
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.releases_lock = True
        self._add_bos = add_bos
        self._add_eos = add_eos
        self._texts: dict[int, str] = {}
        self._first_texts: tuple[dict[int, str], dict[int, str]] = ({}, {})
        self.special_tokens = special_tokens or {}
        self.config = config or {}
        self.bos_token = self.special_tokens.get("bos_token")
        self.eos_token = self.special_tokens.get("eos_token")
        self.bos_token_id = self.token_id(self.bos_token)
        self.eos_token_id = self.token_id(self.eos_token)
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._special_texts = [token.content for token in added.values() if token.special]
        self.special_spellings = SpecialSpellings(self._special_texts)
        self.added_tokens = {token_id: token.content for token_id, token in added.items()}

    def spellings_with(self, words: Collection[str]) -> SpecialSpellings:
        """Return the texts of special tokens, and those of words that are to stay text as well."""
        return SpecialSpellings([*self._special_texts, *words]) if words else self.special_spellings

    @classmethod
    def open(cls, path: str | Path) -> Tokenizer:
        """Read the tokenizer of a model directory (or a tokenizer.json file and what lies beside it) or GGUF file.

        Raises CheckpointError when there is none or it is damaged.
        """
        path = Path(path)
        if is_gguf(path):
            backend, special, config = read_tokenizer(read_gguf(path))
        else:
            directory = path.parent if path.is_file() else path
            backend, config = _open_backend(path)
            config |= _read_object(directory / TOKENIZER_CONFIG)
            special = _special_tokens({**_read_object(directory / SPECIAL_TOKENS_MAP), **config})
            _add_missing_tokens(backend, config, directory)
        states_bos_or_eos = config.get("add_bos_token") is not None or config.get("add_eos_token") is not None
        return cls(
            backend,
            special_tokens=special,
            add_bos=bool(config.get("add_bos_token")) if states_bos_or_eos else None,
            add_eos=bool(config.get("add_eos_token")) if states_bos_or_eos else None,
            config=config,
        )

    def __len__(self) -> int:
        return self.vocab_size

    @cached_property
    def vocab_size(self) -> int:
        """Return the number of tokens, added ones included."""
        return int(self._backend.get_vocab_size(with_added_tokens=True))

    @cached_property
    def longest_token_chars(self) -> int:
        """Return the characters of the longest token: a text of more than n times as many has more than n tokens."""
        return max(len(token) for token in self._backend.get_vocab(with_added_tokens=True))

    def has_more_tokens(self, text: str, count: int) -> bool:
        """Return whether a text has more than so many tokens whatever they are. It may have, where this is False."""
        # nearly every text has a token per 16 characters; the vocabulary is searched only for texts beyond that
        return len(text) > 16 * count and len(text) > count * self.longest_token_chars

    def token_id(self, token: str | None) -> int | None:
        """Return the id of one token given by its text in the vocabulary, None when it has none."""
        return None if token is None else self._backend.token_to_id(token)

    def has_id(self, token_id: int) -> bool:
        """Return whether an id stands for a token; models often have more rows of embeddings than tokens."""
        return self.word(token_id) is not None

    def word(self, token_id: int) -> str | None:
        """Return the text of a token in the vocabulary; None for an id without a token."""
        return self._backend.id_to_token(token_id)

    def encode(self, text: str, add_special_tokens: bool = True, cuts: Sequence[int] = ()) -> list[int]:
        """Return the token ids of a text. Where the text itself starts with the BOS token, as chat templates write it,
        none is added; every one that the text has stays. cuts: positions in the text that no token spans. Raises
        InvalidRequest for text that no UTF-8 stands for."""
        checked_text(text, "prompt")
        if cuts:
            return self._encode_cut(text, add_special_tokens, cuts)
        # a text with explicit rules gets BOS and EOS here, else from the post-processor
        explicit = self._add_bos is not None
        from_backend = add_special_tokens and not explicit
        try:
            if len(text) < LONG_TEXT_CHARS or not self.releases_lock:
                ids: list[int] = self._backend.encode(text, add_special_tokens=from_backend).ids
            else:
                ids = self._backend.encode_batch_fast([text], add_special_tokens=from_backend)[0].ids
        except Exception as error:  # the library raises bare Exception
            said = f"the tokenizer has no tokens for this text ({error}); send another, or download its files again"
            raise InvalidRequest(said, field="prompt") from error
        if not add_special_tokens:
            return ids
        bos, eos = self.bos_token_id, self.eos_token_id
        if explicit:
            if self._add_bos and bos is not None and ids[:1] != [bos]:
                ids = [bos, *ids]
            return [*ids, eos] if self._add_eos and eos is not None else ids
        return ids[1:] if bos is not None and ids[:2] == [bos, bos] and self._backend_adds_bos else ids

    def encode_whole(
        self, texts: Sequence[str], most: int | None, add_special: bool = True, side: str = "right"
    ) -> tuple[list[int], int]:
        """Return the token ids of a text or a pair with all special tokens, and where tokens of type 1 begin; 0 where
        there are none. most: tokens that are kept of it, with special ones; the longer text is cut first, on a side."""
        single = len(texts) == 1
        if self._add_bos is not None and single:
            ids = self.encode(texts[0], add_special)
            num_last = int(bool(self._add_eos and add_special))
            if most is None or len(ids) <= most:
                return ids, 0
            if side == "left":
                num_first = int(add_special and most > 1 and ids[:1] == [self.bos_token_id])
                return [*ids[:num_first], *ids[len(ids) - most + num_first :]], 0
            return ([*ids[: most - num_last], *ids[len(ids) - num_last :]] if most else ids), 0
        given = texts[0] if single else (texts[0], texts[1])
        [whole] = self._backend.encode_batch([given], add_special_tokens=add_special)
        ids, types = whole.ids, whole.type_ids
        if most is not None and len(ids) > most:
            own = [place for place, is_special in enumerate(whole.special_tokens_mask) if not is_special]
            first = len(own) if single else len(self._backend.encode(texts[0], add_special_tokens=False).ids)
            parts = [own] if single else [own[:first], own[first:]]
            shares = _shares([*map(len, parts)], max(0, most - len(ids) + len(own)))
            cut: set[int] = set()  # not by `truncate` of tokenizers: it makes each pair of the pieces that it cuts off
            for part, share in zip(parts, shares, strict=True):
                cut.update(part[: len(part) - share] if side == "left" else part[share:])
            ids, types = ([value for place, value in enumerate(values) if place not in cut] for values in (ids, types))
        has_types = "token_type_ids" in self.config.get("model_input_names", ("token_type_ids",))
        return ids, types.index(1) if has_types and 1 in types else 0

    def _encode_cut(self, text: str, add_special_tokens: bool, cuts: Sequence[int]) -> list[int]:
        first, *others = (text[start:end] for start, end in pairwise((0, *cuts, len(text))))
        ids = self.encode(first, add_special_tokens=False)
        for piece in others:
            ids += self._encode_inside(piece) if piece else []
        if not add_special_tokens:
            return ids
        added = self.encode("")  # the special tokens before and after every text
        num_before = int(added[:1] == [self.bos_token_id])
        has_bos = bool(num_before) and ids[:1] == added[:1]
        return [*([] if has_bos else added[:num_before]), *ids, *added[num_before:]]

    @cached_property
    def _backend_adds_bos(self) -> bool:
        """Return whether the post-processor writes a BOS token before every text."""
        return self._backend.encode("", add_special_tokens=True).ids[:1] == [self.bos_token_id]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of token ids; ids without a token have none."""
        return str(self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens))

    @cached_property
    def joins_bytes(self) -> bool:
        """Return whether a text is the bytes of its tokens, one after the other, whatever their neighbours are."""
        from tokenizers import decoders

        return isinstance(self._backend.decoder, decoders.ByteLevel)

    def first_text(self, token_id: int, skip_special_tokens: bool = True) -> str:
        """Return the text of one token at the start of a text, from a cache: the decoder takes microseconds."""
        texts = self._first_texts[skip_special_tokens]
        text = texts.get(token_id)
        if text is None:
            text = texts[token_id] = self.decode([token_id], skip_special_tokens)
        return text

    def token_text(self, token_id: int) -> str:
        """Return the text of one token in the middle of a text, with its leading space; "" for an id without a token.

        Bytes that are no character by themselves show as U+FFFD.
        """
        text = self._texts.get(token_id)
        if text is None:
            # decoders of the sentencepiece kind strip the space of a first token, so another one goes before it
            before = self._anchor
            text = self.decode([*before, token_id], skip_special_tokens=False)
            text = text.removeprefix(self.decode(before, skip_special_tokens=False))
            self._texts[token_id] = text
        return text

    def token_bytes(self, token_id: int) -> bytes | None:
        """Return the bytes that a token adds in the middle of a text; None where they are not known."""
        piece = self._backend.id_to_token(token_id)
        if piece is None:
            return b""
        text = self.token_text(token_id)
        if _REPLACEMENT not in text:
            return text.encode()
        if token_id in self.added_tokens:
            return self.added_tokens[token_id].encode()
        if (byte := _BYTE_PIECE.fullmatch(piece)) is not None:
            return bytes.fromhex(byte[1])
        if any(char not in _BYTE_OF_CHAR for char in piece):
            return None
        found = bytes(_BYTE_OF_CHAR[char] for char in piece)
        return found if found.decode(errors="replace") == text else None

    def encode_word(self, word: str) -> list[tuple[int, ...]]:
        """Return the token sequences that a word stands for: behind other text, at the start, and after a space.

        A word with a leading space stands for itself after other text alone.
        """
        texts = (word,) if word.startswith(" ") else (word, " " + word)
        variants = [self._encode_inside(text) for text in texts]
        if not word.startswith(" "):
            variants.append(self.encode(word, add_special_tokens=False))
        return list(dict.fromkeys(tuple(ids) for ids in variants if ids))

    def _encode_inside(self, text: str) -> list[int]:
        """Return the token ids of a text behind other text: tokenizers of the sentencepiece kind write a space before
        the first word of a text, which is none there."""
        for before in _BEFORE_A_WORD:
            start = self.encode(before, add_special_tokens=False)
            ids = self.encode(before + text, add_special_tokens=False)
            if len(ids) > len(start) and ids[: len(start)] == start:
                return ids[len(start) :]
        return self.encode(text, add_special_tokens=False)

    @cached_property
    def _anchor(self) -> list[int]:
        return self.encode("a", add_special_tokens=False)[-1:]


def _shares(lengths: Sequence[int], room: int) -> list[int]:
    """Return how many tokens of one text or two are kept where the longer one gives up its tokens first."""
    if len(lengths) == 1:
        return [min(lengths[0], room)]
    short = min(lengths)
    long = max(short, room - short)
    if short + long > room:
        short, long = room // 2, room - room // 2
    return [short, long] if lengths[0] <= lengths[1] else [long, short]


_BYTE_OF_CHAR: Final = byte_of_char()


def _open_backend(path: Path) -> tuple[Backend, dict[str, Any]]:
    """Open a tokenizer.json or a file of ranked tokens, or a directory with one (or with the older vocab.json and
    merges.txt).

    Return with it what a tokenizer_config.json would say of a tekken.json.
    """
    from tokenizers import Tokenizer as Backend

    if (ranked := ranked_beside(path)) is not None:
        contents, config = read_ranked(ranked)
        with _refusing_damage(f"{ranked}: is not a usable tokenizer"):
            return Backend.from_str(json.dumps(contents)), config
    file = path if path.is_file() else path / TOKENIZER_JSON
    if file.is_file():
        with _refusing_damage(f"{file}: is not a usable tokenizer"):
            return Backend.from_file(str(file)), {}
    if (path / "vocab.json").is_file() and (path / "merges.txt").is_file():
        return _byte_level_bpe(path), {}
    raise CheckpointError(
        f"{path}: has no {TOKENIZER_JSON}, and no file in its place (tekken.json, tokenizer.model, qwen.tiktoken, "
        "tiktoken.model); copy one there from where the model came from, or name the model that the tokenizer belongs "
        "to with the argument tokenizer"
    )


@contextmanager
def _refusing_damage(message: str) -> Iterator[None]:
    """Raise CheckpointError for what the library raises: bare Exception, and panics, which are none."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise CheckpointError(f"{message} ({error}); download it again") from error


def _byte_level_bpe(path: Path) -> Backend:
    """Return GPT-2's tokenizer from vocab.json and merges.txt, as OPT's first checkpoints have it."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers

    with _refusing_damage(f"{path}: vocab.json and merges.txt are not usable"):
        model = models.BPE.from_file(str(path / "vocab.json"), str(path / "merges.txt"))
    backend = Backend(model)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    config = {**_read_object(path / SPECIAL_TOKENS_MAP), **_read_object(path / TOKENIZER_CONFIG)}
    special = _special_tokens(config).values()
    backend.add_special_tokens([token for token in special if backend.token_to_id(token) is not None])
    return backend


def _add_missing_tokens(backend: Backend, config: dict[str, Any], directory: Path) -> None:
    """Add the tokens that only `added_tokens_decoder` of tokenizer_config.json names, in the order of their ids."""
    from tokenizers import AddedToken

    listed = config.get("added_tokens_decoder") or {}
    try:
        entries = sorted(
            ((int(key), str(entry["content"]), entry) for key, entry in listed.items()), key=lambda item: item[0]
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{directory / TOKENIZER_CONFIG}: added_tokens_decoder is not an object from token ids to objects with "
            "their content; download the tokenizer again"
        ) from error
    for token_id, content, entry in entries:
        if backend.token_to_id(content) is not None:
            continue
        token = AddedToken(
            content,
            **{name: bool(entry.get(name)) for name in ("single_word", "lstrip", "rstrip", "normalized", "special")},
        )
        backend.add_tokens([token])
        if backend.token_to_id(content) != token_id:
            raise CheckpointError(
                f"{directory / TOKENIZER_CONFIG}: added_tokens_decoder gives {content!r} the id {token_id}, "
                f"but in {TOKENIZER_JSON} it gets {backend.token_to_id(content)}; download the tokenizer again"
            )


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """Return the texts of the named special tokens; each is a string or an object with its `content`."""
    found: dict[str, str] = {}
    for name in _SPECIAL_NAMES:
        value = config.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            found[name] = value
    return found


def _read_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file, {} when there is no such file. Raises CheckpointError."""
    return read_json_object(path) if path.is_file() else {}
