"""Small random checkpoints of models that read images, as transformers writes them, with tokenizer and settings."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

TEXT: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TOWER: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 56,
    "patch_size": 14,
}
SPECIALS = [
    *("<pad>", "<s>", "</s>", "<unk>", "<image>", "<end>", "<start>", "<video>", "[IMG_BREAK]", "[IMG_END]"),
    *("<img>", "</img>", "<fake_token_around_image>", "<global-img>"),
    *(f"<row_{row}_col_{column}>" for row in (1, 2, 3) for column in (1, 2, 3)),
]
IMAGE, VIDEO, START, END = (SPECIALS.index(each) for each in ("<image>", "<video>", "<start>", "<end>"))


def image(seed: int, width: int = 84, height: int = 56) -> Any:
    """An image of Pillow with random pixels."""
    import numpy as np
    from PIL import Image

    return Image.fromarray(np.random.RandomState(seed).randint(0, 255, (height, width, 3), dtype=np.uint8))


def _llava() -> tuple[Any, Any]:
    import transformers as tf

    text = tf.LlamaConfig(**TEXT)
    tower = tf.CLIPVisionConfig(**TOWER, projection_dim=32)
    config = tf.LlavaConfig(text_config=text, vision_config=tower, image_token_index=IMAGE, image_seq_length=16)
    size = {"height": 56, "width": 56}
    return config, tf.CLIPImageProcessorPil(size={"shortest_edge": 56}, crop_size=size)


def _pixtral_tower() -> Any:
    import transformers as tf

    sizes = {name: value for name, value in TOWER.items() if name != "image_size"}
    return tf.PixtralVisionConfig(**sizes, head_dim=16, image_size=112)


def _pixtral() -> tuple[Any, Any]:
    import transformers as tf

    config = tf.LlavaConfig(
        text_config=tf.LlamaConfig(**TEXT),
        vision_config=_pixtral_tower(),
        image_token_index=IMAGE,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
    )
    return config, tf.PixtralImageProcessorPil(size={"longest_edge": 112}, patch_size={"height": 14, "width": 14})


def _mistral3() -> tuple[Any, Any]:
    import transformers as tf

    text, tower = tf.MistralConfig(**TEXT, sliding_window=None), _pixtral_tower()
    config = tf.Mistral3Config(text_config=text, vision_config=tower, image_token_index=IMAGE, spatial_merge_size=2)
    return config, tf.PixtralImageProcessorPil(size={"longest_edge": 112}, patch_size={"height": 28, "width": 28})


def _gemma3() -> tuple[Any, Any]:
    import transformers as tf

    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    text = {**TEXT, "num_hidden_layers": 3, "layer_types": kinds, "sliding_window": 12, "query_pre_attn_scalar": 8}
    tower = tf.SiglipVisionConfig(**TOWER)
    ids = {"boi_token_index": IMAGE, "eoi_token_index": END, "image_token_index": START}
    config = tf.Gemma3Config(text_config=text, vision_config=tower.to_dict(), mm_tokens_per_image=16, **ids)
    size = {"height": 56, "width": 56}
    cut = {
        "pan_and_scan_min_crop_size": 28,
        "pan_and_scan_max_num_crops": 3,
        "pan_and_scan_min_ratio_to_activate": 1.45,
    }
    return config, tf.Gemma3ImageProcessorPil(size=size, do_pan_and_scan=True, **cut)


def _paligemma() -> tuple[Any, Any]:
    import transformers as tf

    kinds = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "num_hidden_layers": 3}
    text = tf.Gemma2Config(**{**TEXT, **kinds}, sliding_window=12, query_pre_attn_scalar=8)
    tower, ids = tf.SiglipVisionConfig(**TOWER, vision_use_head=False), {"image_token_index": IMAGE}
    config = tf.PaliGemmaConfig(text_config=text, vision_config=tower, projection_dim=32, hidden_size=32, **ids)
    return config, tf.SiglipImageProcessorPil(size={"height": 56, "width": 56})


def _gemma4() -> tuple[Any, Any]:
    import transformers as tf

    text = {**TEXT, "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}
    own = {"sliding_window": 12, "global_head_dim": 16, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8}
    wide = {"vocab_size_per_layer_input": 128, "use_bidirectional_attention": "vision"}
    tower = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    tower |= {"num_key_value_heads": 2, "head_dim": 16, "patch_size": 4, "position_embedding_size": 64}
    clipped = {"use_clipped_linears": True, "standardize": True}
    ids = {"image_token_id": IMAGE, "boi_token_id": START, "eoi_token_id": END, "video_token_id": 7}
    config = tf.Gemma4Config(
        text_config={**text, **own, **wide}, vision_config={**tower, **clipped}, audio_config=None, **ids
    )
    return config, tf.Gemma4ImageProcessorPil(patch_size=4, max_soft_tokens=70)


def _llava_next() -> tuple[Any, Any]:
    import transformers as tf

    tower = tf.CLIPVisionConfig(**TOWER, projection_dim=32)
    pinned = [[56, 112], [112, 56], [112, 112]]
    text = tf.LlamaConfig(**TEXT)
    config = tf.LlavaNextConfig(
        text_config=text, vision_config=tower, image_token_index=IMAGE, image_grid_pinpoints=pinned
    )
    sizes = {"size": {"shortest_edge": 56}, "crop_size": {"height": 56, "width": 56}}
    return config, tf.LlavaNextImageProcessorPil(**sizes, image_grid_pinpoints=pinned)


def _llava_onevision() -> tuple[Any, Any]:
    import transformers as tf

    tower = tf.SiglipVisionConfig(**TOWER, vision_use_head=False)
    pinned = [[56, 112], [112, 56], [112, 112]]
    text = tf.Qwen2Config(**TEXT)
    sizes = {"image_grid_pinpoints": pinned, "vision_aspect_ratio": "anyres_max_2"}
    ids = {"image_token_index": IMAGE, "video_token_index": VIDEO}
    config = tf.LlavaOnevisionConfig(text_config=text, vision_config=tower, **ids, **sizes)
    return config, tf.LlavaOnevisionImageProcessorPil(size={"height": 56, "width": 56}, image_grid_pinpoints=pinned)


def _internvl() -> tuple[Any, Any]:
    import transformers as tf

    tower = {**TOWER, "image_size": [56, 56], "patch_size": [14, 14]}
    config = tf.InternVLConfig(
        text_config=tf.Qwen2Config(**TEXT), vision_config=tower, image_token_id=IMAGE, image_seq_length=4
    )
    size = {"height": 56, "width": 56}
    return config, tf.GotOcr2ImageProcessorPil(size=size, crop_to_patches=True, min_patches=1, max_patches=4)


def _smolvlm() -> tuple[Any, Any]:
    import transformers as tf

    config = tf.SmolVLMConfig(
        text_config=tf.LlamaConfig(**TEXT).to_dict(), vision_config=TOWER, image_token_id=IMAGE, scale_factor=2
    )
    sizes = {"size": {"longest_edge": 112}, "max_image_size": {"longest_edge": 56}}
    return config, tf.SmolVLMImageProcessorPil(**sizes, do_image_splitting=True)


def _qwen(name: str, text: str, tower: dict[str, Any], more: Any = {}, **rope: Any) -> tuple[Any, Any]:  # noqa: B006
    import transformers as tf

    sizes = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1], **rope}}
    own = {each: value for each, value in TEXT.items() if each != "head_dim" or text == "Qwen3"} | more
    ids = {"image_token_id": IMAGE, "video_token_id": 7, "vision_start_token_id": 6, "vision_end_token_id": 5}
    config = getattr(tf, f"{name}Config")(text_config={**own, **sizes}, vision_config=tower, **ids)
    size = {"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 64}
    patch = tower.get("patch_size", 14)
    return config, tf.Qwen2VLImageProcessorPil(size=size, patch_size=patch, merge_size=2)


def _qwen2_5() -> tuple[Any, Any]:
    tower = {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 32}
    return _qwen("Qwen2_5_VL", "Qwen2", {**tower, "patch_size": 14, "window_size": 56, "fullatt_block_indexes": [1]})


def _qwen2() -> tuple[Any, Any]:
    return _qwen("Qwen2VL", "Qwen2", {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2})


def _qwen3() -> tuple[Any, Any]:
    tower = {"depth": 3, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 32}
    own = {"patch_size": 16, "deepstack_visual_indexes": [0, 2], "num_position_embeddings": 64}
    return _qwen("Qwen3VL", "Qwen3", {**tower, **own}, {"num_hidden_layers": 3}, mrope_interleaved=True)


def _qwen3_moe() -> tuple[Any, Any]:
    tower = {"depth": 3, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 32}
    own = {"patch_size": 16, "deepstack_visual_indexes": [0, 2], "num_position_embeddings": 64}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "mlp_only_layers": []}
    untied = {**experts, "num_hidden_layers": 3, "tie_word_embeddings": False}
    return _qwen("Qwen3VLMoe", "Qwen3", {**tower, **own}, untied, mrope_interleaved=True)


def _qwen3_5() -> tuple[Any, Any]:
    tower = {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 32}
    own = {"patch_size": 16, "num_position_embeddings": 64, "deepstack_visual_indexes": []}
    linear = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    linear |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8}
    kinds = {"layer_types": ["linear_attention", "full_attention"] * 2, "num_hidden_layers": 4, "head_dim": 32}
    return _qwen("Qwen3_5", "Qwen3", {**tower, **own}, {**linear, **kinds}, mrope_interleaved=True)


def _glm4v(name: str = "Glm4v", **text: Any) -> tuple[Any, Any]:
    import transformers as tf

    tower = {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64}
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}
    own = {**TEXT, "hidden_size": 64, "head_dim": 16, "rope_parameters": rope, **text}
    ids = {"image_token_id": IMAGE, "video_token_id": VIDEO, "video_start_token_id": START, "video_end_token_id": END}
    ids |= {f"image_{each}_token_id": SPECIALS.index(word) for each, word in (("start", "<img>"), ("end", "</img>"))}
    config = getattr(tf, f"{name}Config")(text_config=own, vision_config={**tower, "image_size": 56}, **ids)
    size = {"shortest_edge": 28 * 28 * 2, "longest_edge": 28 * 28 * 32}
    processor = "Glm4v" if name == "Glm4v" else "Glm46V"
    return config, getattr(tf, f"{processor}ImageProcessorPil")(size=size)


def _glm46v() -> tuple[Any, Any]:
    return _glm4v("Glm46V", model_type="glm4v_text")


def _glm_ocr() -> tuple[Any, Any]:
    return _glm4v("GlmOcr", head_dim=8, rope_parameters={"rope_type": "default", "mrope_section": [2, 1, 1]})


def _paddleocr() -> tuple[Any, Any]:
    import transformers as tf

    text = {**TEXT, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}}
    ids = {"image_token_id": IMAGE, "video_token_id": VIDEO, "tie_word_embeddings": False}
    config = tf.PaddleOCRVLConfig(text_config={**text, "tie_word_embeddings": False}, vision_config=TOWER, **ids)
    return config, tf.PaddleOCRVLImageProcessorPil(size={"shortest_edge": 28 * 28 * 2, "longest_edge": 28 * 28 * 32})


def _deepseek_ocr2() -> tuple[Any, Any]:
    import transformers as tf

    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_shared_experts": 1}
    text = {**TEXT, **experts, "mlp_layer_types": ["dense", "sparse"], "num_key_value_heads": 4}
    text["max_position_embeddings"] = 1024  # for images of several times 144 vectors
    sam = {name: TOWER[name] for name in ("hidden_size", "num_attention_heads", "image_size")}
    sam |= {"num_hidden_layers": 2, "window_size": 3, "global_attn_indexes": [1]}
    sam |= {"patch_size": 7, "output_channels": 16, "downsample_channels": [24, 32]}
    encoder = {name: value for name, value in TEXT.items() if name != "head_dim"}
    config = tf.DeepseekOcr2Config(
        text_config=text, vision_config={"sam_config": sam, "encoder_config": encoder}, image_token_id=IMAGE
    )
    return config, tf.DeepseekOcr2ImageProcessorPil(size={"height": 56, "width": 56}, tile_size=84, max_patches=2)


def _minicpm() -> tuple[Any, Any]:
    import transformers as tf

    linear = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "head_dim": 32}
    linear |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8}
    kinds = {"layer_types": ["linear_attention", "full_attention"], "num_hidden_layers": 2}
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1], "mrope_interleaved": True}
    text = tf.Qwen3_5TextConfig(**{**TEXT, **linear, **kinds, "rope_parameters": rope})
    tower = {**TOWER, "insert_layer_id": 1}
    config = tf.MiniCPMV4_6Config(
        text_config=text.to_dict(), vision_config=tower, image_token_id=START, video_token_id=VIDEO, insert_layer_id=1
    )
    return config, tf.MiniCPMV4_6ImageProcessorPil(scale_resolution=56, max_slice_nums=4)


def _dots_ocr() -> tuple[Any, Any]:
    import transformers as tf

    from tests.fakes.dots_ocr import DotsOCRConfig

    tower = {"embed_dim": 32, "num_attention_heads": 2, "num_hidden_layers": 2, "intermediate_size": 48}
    own = {name: value for name, value in TEXT.items() if name != "head_dim"}
    config = DotsOCRConfig(**own, vision_config={**tower, "patch_size": 14}, image_token_id=IMAGE)
    size = {"shortest_edge": 28 * 28 * 2, "longest_edge": 28 * 28 * 32}
    return config, tf.Qwen2VLImageProcessorPil(size=size, temporal_patch_size=1)


def _got_ocr2() -> tuple[Any, Any]:
    import transformers as tf

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
    return config, tf.GotOcr2ImageProcessorPil(size={"height": 56, "width": 56})


def _deepseek_ocr() -> tuple[Any, Any]:
    import transformers as tf

    values = _deepseek_ocr2()[0].to_dict()
    sam, text = values["vision_config"]["sam_config"], values["text_config"]
    encoder = {name: value for name, value in TOWER.items() if name != "image_size"}
    vision = {"sam_config": {**sam, "mlp_dim": 48}, "encoder_config": {**encoder, "image_size": 56}}
    text |= {"layer_types": ["full_attention"] * 2, "model_type": "unlimited_ocr_text"}
    config = tf.UnlimitedOcrConfig(text_config=text, vision_config=vision, image_token_id=IMAGE)
    return config, Settings("DeepseekOcrImageProcessor", size={"height": 56, "width": 56}, tile_size=84, max_patches=4)


def _lighton_ocr() -> tuple[Any, Any]:
    import transformers as tf

    config = tf.LightOnOcrConfig(
        text_config=tf.Qwen3Config(**TEXT).to_dict(), vision_config=_pixtral_tower().to_dict(), image_token_id=IMAGE
    )
    return config, tf.PixtralImageProcessorPil(size={"longest_edge": 112}, patch_size={"height": 14, "width": 14})


def _glm4v_moe() -> tuple[Any, Any]:
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_shared_experts": 1}
    return _glm4v("Glm4vMoe", **experts, num_hidden_layers=3, routed_scaling_factor=1.5)


def _lfm2_vl() -> tuple[Any, Any]:
    import transformers as tf

    layers = {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"], "conv_L_cache": 3}
    tower = {name: value for name, value in TOWER.items() if name != "image_size"}
    sizes = {"num_patches": 16, "vision_use_head": False}
    config = tf.Lfm2VlConfig(
        text_config=tf.Lfm2Config(**{**TEXT, **layers}).to_dict(),
        vision_config=tf.Siglip2VisionConfig(**tower, **sizes).to_dict(),
        image_token_id=IMAGE,
        projector_hidden_size=40,
    )
    tiles = {"tile_size": 56, "min_tiles": 2, "max_tiles": 4, "min_image_tokens": 1, "max_image_tokens": 2}
    return config, Settings("Lfm2VlImageProcessorFast", encoder_patch_size=14, downsample_factor=2, **tiles)


def _aya_vision() -> tuple[Any, Any]:
    import transformers as tf

    config = _cohere2_vision()[0].to_dict()
    tower = tf.SiglipVisionConfig(**TOWER, vision_use_head=False)
    own = tf.AyaVisionConfig(text_config=config["text_config"], vision_config=tower, image_token_index=IMAGE)
    size = {"height": 56, "width": 56}
    return own, tf.GotOcr2ImageProcessorPil(size=size, crop_to_patches=True, min_patches=1, max_patches=4)


def _granite4_vision() -> tuple[Any, Any]:
    import transformers as tf

    factors = {"embedding_multiplier": 3.0, "residual_multiplier": 0.7, "attention_multiplier": 0.4}
    text = tf.Granite4VisionTextConfig(**{**TEXT, "num_hidden_layers": 4}, **factors, logits_scaling=2.0)
    tower = tf.SiglipVisionConfig(**{**TOWER, "hidden_size": 64}, vision_use_head=False)
    pinned, levels = [[56, 112], [112, 56], [112, 112]], {"deepstack_layer_map": [[-1, 0], [1, 2]]}
    levels |= {"spatial_vision_layer": -2, "spatial_target_layers": [1, 2, 3]}
    former = {"model_type": "blip_2_qformer", "num_hidden_layers": 1, "intermediate_size": 48}
    config = tf.Granite4VisionConfig(
        text_config=text.to_dict(),
        vision_config=tower.to_dict(),
        qformer_config={**former, "cross_attention_frequency": 1, "use_qformer_text_input": False},
        image_token_index=IMAGE,
        image_grid_pinpoints=pinned,
        downsample_rate="1/2",
        vision_feature_select_strategy="full",
        **levels,
    )
    sizes = {"size": {"shortest_edge": 56}, "crop_size": {"height": 56, "width": 56}}
    return config, tf.LlavaNextImageProcessorPil(**sizes, image_grid_pinpoints=pinned)


def _exaone4_5() -> tuple[Any, Any]:
    import transformers as tf

    text = tf.Exaone4Config(**{**TEXT, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 12})
    tower = {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "num_key_value_heads": 1}
    own = {"out_hidden_size": 32, "patch_size": 14, "window_size": 56, "fullatt_block_indexes": [1]}
    ids = {"image_token_id": IMAGE, "video_token_id": VIDEO}
    config = tf.Exaone4_5_Config(text_config=text.to_dict(), vision_config={**tower, **own}, **ids)
    return config, tf.Qwen2VLImageProcessorPil(size={"shortest_edge": 28 * 28 * 2, "longest_edge": 28 * 28 * 32})


def _vipllava() -> tuple[Any, Any]:
    import transformers as tf

    tower = tf.CLIPVisionConfig(**TOWER, projection_dim=32)
    layers = {"vision_feature_layer": [-2, 1, 3], "image_seq_length": 16}
    config = tf.VipLlavaConfig(
        text_config=tf.LlamaConfig(**TEXT), vision_config=tower, image_token_index=IMAGE, **layers
    )
    return config, _llava()[1]


def _hyperclovax_vision() -> tuple[Any, Any]:
    import transformers as tf

    text = tf.HyperCLOVAXConfig(**TEXT, attention_multiplier=0.4, residual_multiplier=0.7, logits_scaling=0.5)
    tower = {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 24}
    tower |= {"window_size": 56, "fullatt_block_indexes": [1], "model_type": "qwen2_5_vl_vision"}
    ids = {"image_token_id": IMAGE, "video_token_id": VIDEO}
    config = tf.HyperCLOVAXVisionV2Config(text_config=text.to_dict(), vision_config=tower, **ids)
    return config, tf.Qwen2VLImageProcessorPil(size={"shortest_edge": 28 * 28 * 2, "longest_edge": 28 * 28 * 32})


def _janus() -> tuple[Any, Any]:
    import transformers as tf

    tower = {name: TOWER[name] for name in TOWER if name != "intermediate_size"}
    made = {"base_channels": 32, "channel_multiplier": [1], "latent_channels": 32, "num_embeddings": 8}
    config = tf.JanusConfig(
        text_config=tf.LlamaConfig(**TEXT).to_dict(),
        vision_config={**tower, "projection_dim": 32, "num_image_tokens": 16},
        vq_config={**made, "projection_dim": 32, "image_token_embed_dim": 32},
        image_token_id=IMAGE,
    )
    return config, tf.JanusImageProcessorPil(size={"height": 56, "width": 56})


def _lfm3_vl() -> tuple[Any, Any]:
    import transformers as tf

    layers = {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"], "conv_L_cache": 3}
    tower = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = tf.Lfm3VlConfig(
        text_config=tf.Lfm3Config(**{**TEXT, **layers}).to_dict(),
        vision_config={**tower, "num_key_value_heads": 1, "patch_size": 14},
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        projector_hidden_size=40,
    )
    return config, tf.Qwen2VLImageProcessorPil(size={"shortest_edge": 28 * 28 * 2, "longest_edge": 28 * 28 * 32})


def _llava_next_video() -> tuple[Any, Any]:
    import transformers as tf

    config, processor = _llava_next()
    own = {name: getattr(config, name) for name in ("text_config", "vision_config", "image_grid_pinpoints")}
    ids = {"image_token_index": IMAGE, "video_token_index": VIDEO}
    return tf.LlavaNextVideoConfig(**own, **ids), processor


def _deepseek_vl() -> tuple[Any, Any]:
    import transformers as tf

    tower = tf.SiglipVisionConfig(**TOWER, vision_use_head=False)
    text = tf.LlamaConfig(**TEXT).to_dict()
    config = tf.DeepseekVLConfig(text_config=text, vision_config=tower.to_dict(), image_token_id=IMAGE)
    return config, tf.DeepseekVLImageProcessorPil(size={"height": 56, "width": 56})


def _video_llama_3() -> tuple[Any, Any]:
    import transformers as tf

    tower = {name: value for name, value in TOWER.items() if name != "image_size"}
    ids = {"image_token_id": IMAGE, "video_token_id": VIDEO}
    config = tf.VideoLlama3Config(text_config=tf.Qwen2Config(**TEXT).to_dict(), vision_config=tower, **ids)
    size = {"shortest_edge": 28 * 28 * 2, "longest_edge": 28 * 28 * 32}
    return config, tf.VideoLlama3ImageProcessorPil(size=size, patch_size=14, merge_size=2)


def _llama4() -> tuple[Any, Any]:
    import transformers as tf

    experts = {"num_local_experts": 4, "intermediate_size_mlp": 48, "moe_layers": [1], "no_rope_layers": [1, 0]}
    text = tf.Llama4TextConfig(**{**TEXT, **experts, "layer_types": ["chunked_attention", "full_attention"]})
    tower = {**TOWER, "intermediate_size": 128, "projector_input_dim": 24, "projector_output_dim": 24}
    tower |= {"vision_output_dim": 24, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    config = tf.Llama4Config(text_config=text.to_dict(), vision_config=tower, image_token_index=IMAGE)
    return config, Settings("Llama4ImageProcessorFast", size={"height": 56, "width": 56}, max_patches=4)


def _ovis2() -> tuple[Any, Any]:
    import transformers as tf

    tower = {**TOWER, "vocab_size": 16, "hidden_stride": 2, "num_hidden_layers": 1}
    ids = {"image_token_id": IMAGE, "visual_indicator_token_ids": [VIDEO, START, END, 8, 9]}
    text = tf.Qwen2Config(**TEXT).to_dict()
    config = tf.Ovis2Config(text_config=text, vision_config=tower, hidden_size=32, vocab_size=128, **ids)
    size = {"height": 56, "width": 56}
    return config, tf.Ovis2ImageProcessorPil(size=size, crop_to_patches=True, max_patches=4)


def _cohere2_vision() -> tuple[Any, Any]:
    import transformers as tf

    # transformers' class leaves logit_scale out, which the text model alone has
    own = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 12, "logit_scale": 1.0}
    text = tf.Cohere2Config(**{**TEXT, **own}).to_dict()
    config = tf.Cohere2VisionConfig(
        text_config=text, vision_config=TOWER, image_token_id=IMAGE, alignment_intermediate_size=48
    )
    return config, Settings("Cohere2VisionImageProcessorFast", size={"height": 56, "width": 56}, max_patches=4)


class Settings:
    """Those of an image processor that transformers has with torchvision alone."""

    def __init__(self, name: str, **values: Any) -> None:
        self.values = {"image_processor_type": name, "image_mean": [0.5] * 3, "image_std": [0.5] * 3, **values}

    def save_pretrained(self, path: Path) -> None:
        (path / "preprocessor_config.json").write_text(json.dumps(self.values))


FAMILIES = {
    "aya_vision": (_aya_vision, "AyaVisionForConditionalGeneration"),
    "exaone4_5": (_exaone4_5, "Exaone4_5_ForConditionalGeneration"),
    "hyperclovax_vision": (_hyperclovax_vision, "HyperCLOVAXVisionV2ForConditionalGeneration"),
    "janus": (_janus, "JanusForConditionalGeneration"),
    "lfm3_vl": (_lfm3_vl, "Lfm3VlForConditionalGeneration"),
    "llava_next_video": (_llava_next_video, "LlavaNextVideoForConditionalGeneration"),
    "vipllava": (_vipllava, "VipLlavaForConditionalGeneration"),
    "deepseek_vl": (_deepseek_vl, "DeepseekVLForConditionalGeneration"),
    "video_llama_3": (_video_llama_3, "VideoLlama3ForConditionalGeneration"),
    "granite4_vision": (_granite4_vision, "Granite4VisionForConditionalGeneration"),
    "llama4": (_llama4, "Llama4ForConditionalGeneration"),
    "ovis2": (_ovis2, "Ovis2ForConditionalGeneration"),
    "cohere2_vision": (_cohere2_vision, "Cohere2VisionForConditionalGeneration"),
    "lfm2_vl": (_lfm2_vl, "Lfm2VlForConditionalGeneration"),
    "glm_ocr": (_glm_ocr, "GlmOcrForConditionalGeneration"),
    "paddleocr_vl": (_paddleocr, "PaddleOCRVLForConditionalGeneration"),
    "deepseek_ocr2": (_deepseek_ocr2, "DeepseekOcr2ForConditionalGeneration"),
    "minicpmv4_6": (_minicpm, "MiniCPMV4_6ForConditionalGeneration"),
    "dots_ocr": (_dots_ocr, "DotsOCRForCausalLM"),
    "got_ocr2": (_got_ocr2, "GotOcr2ForConditionalGeneration"),
    "deepseek_ocr": (_deepseek_ocr, "DeepseekOCRForCausalLM"),
    "lighton_ocr": (_lighton_ocr, "LightOnOcrForConditionalGeneration"),
    "glm46v": (_glm46v, "Glm46VForConditionalGeneration"),
    "glm4v": (_glm4v, "Glm4vForConditionalGeneration"),
    "glm4v_moe": (_glm4v_moe, "Glm4vMoeForConditionalGeneration"),
    "qwen2_vl": (_qwen2, "Qwen2VLForConditionalGeneration"),
    "qwen2_5_vl": (_qwen2_5, "Qwen2_5_VLForConditionalGeneration"),
    "qwen3_vl": (_qwen3, "Qwen3VLForConditionalGeneration"),
    "qwen3_vl_moe": (_qwen3_moe, "Qwen3VLMoeForConditionalGeneration"),
    "paligemma": (_paligemma, "PaliGemmaForConditionalGeneration"),
    "gemma3": (_gemma3, "Gemma3ForConditionalGeneration"),
    "gemma4": (_gemma4, "Gemma4ForConditionalGeneration"),
    "llava_next": (_llava_next, "LlavaNextForConditionalGeneration"),
    "llava_onevision": (_llava_onevision, "LlavaOnevisionForConditionalGeneration"),
    "qwen3_5": (_qwen3_5, "Qwen3_5ForConditionalGeneration"),
    "internvl": (_internvl, "InternVLForConditionalGeneration"),
    "llava": (_llava, "LlavaForConditionalGeneration"),
    "mistral3": (_mistral3, "Mistral3ForConditionalGeneration"),
    "pixtral": (_pixtral, "LlavaForConditionalGeneration"),
    "smolvlm": (_smolvlm, "SmolVLMForConditionalGeneration"),
}
_LIBRARY = {"DeepseekOCRForCausalLM": "UnlimitedOcrForConditionalGeneration"}
"""transformers' class by architecture, where it has another name."""


def _class(architecture: str) -> Any:
    import transformers

    from tests.fakes import dots_ocr

    return getattr(dots_ocr, architecture, None) or getattr(transformers, _LIBRARY.get(architecture, architecture))


def make_vision_checkpoint(family: str, path: Path, seed: int = 0) -> Path:
    """Write a random model of a family to `path` and return it."""
    make, architecture = FAMILIES[family]
    return write_random(path, *make(), architecture, seed)


def write_random(path: Path, config: Any, processor: Any, architecture: str, seed: int = 0) -> Path:
    """Write a random model, the settings of its processor and a tokenizer to `path` and return it."""
    import torch

    model = _class(architecture)(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise * 0.2 + 1.0 if parameter.dim() == 1 else noise * 2.0 / parameter.shape[-1] ** 0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(path)
        processor.save_pretrained(path)
    written = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**written, "architectures": [architecture]}))
    _write_tokenizer(path)
    return path


def _write_tokenizer(path: Path) -> None:
    """Words, one token each: the special tokens, and w0 to w99."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = [*SPECIALS, *(f"w{number}" for number in range(100)), "<|image|>"]
    tokenizer = Tokenizer(models.WordLevel({word: place for place, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([*SPECIALS, "<|image|>"])
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))


def load_vision_oracle(path: Path, architecture: str) -> Any:
    """The checkpoint as transformers reads it, in float32 with its plainest attention."""
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = _class(architecture)
        oracle = made.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    if architecture.startswith("Llama4"):
        # transformers 5.24 reads this of what its text model returns, which lacks it
        oracle.language_model.register_forward_hook(lambda *call: setattr(call[2], "image_outputs", None))
    return oracle
