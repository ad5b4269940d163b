"""Small random checkpoints of models that read sounds in the place of tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.fakes.tekken import SPECIAL, VOCABULARY, write_tekken
from tests.fakes.vision import IMAGE, TEXT, write_random

AUDIO = IMAGE
"""The token that stands for a sound."""
_SIZES: dict[str, Any] = {"num_mel_bins": 16, "max_source_positions": 100}


def _qwen2_audio() -> tuple[Any, Any]:
    import transformers as tf

    tower = {"d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 48}
    text = tf.Qwen2Config(**TEXT).to_dict()
    return tf.Qwen2AudioConfig(text_config=text, audio_config=tower | _SIZES, audio_token_index=AUDIO), extractor()


def _voxtral(audio: int = AUDIO, **own: Any) -> tuple[Any, Any]:
    import transformers as tf

    tower = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128}
    text = tf.LlamaConfig(**{**TEXT, **own}).to_dict()
    return tf.VoxtralConfig(text_config=text, audio_config=tower | _SIZES, audio_token_id=audio), extractor()


def _qwen3_asr() -> tuple[Any, Any]:
    import transformers as tf

    tower = {"d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 48}
    tower |= {"output_dim": 32, "downsample_hidden_size": 8, "n_window_infer": 100, "num_mel_bins": 16}
    text = tf.Qwen3Config(**TEXT, tie_word_embeddings=True).to_dict()
    config = tf.Qwen3ASRConfig(text_config=text, audio_config=tower, audio_token_id=AUDIO)
    return config, tf.Qwen3ASRFeatureExtractor(feature_size=16)


FAMILIES = {
    "qwen3_asr": (_qwen3_asr, "Qwen3ASRForConditionalGeneration"),
    "qwen2_audio": (_qwen2_audio, "Qwen2AudioForConditionalGeneration"),
    "voxtral": (_voxtral, "VoxtralForConditionalGeneration"),
}
"""Two hear 2 s at once, and Qwen3-ASR 1 s."""


def make_hearing_checkpoint(family: str, path: Path) -> Path:
    """Write a random model to `path` and return it."""
    make, architecture = FAMILIES[family]
    return write_random(path, *make(), architecture)


def make_voxtral(path: Path) -> Path:
    """Write a random Voxtral with a tokenizer of its kind to `path` and return it."""
    config = _voxtral(SPECIAL.index("[AUDIO]"), vocab_size=VOCABULARY)
    write_random(path, *config, "VoxtralForConditionalGeneration")
    (path / "tokenizer.json").unlink()
    (path / "tokenizer_config.json").unlink()
    return write_tekken(path)


def extractor() -> Any:
    """Return transformers' feature extractor of the checkpoints."""
    import transformers as tf

    return tf.WhisperFeatureExtractor(feature_size=16, chunk_length=2)
