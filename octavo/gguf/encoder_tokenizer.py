"""Tokenizers of encoders in GGUF files: WordPiece and Unigram, and the tokens around a text and between two."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from octavo.errors import CheckpointError
from octavo.gguf.reader import Array, GGUFFile

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

_CONTROL: Final = 3
_TWICE: Final = ("roberta-bpe", "jina-v1-en", "jina-v2-code")
"""Pre-tokenizers of models that separate two texts by two tokens, as those of the kind t5 do."""


def word_pieces(tokens: Sequence[str], types: Sequence[int]) -> list[str]:
    """Return the tokens as WordPiece has them: in a file the first of a word has ▁ before it, the others nothing."""

    def restored(token: str, kind: int) -> str:
        if kind == _CONTROL:
            return token
        return token[1:] if token.startswith("▁") else f"##{token}"

    return [restored(*each) for each in zip(tokens, types, strict=True)]


def word_piece(file: GGUFFile, ids: Mapping[str, int], types: Sequence[int]) -> Backend:
    """Return the tokenizer of BERT. Files do not all say whether it keeps case: one does that has a capital letter."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    unknown = _special(file, ids, "unknown", "[UNK]")
    backend = Tokenizer(models.WordPiece(dict(ids), unk_token=unknown, max_input_chars_per_word=100))
    lowercase = file.metadata.get("tokenizer.ggml.normalizer.lowercase", "A" not in ids)
    strip = file.metadata.get("tokenizer.ggml.normalizer.strip_accents")
    backend.normalizer = normalizers.BertNormalizer(
        lowercase=lowercase is True, strip_accents=strip if isinstance(strip, bool) else None
    )
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    return backend


def unigram(file: GGUFFile, ids: Mapping[str, int], types: Sequence[int]) -> Backend:
    """Return the tokenizer of XLM-RoBERTa and T5: pieces with the logarithms of their probabilities."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    listed, unknown = file.metadata.get("tokenizer.ggml.scores"), file.metadata.get("tokenizer.ggml.unknown_token_id")
    scores: list[Any] = listed.values() if isinstance(listed, Array) else []
    if len(scores) != len(types) or not all(isinstance(each, float) for each in scores):
        raise CheckpointError(f"{file.path}: tokenizer.ggml.scores has {len(scores)} numbers, expected {len(types)}")
    if len(ids) != len(types):
        raise CheckpointError(f"{file.path}: tokenizer.ggml.tokens has a token twice, expected each once")
    if unknown is not None and not (isinstance(unknown, int) and 0 <= unknown < len(types)):
        raise CheckpointError(
            f"{file.path}: tokenizer.ggml.unknown_token_id is {unknown!r}, expected 0 to {len(types) - 1:,}"
        )
    backend = Tokenizer(models.Unigram([*zip(ids, scores, strict=True)], unk_id=unknown, byte_fallback=False))
    if (normal_forms := _normal_forms(file)) is not None:
        backend.normalizer = normalizers.Precompiled(normal_forms)
    has_prefix = file.metadata.get("tokenizer.ggml.add_space_prefix", True) is not False
    spaces = pre_tokenizers.Metaspace(prepend_scheme="always" if has_prefix else "never")
    splits = [pre_tokenizers.WhitespaceSplit()] if _flag(file, "remove_extra_whitespaces", False) else []
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, spaces])
    backend.decoder = decoders.Metaspace(prepend_scheme="always" if has_prefix else "never")
    return backend


def add_ends(file: GGUFFile, backend: Backend, ids: Mapping[str, int]) -> bool:
    """Give the tokenizer of an encoder the tokens around a text and between two; return whether it is one's.

    Raises CheckpointError where the file lacks them.
    """
    from tokenizers import processors

    model, pre = (file.metadata.get(f"tokenizer.ggml.{each}") for each in ("model", "pre"))
    if model not in ("bert", "t5") and pre not in _TWICE and not _flag(file, "add_sep_token", False):
        return False
    is_bert = model == "bert"
    first = _special(file, ids, "bos", "[CLS]") if is_bert or _flag(file, "add_bos_token", pre in _TWICE) else ""
    ends = is_bert or _flag(file, "add_eos_token", True)
    last = _special(file, ids, *(("seperator", "[SEP]") if is_bert else ("eos", "</s>"))) if ends else ""
    between = f"{last} {last}" if last and (model == "t5" or pre in _TWICE) else last
    kind = ":1" if is_bert else ""
    special = [(token, ids[token]) for token in dict.fromkeys(filter(None, (first, last)))]
    backend.post_processor = processors.TemplateProcessing(
        single=f"{first} $A {last}".strip(),
        pair=f"{first} $A {between} $B{kind} {last}{kind if last else ''}".strip(),
        special_tokens=special,
    )
    return True


def _flag(file: GGUFFile, name: str, default: bool) -> bool:
    return bool(file.metadata.get(f"tokenizer.ggml.{name}", default))


def _special(file: GGUFFile, ids: Mapping[str, int], name: str, usual: str) -> str:
    """Return the text of a special token that a file names by its id, or has under its usual text."""
    keys = (f"tokenizer.ggml.{each}_token_id" for each in ((name, "cls") if name == "bos" else (name,)))
    stated = next((each for key in keys if (each := file.metadata.get(key)) is not None), ids.get(usual))
    found = next((token for token, number in ids.items() if number == stated), None)
    if found is None:
        raise CheckpointError(
            f"{file.path}: tokenizer.ggml.{name}_token_id is {stated!r}, expected the id of the token {usual}"
        )
    return found


def _normal_forms(file: GGUFFile) -> bytes | None:
    """Return the table of normal forms of SentencePiece: a trie after its length, and texts. Raises CheckpointError."""
    listed = file.metadata.get("tokenizer.ggml.precompiled_charsmap")
    if listed is None:
        return None
    values = listed.values() if isinstance(listed, Array) else []
    table = bytes(each & 0xFF for each in values if isinstance(each, int))
    if len(table) != len(values) or not _is_whole(table):
        raise CheckpointError(
            f"{file.path}: tokenizer.ggml.precompiled_charsmap has {len(values):,} elements, expected the bytes of a "
            "table of normal forms; download the file again"
        )
    return table


def _is_whole(table: bytes) -> bool:
    """Return whether no step in the trie leads out of it or out of the texts: the library reads it without a check.

    A unit of the trie has the distance (by xor) to the block of 256 units that follow it, or the place of a text.
    """
    end = 4 + int.from_bytes(table[:4], "little")
    texts = table[end:]
    if end % 1024 != 4 or not 4 < end < len(table):
        return False
    units = array("I", table[4:end])
    for place, unit in enumerate(units):
        is_text, to = unit >> 31, unit & 0x7FFFFFFF
        if not is_text:
            to = place ^ (unit >> 10) << ((unit & 512) >> 6)
        if to >= (len(texts) if is_text else len(units)) or (is_text and texts[to] & 0xC0 == 0x80):
            return False
    return True
