"""From the architecture that a checkpoint names to the class that implements it, which has the same name.

The `model_type` of a family selects it where config.json names no architecture.
"""

from __future__ import annotations

import re
from importlib import import_module
from typing import Any, Final, Protocol

from octavo.config.checkpoint import Checkpoint
from octavo.config.images import READ_IMAGES, image_settings
from octavo.config.released_minicpm import MINICPM_V
from octavo.config.released_ovis import OVIS
from octavo.config.released_pages import NEMOTRON_PAGES
from octavo.config.section import shown
from octavo.config.sounds import READ_SOUND, sound_section
from octavo.distributed.mesh import Mesh
from octavo.errors import UnsupportedModel
from octavo.models.config import DecoderConfig
from octavo.models.decoder import DecoderStack
from octavo.models.fallback.library import INSTALL, find_class, library_version

_TEXT_ALONE: Final = frozenset(
    {
        "MiniCPMV4_7ForConditionalGeneration",
        "MiMoV2OmniForCausalLM",
        "Qwen4ExpForConditionalGeneration",
        "Step3VLForConditionalGeneration",
    }
)
"""Architectures whose images and sounds are not read."""
AROUND_A_TEXT_MODEL: Final = READ_IMAGES | READ_SOUND | _TEXT_ALONE
"""Architectures that read images or sound, and whose text model alone is the family that `text_config` names."""
_FAMILY_OF_TYPE: Final = {
    "aria": "ariatext",
    "Keye": "qwen3",
    "KeyeVL1_5": "qwen3",
    "deepseek_ocr2": "deepseek",
    "camembert": "roberta",
    "dots_ocr": "qwen2",
    "eurobert": "llama",
    "exaone4_5": "exaone4",
    "glm4v": "glm4",
    "granite4_vision": "granite",
    "glm4v_moe": "glm4_moe",
    "glm_ocr": "glm4",
    "hunyuan_v1_dense": "hunyuandensev1",
    "hunyuan_v1_moe": "hunyuanmoev1",
    "hunyuan_vl": "hunyuandensev1",
    "hy_v4_vl": "hyv4",
    "llama_bidirec": "llama",
    "mimovl": "mimov2",
    "minimax_m3": "minimaxm3sparse",
    "modernbert-decoder": "modernbertdecoder",
    "nemotron-nas": "decilm",
    "new": "gte",
    "paddleocr_vl": "ernie4_5",
    "qwen2_5_omni": "qwen2",
    "qwen2_vl": "qwen2",
    "qwen2_5_vl": "qwen2",
    "qwen3_omni_moe": "qwen3_moe",
    "qwen3_vl": "qwen3",
    "qwen3_vl_moe": "qwen3_moe",
    "step3": "step3text",
    "unlimited_ocr": "deepseek",
}
"""Families by the `model_type` of their text models, without `_text`, where that is not the family's name."""
_READERS: Final = {
    **dict.fromkeys(MINICPM_V, ("minicpm_encoder", "MiniCPMReader")),
    **dict.fromkeys(NEMOTRON_PAGES, ("siglip_encoder", "SiglipReader")),
    **dict.fromkeys(OVIS, ("ovis_encoder", "OvisReader")),
}
"""By architecture: the file and the class of what reads images, where text models of several families have it."""
_FILES: Final = {
    "corrected_mixtures": (
        *("Afmoe", "BailingMoe", "BailingMoeV2", "Dots1", "Ernie4_5_Moe", "ExaoneMoE", "ExaoneMoe", "Glm4Moe", "HYV3"),
        *("Kolibri1", "MiniMaxM2", "Param2MoE", "SarvamMoE", "SolarOpen"),
    ),
    "bitnet": ("BitNet",),
    "dbrx": ("Dbrx",),
    "cohere": ("Cohere", "Cohere2", "Cohere2Moe"),
    "distance_encoders": ("DebertaV2", "JinaBert", "MPNet"),
    "encoders": (
        "Albert",
        "Bert",
        "DistilBert",
        "Electra",
        "Ernie",
        "Gte",
        "JinaEmbeddingsV3",
        "ModernBert",
        "NomicBert",
        "Roberta",
        "XLMRoberta",
    ),
    "deci": ("DeciLM",),
    "dual_encoders": ("CLIP", "Siglip"),
    "deepseek": (
        *("AXK1", "DeepseekV2", "DeepseekV3", "Glm4MoeLite", "KimiK2", "Mistral4", "MistralLarge3"),
        *("PanguUltraMoE", "SarvamMLA", "Youtu"),
    ),
    "deepseek_sparse": ("AXK2", "DeepseekV32", "GlmMoeDsa", "HYV4"),
    "deepseek_v4": ("DeepseekV4",),
    "ernie_vl": ("Ernie4_5_VLMoe",),
    "gemma": ("Gemma", "Gemma2", "Gemma3", "Rnj1", "VaultGemma"),
    "gemma3n": ("Gemma3n",),
    "gemma4": ("EmbeddingGemma2", "Gemma4", "Gemma4Unified"),
    "glm5_next": ("Glm5Next",),
    "granite": (
        *("Granite", "GraniteMoe", "GraniteMoeHybrid", "GraniteMoeSWA", "GraniteMoeShared", "GraniteSWA"),
        *("HyperCLOVAX", "MiniCPM", "MiniCPM3"),
    ),
    "layer_norms": (
        *("CodeGen", "Falcon", "GPT2", "GPTBigCode", "GPTJ", "GPTNeo", "GPTNeoX", "JAIS", "Jais2"),
        *("Nemotron", "Olmo", "Orion", "Phi", "StableLm", "Starcoder2"),
    ),
    "jamba": ("Jamba",),
    "kimi_linear": ("BailingHybrid", "BailingMoeV3", "KimiLinear"),
    "lfm2": ("Lfm2", "Lfm2Moe", "Lfm3"),
    "llama": (
        *("Apertus", "Apertus1p5", "Apertus1p5Text", "Aquila", "Arcee", "Cwm", "Ernie4_5", "Exaone", "Exaone4"),
        *("Glm", "Glm4", "Helium"),
        *("HunYuanDenseV1", "IQuestCoder", "InternLM2", "InternLM3", "LLaMA", "Llama", "MiMo", "Ministral"),
        *("Ministral3", "Mistral", "Olmo2", "Olmo3", "Phi3", "Phi3V", "Phi4MM", "Phi4Multimodal", "Qwen2", "Qwen3"),
        *("SeedOss", "SmolLM3", "TeleChat3", "Xverse"),
    ),
    "laguna": ("Laguna",),
    "ling": ("BailingMoeV2_5",),
    "llama4": ("Llama4",),
    "looped": ("Nanbeige", "Ouro"),
    "longcat": ("LongcatFlash", "LongcatFlashNgram"),
    "mamba": ("Bamba", "FalconH1", "FalconMamba", "Mamba", "Mamba2", "NemotronH", "NemotronHPuzzle"),
    "mimo": ("MiMoV2", "MiMoV2Flash"),
    "mistral_large4": ("MistralLarge4",),
    "mllama": ("Mllama",),
    "minimax": ("MiniMax", "MiniMaxM1", "MiniMaxText01"),
    "minimax_m3": ("MiniMaxM3Sparse", "MiniMaxM3VL"),
    "mixtures": (
        *("AriaText", "Deepseek", "FlexOlmo", "Flint", "GptOss", "HunYuanMoEV1", "Mellum", "Mixtral", "Olmoe"),
        *("OpenAIPrivacyFilter", "PhiMoE", "Phimoe", "Qwen2Moe", "Qwen3Moe"),
    ),
    "modernbert_decoder": ("ModernBertDecoder",),
    "muse": ("MuseGlimmer",),
    "nanochat": ("NanoChat",),
    "olmo_hybrid": ("OlmoHybrid",),
    "opt": ("OPT",),
    "own_code": ("Baichuan", "ChatGLM", "InternLM", "PanguEmbedded", "QWen", "TeleChat", "TeleFLM"),
    "qwen4_exp": ("Qwen4Exp",),
    "qwen_linear": ("Qwen3Next", "Qwen3_5", "Qwen3_5Moe"),
    "slopes": ("Bloom", "MPT", "Mpt"),
    "solar": ("Solar",),
    "step": ("Step3Text", "Step3p5"),
    "whisper": ("CohereAsr", "Moonshine", "Whisper"),
    "zamba2": ("Zamba2",),
}
"""The families of each file, which has a class `<family>ForCausalLM`, unless `_OTHER_NAMES` has another name."""
_OTHER_NAMES: Final = {
    **{family: f"{family}Model" for file in ("distance_encoders", "encoders") for family in _FILES[file]},
    "Apertus1p5": "Apertus1p5ForConditionalGeneration",
    "CLIP": "CLIPModel",
    "CohereAsr": "CohereAsrForConditionalGeneration",
    "EmbeddingGemma2": "EmbeddingGemma2Model",
    "Glm5Next": "Glm5NextForConditionalGeneration",
    "GPT2": "GPT2LMHeadModel",
    "JAIS": "JAISLMHeadModel",
    "QWen": "QWenLMHeadModel",
    "MiniMaxM3Sparse": "MiniMaxM3SparseForConditionalGeneration",
    "MistralLarge4": "MistralLarge4ForConditionalGeneration",
    "Mllama": "MllamaForConditionalGeneration",
    "Moonshine": "MoonshineForConditionalGeneration",
    "OpenAIPrivacyFilter": "OpenAIPrivacyFilterModel",
    "Siglip": "SiglipModel",
    "Whisper": "WhisperForConditionalGeneration",
}
_FILE_OF: Final = {
    _OTHER_NAMES.get(family, f"{family}ForCausalLM"): file for file, families in _FILES.items() for family in families
} | {
    "DeepseekV4ForConditionalGeneration": "deepseek_v4",
    "Glm5NextForCausalLM": "glm5_next",
    "MiniMaxM3SparseForCausalLM": "minimax_m3",
}


class ModelClass(Protocol):
    """The class of a family: a `DecoderStack` that is made from its config."""

    def read(self, c: Checkpoint) -> DecoderConfig:
        """Read the config of `c`. Raises CheckpointError or UnsupportedModel."""

    def __call__(self, config: Any, mesh: Mesh) -> DecoderStack:
        """Make the part of the model that the mesh's rank has."""


def resolve_model(checkpoint: Checkpoint, *, makes_text: bool = True, reads_images: bool = True) -> ModelClass:
    """Return the class for the checkpoint's architecture: a family's, else what runs a class of transformers.

    makes_text: False takes a family's class for its hidden states alone, whatever the architecture does with them.
    reads_images: False leaves encoders of images and sounds out.
    Raises UnsupportedModel.
    """
    found = _text_class(checkpoint, makes_text=makes_text)
    if not reads_images or library_version() is None:
        return found
    made: ModelClass = found
    place = None
    if sound_section(checkpoint) is not None:
        place = "hearing", "OmniReader" if checkpoint.architecture in READ_IMAGES else "SoundReader"
    elif image_settings(checkpoint) is not None:
        place = "vision", "ImageReader"
    if place is not None:
        module, name = _READERS.get(checkpoint.architecture, getattr(found, "READER", place))
        made = getattr(import_module(f"octavo.models.{module}"), name).of_text(checkpoint.architecture, found)
    return made


def _text_class(checkpoint: Checkpoint, *, makes_text: bool) -> ModelClass:
    wanted = checkpoint.architecture
    names = [wanted]
    if not makes_text:
        names += [_family(wanted).lower(), str(checkpoint.values.get("model_type"))]
    if wanted in AROUND_A_TEXT_MODEL:  # older configs have the keys of the text model beside the others
        names.append(checkpoint.text_model_type or checkpoint.str("model_type", ""))
    if wanted in _FILE_OF:  # whatever its text model says
        return getattr(import_module(f"octavo.models.{_FILE_OF[wanted]}"), wanted)
    for architecture, file in _FILE_OF.items():
        if architecture in names or _plain_type(_family(architecture).lower()) in map(_plain_type, names):
            return getattr(import_module(f"octavo.models.{file}"), architecture)
    without = f"; with transformers there are more: {INSTALL}" if library_version() is None else ""
    own_code = (
        "; its auto_map names code in its directory, which octavo never runs, whatever trust_remote_code says"
        if "auto_map" in checkpoint.values
        else ""
    )
    if library_version() is not None and find_class(checkpoint) is not None:
        return import_module("octavo.models.fallback.model").FallbackModel
    where = checkpoint.origin("architectures", "model_type")
    inner = f" with text_config.model_type {shown(names[-1])}" if wanted in AROUND_A_TEXT_MODEL else ""
    raise UnsupportedModel(
        f"{where}: there is no model family {_family(wanted)} yet (architecture {wanted}{inner}); "
        f"octavo models lists those that are there{without}{own_code}"
    )


def _family(architecture: str) -> str:
    """Return the family of an architecture: `Gemma2` of `Gemma2ForCausalLM`."""
    return re.sub(r"(For[A-Z]\w+|LMHeadModel|Model)$", "", architecture) or architecture


def _plain_type(model_type: str) -> str:
    """Return the name of the family of a `model_type`, without underscores."""
    name = model_type.removesuffix("_text")
    return _FAMILY_OF_TYPE.get(name, name).replace("_", "")


def known_architectures() -> list[str]:
    """Return all architectures that some file implements, sorted."""
    return sorted(_FILE_OF)
