"""llama.cpp's vision encoders with projectors in the layout of Hugging Face: configs, settings of images, names.

A kind of projector is a line of `PROJECTORS`. Names of metadata and tensors are those of gguf-py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from octavo.gguf import projector_names as tables
from octavo.gguf.names import named
from octavo.gguf.vision import Vision


class Made(NamedTuple):
    """The parts of a config that a model with images has besides its text model's."""

    vision: Mapping[str, Any]
    """The `vision_config`."""
    own: Mapping[str, Any]
    """Keys beside the `vision_config`."""
    settings: Mapping[str, Any]
    """Settings of the image processor."""
    text: Mapping[str, Any] = {}
    """Keys of the `text_config` that the text model alone does not have."""


@dataclass(frozen=True, slots=True)
class Projector:
    """A kind of vision encoder and projector."""

    family: str
    """The class of transformers, without `ForConditionalGeneration`."""
    texts: Mapping[str, str]
    """By `general.architecture` of the models that it belongs to: the `model_type` of their text model."""
    make: Callable[[Vision], Made]
    names: Mapping[str, str]
    """Names of tensors, with {} for the number of a layer, as in `architectures.LAYER`; of those that are joined, / and
    their order stand behind."""
    shifted: str = ""
    """The norm to whose weight the converter has added 1."""
    permuted: tuple[str, ...] = ()
    """Tensors whose rows the converter has reordered into pairs."""
    flattened: str = ""
    """The kernels that a checkpoint stores as rows, with channels as the last dimension."""
    stand_ins: Mapping[str, str] = field(default_factory=dict)
    """Names of unused weights that files lack, and of the tensors of the same shape that replace them."""


def _gemma3(meta: Vision) -> Made:
    vision = {
        **meta.sizes(),
        "model_type": "siglip_vision_model",
        "image_size": meta.positive("vision.image_size"),
        "layer_norm_eps": meta.positive_float("vision.attention.layer_norm_epsilon", 1e-6),
        "vision_use_head": False,
    }
    own = {
        "model_type": "gemma3",
        "mm_tokens_per_image": meta.side(meta.positive("vision.projector.scale_factor", 4)) ** 2,
        "boi_token_index": meta.token("<start_of_image>"),
        "eoi_token_index": meta.token("<end_of_image>"),
        # files of tokenizers without it have no token for vectors: any that no image is written with stands for them
        "image_token_index": meta.token("<image_soft_token>", "<unused0>"),
    }
    return Made(vision, own, meta.settings("Gemma3", size=meta.image_size()))


def _gemma4(meta: Vision) -> Made:
    pooled = meta.positive("vision.projector.scale_factor", 3)
    vision = {
        **meta.sizes(),
        "model_type": "gemma4_vision",
        "num_key_value_heads": meta.num_heads,
        "head_dim": meta.shape("v.blk.0.attn_q_norm.weight")[0],
        "position_embedding_size": meta.shape("v.position_embd.weight")[-2:][0],
        "pooling_kernel_size": pooled,
        "rms_norm_eps": meta.positive_float("vision.attention.layer_norm_epsilon", 1e-6),
        "standardize": "v.std_bias" in meta.types,
        "use_clipped_linears": "v.blk.0.attn_q.input_max" in meta.types,
    }
    own = {
        "model_type": "gemma4",
        "image_token_id": meta.token("<|image|>"),
        "boi_token_id": meta.token("<|image>"),
        "eoi_token_id": meta.token("<image|>"),
        "audio_config": None,
    }
    # models without inputs of their own for each layer are those whose images see all of themselves
    inner = (
        {} if meta.text.values.get("embedding_length_per_layer_input") else {"use_bidirectional_attention": "vision"}
    )
    settings = meta.settings("Gemma4", patch_size=meta.patch, pooling_kernel_size=pooled, max_soft_tokens=280)
    return Made(vision, own, settings, inner)


def _llama4(meta: Vision) -> Made:
    scale = meta.positive("vision.projector.scale_factor", 2)
    meta.side(scale)
    vision = {
        **meta.sizes(),
        "model_type": "llama4_vision_model",
        "image_size": meta.positive("vision.image_size"),
        "norm_eps": meta.positive_float("vision.attention.layer_norm_epsilon", 1e-5),
        "pixel_shuffle_ratio": 1 / scale,
        "projector_input_dim": meta.shape("mm.model.mlp.2.weight")[-1],
        "projector_output_dim": meta.shape("mm.model.mlp.2.weight")[0],
        "vision_output_dim": meta.shape("mm.model.fc.weight")[-1],
    }
    own = {
        "model_type": "llama4",
        "image_token_index": meta.token("<|patch|>"),
        "boi_token_index": meta.token("<|image_start|>"),
        "eoi_token_index": meta.token("<|image_end|>"),
    }
    return Made(vision, own, meta.settings("Llama4", size=meta.image_size(), max_patches=16))


def _qwen_settings(meta: Vision, least: int, most: int) -> dict[str, Any]:
    pixels = {
        "shortest_edge": meta.positive("vision.image_min_pixels", least),
        "longest_edge": meta.positive("vision.image_max_pixels", most),
    }
    merged = {"merge_size": meta.merged("mm.0.weight"), "temporal_patch_size": 2}
    return meta.settings("Qwen2VL", size=pixels, patch_size=meta.patch, **merged)


def _qwen(meta: Vision, **more: Any) -> dict[str, Any]:
    own = {
        "spatial_merge_size": meta.merged("mm.0.weight"),
        "out_hidden_size": meta.positive("vision.projection_dim"),
        **more,
    }
    return {**meta.sizes(layers="depth", heads="num_heads"), **own}


def _qwen2(meta: Vision) -> Made:
    sizes = _qwen(meta)
    vision = {
        **{name: sizes[name] for name in ("depth", "num_heads", "patch_size", "spatial_merge_size")},
        "embed_dim": meta.width,
        "hidden_size": sizes["out_hidden_size"],
        "mlp_ratio": sizes["intermediate_size"] // meta.width,
    }
    own = {"model_type": "qwen2_vl", "image_token_id": meta.token("<|image_pad|>")}
    return Made(vision, own, _qwen_settings(meta, 3136, 12_845_056))


def _qwen2_5(meta: Vision) -> Made:
    every, vision = meta.positive("vision.n_wa_pattern"), _qwen(meta, window_size=112, tokens_per_second=2)
    vision["fullatt_block_indexes"] = [*range(every - 1, vision["depth"], every)]
    own = {"model_type": "qwen2_5_vl", "image_token_id": meta.token("<|image_pad|>")}
    return Made(vision, own, _qwen_settings(meta, 3136, 12_845_056))


def _qwen3(meta: Vision) -> Made:
    vision = _qwen(meta, num_position_embeddings=meta.shape("v.position_embd.weight")[0])
    vision["deepstack_visual_indexes"] = meta.deepstack
    own = {"model_type": tables.QWEN3_TYPES[meta.text.architecture], "image_token_id": meta.token("<|image_pad|>")}
    return Made(vision, own, _qwen_settings(meta, 65_536, 16_777_216))


def _smolvlm(meta: Vision) -> Made:
    side, scale = meta.positive("vision.image_size"), meta.positive("vision.projector.scale_factor", 2)
    meta.side(scale)
    vision = {
        **meta.sizes(),
        "model_type": "smolvlm_vision",
        "image_size": side,
        "layer_norm_eps": meta.positive_float("vision.attention.layer_norm_epsilon", 1e-6),
    }
    own = {
        "model_type": "smolvlm",
        "scale_factor": scale,
        "image_token_id": meta.token("<image>"),
    }
    cut = {
        "size": {"longest_edge": meta.positive("vision.preproc_image_size", 4 * side)},
        "max_image_size": {"longest_edge": side},
        "do_image_splitting": True,
    }
    return Made(vision, own, meta.settings("SmolVLM", **cut))


def _internvl(meta: Vision) -> Made:
    side, patch = meta.positive("vision.image_size"), meta.patch
    scale = meta.positive("vision.projector.scale_factor", 2)
    vision = {
        **meta.sizes(),
        "model_type": "internvl_vision",
        "image_size": [side, side],
        "patch_size": [patch, patch],
        "layer_norm_eps": meta.positive_float("vision.attention.layer_norm_epsilon", 1e-6),
        "norm_type": "layer_norm" if "v.blk.0.ln1.bias" in meta.types else "rms_norm",
        "attention_bias": "v.blk.0.attn_q.bias" in meta.types,
        "use_qk_norm": "v.blk.0.attn_q_norm.weight" in meta.types,
    }
    own = {
        "model_type": "internvl",
        "downsample_ratio": 1 / scale,
        "image_seq_length": meta.side(scale) ** 2,
        "image_token_id": meta.token("<IMG_CONTEXT>"),
    }
    least, most = (
        meta.positive(f"vision.preproc_{each}_tiles", default) for each, default in (("min", 1), ("max", 12))
    )
    tiles = {"crop_to_patches": True, "min_patches": least, "max_patches": most}
    return Made(vision, own, meta.settings("GotOcr2", size=meta.image_size(), **tiles))


def _pixtral(meta: Vision) -> Made:
    side, patch = meta.positive("vision.image_size"), meta.patch
    vision = {
        **meta.sizes(),
        "model_type": "pixtral",
        "image_size": side,
        "head_dim": meta.width // meta.num_heads,
        "hidden_act": "silu" if meta.bool("use_silu", False) else "gelu",
    }
    own = {
        "model_type": "llava",
        "image_token_index": meta.token("[IMG]"),
        "multimodal_projector_bias": "mm.1.bias" in meta.types,
        "vision_feature_layer": -1,
    }
    merged = 1
    if "mm.patch_merger.weight" in meta.types:
        merged = meta.merged("mm.patch_merger.weight")
        own |= {"model_type": "mistral3", "spatial_merge_size": merged}
    else:
        own["vision_feature_select_strategy"] = "full"
    pixels = {"size": {"longest_edge": side}, "patch_size": dict.fromkeys(("height", "width"), patch * merged)}
    return Made(vision, own, meta.settings("Pixtral", **pixels))


def _llava(meta: Vision) -> Made:
    """Return LLaVA's config: the file lacks the layers after the one whose results are projected."""
    side, layers = meta.positive("vision.image_size"), meta.array("vision.feature_layer")
    if layers is not None and layers != [meta.num_layers]:
        raise meta.error("vision.feature_layer", f"the last one, [{meta.num_layers}]")
    vision = {
        **meta.sizes(),
        "model_type": "clip_vision_model",
        "image_size": side,
        "layer_norm_eps": meta.positive_float("vision.attention.layer_norm_epsilon", 1e-5),
        "hidden_act": "gelu" if meta.bool("use_gelu", False) else "quick_gelu",
    }
    own = {
        "model_type": "llava",
        # texts of older files have no token for vectors: one that no image is written with stands for them
        "image_token_index": meta.token("<image>", "<unk>", "<|endoftext|>"),
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "default",
        "multimodal_projector_bias": "mm.0.bias" in meta.types,
    }
    sizes = {"size": {"shortest_edge": side}, "crop_size": meta.image_size()}
    vectors = meta.side(1) ** 2
    if not meta.is_cut:
        return Made(vision, {**own, "image_seq_length": vectors}, meta.settings("CLIP", **sizes))
    sides = meta.array("vision.image_grid_pinpoints") or []
    if not sides or len(sides) % 2 or not all(isinstance(each, int) and each > 0 for each in sides):
        raise meta.error("vision.image_grid_pinpoints", "heights and widths of cut images, one behind the other")
    grid = {"image_grid_pinpoints": [sides[place : place + 2] for place in range(0, len(sides), 2)]}
    return Made(vision, {**own, **grid, "model_type": "llava_next"}, meta.settings("LlavaNext", **sizes, **grid))


_CLIP: Final = {f"vision_tower.post_layernorm.{each}": f"v.pre_ln.{each}" for each in ("weight", "bias")}
PROJECTORS: Final[Mapping[str, Projector]] = {
    "gemma3": Projector(
        "Gemma3",
        {"gemma3": "gemma3_text"},
        _gemma3,
        {
            **tables.siglip("vision_tower"),
            "mm.input_projection": "multi_modal_projector.mm_input_projection_weight!",
            "mm.soft_emb_norm": "multi_modal_projector.mm_soft_emb_norm",
        },
        shifted="mm.soft_emb_norm",
    ),
    "gemma4v": Projector("Gemma4", {"gemma4": "gemma4_text"}, _gemma4, tables.GEMMA4, flattened="v.patch_embd"),
    "llama4": Projector("Llama4", {"llama4": "llama4_text"}, _llama4, tables.LLAMA4),
    "qwen2vl_merger": Projector(
        "Qwen2VL",
        {"qwen2vl": "qwen2_vl_text"},
        _qwen2,
        {
            **tables.QWEN2,
            **named("v.blk.{}.ffn_*", "visual.blocks.{}.mlp.*", tables.TWO),
        },
    ),
    "qwen2.5vl_merger": Projector(
        "Qwen2_5_VL",
        {"qwen2vl": "qwen2_5_vl_text"},
        _qwen2_5,
        {
            **tables.QWEN2,
            **{f"v.blk.{{}}.ffn_{each}": f"visual.blocks.{{}}.mlp.{each}_proj" for each in ("gate", "up", "down")},
        },
    ),
    **{
        f"qwen3vl_merger ({text})": Projector(family, {text: f"{tables.QWEN3_TYPES[text]}_text"}, _qwen3, tables.QWEN3)
        for text, family in (
            *(("qwen3vl", "Qwen3VL"), ("qwen3vlmoe", "Qwen3VLMoe")),
            *(("qwen35", "Qwen3_5"), ("qwen35moe", "Qwen3_5Moe")),
        )
    },
    "idefics3": Projector(
        "SmolVLM",
        {"llama": "llama"},
        _smolvlm,
        {**tables.siglip("vision_model"), "mm.model.fc": "connector.modality_projection.proj"},
    ),
    "internvl": Projector("InternVL", tables.LLAMAS, _internvl, tables.INTERNVL),
    "mlp": Projector("Llava", tables.LLAVA_TEXTS, _llava, tables.LLAVA, stand_ins=_CLIP),
    "mlp (cut)": Projector("LlavaNext", tables.LLAVA_TEXTS, _llava, tables.LLAVA, stand_ins=_CLIP),
    "pixtral": Projector("Llava", {"llama": "llama"}, _pixtral, tables.PIXTRAL, permuted=tables.TURNED),
    "pixtral (merged)": Projector(
        "Mistral3", {"llama": "llama", "mistral3": "ministral3"}, _pixtral, tables.PIXTRAL, permuted=tables.TURNED
    ),
}
"""By `clip.projector_type`, with what else distinguishes families behind it."""
