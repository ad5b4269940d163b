"""Small random checkpoints of models that read samples through caches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from octavo.server.speech.speech_prompts import _COHERE_MARKS
from tests.fakes.byte_tokenizer import write_byte_tokenizer
from tests.fakes.checkpoints import make_checkpoint

FAMILIES = ("cohere_asr", "moonshine")


def make_listener(family: str, path: Path, **overrides: Any) -> Path:
    """Write a random model with a tokenizer of bytes to `path` and return it."""
    make_checkpoint(family, path, vocab_size=300, **overrides)
    write_byte_tokenizer(path)
    file = str(path / "tokenizer.json")
    backend = Tokenizer.from_file(file)
    backend.add_tokens([*_COHERE_MARKS, "<|en|>", "<|de|>"])
    backend.save(file)
    return path
