"""Small configs of models that read images, and the settings of their processors."""

from __future__ import annotations

from typing import Any

from tests.fakes.ocr_families import OCR_FAMILIES
from tests.fakes.vision_sizes import (
    DEEP,
    DEEPSTACK,
    END,
    EXPERTS,
    IMAGE,
    LINEAR,
    MROPE,
    NO_HEAD_DIM,
    PINNED,
    PIXELS,
    SIDE,
    SIZELESS_TOWER,
    SPECIALS,
    START,
    TEXT,
    TOWER,
    VIDEO,
    Settings,
    tf,
)


def _llava() -> tuple[Any, Any]:
    text = tf.LlamaConfig(**TEXT)
    tower = tf.CLIPVisionConfig(**TOWER, projection_dim=32)
    config = tf.LlavaConfig(text_config=text, vision_config=tower, image_token_index=IMAGE, image_seq_length=16)
    return config, tf.CLIPImageProcessorPil(size={"shortest_edge": 56}, crop_size=SIDE)


def _aria() -> tuple[Any, Any]:
    experts = {"moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1}
    tower = {**TOWER, "model_type": "idefics3_vision", "image_size": 490, "patch_size": 70}
    config = tf.AriaConfig(
        text_config=tf.AriaTextConfig(**TEXT, **experts),
        vision_config=tower,
        projector_patch_to_query_dict={49: 4},
        image_token_index=IMAGE,
    )
    return config, tf.AriaImageProcessorPil(max_image_size=490, min_image_size=140)


def _blip2() -> tuple[Any, Any]:
    heads = {"num_attention_heads": 2, "num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 24}
    text = {name: NO_HEAD_DIM[name] for name in NO_HEAD_DIM if name not in ("intermediate_size", "num_key_value_heads")}
    config = tf.Blip2Config(
        text_config=tf.OPTConfig(**text, ffn_dim=48, word_embed_proj_dim=32).to_dict(),
        vision_config=TOWER,
        qformer_config={**heads, "vocab_size": 8},
        num_query_tokens=8,
        image_token_index=IMAGE,
    )
    return config, tf.BlipImageProcessorPil(size=SIDE)


def _siglip() -> Any:
    return tf.SiglipVisionConfig(**TOWER, vision_use_head=False)


def _pixtral_tower() -> Any:
    return tf.PixtralVisionConfig(**SIZELESS_TOWER, head_dim=16, image_size=112)


def _pixtral() -> tuple[Any, Any]:
    config = tf.LlavaConfig(
        text_config=tf.LlamaConfig(**TEXT),
        vision_config=_pixtral_tower(),
        image_token_index=IMAGE,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
    )
    return config, tf.PixtralImageProcessorPil(size={"longest_edge": 112}, patch_size={"height": 14, "width": 14})


def _mistral3() -> tuple[Any, Any]:
    text, tower = tf.MistralConfig(**TEXT, sliding_window=None), _pixtral_tower()
    config = tf.Mistral3Config(text_config=text, vision_config=tower, image_token_index=IMAGE, spatial_merge_size=2)
    return config, tf.PixtralImageProcessorPil(size={"longest_edge": 112}, patch_size={"height": 28, "width": 28})


def _gemma3() -> tuple[Any, Any]:
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    text = {**TEXT, "num_hidden_layers": 3, "layer_types": kinds, "sliding_window": 12, "query_pre_attn_scalar": 8}
    tower = tf.SiglipVisionConfig(**TOWER)
    ids = {"boi_token_index": IMAGE, "eoi_token_index": END, "image_token_index": START}
    config = tf.Gemma3Config(text_config=text, vision_config=tower.to_dict(), mm_tokens_per_image=16, **ids)
    cut = {
        "pan_and_scan_min_crop_size": 28,
        "pan_and_scan_max_num_crops": 3,
        "pan_and_scan_min_ratio_to_activate": 1.45,
    }
    return config, tf.Gemma3ImageProcessorPil(size=SIDE, do_pan_and_scan=True, **cut)


def _paligemma() -> tuple[Any, Any]:
    kinds = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "num_hidden_layers": 3}
    text = tf.Gemma2Config(**{**TEXT, **kinds}, sliding_window=12, query_pre_attn_scalar=8)
    tower, ids = _siglip(), {"image_token_index": IMAGE}
    config = tf.PaliGemmaConfig(text_config=text, vision_config=tower, projection_dim=32, hidden_size=32, **ids)
    return config, tf.SiglipImageProcessorPil(size=SIDE)


def _gemma4() -> tuple[Any, Any]:
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
    tower = tf.CLIPVisionConfig(**TOWER, projection_dim=32)
    text = tf.LlamaConfig(**TEXT)
    config = tf.LlavaNextConfig(
        text_config=text, vision_config=tower, image_token_index=IMAGE, image_grid_pinpoints=PINNED
    )
    sizes = {"size": {"shortest_edge": 56}, "crop_size": SIDE}
    return config, tf.LlavaNextImageProcessorPil(**sizes, image_grid_pinpoints=PINNED)


def _llava_onevision() -> tuple[Any, Any]:
    tower = _siglip()
    text = tf.Qwen2Config(**TEXT)
    sizes = {"image_grid_pinpoints": PINNED, "vision_aspect_ratio": "anyres_max_2"}
    ids = {"image_token_index": IMAGE, "video_token_index": VIDEO}
    config = tf.LlavaOnevisionConfig(text_config=text, vision_config=tower, **ids, **sizes)
    return config, tf.LlavaOnevisionImageProcessorPil(size=SIDE, image_grid_pinpoints=PINNED)


def _internvl() -> tuple[Any, Any]:
    tower = {**TOWER, "image_size": [56, 56], "patch_size": [14, 14]}
    config = tf.InternVLConfig(
        text_config=tf.Qwen2Config(**TEXT), vision_config=tower, image_token_id=IMAGE, image_seq_length=4
    )
    return config, tf.GotOcr2ImageProcessorPil(size=SIDE, crop_to_patches=True, min_patches=1, max_patches=4)


def _smolvlm() -> tuple[Any, Any]:
    config = tf.SmolVLMConfig(
        text_config=tf.LlamaConfig(**TEXT).to_dict(), vision_config=TOWER, image_token_id=IMAGE, scale_factor=2
    )
    sizes = {"size": {"longest_edge": 112}, "max_image_size": {"longest_edge": 56}}
    return config, tf.SmolVLMImageProcessorPil(**sizes, do_image_splitting=True)


def _qwen(name: str, text: str, tower: dict[str, Any], more: Any = {}, **rope: Any) -> tuple[Any, Any]:  # noqa: B006
    sizes = {"rope_parameters": {**MROPE, **rope}}
    own = {each: value for each, value in TEXT.items() if each != "head_dim" or text == "Qwen3"} | more
    ids = {"image_token_id": IMAGE, "video_token_id": 7, "vision_start_token_id": 6, "vision_end_token_id": 5}
    config = getattr(tf, f"{name}Config")(text_config={**own, **sizes}, vision_config=tower, **ids)
    size = {"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 64}
    patch = tower.get("patch_size", 14)
    return config, tf.Qwen2VLImageProcessorPil(size=size, patch_size=patch, merge_size=2)


def _qwen2_5() -> tuple[Any, Any]:
    return _qwen("Qwen2_5_VL", "Qwen2", {**DEEP, "patch_size": 14, "window_size": 56, "fullatt_block_indexes": [1]})


def _qwen2() -> tuple[Any, Any]:
    return _qwen("Qwen2VL", "Qwen2", {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2})


def _qwen3() -> tuple[Any, Any]:
    return _qwen("Qwen3VL", "Qwen3", DEEPSTACK, {"num_hidden_layers": 3}, mrope_interleaved=True)


def _qwen3_moe() -> tuple[Any, Any]:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "mlp_only_layers": []}
    untied = {**experts, "num_hidden_layers": 3, "tie_word_embeddings": False}
    return _qwen("Qwen3VLMoe", "Qwen3", DEEPSTACK, untied, mrope_interleaved=True)


def _qwen3_5() -> tuple[Any, Any]:
    own = {"patch_size": 16, "num_position_embeddings": 64, "deepstack_visual_indexes": []}
    kinds = {"layer_types": ["linear_attention", "full_attention"] * 2, "num_hidden_layers": 4}
    return _qwen("Qwen3_5", "Qwen3", {**DEEP, **own}, {**LINEAR, **kinds}, mrope_interleaved=True)


def _glm4v(name: str = "Glm4v", **text: Any) -> tuple[Any, Any]:
    rope = {**MROPE, "partial_rotary_factor": 0.5}
    own = {**TEXT, "hidden_size": 64, "head_dim": 16, "rope_parameters": rope, **text}
    ids = {"image_token_id": IMAGE, "video_token_id": VIDEO, "video_start_token_id": START, "video_end_token_id": END}
    ids |= {f"image_{each}_token_id": SPECIALS.index(word) for each, word in (("start", "<img>"), ("end", "</img>"))}
    config = getattr(tf, f"{name}Config")(
        text_config=own, vision_config={**DEEP, "out_hidden_size": 64, "image_size": 56}, **ids
    )
    processor = "Glm4v" if name == "Glm4v" else "Glm46V"
    return config, getattr(tf, f"{processor}ImageProcessorPil")(size=PIXELS)


def _glm46v() -> tuple[Any, Any]:
    return _glm4v("Glm46V", model_type="glm4v_text")


def _glm_ocr() -> tuple[Any, Any]:
    return _glm4v("GlmOcr", head_dim=8, rope_parameters={"rope_type": "default", "mrope_section": [2, 1, 1]})


def _lighton_ocr() -> tuple[Any, Any]:
    config = tf.LightOnOcrConfig(
        text_config=tf.Qwen3Config(**TEXT).to_dict(), vision_config=_pixtral_tower().to_dict(), image_token_id=IMAGE
    )
    return config, tf.PixtralImageProcessorPil(size={"longest_edge": 112}, patch_size={"height": 14, "width": 14})


def _glm4v_moe() -> tuple[Any, Any]:
    return _glm4v("Glm4vMoe", **EXPERTS, num_hidden_layers=3, routed_scaling_factor=1.5)


def _lfm2_vl() -> tuple[Any, Any]:
    layers = {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"], "conv_L_cache": 3}
    sizes = {"num_patches": 16, "vision_use_head": False}
    config = tf.Lfm2VlConfig(
        text_config=tf.Lfm2Config(**{**TEXT, **layers}).to_dict(),
        vision_config=tf.Siglip2VisionConfig(**SIZELESS_TOWER, **sizes).to_dict(),
        image_token_id=IMAGE,
        projector_hidden_size=40,
    )
    tiles = {"tile_size": 56, "min_tiles": 2, "max_tiles": 4, "min_image_tokens": 1, "max_image_tokens": 2}
    return config, Settings("Lfm2VlImageProcessorFast", encoder_patch_size=14, downsample_factor=2, **tiles)


def _aya_vision() -> tuple[Any, Any]:
    config = _cohere2_vision()[0].to_dict()
    tower = _siglip()
    own = tf.AyaVisionConfig(text_config=config["text_config"], vision_config=tower, image_token_index=IMAGE)
    return own, tf.GotOcr2ImageProcessorPil(size=SIDE, crop_to_patches=True, min_patches=1, max_patches=4)


def _granite4_vision() -> tuple[Any, Any]:
    factors = {"embedding_multiplier": 3.0, "residual_multiplier": 0.7, "attention_multiplier": 0.4}
    text = tf.Granite4VisionTextConfig(**{**TEXT, "num_hidden_layers": 4}, **factors, logits_scaling=2.0)
    tower = tf.SiglipVisionConfig(**{**TOWER, "hidden_size": 64}, vision_use_head=False)
    levels = {"deepstack_layer_map": [[-1, 0], [1, 2]]}
    levels |= {"spatial_vision_layer": -2, "spatial_target_layers": [1, 2, 3]}
    former = {"model_type": "blip_2_qformer", "num_hidden_layers": 1, "intermediate_size": 48}
    config = tf.Granite4VisionConfig(
        text_config=text.to_dict(),
        vision_config=tower.to_dict(),
        qformer_config={**former, "cross_attention_frequency": 1, "use_qformer_text_input": False},
        image_token_index=IMAGE,
        image_grid_pinpoints=PINNED,
        downsample_rate="1/2",
        vision_feature_select_strategy="full",
        **levels,
    )
    sizes = {"size": {"shortest_edge": 56}, "crop_size": SIDE}
    return config, tf.LlavaNextImageProcessorPil(**sizes, image_grid_pinpoints=PINNED)


def _exaone4_5() -> tuple[Any, Any]:
    text = tf.Exaone4Config(**{**TEXT, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 12})
    tower = {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "num_key_value_heads": 1}
    own = {"out_hidden_size": 32, "patch_size": 14, "window_size": 56, "fullatt_block_indexes": [1]}
    ids = {"image_token_id": IMAGE, "video_token_id": VIDEO}
    config = tf.Exaone4_5_Config(text_config=text.to_dict(), vision_config={**tower, **own}, **ids)
    return config, tf.Qwen2VLImageProcessorPil(size=PIXELS)


def _vipllava() -> tuple[Any, Any]:
    tower = tf.CLIPVisionConfig(**TOWER, projection_dim=32)
    layers = {"vision_feature_layer": [-2, 1, 3], "image_seq_length": 16}
    config = tf.VipLlavaConfig(
        text_config=tf.LlamaConfig(**TEXT), vision_config=tower, image_token_index=IMAGE, **layers
    )
    return config, _llava()[1]


def _hyperclovax_vision() -> tuple[Any, Any]:
    text = tf.HyperCLOVAXConfig(**TEXT, attention_multiplier=0.4, residual_multiplier=0.7, logits_scaling=0.5)
    tower = {
        **DEEP,
        "out_hidden_size": 24,
        "window_size": 56,
        "fullatt_block_indexes": [1],
        "model_type": "qwen2_5_vl_vision",
    }
    ids = {"image_token_id": IMAGE, "video_token_id": VIDEO}
    config = tf.HyperCLOVAXVisionV2Config(text_config=text.to_dict(), vision_config=tower, **ids)
    return config, tf.Qwen2VLImageProcessorPil(size=PIXELS)


def _janus() -> tuple[Any, Any]:
    tower = {name: TOWER[name] for name in TOWER if name != "intermediate_size"}
    made = {"base_channels": 32, "channel_multiplier": [1], "latent_channels": 32, "num_embeddings": 8}
    config = tf.JanusConfig(
        text_config=tf.LlamaConfig(**TEXT).to_dict(),
        vision_config={**tower, "projection_dim": 32, "num_image_tokens": 16},
        vq_config={**made, "projection_dim": 32, "image_token_embed_dim": 32},
        image_token_id=IMAGE,
    )
    return config, tf.JanusImageProcessorPil(size=SIDE)


def _lfm3_vl() -> tuple[Any, Any]:
    layers = {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"], "conv_L_cache": 3}
    tower = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = tf.Lfm3VlConfig(
        text_config=tf.Lfm3Config(**{**TEXT, **layers}).to_dict(),
        vision_config={**tower, "num_key_value_heads": 1, "patch_size": 14},
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        projector_hidden_size=40,
    )
    return config, tf.Qwen2VLImageProcessorPil(size=PIXELS)


def _llava_next_video() -> tuple[Any, Any]:
    config, processor = _llava_next()
    own = {name: getattr(config, name) for name in ("text_config", "vision_config", "image_grid_pinpoints")}
    ids = {"image_token_index": IMAGE, "video_token_index": VIDEO}
    return tf.LlavaNextVideoConfig(**own, **ids), processor


def _deepseek_vl() -> tuple[Any, Any]:
    tower = _siglip()
    text = tf.LlamaConfig(**TEXT).to_dict()
    config = tf.DeepseekVLConfig(text_config=text, vision_config=tower.to_dict(), image_token_id=IMAGE)
    return config, tf.DeepseekVLImageProcessorPil(size=SIDE)


def _video_llama_3() -> tuple[Any, Any]:
    ids = {"image_token_id": IMAGE, "video_token_id": VIDEO}
    config = tf.VideoLlama3Config(text_config=tf.Qwen2Config(**TEXT).to_dict(), vision_config=SIZELESS_TOWER, **ids)
    return config, tf.VideoLlama3ImageProcessorPil(size=PIXELS, patch_size=14, merge_size=2)


def _llama4() -> tuple[Any, Any]:
    experts = {"num_local_experts": 4, "intermediate_size_mlp": 48, "moe_layers": [1], "no_rope_layers": [1, 0]}
    text = tf.Llama4TextConfig(**{**TEXT, **experts, "layer_types": ["chunked_attention", "full_attention"]})
    tower = {**TOWER, "intermediate_size": 128, "projector_input_dim": 24, "projector_output_dim": 24}
    tower |= {"vision_output_dim": 24, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    config = tf.Llama4Config(text_config=text.to_dict(), vision_config=tower, image_token_index=IMAGE)
    return config, Settings("Llama4ImageProcessorFast", size=SIDE, max_patches=4)


def _kimi_k25() -> tuple[Any, Any]:
    latent = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
    experts = {**EXPERTS, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
    text = tf.DeepseekV3Config(**{**NO_HEAD_DIM, "num_key_value_heads": 4}, **latent, **experts)
    tower = {name: SIZELESS_TOWER[name] for name in SIZELESS_TOWER if name != "num_hidden_layers"}
    tower |= {"num_hidden_layers": 2, "pos_emb_height": 8, "pos_emb_width": 8, "pos_emb_time": 2}
    ids = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": START, "vision_end_token_id": END}
    config = tf.Kimi_K25Config(
        text_config=text.to_dict(), vision_config=tower, projection_hidden_size=32, tie_word_embeddings=False, **ids
    )
    return config, Settings("Kimi_K25ImageProcessor", size={"max_height": 8, "max_width": 8}, max_patches=24)


def _qianfan_ocr() -> tuple[Any, Any]:
    text, (internvl, processor) = tf.Qwen3Config(**TEXT).to_dict(), _internvl()
    tower = {name: value for name, value in internvl.vision_config.to_dict().items() if name != "model_type"}
    config = tf.QianfanOCRConfig(text_config=text, vision_config=tower, image_token_id=IMAGE, image_seq_length=4)
    return config, processor


def _mllama() -> tuple[Any, Any]:
    text = {**NO_HEAD_DIM, "num_hidden_layers": 4, "cross_attention_layers": [1, 3], "max_position_embeddings": 512}
    tower = {name: SIZELESS_TOWER[name] for name in ("hidden_size", "intermediate_size", "patch_size")}
    tower |= {"image_size": 28, "num_hidden_layers": 3, "num_global_layers": 1, "attention_heads": 2}
    read = {"intermediate_layers_indices": [0, 2], "vision_output_dim": 96}
    config = tf.MllamaConfig(text_config=text, vision_config={**tower, **read}, image_token_index=IMAGE)
    return config, tf.MllamaImageProcessorPil(size={"height": 28, "width": 28})


def _ovis2() -> tuple[Any, Any]:
    tower = {**TOWER, "vocab_size": 16, "hidden_stride": 2, "num_hidden_layers": 1}
    ids = {"image_token_id": IMAGE, "visual_indicator_token_ids": [VIDEO, START, END, 8, 9]}
    text = tf.Qwen2Config(**TEXT).to_dict()
    config = tf.Ovis2Config(text_config=text, vision_config=tower, hidden_size=32, vocab_size=128, **ids)
    return config, tf.Ovis2ImageProcessorPil(size=SIDE, crop_to_patches=True, max_patches=4)


def _ernie_vl() -> tuple[Any, Any]:
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    text = {**TEXT, "num_hidden_layers": 3, "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": [24, 16]}
    text |= {"moe_num_shared_experts": 1, "rope_parameters": rope, "tie_word_embeddings": False}
    tower = {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "patch_size": 14}
    ids = {"image_token_id": IMAGE, "image_start_token_id": START, "image_end_token_id": END}
    ids |= {"video_token_id": VIDEO, "video_start_token_id": 8, "video_end_token_id": 9}
    config = tf.Ernie4_5_VLMoeConfig(text_config=text, vision_config=tower, tie_word_embeddings=False, **ids)
    return config, tf.Ernie4_5_VLMoeImageProcessorPil(size=PIXELS)


def _molmo2() -> tuple[Any, Any]:
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128}
    text = {**TEXT, "vocab_size": 120, "additional_vocab_size": 8, "rope_parameters": rope}
    text |= {"num_hidden_layers": 3, "rope_scaling_layers": [1], "tie_word_embeddings": False}
    tower = {**SIZELESS_TOWER, "num_key_value_heads": 2, "head_dim": 16, "image_size": [56, 56]}
    adapter = {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16}
    adapter |= {"intermediate_size": 40, "text_hidden_size": 32, "vision_feature_layer": [2, 0]}
    ids = {"image_patch_id": IMAGE, "image_start_token_id": START, "image_end_token_id": END}
    ids |= {"low_res_image_start_token_id": 10, "image_col_id": 11}
    config = tf.Molmo2Config(text_config=text, vision_config=tower, adapter_config=adapter, **ids)
    return config, Settings("Molmo2ImageProcessor", size=SIDE, max_crops=3, overlap_margins=[1, 0])


def _muse_glimmer() -> tuple[Any, Any]:
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    text = {**TEXT, "num_hidden_layers": 3, "layer_types": kinds, "sliding_window": 12}
    tower = {**SIZELESS_TOWER, "pos_emb_height": 4, "pos_emb_width": 4}
    sizes = {"out_hidden_size": 128, "projector_hidden_size": 40, "image_token_id": IMAGE, "video_token_id": VIDEO}
    config = tf.MuseGlimmerConfig(text_config=text, vision_config=tower, **sizes)
    return config, Settings("MuseGlimmerImageProcessor", patch_size=14, merge_size=2, max_image_tokens=8)


def _minimax_m3() -> tuple[Any, Any]:
    text = {**TEXT, "num_hidden_layers": 3, "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 24}
    text |= {"dense_intermediate_size": 56, "shared_intermediate_size": 40, "tie_word_embeddings": False}
    text |= {"mlp_layer_types": ["dense", "sparse", "sparse"], "index_block_size": 4, "index_topk_blocks": 3}
    text |= {"layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"]}
    text |= {"index_n_heads": TEXT["num_key_value_heads"], "index_head_dim": TEXT["head_dim"]}
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    sizes = {"projector_hidden_size": 40, "image_token_index": IMAGE, "video_token_index": VIDEO}
    config = tf.MiniMaxM3VLConfig(text_config=text, vision_config=TOWER, **sizes)
    return config, Settings("MiniMaxM3VLImageProcessor", size=PIXELS)


def _phi4_multimodal() -> tuple[Any, Any]:
    audio = {"hidden_size": 16, "intermediate_size": 8, "num_blocks": 1, "num_attention_heads": 1}
    audio |= {"ext_pw_out_channel": 16, "depthwise_separable_out_channel": 16, "nemo_conv_channels": 8}
    tower = {**TOWER, "crop_size": 56, "image_token_id": IMAGE}
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}
    config = tf.Phi4MultimodalConfig(
        **NO_HEAD_DIM,
        rope_parameters=rope,
        tie_word_embeddings=False,
        vision_config=tower,
        audio_config={**audio, "audio_token_id": VIDEO},
    )
    return config, Settings("Phi4MultimodalImageProcessorFast", size=SIDE, dynamic_hd=4)


def _nemotron_omni() -> tuple[Any, Any]:
    from tests.fakes.checkpoints import family_config

    vision = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 14, "mlp_ratio": 1.5}
    config = tf.NemotronH_Omni_Reasoning_V3_Config(
        text_config=family_config("nemotron_h", max_position_embeddings=512).to_dict(),
        vision_config={**vision, "max_img_size": 112, "video_temporal_patch_size": 2},
        vision_hidden_size=32,
        projector_hidden_size=24,
        image_token_id=IMAGE,
    )
    sizes = {"patch_size": 14, "min_num_patches": 8, "max_num_patches": 40}
    return config, Settings("NemotronH_Omni_Reasoning_V3ImageProcessor", **sizes)


def _cohere2_vision() -> tuple[Any, Any]:
    # transformers' class leaves logit_scale out, which the text model alone has
    own = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 12, "logit_scale": 1.0}
    text = tf.Cohere2Config(**{**TEXT, **own}).to_dict()
    config = tf.Cohere2VisionConfig(
        text_config=text, vision_config=TOWER, image_token_id=IMAGE, alignment_intermediate_size=48
    )
    return config, Settings("Cohere2VisionImageProcessorFast", size=SIDE, max_patches=4)


FAMILIES = {
    **OCR_FAMILIES,
    "aria": (_aria, "AriaForConditionalGeneration"),
    "blip_2": (_blip2, "Blip2ForConditionalGeneration"),
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
    "kimi_k25": (_kimi_k25, "Kimi_K25ForConditionalGeneration"),
    "mllama": (_mllama, "MllamaForConditionalGeneration"),
    "ernie4_5_vl": (_ernie_vl, "Ernie4_5_VLMoeForConditionalGeneration"),
    "molmo2": (_molmo2, "Molmo2ForConditionalGeneration"),
    "muse_glimmer": (_muse_glimmer, "MuseGlimmerForConditionalGeneration"),
    "minimax_m3": (_minimax_m3, "MiniMaxM3SparseForConditionalGeneration"),
    "nemotron_omni": (_nemotron_omni, "NemotronH_Omni_Reasoning_V3"),
    "phi4_multimodal": (_phi4_multimodal, "Phi4MultimodalForCausalLM"),
    "qianfan_ocr": (_qianfan_ocr, "QianfanOCRForConditionalGeneration"),
    "ovis2": (_ovis2, "Ovis2ForConditionalGeneration"),
    "cohere2_vision": (_cohere2_vision, "Cohere2VisionForConditionalGeneration"),
    "lfm2_vl": (_lfm2_vl, "Lfm2VlForConditionalGeneration"),
    "glm_ocr": (_glm_ocr, "GlmOcrForConditionalGeneration"),
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
