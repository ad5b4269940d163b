"""Layers of a text model behind which an encoder's vectors of an image, from several depths, are added (DeepStack)."""

from __future__ import annotations

import re
from fractions import Fraction
from math import isqrt, prod
from typing import Any, Final

from octavo.config.section import Section

_MOST_MERGERS: Final = 8
"""The limit of mergers, each of which joins the patches of an image once more."""

_MOST_QUERIES: Final = 1024
"""The limit of BLIP-2's vectors of an image; releases have 32."""


def levels_of(library: Any) -> tuple[int, ...]:
    """Return the layer behind which each level is added, -1 for the input of the first one.

    library: transformers' config of the whole model.
    """
    if hasattr(library, "deepstack_layer_map"):  # Granite 4 Vision; of several for one layer the last counts
        pairs = library.deepstack_layer_map or ()
        return tuple(
            dict.fromkeys(layer - 1 for layer in (*(each for _, each in pairs), *library.spatial_target_layers))
        )
    vision = getattr(library, "vision_config", None)
    return tuple(range(len(getattr(vision, "deepstack_visual_indexes", None) or ())))


def check_features(config: Section, library: Any) -> None:
    """Raise CheckpointError or UnsupportedModel for layers that an encoder does not have, and for patches that cannot
    be joined."""
    vision: Any = getattr(library, "vision_config", None)
    layers = getattr(library, "vision_feature_layer", None)
    depth = getattr(vision, "num_hidden_layers", None)
    if layers is not None and depth is not None:
        each_layer = layers if isinstance(layers, list | tuple) else [layers]
        # a single 0 is taken for no layer
        if layers == 0 or not each_layer or not all(-depth - 1 <= each <= depth for each in each_layer):
            raise config.error("vision_feature_layer", f"a layer of the encoder, which has {depth}, or several")
    own = config.part("vision_config")
    for part, name in ((config, "merge_kernel_size"), (own, "window_kernel_size")):
        if part.values.get(name) not in (None, [1, 1], [2, 2], [4, 4]):
            raise part.error(name, "[1, 1], [2, 2] or [4, 4]")
    if (config.optional_positive("merger_times") or 1) > _MOST_MERGERS:
        raise config.error("merger_times", f"at most {_MOST_MERGERS}")
    if library.model_type == "kimi_k25":
        _check_kimi(config, own, library)
    if library.model_type == "blip-2":
        if not 0 < config.int("num_query_tokens", 32) <= _MOST_QUERIES:
            raise config.error("num_query_tokens", f"1 to {_MOST_QUERIES:,}")
        config.part("qformer_config").expect("use_qformer_text_input", False, default=False)
    if library.model_type in ("bee", "llava_onevision"):
        ratio = config.str("vision_aspect_ratio", "anyres_max_9")
        if re.fullmatch(r"anyres_max_[1-9]\d{0,3}", ratio) is None:
            raise config.error("vision_aspect_ratio", 'the most tiles of an image, such as "anyres_max_9"')
    if library.model_type == "step3p7":
        own.expect_all(use_cls_token=False, use_ln_post=False, use_ln_pre=True, use_abs_posemb=True, use_rope2d=True)
    if library.model_type == "ovis2":
        own.expect("tokenize_function", "softmax", "st_argmax", default="softmax")
    if library.model_type in ("aya_vision", "cohere2_vision"):
        config.expect("vision_feature_select_strategy", "full", default="full")
        side, patch = (own.positive(name, getattr(vision, name)) for name in ("image_size", "patch_size"))
        num_patches = side // patch
        if num_patches % config.positive("downsample_factor", library.downsample_factor):
            raise config.error("downsample_factor", f"a divisor of {num_patches} patches")
    if library.model_type in ("gemma3", "idefics3", "internvl", "smolvlm"):
        _check_counts(config, own, library)


def _check_counts(config: Section, own: Section, library: Any) -> None:
    """Raise CheckpointError where a prompt has another number of tokens for an image than an encoder makes vectors."""
    vision, kind = library.vision_config, library.model_type
    if kind == "internvl":
        ratio = config.positive_float("downsample_ratio", library.downsample_ratio)
        sides = zip(vision.image_size, vision.patch_size, strict=True)
        name, made = "image_seq_length", prod(int(side // patch * ratio) for side, patch in sides)
    else:
        side, patch = (own.positive(each, getattr(vision, each)) for each in ("image_size", "patch_size"))
        side //= patch
        if kind != "gemma3":
            if side % config.positive("scale_factor", library.scale_factor):
                raise config.error("scale_factor", f"a divisor of {side} patches")
            return
        name = "mm_tokens_per_image"
        made = (side // max(1, side // isqrt(config.positive(name, library.mm_tokens_per_image)))) ** 2
    if config.positive(name, getattr(library, name)) != made:
        raise config.error(name, f"{made:,}, as many vectors as the encoder makes of an image")


def _check_kimi(config: Section, own: Section, library: Any) -> None:
    """Raise CheckpointError for a table of positions that is no square, and for patches that are joined otherwise."""
    vision = library.vision_config
    if vision.pos_emb_width != vision.pos_emb_height:
        raise own.error("pos_emb_width", f"pos_emb_height, which is {vision.pos_emb_height}")
    if list(vision.merge_kernel_size) != [2, 2]:
        raise own.error("merge_kernel_size", "[2, 2]")
    if library.projection_hidden_size != vision.hidden_size:
        raise config.error("projection_hidden_size", f"hidden_size of vision_config, which is {vision.hidden_size}")
    if vision.hidden_size // vision.num_attention_heads % 4:
        raise own.error("num_attention_heads", "heads of a multiple of 4, half of which turns by rows")


def check_levels(config: Section, library: Any, num_layers: int) -> None:
    """Raise CheckpointError for values of Granite 4 Vision that name layers or parts of images that do not exist."""
    if not hasattr(library, "deepstack_layer_map"):
        return
    vision, pairs = library.vision_config, library.deepstack_layer_map or ()
    depth = vision.num_hidden_layers
    if not pairs or any(not -depth - 1 <= own <= depth or not 0 <= layer < num_layers for own, layer in pairs):
        raise config.error(
            "deepstack_layer_map", f"pairs of a layer of the encoder, which has {depth}, and one of {num_layers} layers"
        )
    targets = library.spatial_target_layers
    if len(targets) > 4 or not all(type(each) is int and 0 <= each < num_layers for each in targets):
        raise config.error("spatial_target_layers", f"at most 4 of {num_layers} layers")
    if not -depth - 1 <= library.spatial_vision_layer <= depth:
        raise config.error("spatial_vision_layer", f"a layer of the encoder, which has {depth}")
    windows = str(library.downsample_rate).split("/")
    sides = [int(each) if each.isdecimal() else 0 for each in windows]
    if len(sides) != 2 or not all(sides) or Fraction(*sides) != Fraction(1, 2):
        raise config.error("downsample_rate", 'one half, such as "4/8"')
    if vision.image_size // vision.patch_size % sides[1]:
        raise config.error("downsample_rate", "windows that the patches of an image are a multiple of")
