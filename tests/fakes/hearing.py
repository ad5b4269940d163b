"""Small random checkpoints of models that read sounds in the place of tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.fakes.vision import IMAGE, TEXT, write_random

AUDIO = IMAGE
"""The token that stands for a sound."""


def hearing_config() -> tuple[Any, Any]:
    """Return the config of a Qwen2-Audio that hears 2 s at once, and its feature extractor."""
    import transformers as tf

    tower = {"d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 48}
    sizes: dict[str, Any] = {"num_mel_bins": 16, "max_source_positions": 100}
    text = tf.Qwen2Config(**TEXT).to_dict()
    return tf.Qwen2AudioConfig(text_config=text, audio_config={**tower, **sizes}, audio_token_index=AUDIO), extractor()


def make_hearing_checkpoint(path: Path) -> Path:
    """Write a random model to `path` and return it."""
    return write_random(path, *hearing_config(), "Qwen2AudioForConditionalGeneration")


def extractor() -> Any:
    """Return transformers' feature extractor of the checkpoint."""
    import transformers as tf

    return tf.WhisperFeatureExtractor(feature_size=16, chunk_length=2)
