"""Tokenizers small enough to reason about: one token per byte, and one that marks spaces as sentencepiece does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from octavo.engine.text.tokenizer import Tokenizer as OctavoTokenizer

BOS, EOS, USER = 256, 257, 258
"""Ids of `<bos>`, `<eos>` and `<user>`; the id of a byte is the byte."""

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}[{{ message['role'] }}]{{ message['content'] }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


def write_byte_tokenizer(path: Path, **config: Any) -> Path:
    """A model directory's tokenizer files; `config` are keys of tokenizer_config.json."""
    backend = Tokenizer(models.BPE(vocab={char: byte for byte, char in _byte_chars().items()}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True) for text in ("<bos>", "<eos>", "<user>")])
    return _write(path, backend, {"bos_token": "<bos>", "eos_token": "<eos>", "chat_template": CHAT_TEMPLATE, **config})


def write_piece_tokenizer(path: Path, **config: Any) -> Path:
    """Spaces are part of the next word (`▁word`), unknown characters fall back to bytes, decoding strips one space."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁"]
    pieces += [chr(char) for char in range(ord("a"), ord("z") + 1)] + [".", "▁a", "▁b", "ab", "▁ab"]
    merges = [("▁", "a"), ("▁", "b"), ("a", "b"), ("▁a", "b")]
    vocab = {piece: number for number, piece in enumerate(pieces)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken(text, special=True) for text in ("<unk>", "<s>", "</s>")])
    return _write(path, backend, {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True, **config})


def byte_tokenizer(tmp_path: Path, **config: Any) -> OctavoTokenizer:
    return OctavoTokenizer.open(write_byte_tokenizer(tmp_path, **config))


def piece_tokenizer(tmp_path: Path, **config: Any) -> OctavoTokenizer:
    return OctavoTokenizer.open(write_piece_tokenizer(tmp_path, **config))


def _write(path: Path, backend: Tokenizer, config: dict[str, Any]) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    backend.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return path


def _byte_chars() -> dict[int, str]:
    """GPT-2's character for each byte: printable ones stand for themselves, the others come from 256 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    chars = {byte: chr(byte) for byte in printable}
    others = (byte for byte in range(256) if byte not in chars)
    return chars | {byte: chr(256 + number) for number, byte in enumerate(others)}
