"""A tiny Whisper on disk that hears one second at once, with the tokens and the files of the published ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from octavo.multimodal.sound import Samples
from tests.fakes.byte_tokenizer import _byte_chars
from tests.fakes.checkpoints import make_checkpoint

NUM_VECTORS = 50
RATE = 16_000
SPECIAL = (
    *("<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|fr|>", "<|translate|>", "<|transcribe|>"),
    *("<|startofprev|>", "<|nospeech|>", "<|notimestamps|>"),
)
END, START, EN, FR, TRANSLATE, TRANSCRIBE, PREVIOUS, NO_SPEECH, NO_TIMESTAMPS = range(256, 256 + len(SPECIAL))
FIRST_STAMP = NO_TIMESTAMPS + 1
VOCABULARY = FIRST_STAMP + NUM_VECTORS + 1
PROMPT = [START, EN, TRANSCRIBE, NO_TIMESTAMPS]


def make_whisper(path: Path, **overrides: Any) -> Path:
    """Write model, tokenizer and settings; `overrides` are keys of config.json."""
    sizes = {"vocab_size": VOCABULARY, "d_model": 64, "max_source_positions": NUM_VECTORS, "max_target_positions": 96}
    sizes |= {"encoder_ffn_dim": 96, "decoder_ffn_dim": 96, "decoder_start_token_id": START, "eos_token_id": END}
    make_checkpoint("whisper", path, **sizes | {"bos_token_id": END, "pad_token_id": END} | overrides)
    generation = {
        "decoder_start_token_id": START,
        "eos_token_id": END,
        "pad_token_id": END,
        "is_multilingual": True,
        "lang_to_id": {"<|en|>": EN, "<|fr|>": FR},
        "task_to_id": {"transcribe": TRANSCRIBE, "translate": TRANSLATE},
        "no_timestamps_token_id": NO_TIMESTAMPS,
        "prev_sot_token_id": PREVIOUS,
        "max_initial_timestamp_index": 20,
        "suppress_tokens": [1, 2, 7, PREVIOUS, NO_SPEECH],
        "begin_suppress_tokens": [32, END],
        "max_length": 60,
    }
    (path / "generation_config.json").write_text(json.dumps(generation))
    (path / "preprocessor_config.json").write_text(json.dumps({"feature_size": 8, "chunk_length": 1}))
    backend = Tokenizer(models.BPE(vocab={char: byte for byte, char in _byte_chars().items()}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    backend.add_tokens([AddedToken(f"<|{i * 0.02:.2f}|>", special=False) for i in range(NUM_VECTORS + 1)])
    backend.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": SPECIAL[0], "bos_token": SPECIAL[0]}))
    return path


def tone(seconds: float, pitch: float = 440.0, rate: int = RATE) -> Samples:
    """A voice of sorts: a tone with a slow beat and some noise."""
    time = np.arange(int(seconds * rate)) / rate
    noise = np.random.default_rng(int(pitch)).standard_normal(len(time)) * 0.01
    return (np.sin(2 * np.pi * pitch * time) * np.sin(5 * time) * 0.3 + noise).astype(np.float32)
