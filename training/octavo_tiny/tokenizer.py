"""The tokenizer of octavo-tiny: byte-level BPE learned from the generated text, with every byte in its alphabet."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from training.octavo_tiny.corpus import CHAT_TEMPLATE, END_OF_TEXT, MESSAGE_END, SPECIAL_TOKENS


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Learn a tokenizer of at most `vocab_size` tokens; the special tokens come first."""
    tokenizer = Tokenizer(models.BPE())
    # single digits, so that sums are made of a few well-known tokens instead of many rare ones
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def token_id(tokenizer: Tokenizer, token: str) -> int:
    """Return the id of a token that must be in the vocabulary."""
    number = tokenizer.token_to_id(token)
    if number is None:
        raise ValueError(f"the tokenizer has no token {token!r}; train it with training.octavo_tiny.tokenizer")
    return int(number)


def tokenizer_config(max_positions: int) -> dict[str, Any]:
    """Return the `tokenizer_config.json` that goes with the tokenizer."""
    special = {
        str(number): {
            "content": token,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": True,
        }
        for number, token in enumerate(SPECIAL_TOKENS)
    }
    return {
        "added_tokens_decoder": special,
        "additional_special_tokens": [token for token in SPECIAL_TOKENS if token != END_OF_TEXT],
        "bos_token": None,
        "eos_token": MESSAGE_END,
        "pad_token": END_OF_TEXT,
        "unk_token": None,
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_positions,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": CHAT_TEMPLATE,
    }


def write_tokenizer(tokenizer: Tokenizer, directory: Path, max_positions: int) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json` into `directory`."""
    tokenizer.save(str(directory / "tokenizer.json"))
    text = json.dumps(tokenizer_config(max_positions), indent=2, ensure_ascii=False)
    (directory / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")
