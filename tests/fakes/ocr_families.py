"""Small configs of models that write down what images show, and the settings of their processors."""

from __future__ import annotations

from typing import Any

from tests.fakes.sizes import INDEXED, LATENT_EXPERTS
from tests.fakes.sparse_families import SPARSE_FAMILIES
from tests.fakes.vision_sizes import (
    EXPERTS,
    IMAGE,
    LINEAR,
    MROPE,
    NO_HEAD_DIM,
    PIXELS,
    SIDE,
    SIZELESS_TOWER,
    START,
    TEXT,
    TOWER,
    VIDEO,
    Settings,
    tf,
)


def _paddleocr() -> tuple[Any, Any]:
    text = {**TEXT, "rope_parameters": MROPE}
    ids = {"image_token_id": IMAGE, "video_token_id": VIDEO, "tie_word_embeddings": False}
    config = tf.PaddleOCRVLConfig(text_config={**text, "tie_word_embeddings": False}, vision_config=TOWER, **ids)
    return config, tf.PaddleOCRVLImageProcessorPil(size=PIXELS)


def _deepseek_ocr2() -> tuple[Any, Any]:
    text = {**TEXT, **EXPERTS, "mlp_layer_types": ["dense", "sparse"], "num_key_value_heads": 4}
    text["max_position_embeddings"] = 1024  # for images of several times 144 vectors
    sam = {name: TOWER[name] for name in ("hidden_size", "num_attention_heads", "image_size")}
    sam |= {"num_hidden_layers": 2, "window_size": 3, "global_attn_indexes": [1]}
    sam |= {"patch_size": 7, "output_channels": 16, "downsample_channels": [24, 32]}
    config = tf.DeepseekOcr2Config(
        text_config=text, vision_config={"sam_config": sam, "encoder_config": NO_HEAD_DIM}, image_token_id=IMAGE
    )
    return config, tf.DeepseekOcr2ImageProcessorPil(size=SIDE, tile_size=84, max_patches=2)


def _minicpm() -> tuple[Any, Any]:
    kinds = {"layer_types": ["linear_attention", "full_attention"], "num_hidden_layers": 2}
    rope = {**MROPE, "mrope_interleaved": True}
    text = tf.Qwen3_5TextConfig(**{**TEXT, **LINEAR, **kinds, "rope_parameters": rope})
    tower = {**TOWER, "insert_layer_id": 1}
    config = tf.MiniCPMV4_6Config(
        text_config=text.to_dict(), vision_config=tower, image_token_id=START, video_token_id=VIDEO, insert_layer_id=1
    )
    return config, tf.MiniCPMV4_6ImageProcessorPil(scale_resolution=56, max_slice_nums=4)


def _dots_ocr() -> tuple[Any, Any]:
    from tests.fakes.dots_ocr import DotsOCRConfig

    tower = {"embed_dim": 32, "num_attention_heads": 2, "num_hidden_layers": 2, "intermediate_size": 48}
    config = DotsOCRConfig(**NO_HEAD_DIM, vision_config={**tower, "patch_size": 14}, image_token_id=IMAGE)
    return config, tf.Qwen2VLImageProcessorPil(size=PIXELS, temporal_patch_size=1)


def _got_ocr2() -> tuple[Any, Any]:
    sam = {name: TOWER[name] for name in ("hidden_size", "num_attention_heads", "image_size")} | {"mlp_dim": 48}
    sam |= {
        "num_hidden_layers": 2,
        "window_size": 3,
        "global_attn_indexes": [1],
        "patch_size": 7,
        "output_channels": 16,
    }
    text = tf.Qwen2Config(**TEXT).to_dict()
    config = tf.GotOcr2Config(text_config=text, vision_config=sam, image_token_index=IMAGE, tie_word_embeddings=False)
    return config, tf.GotOcr2ImageProcessorPil(size=SIDE)


def _deepseek_ocr() -> tuple[Any, Any]:
    values = _deepseek_ocr2()[0].to_dict()
    sam, text = values["vision_config"]["sam_config"], values["text_config"]
    vision = {"sam_config": {**sam, "mlp_dim": 48}, "encoder_config": TOWER}
    text |= {"layer_types": ["full_attention"] * 2, "model_type": "unlimited_ocr_text"}
    config = tf.UnlimitedOcrConfig(text_config=text, vision_config=vision, image_token_id=IMAGE)
    return config, Settings("DeepseekOcrImageProcessor", size=SIDE, tile_size=84, max_patches=4)


def _hunyuan_vl() -> tuple[Any, Any]:
    rope = {"rope_type": "xdrope", "rope_theta": 1e4, "alpha": 10.0, "factor": 1.0}
    rope["xdrope_section"] = [1, 1, 1, 1]
    tower = {**SIZELESS_TOWER, "patch_size": 8, "max_image_size": 64, "out_hidden_size": 32}
    config = tf.HunYuanVLConfig(
        text_config={**TEXT, "rope_parameters": rope}, vision_config=tower, image_token_id=IMAGE
    )
    return config, tf.HunYuanVLImageProcessorPil(size={"shortest_edge": 1024, "longest_edge": 4096}, patch_size=8)


def _hy_v4_vl() -> tuple[Any, Any]:
    text: dict[str, Any] = {**LATENT_EXPERTS, **INDEXED}
    text |= {"num_hidden_layers": 2, "hc_mult": 3, "mlp_layer_types": ["dense", "sparse"], "rms_norm_eps": 1e-5}
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
    own = {name: each for name, each in TEXT.items() if name not in ("head_dim", "num_key_value_heads")}
    tower = {**SIZELESS_TOWER, "patch_size": 8, "max_image_size": 64, "out_hidden_size": 32}
    config = tf.HYV4VLConfig(
        text_config={**own, **text, "num_key_value_heads": 4, "index_head_dim": 12},
        vision_config=tower,
        image_token_id=IMAGE,
    )
    return config, tf.HYV4VLImageProcessorPil(size={"shortest_edge": 1024, "longest_edge": 4096}, patch_size=8)


def _glm5_next() -> tuple[Any, Any]:
    own = {name: each for name, each in TEXT.items() if name not in ("head_dim", "num_key_value_heads")}
    tower = {"depth": 2, "hidden_size": 32, "intermediate_size": 44, "num_heads": 2, "out_hidden_size": 32}
    config = tf.Glm5NextConfig(
        text_config={**own, **SPARSE_FAMILIES["glm5_next"][2]},
        vision_config={**tower, "projection_intermediate_size": 24, "image_size": 56},
        image_token_id=IMAGE,
    )
    return config, tf.Glm5NextImageProcessorPil(min_image_tokens=2, max_image_tokens=16)


def _mistral_large4() -> tuple[Any, Any]:
    own = {name: each for name, each in TEXT.items() if name not in ("head_dim", "num_key_value_heads")}
    config = tf.MistralLarge4Config(
        text_config={**own, **SPARSE_FAMILIES["mistral_large4"][2]},
        vision_config={**SIZELESS_TOWER, "model_type": "pixtral", "head_dim": 16, "image_size": 112},
        image_token_index=IMAGE,
    )
    return config, tf.PixtralImageProcessorPil(size={"longest_edge": 112}, patch_size={"height": 28, "width": 28})


def _step3p7() -> tuple[Any, Any]:
    kinds = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 12, "num_hidden_layers": 2}
    text = {**TEXT, **kinds, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    text |= {"share_expert_dim": 24, "mlp_layer_types": ["dense", "sparse"], "tie_word_embeddings": False}
    tower = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 56, "patch_size": 14}
    vision = {**tower, "mlp_ratio": 1.5, "max_position_embeddings": 16}
    config = tf.Step3p7Config(text_config=text, vision_config=vision, image_token_id=IMAGE)
    return config, Settings("Step3p7ImageProcessor", size=SIDE, patch_size=28)


OCR_FAMILIES = {
    "step3p7": (_step3p7, "Step3p7ForConditionalGeneration"),
    "mistral_large4": (_mistral_large4, "MistralLarge4ForConditionalGeneration"),
    "glm5_next": (_glm5_next, "Glm5NextForConditionalGeneration"),
    "hy_v4_vl": (_hy_v4_vl, "HYV4VLForConditionalGeneration"),
    "paddleocr_vl": (_paddleocr, "PaddleOCRVLForConditionalGeneration"),
    "deepseek_ocr2": (_deepseek_ocr2, "DeepseekOcr2ForConditionalGeneration"),
    "minicpmv4_6": (_minicpm, "MiniCPMV4_6ForConditionalGeneration"),
    "dots_ocr": (_dots_ocr, "DotsOCRForCausalLM"),
    "hunyuan_vl": (_hunyuan_vl, "HunYuanVLForConditionalGeneration"),
    "got_ocr2": (_got_ocr2, "GotOcr2ForConditionalGeneration"),
    "deepseek_ocr": (_deepseek_ocr, "DeepseekOCRForCausalLM"),
}
