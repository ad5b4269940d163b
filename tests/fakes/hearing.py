"""Small random checkpoints of models that read sounds in the place of tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.fakes.families import FAMILIES as FAMILY_SIZES
from tests.fakes.tekken import SPECIAL, VOCABULARY, write_tekken
from tests.fakes.vision import write_random
from tests.fakes.vision_families import FAMILIES as VISION_FAMILIES
from tests.fakes.vision_sizes import END, IMAGE, SPECIALS, START, TEXT, VIDEO

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


def _granite_speech(name: str = "GraniteSpeech", **own: Any) -> tuple[Any, Any]:
    import transformers as tf

    tower = {"input_dim": 32, "num_layers": 2, "hidden_dim": 32, "feedforward_mult": 2, "num_heads": 2}
    tower |= {"output_dim": 10, "context_size": 20, "max_pos_emb": 24, "conv_kernel_size": 5, **own}
    projector = {"model_type": "blip_2_qformer", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    projector |= {
        "intermediate_size": 48,
        "encoder_hidden_size": 64 if own else 32,
        "cross_attention_frequency": 1,
        "vocab_size": 8,
    }
    text = tf.GraniteConfig(**TEXT, embedding_multiplier=3.0, tie_word_embeddings=True).to_dict()
    parts = {"text_config": text, "encoder_config": tower, "projector_config": projector}
    config = getattr(tf, f"{name}Config")(**parts, audio_token_index=AUDIO, has_lora_adapter=False)
    return config, MelSettings()


def _glm_asr() -> tuple[Any, Any]:
    import transformers as tf

    tower = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128}
    text = tf.LlamaConfig(**TEXT, tie_word_embeddings=True).to_dict()
    sizes = {"num_mel_bins": 16, "max_position_embeddings": 100}
    return tf.GlmAsrConfig(text_config=text, audio_config=tower | sizes, audio_token_id=AUDIO), extractor()


def _audio_flamingo() -> tuple[Any, Any]:
    import transformers as tf

    tower = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
    text = tf.Qwen2Config(**TEXT).to_dict()
    return tf.AudioFlamingo3Config(text_config=text, audio_config=tower | _SIZES, audio_token_id=AUDIO), extractor()


def _fun_asr_nano() -> tuple[Any, Any]:
    import transformers as tf

    tower = {"hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 40}
    tower |= {"num_mel_bins": 16, "num_stacked_frames": 5, "num_timestamp_prediction_layers": 1, "fsmn_kernel_size": 5}
    adaptor = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 8, "projector_hidden_size": 40}
    text = tf.Qwen3Config(**TEXT, tie_word_embeddings=True).to_dict()
    parts = {"text_config": text, "audio_config": tower | {"model_type": "fun_asr_nano_encoder"}}
    return tf.FunAsrNanoConfig(**parts, adaptor_config=adaptor, audio_token_id=AUDIO), StackedSettings()


def _moss() -> tuple[Any, Any]:
    import transformers as tf

    tower = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
    text = tf.Qwen3Config(**TEXT, tie_word_embeddings=True).to_dict()
    ids = {"audio_token_id": AUDIO, "audio_chunk_size": 32_000}
    config = tf.MossTranscribeDiarizeConfig(text_config=text, audio_config=tower | _SIZES, **ids)
    return config, tf.MossTranscribeDiarizeFeatureExtractor(feature_size=16, chunk_length=2)


def _music_flamingo() -> tuple[Any, Any]:
    import transformers as tf

    tower = {
        "model_type": "audioflamingo3_encoder",
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 48,
    }
    text = tf.Qwen2Config(**TEXT).to_dict()
    rope = {"rope_type": "default", "rope_theta": 1200.0, "partial_rotary_factor": 0.5}
    ids = {"audio_token_id": AUDIO, "audio_bos_token_id": START, "audio_eos_token_id": END}
    config = tf.MusicFlamingoConfig(text_config=text, audio_config=tower | _SIZES, rope_parameters=rope, **ids)
    return config, extractor()


def _granite_speech_plus() -> tuple[Any, Any]:
    return _granite_speech("GraniteSpeechPlus", cat_hidden_layers=[1])


def _vibevoice() -> tuple[Any, Any]:
    import transformers as tf

    sizes = {"num_filters": 2, "depths": [1] * 7, "ffn_expansion": 2}
    parts = {
        f"{name}_tokenizer_encoder_config": tf.VibeVoiceAcousticTokenizerEncoderConfig(**sizes, hidden_size=width)
        for name, width in (("acoustic", 6), ("semantic", 8))
    }
    ids = {"audio_token_id": AUDIO, "audio_bos_token_id": START, "audio_eos_token_id": END}
    text = tf.Qwen2Config(**TEXT)
    config = tf.VibeVoiceAsrConfig(text_config=text, **parts, **ids, acoustic_tokenizer_chunk_size=16_000)
    return config, tf.VibeVoiceAcousticTokenizerFeatureExtractor()


class StackedSettings:
    """Of a feature extractor that transformers has with torchaudio alone."""

    def save_pretrained(self, path: Path) -> None:
        (path / "preprocessor_config.json").write_text(json.dumps({"feature_size": 16, "num_frames_lfr": 5}))


class MelSettings:
    """Of a feature extractor that transformers has with torchaudio alone."""

    def to_dict(self) -> dict[str, Any]:
        sizes = {"sample_rate": 16_000, "n_fft": 512, "win_length": 400, "hop_length": 160, "n_mels": 16}
        return {"melspec_kwargs": sizes, "feature_extractor_type": "GraniteSpeechFeatureExtractor"}

    def save_pretrained(self, path: Path) -> None:
        (path / "preprocessor_config.json").write_text(json.dumps(self.to_dict()))


OMNI = {name: SPECIALS.index(word) for name, word in (("audio", "<img>"), ("begin", "</img>"), ("end", "<global-img>"))}
"""Tokens of sounds beside images."""


def _omni(
    name: str, text: dict[str, Any], vision: dict[str, Any], audio: dict[str, Any], patch: int
) -> tuple[Any, Any]:
    import transformers as tf

    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
    tower = {"d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 48, "output_dim": 32}
    ids = {"audio_start_token_id": OMNI["begin"], "vision_start_token_id": START, "position_id_per_seconds": 5}
    ids |= {f"{kind}_token_id": token for kind, token in (("audio", OMNI["audio"]), ("image", IMAGE), ("video", VIDEO))}
    seen = {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 32, **vision}
    thinker = getattr(tf, f"{name}ThinkerConfig")(
        text_config={**TEXT, **text, "rope_parameters": rope},
        vision_config={**seen, "patch_size": patch},
        audio_config={**tower, **audio, "num_mel_bins": 16},
        **ids,
    )
    config = getattr(tf, f"{name}Config")(thinker_config=thinker.to_dict(), enable_audio_output=False)
    size = {"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 64}
    return config, Processors(tf.Qwen2VLImageProcessorPil(size=size, patch_size=patch, merge_size=2))


class Processors:
    """Settings of images and sounds in one file."""

    def __init__(self, images: Any, sounds: Any = None) -> None:
        self.images, self.sounds = images, sounds or extractor()

    def save_pretrained(self, path: Path) -> None:
        values = {
            "image_processor": self.images.to_dict(),
            "feature_extractor": json.loads(self.sounds.to_json_string()),
        }
        (path / "processor_config.json").write_text(json.dumps(values, default=str))


def _qwen2_5_omni() -> tuple[Any, Any]:
    vision = {"window_size": 56, "fullatt_block_indexes": [1]}
    return _omni("Qwen2_5Omni", {}, vision, {"n_window": 20, "max_source_positions": 100}, 14)


def _qwen3_omni_moe() -> tuple[Any, Any]:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "num_hidden_layers": 3}
    vision = {"depth": 3, "deepstack_visual_indexes": [0, 2], "num_position_embeddings": 64}
    audio = {"downsample_hidden_size": 8, "n_window_infer": 100, "max_source_positions": 100}
    return _omni("Qwen3OmniMoe", experts, vision, audio, 16)


def _gemma3n() -> tuple[Any, Any]:
    """Tokens from 100 on are those of images, and from 114 on those of sounds."""
    import transformers as tf

    text = {**FAMILY_SIZES["gemma3n"][2], **TEXT, "num_hidden_layers": 6, "num_key_value_heads": 2}
    text |= {"intermediate_size": [56] * 6, "vocab_size_per_layer_input": 100, "hidden_activation": "gelu_pytorch_tanh"}
    tower = {"hidden_size": 32, "input_feat_size": 16, "conf_num_hidden_layers": 2, "conf_num_attention_heads": 2}
    tower |= {"sscp_conv_channel_size": [8, 4], "vocab_size": 14, "vocab_offset": 114}
    seen = {"channel_multiplier": 1 / 16, "msfa_output_resolution": 2}
    ids = {"boi_token_id": START, "eoi_token_id": 100, "image_token_id": 101}
    ids |= {"boa_token_id": END, "eoa_token_id": 114, "audio_token_id": 115}
    config = tf.Gemma3nConfig(
        text_config=text,
        vision_config={"model_args": seen, "vocab_size": 14, "vocab_offset": 100},
        audio_config=tower,
        vision_soft_tokens_per_image=4,
        audio_soft_tokens_per_image=20,
        **ids,
    )
    size = {"height": 96, "width": 96}
    return config, Processors(
        tf.SiglipImageProcessorPil(size=size, do_normalize=False), tf.Gemma3nAudioFeatureExtractor(feature_size=16)
    )


def _gemma4() -> tuple[Any, Any]:
    import transformers as tf

    config, images = VISION_FAMILIES["gemma4"][0]()
    tower = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "subsampling_conv_channels": [16, 8]}
    values = config.to_dict() | {"audio_config": {**tower, "output_proj_dims": 24}}
    values |= {"boa_token_id": START, "eoa_token_id": END, "audio_token_id": OMNI["audio"]}
    return tf.Gemma4Config(**values), Processors(images, tf.Gemma4AudioFeatureExtractor(feature_size=16))


def _gemma4_unified() -> tuple[Any, Any]:
    import transformers as tf

    given, _ = VISION_FAMILIES["gemma4"][0]()
    text = given.text_config.to_dict() | {"model_type": "gemma4_unified_text", "attention_k_eq_v": True}
    for name in ("vocab_size_per_layer_input", "hidden_size_per_layer_input", "enable_moe_block"):
        text.pop(name)
    text = {name: value for name, value in text.items() if not name.endswith(("experts", "moe_intermediate_size"))}
    seen = {"patch_size": 4, "mm_embed_dim": 24, "mm_posemb_size": 70, "output_proj_dims": 24}
    ids = {name: getattr(given, name) for name in ("image_token_id", "boi_token_id", "eoi_token_id", "video_token_id")}
    ids |= {"boa_token_id": START, "eoa_token_index": END, "audio_token_id": OMNI["audio"]}
    config = tf.Gemma4UnifiedConfig(text_config=text, vision_config=seen, audio_config={"audio_embed_dim": 640}, **ids)
    sounds = tf.Gemma4UnifiedAudioFeatureExtractor()
    return config, JoinedPatches(tf.Gemma4ImageProcessorPil(patch_size=4, max_soft_tokens=70), sounds)


class JoinedPatches(Processors):
    """Those of Gemma 4, whose image processor joins patches; transformers has it with torchvision alone."""

    def __init__(self, plain: Any, sounds: Any) -> None:
        super().__init__(self._joined, sounds)
        self.plain = plain

    def _joined(self, images: Any, return_tensors: str) -> dict[str, Any]:
        import torch

        made, rows = self.plain(images, return_tensors="pt"), 3
        pixels, places = [], []
        for patches, positions in zip(made["pixel_values"], made["image_position_ids"], strict=True):
            width, height = (positions.max(0).values + 1).tolist()
            kept = patches[: width * height].view(height // rows, rows, width // rows, rows, 4, 4, 3)
            joined = kept.permute(0, 2, 1, 4, 3, 5, 6).reshape(-1, rows * 4 * rows * 4 * 3)
            own = positions[: width * height].view(height, width, 2)[::rows, ::rows].reshape(-1, 2) // rows
            fill = 70 - len(joined)
            pixels.append(torch.nn.functional.pad(joined, (0, 0, 0, fill)))
            places.append(torch.nn.functional.pad(own, (0, 0, 0, fill), value=-1))
        return {"pixel_values": torch.stack(pixels), "image_position_ids": torch.stack(places)}

    def save_pretrained(self, path: Path) -> None:
        images = self.plain.to_dict() | {"image_processor_type": "Gemma4UnifiedImageProcessor"}
        values = {"image_processor": images, "feature_extractor": json.loads(self.sounds.to_json_string())}
        (path / "processor_config.json").write_text(json.dumps(values, default=str))


GEMMAS = {
    "gemma3n": (_gemma3n, "Gemma3nForConditionalGeneration"),
    "gemma4": (_gemma4, "Gemma4ForConditionalGeneration"),
    "gemma4_unified": (_gemma4_unified, "Gemma4UnifiedForConditionalGeneration"),
}
ALL_KINDS = {
    "qwen2_5_omni": (_qwen2_5_omni, "Qwen2_5OmniForConditionalGeneration"),
    "qwen3_omni_moe": (_qwen3_omni_moe, "Qwen3OmniMoeForConditionalGeneration"),
}
"""Families that read images and videos, too."""
FAMILIES = {
    "audioflamingo3": (_audio_flamingo, "AudioFlamingo3ForConditionalGeneration"),
    "fun_asr_nano": (_fun_asr_nano, "FunAsrNanoForConditionalGeneration"),
    "glmasr": (_glm_asr, "GlmAsrForConditionalGeneration"),
    "granite_speech": (_granite_speech, "GraniteSpeechForConditionalGeneration"),
    "granite_speech_plus": (_granite_speech_plus, "GraniteSpeechPlusForConditionalGeneration"),
    "moss_transcribe_diarize": (_moss, "MossTranscribeDiarizeForConditionalGeneration"),
    "musicflamingo": (_music_flamingo, "MusicFlamingoForConditionalGeneration"),
    "qwen3_asr": (_qwen3_asr, "Qwen3ASRForConditionalGeneration"),
    "qwen2_audio": (_qwen2_audio, "Qwen2AudioForConditionalGeneration"),
    "voxtral": (_voxtral, "VoxtralForConditionalGeneration"),
}
"""Two hear 2 s at once, and Qwen3-ASR 1 s."""


HOURS = {"vibevoice_asr": (_vibevoice, "VibeVoiceAsrForConditionalGeneration")}
"""It hears an hour at once."""


def make_hearing_checkpoint(family: str, path: Path) -> Path:
    """Write a random model to `path` and return it."""
    make, architecture = (FAMILIES | ALL_KINDS | GEMMAS | HOURS)[family]
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


def make_nemotron_omni(path: Path) -> Path:
    """Write a random Nemotron Omni that hears to `path` and return it."""
    import transformers as tf

    given, images = VISION_FAMILIES["nemotron_omni"][0]()
    tower = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
    tower |= {"num_mel_bins": 16, "subsampling_conv_channels": 8, "conv_kernel_size": 5, "convolution_bias": False}
    tower |= {"projection_hidden_size": 40, "projection_bias": True, "sampling_rate": 16_000}
    values = given.to_dict() | {"audio_config": tower, "audio_token_id": OMNI["audio"]}
    config = tf.NemotronH_Omni_Reasoning_V3_Config(**values)
    return write_random(path, config, images, "NemotronH_Omni_Reasoning_V3")
