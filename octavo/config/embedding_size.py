"""The width of vectors that prompts bring in place of tokens."""

from __future__ import annotations

from typing import Final

from octavo.config.checkpoint import Checkpoint
from octavo.config.media.speech import read_speech
from octavo.config.pooling.pooling_config import PoolingConfig
from octavo.errors import ConfigError

_NAMES: Final = ("word_embed_proj_dim", "n_embd", "hidden_size")
"""Keys of the width, in the order in which they are looked for: OPT's layers may be wider than its embeddings."""

_OF_NGRAMS: Final = ("emb_neighbor_num", "ple_layer_ids")
"""Keys of models with tables of n-grams: LongCat-Flash-Lite and Qwen4-Exp."""


def embedding_size(checkpoint: Checkpoint, pooling: PoolingConfig | None) -> int:
    """Return the width of a model's embeddings. Raises ConfigError where its prompts cannot be given as vectors."""
    obstacle = None
    if pooling is not None:
        obstacle = "makes vectors of texts"
    elif read_speech(checkpoint) is not None:
        obstacle = "writes down sounds"
    elif checkpoint.values.get("hidden_size_per_layer_input"):
        obstacle = "reads the tokens of a prompt in every layer"
    elif isinstance(kinds := checkpoint.values.get("mlp_layer_types"), list) and "hash_moe" in kinds:
        obstacle = "chooses experts by the tokens of a prompt"
    elif any(checkpoint.values.get(name) for name in _OF_NGRAMS):
        obstacle = "reads n-grams of the tokens of a prompt"
    elif checkpoint.values.get("cross_attention_layers"):
        obstacle = "reads images in layers of their own"
    if obstacle is not None:
        raise ConfigError(f"enable_prompt_embeds is set, and {checkpoint.architecture} {obstacle}; leave it out")
    return checkpoint.positive(next(name for name in _NAMES if name in checkpoint.values or name == _NAMES[-1]))
