"""The families of models that read images, and no sounds, a row for each."""

from __future__ import annotations

from typing import Final

from octavo.config.media.image_fits import aria_fit, minicpm_fit, mllama_fit
from octavo.config.media.media_family import MediaFamily, Side
from octavo.config.released.blip2 import blip2_layout
from octavo.config.released.deepseek_ocr import SECOND, deepseek_ocr_layout
from octavo.config.released.deepseek_vl2 import DEEPSEEK_VL2, VL2_TYPE, deepseek_vl2_layout, deepseek_vl2_settings
from octavo.config.released.ernie import ERNIE_VL, ernie_layout, ernie_settings
from octavo.config.released.intern import intern_layout, intern_settings, nvlm_layout
from octavo.config.released.kimi import KIMI, kimi_layout, kimi_settings
from octavo.config.released.minicpm import minicpm_layout
from octavo.config.released.minimax import minimax_settings
from octavo.config.released.molmo2 import molmo2_layout, molmo2_settings
from octavo.config.released.nemotron import radio_layout, squares_settings, tiles_layout, tiles_settings
from octavo.config.released.ovis import ovis_layout, ovis_patches, ovis_settings
from octavo.config.released.pages import eagle_layout, eagle_settings, pages_layout, pages_settings
from octavo.config.released.phi3 import phi3v_layout
from octavo.config.released.step import step_settings

_PADDLE: Final = "PaddleOCRVLForConditionalGeneration"
_PADDLE_IMAGES: Final = {
    f"{name}ImageProcessor": "PaddleOCRVLImageProcessor" for name in ("KeyeVL", "KeyeVL1_5", "Siglip")
}

IMAGE_FAMILIES: Final = (
    MediaFamily(
        ("AriaForConditionalGeneration",),
        text={"aria": "ariatext"},
        images="aria",
        fit=aria_fit,
        reader="aria_encoder.AriaReader",
    ),
    MediaFamily(("AyaVisionForConditionalGeneration",), images="aya", side=Side(384)),
    MediaFamily(
        ("BeeForConditionalGeneration",),
        images="pinned",
        processors={"BeeImageProcessor": "LlavaOnevisionImageProcessor"},
        reader="bee_encoder.BeeReader",
        library="LlavaOnevisionForConditionalGeneration",
        is_apart=True,
    ),
    MediaFamily(("Blip2ForConditionalGeneration",), layout=blip2_layout, images="blip2", side=Side(224)),
    MediaFamily(
        ("CLIPModel",),
        images="clip",
        is_dual=True,
        side=Side(setting="crop_size"),
        reader="dual_encoders.DualReader",
        library_config="CLIPConfig",
    ),
    MediaFamily(("Cohere2VisionForConditionalGeneration",), images="cohere2"),
    MediaFamily(
        ("DeepseekOCRForCausalLM",),
        layout=deepseek_ocr_layout,
        text={"unlimited_ocr": "deepseek"},
        images="deepseek_ocr",
        unstated=lambda config: {"image_processor_type": "DeepseekOcrImageProcessor"},
        library="UnlimitedOcrForConditionalGeneration",
        names="deepseek_ocr",
    ),
    MediaFamily(
        ("DeepseekOcr2ForConditionalGeneration",),
        released=(SECOND,),
        layout=deepseek_ocr_layout,
        text={"deepseek_ocr2": "deepseek"},
        images="deepseek_ocr2",
        unstated=lambda config: {"image_processor_type": "DeepseekOcr2ImageProcessor"},
        names="deepseek_ocr2",
    ),
    MediaFamily(("DeepseekVLForConditionalGeneration",), images="patches", side=Side(224)),
    MediaFamily(
        (DEEPSEEK_VL2,),
        released=(VL2_TYPE,),
        layout=deepseek_vl2_layout,
        images="deepseek_vl2",
        computed=deepseek_vl2_settings,
        reader="deepseek_vl2_encoder.DeepseekVl2Reader",
        library_config="LlavaConfig",
        is_apart=True,
        names="deepseek_vl2",
    ),
    MediaFamily(
        ("DotsOCRForCausalLM",),
        text={"dots_ocr": "qwen2"},
        images="qwen_in_line",
        reader="dots_ocr.DotsOcrReader",
        names="dots_ocr",
    ),
    MediaFamily(
        ("Eagle2_5_VLForConditionalGeneration",),
        layout=eagle_layout,
        images="eagle",
        computed=eagle_settings,
        reader="siglip_encoder.SiglipReader",
        library_config="LlavaConfig",
        is_apart=True,
    ),
    MediaFamily(
        (ERNIE_VL,), layout=ernie_layout, images="ernie", videos="ernie", settings=ernie_settings, names="ernie"
    ),
    MediaFamily(("Exaone4_5_ForConditionalGeneration",), text={"exaone4_5": "exaone4"}, images="qwen_in_line"),
    MediaFamily(("Gemma3ForConditionalGeneration",), images="gemma3", side=Side(224)),
    MediaFamily(("Glm46VForConditionalGeneration",), images="qwen", videos="glm46"),
    MediaFamily(
        ("Glm4vForConditionalGeneration", "Glm4vMoeForConditionalGeneration"),
        text={"glm4v": "glm4", "glm4v_moe": "glm4_moe"},
        images="qwen",
        videos="glm",
    ),
    MediaFamily(("Glm5NextForConditionalGeneration",), images="qwen_in_line"),
    MediaFamily(("GlmOcrForConditionalGeneration",), text={"glm_ocr": "glm4"}, images="qwen", videos="glm46"),
    MediaFamily(("GotOcr2ForConditionalGeneration",), images="got_ocr", side=Side(1024)),
    MediaFamily(
        ("Granite4VisionForConditionalGeneration",),
        text={"granite4_vision": "granite"},
        images="pinned",
        side=Side(setting="crop_size"),
    ),
    MediaFamily(
        ("H2OVLChatModel", "InternVLChatModel", "SkyworkR1VChatModel"),
        layout=intern_layout,
        images="intern",
        unstated=intern_settings,
        library="InternVLForConditionalGeneration",
        is_apart=True,
        names="intern",
    ),
    MediaFamily(("HYV4VLForConditionalGeneration",), text={"hy_v4_vl": "hyv4"}, images="hyv4", names="hunyuan"),
    MediaFamily(
        ("HunYuanVLForConditionalGeneration",),
        text={"hunyuan_vl": "hunyuandensev1"},
        images="hunyuan",
        width="vision_config.text_hidden_size",
        names="hunyuan",
    ),
    MediaFamily(
        ("HyperCLOVAXVisionV2ForConditionalGeneration",), images="qwen_in_line", width="text_config.hidden_size"
    ),
    MediaFamily(
        ("Idefics3ForConditionalGeneration", "SmolVLMForConditionalGeneration"),
        images="smolvlm",
        side=Side(224, "max_image_size"),
    ),
    MediaFamily(("InternVLForConditionalGeneration",), images="internvl", side=Side(448)),
    MediaFamily(("JanusForConditionalGeneration",), images="janus", side=Side(384)),
    MediaFamily(
        ("KeyeForConditionalGeneration",),
        text={"Keye": "qwen3"},
        images="qwen",
        processors=_PADDLE_IMAGES,
        library=_PADDLE,
        is_apart=True,
    ),
    MediaFamily(
        ("KeyeVL1_5ForConditionalGeneration",),
        text={"KeyeVL1_5": "qwen3"},
        images="qwen",
        processors=_PADDLE_IMAGES,
        reader="keye.KeyeReader",
        library=_PADDLE,
        is_apart=True,
    ),
    MediaFamily(
        (KIMI,),
        released=("KimiK25ForConditionalGeneration", "KimiVLForConditionalGeneration"),
        layout=kimi_layout,
        images="kimi",
        settings=kimi_settings,
        names="kimi",
    ),
    MediaFamily(("Lfm2VlForConditionalGeneration",), images="lfm2"),
    MediaFamily(("Lfm3VlForConditionalGeneration",), images="qwen_in_line", names="lfm3"),
    MediaFamily(("LightOnOcrForConditionalGeneration",), images="lighton"),
    MediaFamily(
        ("LlamaNemotronVLForSequenceClassification", "LlamaNemotronVLModel"),
        layout=pages_layout,
        images="pages",
        computed=pages_settings,
        reader="siglip_encoder.SiglipReader",
        library_config="LlavaConfig",
        is_apart=True,
    ),
    MediaFamily(
        ("Llama_Nemotron_Nano_VL",),
        layout=tiles_layout,
        images="tiles",
        computed=tiles_settings,
        reader="nemotron_encoder.TilesReader",
        library_config="NemotronH_Omni_Reasoning_V3_Config",
        is_apart=True,
        names="nemotron",
    ),
    MediaFamily(("Llama4ForConditionalGeneration",), images="llama4", side=Side(448)),
    MediaFamily(
        ("LlavaForConditionalGeneration",), images="llava", side=Side(setting="crop_size", of="clip_vision_model")
    ),
    MediaFamily(("LlavaNextForConditionalGeneration",), images="pinned", side=Side(setting="crop_size")),
    MediaFamily(("LlavaNextVideoForConditionalGeneration", "LlavaOnevisionForConditionalGeneration"), images="pinned"),
    MediaFamily(
        ("MiniCPMV",),
        layout=minicpm_layout,
        images="minicpm",
        fit=minicpm_fit,
        reader="minicpm_encoder.MiniCPMReader",
        library_config="LlavaConfig",
        is_apart=True,
    ),
    MediaFamily(("MiniCPMV4_6ForConditionalGeneration",), images="minicpm4_6", fit=minicpm_fit),
    MediaFamily(
        ("MiniMaxM3SparseForConditionalGeneration",),
        text={"minimax_m3": "minimaxm3sparse"},
        images="minimax",
        videos="minimax",
        settings=minimax_settings,
        library_config="MiniMaxM3VLConfig",
        names="minimax",
    ),
    MediaFamily(("Mistral3ForConditionalGeneration",), images="pixtral"),
    MediaFamily(("MistralLarge4ForConditionalGeneration",), images="pixtral", names="mistral"),
    MediaFamily(
        ("MllamaForConditionalGeneration",),
        images="mllama",
        fit=mllama_fit,
        side=Side(448),
        reader="mllama.CrossReader",
    ),
    MediaFamily(
        ("Molmo2ForConditionalGeneration",),
        layout=molmo2_layout,
        images="molmo2",
        computed=molmo2_settings,
        width="adapter_config.text_hidden_size",
        names="molmo2",
    ),
    MediaFamily(("MuseGlimmerForConditionalGeneration",), images="muse", videos="muse"),
    MediaFamily(
        ("NemotronH_Nano_VL_V2",),
        layout=radio_layout,
        images="nemotron",
        computed=squares_settings,
        reader="nemotron_encoder.SquaresReader",
        library_config="NemotronH_Omni_Reasoning_V3_Config",
        is_apart=True,
        names="nemotron",
    ),
    MediaFamily(
        ("NVLM_D",),
        layout=nvlm_layout,
        images="nvlm",
        unstated=intern_settings,
        reader="nvlm_encoder.NvlmReader",
        library="InternVLForConditionalGeneration",
        is_apart=True,
        names="intern",
    ),
    MediaFamily(
        ("OpenCUAForConditionalGeneration",),
        images="opencua",
        library="Qwen2_5_VLForConditionalGeneration",
        is_apart=True,
        names="opencua",
    ),
    MediaFamily(("Ovis2ForConditionalGeneration",), images="ovis2", side=Side(224), width="hidden_size"),
    MediaFamily(
        ("Ovis2_5", "Ovis2_6ForCausalLM", "Ovis2_6_MoeForCausalLM"),
        layout=ovis_layout,
        images="ovis2_5",
        settings=ovis_settings,
        fit=ovis_patches,
        reader="ovis_encoder.OvisReader",
        library_config="PaddleOCRVLConfig",
        is_apart=True,
    ),
    MediaFamily((_PADDLE,), text={"paddleocr_vl": "ernie4_5"}, images="qwen", processors=_PADDLE_IMAGES),
    MediaFamily(
        ("PaliGemmaForConditionalGeneration",),
        images="paligemma",
        has_whole_prompts=True,
        side=Side(224),
        width="projection_dim",
    ),
    MediaFamily(
        ("Phi3VForCausalLM",),
        layout=phi3v_layout,
        images="phi3v",
        reader="phi3v_encoder.Phi3VReader",
        library_config="LlavaConfig",
        is_apart=True,
    ),
    MediaFamily(
        ("QianfanOCRForConditionalGeneration",),
        layout=intern_layout,
        images="intern",
        side=Side(448),
        is_apart=True,
        names="qianfan",
    ),
    MediaFamily(
        ("Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration"),
        text={"qwen2_vl": "qwen2", "qwen2_5_vl": "qwen2"},
        images="qwen",
        videos="qwen2",
    ),
    MediaFamily(
        ("Qwen3VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration"),
        text={"qwen3_vl": "qwen3", "qwen3_vl_moe": "qwen3_moe"},
        images="qwen",
        videos="qwen3",
    ),
    MediaFamily(
        ("Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration"), images="qwen", videos="qwen3"
    ),
    MediaFamily(
        ("SiglipModel",),
        images="siglip",
        is_dual=True,
        side=Side(224),
        reader="dual_encoders.DualReader",
        library_config="SiglipConfig",
    ),
    MediaFamily(
        ("Step3p7ForConditionalGeneration", "StepVLForConditionalGeneration"),
        images="step",
        settings=step_settings,
        unstated=lambda config: {"image_processor_type": "Step3p7ImageProcessor"},
        library="Step3p7ForConditionalGeneration",
        is_apart=True,
        names="step",
    ),
    MediaFamily(("VideoLlama3ForConditionalGeneration",), images="video_llama"),
    MediaFamily(("VipLlavaForConditionalGeneration",), images="patches", side=Side(setting="crop_size")),
)
