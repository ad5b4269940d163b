"""Maps the architecture that a checkpoint names to the class that implements it, which has the same name.

The `model_type` of a family selects it where config.json names no architecture.
"""

from __future__ import annotations

import re
from importlib import import_module
from typing import Any, Final, Protocol

from octavo.config.checkpoint import Checkpoint
from octavo.config.media.images import image_settings
from octavo.config.media.media_families import FAMILIES, media_family
from octavo.config.media.sounds import sound_section
from octavo.config.section import shown
from octavo.distributed.mesh import Mesh
from octavo.errors import UnsupportedModel
from octavo.models.config import DecoderConfig
from octavo.models.decoder import DecoderStack
from octavo.models.fallback.library import INSTALL, find_class, library_version

_FAMILY_OF_TYPE: Final = {
    "camembert": "roberta",
    "eurobert": "llama",
    "hunyuan_v1_dense": "hunyuandensev1",
    "hunyuan_v1_moe": "hunyuanmoev1",
    "llama_bidirec": "llama",
    "modernbert-decoder": "modernbertdecoder",
    "nemotron-nas": "decilm",
    "new": "gte",
    **{model_type: family for row in FAMILIES for model_type, family in row.text.items()},
}
"""Families by the `model_type` of their text models, without `_text`, where that is not the family's name."""
_CLASSES: Final = {
    "alice": "AliceAI",
    "bitnet": "BitNet",
    "cohere": "Cohere Cohere2 Cohere2Moe",
    "corrected_mixtures": (
        "Afmoe BailingMoe BailingMoeV2 Dots1 Ernie4_5_Moe ExaoneMoE ExaoneMoe Glm4Moe HYV3 Kolibri1 MiniMaxM2 "
        "Param2MoE SarvamMoE SolarOpen"
    ),
    "dbrx": "Dbrx",
    "deci": "DeciLM",
    "deepseek": "AXK1 DeepseekV2 DeepseekV3 Glm4MoeLite KimiK2 Mistral4 MistralLarge3 PanguUltraMoE SarvamMLA Youtu",
    "deepseek_sparse": "AXK2 DeepseekV32 GlmMoeDsa HYV4",
    "deepseek_v4": "DeepseekV4 DeepseekV4ForConditionalGeneration",
    "distance_encoders": "DebertaV2Model JinaBertModel MPNetModel",
    "domyn": "DomynEdge",
    "dual_encoders": "CLIPModel SiglipModel",
    "encoders": (
        "AlbertModel BertModel DistilBertModel ElectraModel ErnieModel GteModel JinaEmbeddingsV3Model ModernBertModel "
        "NomicBertModel RobertaModel XLMRobertaModel"
    ),
    "ernie_vl": "Ernie4_5_VLMoe",
    "gemma": "Gemma Gemma2 Gemma3 Rnj1 VaultGemma",
    "gemma3n": "Gemma3n",
    "gemma4": "EmbeddingGemma2Model Gemma4 Gemma4Unified",
    "glm5_next": "Glm5NextForConditionalGeneration Glm5NextForCausalLM",
    "granite": (
        "Granite GraniteMoe GraniteMoeHybrid GraniteMoeSWA GraniteMoeShared GraniteSWA HyperCLOVAX MiniCPM MiniCPM3"
    ),
    "inkling": "InklingForConditionalGeneration",
    "jamba": "Jamba",
    "kimi_linear": "BailingHybrid BailingMoeV3 KimiK3ForConditionalGeneration KimiLinear",
    "laguna": "Laguna",
    "layer_norms": (
        "CodeGen Falcon GPT2LMHeadModel GPTBigCode GPTJ GPTNeo GPTNeoX JAISLMHeadModel Jais2 Nemotron Olmo Orion Phi "
        "StableLm Starcoder2"
    ),
    "lfm2": "Lfm2 Lfm2Moe Lfm3",
    "ling": "BailingMoeV2_5",
    "llama": (
        "Apertus Apertus1p5ForConditionalGeneration Apertus1p5Text Aquila Arcee Cwm Ernie4_5 Exaone Exaone4 Glm Glm4 "
        "Helium HunYuanDenseV1 IQuestCoder InternLM2 InternLM3 LLaMA Llama MiMo Ministral Ministral3 Mistral Olmo2 "
        "Olmo3 Phi3 Phi3V Phi4MM Phi4Multimodal Qwen2 Qwen3 SeedOss SmolLM3 TeleChat3 Xverse"
    ),
    "llama4": "Llama4",
    "longcat": "LongcatFlash LongcatFlashNgram",
    "looped": "Nanbeige Ouro",
    "mamba": "Bamba FalconH1 FalconMamba Mamba Mamba2 NemotronH NemotronHPuzzle",
    "mimo": "MiMoV2 MiMoV2Flash",
    "minimax": "MiniMax MiniMaxM1 MiniMaxText01",
    "minimax_m3": "MiniMaxM3SparseForConditionalGeneration MiniMaxM3VL MiniMaxM3SparseForCausalLM",
    "mistral_large4": "MistralLarge4ForConditionalGeneration",
    "mixtures": (
        "AriaText Deepseek FlexOlmo Flint GptOss HunYuanMoEV1 Mellum Mixtral Olmoe OpenAIPrivacyFilterModel PhiMoE "
        "Phimoe Qwen2Moe Qwen3Moe"
    ),
    "mllama": "MllamaForConditionalGeneration",
    "modernbert_decoder": "ModernBertDecoder",
    "molmo2": "Molmo2ForConditionalGeneration",
    "muse": "MuseGlimmer",
    "nanochat": "NanoChat",
    "olmo_hybrid": "OlmoHybrid",
    "opt": "OPT",
    "own_code": "Baichuan ChatGLM InternLM PanguEmbedded Plamo3 QWenLMHeadModel TeleChat TeleFLM",
    "qwen4_exp": "Qwen4Exp",
    "qwen_linear": "Qwen3Next Qwen3_5 Qwen3_5Moe",
    "slopes": "Bloom MPT Mpt",
    "solar": "Solar",
    "step": "Step3Text Step3p5",
    "whisper": "CohereAsrForConditionalGeneration MoonshineForConditionalGeneration WhisperForConditionalGeneration",
    "zamba2": "Zamba2",
}
"""The classes of each file, whose names end in ForCausalLM where they have no ending here."""


class ModelClass(Protocol):
    """The class of a family: a `DecoderStack` that is made from its config."""

    def read(self, c: Checkpoint) -> DecoderConfig:
        """Read the config of `c`. Raises CheckpointError or UnsupportedModel."""

    def __call__(self, config: Any, mesh: Mesh) -> DecoderStack:
        """Make the part of the model that the mesh's rank has."""


def resolve_model(checkpoint: Checkpoint, *, makes_text: bool = True, reads_images: bool = True) -> ModelClass:
    """Return the class for the checkpoint's architecture: a family's, else the one that runs a class of transformers.

    makes_text: False takes a family's class for its hidden states alone, whatever the architecture does with them.
    reads_images: False leaves encoders of images and sounds out.
    Raises UnsupportedModel.
    """
    found = _text_class(checkpoint, makes_text=makes_text)
    if not reads_images or library_version() is None:
        return found
    if sound_section(checkpoint) is None and image_settings(checkpoint) is None:
        return found
    family = media_family(checkpoint.architecture)
    default = "vision.ImageReader" if family.images else "hearing.SoundReader"
    module, _, name = (family.reader or default).partition(".")
    made: ModelClass = getattr(import_module(f"octavo.models.{module}"), name).of_text(checkpoint.architecture, found)
    return made


def _text_class(checkpoint: Checkpoint, *, makes_text: bool) -> ModelClass:
    wanted = checkpoint.architecture
    names = [wanted]
    if not makes_text:
        names += [_family(wanted).lower(), str(checkpoint.values.get("model_type"))]
    is_around_text = media_family(wanted).is_around_text
    if is_around_text:  # older configs have the keys of the text model beside the others
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
    inner = f" with text_config.model_type {shown(names[-1])}" if is_around_text else ""
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


_FILE_OF: Final = {
    name if name != _family(name) else f"{name}ForCausalLM": file
    for file, names in _CLASSES.items()
    for name in names.split()
}


def known_architectures() -> list[str]:
    """Return all architectures that some file implements, sorted."""
    return sorted(_FILE_OF)
