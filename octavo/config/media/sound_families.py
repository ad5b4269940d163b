"""The families of models that read sounds, some of which read images, too, a row for each."""

from __future__ import annotations

from typing import Final

from octavo.config.media.image_fits import joined_patch, minicpm_fit
from octavo.config.media.listeners import COHERE, MOONSHINE
from octavo.config.media.media_family import MediaFamily, Side
from octavo.config.released.granite_speech import granite_sounds
from octavo.config.released.minicpm import minicpm_layout, minicpm_sounds
from octavo.config.released.nemotron import nemotron_layout, nemotron_settings, nemotron_sounds
from octavo.config.released.phi4 import PHI4, RELEASED, phi4_layout, phi4_settings, phi4_sounds
from octavo.config.released.ultravox import RELEASED as ULTRAVOX_RELEASED
from octavo.config.released.ultravox import ULTRAVOX, ultravox_layout, ultravox_sounds
from octavo.config.released.vibevoice import vibevoice_sounds

SOUND_FAMILIES: Final = (
    MediaFamily(("AudioFlamingo3ForConditionalGeneration",), sounds="audio_flamingo3"),
    MediaFamily(("CohereAsrForConditionalGeneration",), speech="cohere", listener=COHERE),
    MediaFamily(("FunAsrNanoForConditionalGeneration",), sounds="fun_asr", speech="fun_asr"),
    MediaFamily(
        ("Gemma3nForConditionalGeneration",),
        images="gemma3n",
        sounds="gemma3n",
        speech="omni",
        reader="gemma3n_encoders.Gemma3nReader",
    ),
    MediaFamily(
        ("Gemma4ForConditionalGeneration",),
        images="gemma4",
        sounds="gemma4",
        speech="omni",
        reader="hearing.BothReader",
    ),
    MediaFamily(
        ("Gemma4UnifiedForConditionalGeneration",),
        images="gemma4",
        sounds="gemma4_unified",
        speech="omni",
        processors={"Gemma4UnifiedImageProcessor": "Gemma4ImageProcessor"},
        fit=joined_patch,
        reader="hearing.BothReader",
        names="gemma_unified",
    ),
    MediaFamily(("GlmAsrForConditionalGeneration",), sounds="glm_asr", speech="glm"),
    MediaFamily(
        ("GraniteSpeechForConditionalGeneration", "GraniteSpeechPlusForConditionalGeneration"),
        sounds="granite",
        speech="granite",
        sound_part=granite_sounds,
    ),
    MediaFamily(
        ("MiniCPMO",),
        layout=minicpm_layout,
        images="minicpm",
        sounds="minicpm",
        fit=minicpm_fit,
        sound_part=minicpm_sounds,
        reader="minicpm_encoder.MiniCPMReader",
        library_config="LlavaConfig",
        is_apart=True,
    ),
    MediaFamily(("MoonshineForConditionalGeneration",), speech="moonshine", listener=MOONSHINE),
    MediaFamily(("MossTranscribeDiarizeForConditionalGeneration",), sounds="moss", reader="hearing.MossReader"),
    MediaFamily(("MusicFlamingoForConditionalGeneration",), sounds="music_flamingo"),
    MediaFamily(
        ("NemotronH_Nano_Omni_Reasoning_V3", "NemotronH_Omni_Reasoning_V3", "NemotronH_Super_Omni_Reasoning_V3"),
        layout=nemotron_layout,
        images="nemotron",
        sounds="nemotron",
        settings=nemotron_settings,
        sound_part=nemotron_sounds,
        reader="nemotron_encoder.NemotronReader",
        library_config="NemotronH_Omni_Reasoning_V3_Config",
        is_apart=True,
        names="nemotron",
    ),
    MediaFamily(
        (PHI4, RELEASED),
        layout=phi4_layout,
        images="phi4",
        sounds="phi4",
        speech="phi4",
        settings=phi4_settings,
        side=Side(448),
        sound_part=phi4_sounds,
        needs_settings=True,
        reader="phi4_encoder.Phi4Reader",
        library=PHI4,
        names="phi4",
    ),
    MediaFamily(("Qwen2AudioForConditionalGeneration",), sounds="qwen2_audio"),
    MediaFamily(
        ("Qwen2_5OmniForConditionalGeneration",),
        text={"qwen2_5_omni": "qwen2"},
        images="qwen",
        videos="qwen2",
        sounds="qwen2_5_omni",
        speech="omni",
        reader="hearing.OmniReader",
        library="Qwen2_5OmniThinkerForConditionalGeneration",
    ),
    MediaFamily(("Qwen3ASRForConditionalGeneration",), sounds="qwen3_asr", speech="qwen3_asr"),
    MediaFamily(
        ("Qwen3OmniMoeForConditionalGeneration",),
        text={"qwen3_omni_moe": "qwen3_moe"},
        images="qwen",
        videos="qwen2",
        sounds="qwen3_omni",
        speech="omni",
        reader="hearing.OmniReader",
        library="Qwen3OmniMoeThinkerForConditionalGeneration",
    ),
    MediaFamily(
        (ULTRAVOX,),
        (ULTRAVOX_RELEASED,),
        layout=ultravox_layout,
        sounds="ultravox",
        sound_part=ultravox_sounds,
        reader="ultravox_encoder.UltravoxReader",
    ),
    MediaFamily(
        ("VibeVoiceAsrForConditionalGeneration",),
        sounds="vibevoice",
        sound_part=vibevoice_sounds,
        reader="hearing.SamplesReader",
    ),
    MediaFamily(("VoxtralForConditionalGeneration",), sounds="voxtral", speech="voxtral"),
)
