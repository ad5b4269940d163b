"""A small tokenizer file of Mistral's kind."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

SPECIAL = [
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"),
    *("[/TOOL_RESULTS]", "[TOOL_CALLS]", "<pad>", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[AUDIO]", "[BEGIN_AUDIO]"),
    *("[ARGS]", "[TRANSCRIBE]"),
]
NUM_SPECIAL = len(SPECIAL) + 2
WORDS = ["he", "ll", "hell", "lo", "hello", " w"]
VOCABULARY = NUM_SPECIAL + 256 + len(WORDS)


def write_tekken(path: Path, **config: Any) -> Path:
    """Write tekken.json, whose last entry is beyond its vocabulary; `config` are keys of its config."""
    tokens = [bytes([byte]) for byte in range(256)] + [word.encode() for word in [*WORDS, "spare"]]
    contents = {
        "config": {
            "pattern": r" ?\p{L}+|[^\p{L}]",
            "num_vocab_tokens": len(tokens),
            "default_vocab_size": VOCABULARY,
            "default_num_special_tokens": NUM_SPECIAL,
            "version": "v13",
            **config,
        },
        "vocab": [
            {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
            for rank, token in enumerate(tokens)
        ],
        "special_tokens": [
            {"rank": token_id, "token_str": text, "is_control": True} for token_id, text in enumerate(SPECIAL)
        ],
    }
    (path / "tekken.json").write_text(json.dumps(contents))
    return path
