"""The rotation of a decoder's heads, read from its `config.json`."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from octavo.config.checkpoint import Checkpoint
from octavo.config.section import LARGEST_SIZE, MOST_LAYERS, Section, shown
from octavo.errors import CheckpointError, UnsupportedModel
from octavo.layers.rope import (
    BaseScaling,
    LinearScaling,
    Llama3Scaling,
    LongScaling,
    NtkScaling,
    ProportionalScaling,
    QueryGrowth,
    Rope,
    Scaling,
    YarnScaling,
)


def read_rope(
    c: Checkpoint, head_dim: int, *, kind: str = "full_attention", share: float | None = None, interleaved: bool = False
) -> Rope:
    """Read the rotary parameters of one `kind` of layer, for heads of size `head_dim`.

    `share` is the part of a head that turns where the config names none; families without it turn whole heads.
    Raises UnsupportedModel or CheckpointError.
    """
    rope = c.rope(kind)
    if rope.str("rope_type") == "proportional":
        turning = int(_turning_share(rope, 1.0) * head_dim // 2)
        scaling = ProportionalScaling(turning, rope.positive_float("factor", 1.0))
        return Rope(head_dim, rope.positive_float("rope_theta"), scaling, interleaved)
    if share is None:
        _check_whole_heads_turn(c, rope, head_dim)
        turned = head_dim
    else:
        turned = int(head_dim * _turning_share(rope, share))
    if turned % 2 or not 0 < turned <= head_dim:
        where = rope.origin("head_dim", "hidden_size", "partial_rotary_factor", "rotary_pct")
        raise CheckpointError(
            f"{where}: head_dim is {head_dim}, and {turned} elements of a head turn, expected an even number of "
            "them: they turn in pairs"
        )
    bent, (axes, second_axes) = _read_scaling(c, rope, turned), _read_axes(c, rope, turned // 2)
    return Rope(turned, rope.positive_float("rope_theta"), bent, interleaved, axes=axes, second_axes=second_axes)


def ropes_by_layer(c: Checkpoint, rope: Rope, num_layers: int) -> tuple[Rope | None, ...]:
    """Return the rotation of each layer, which has a theta of its own, 0 for none. Raises CheckpointError."""
    thetas: Any = c.values.get("layer_rope_theta")
    is_list = isinstance(thetas, list) and len(thetas) == num_layers
    if not is_list or not all(isinstance(each, int | float) and 0 <= each < 1e300 for each in thetas):
        raise c.error("layer_rope_theta", f"a number for each of {num_layers} layers, 0 for no rotation")
    return tuple(replace(rope, theta=float(each)) if each else None for each in thetas)


def read_turns(c: Checkpoint, num_layers: int) -> tuple[bool, ...]:
    """Return for each layer whether its heads turn, as `no_rope_layers` says (1, or 0 for those that do not), else all
    but those of every fourth. Raises CheckpointError."""
    interval = c.positive("no_rope_layer_interval", 4)
    turns = [int((layer + 1) % interval != 0) for layer in range(min(num_layers, MOST_LAYERS))]
    if c.values.get("no_rope_layers") not in (None, []):
        expected = f"1 or 0 for each of {num_layers} layers"
        turns = c.listed("no_rope_layers", num_layers, lambda each: each in (0, 1), expected)
    return tuple(map(bool, turns))


def with_query_growth(c: Checkpoint, rope: Rope | None) -> Rope | None:
    """Return a rotation with which queries grow, where the rotary parameters say so (`llama_4_scaling_beta`)."""
    stated = c.rope()
    if rope is None or stated.values.get("llama_4_scaling_beta") is None:
        return rope
    growth = QueryGrowth(stated.float("llama_4_scaling_beta"), stated.positive("original_max_position_embeddings"))
    return replace(rope, query_growth=growth)


def _read_axes(c: Checkpoint, rope: Section, num_pairs: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return by which position the first element of each pair turns in a model that reads images (`mrope_section`), and
    the second where that is another; () in a model of text."""
    model_type = c.str("model_type", "")
    defaults = {"glm4v": [8, 12, 12], "glm_ocr": [8, 12, 12], "paddleocr_vl": [16, 24, 24]}
    defaults |= {"ernie4_5_vl": [22, 22, 20], "hy_v4_vl": [12, 10, 10]}
    unstated = next((each for name, each in defaults.items() if model_type.startswith(name)), None)
    sections = rope.values.get("mrope_section", unstated)
    if sections is None and rope.values.get("xdrope_section") is None:
        return (), ()
    if model_type.startswith("ernie4_5_vl"):
        return _axes_in_turn(rope, sections, num_pairs), ()
    if model_type.startswith("hunyuan_vl"):
        name = "xdrope_section" if sections is None else "mrope_section"
        axes = _axes_of_elements(rope, name, num_pairs)
        return axes[:num_pairs], axes[num_pairs:]
    is_three = isinstance(sections, list) and len(sections) == 3 and all(type(each) is int for each in sections)
    if not is_three or sum(sections) != num_pairs:
        raise rope.error("mrope_section", f"three numbers of pairs that are {num_pairs} together")
    if not rope.bool("mrope_interleaved", model_type.startswith(("qwen3", "hy_v4_vl"))):
        return tuple(axis for axis, count in enumerate(sections) for _ in range(count)), ()
    return tuple(pair % 3 if pair < 3 * sections[pair % 3] else 0 for pair in range(num_pairs)), ()


def _axes_in_turn(rope: Section, sections: Any, num_pairs: int) -> tuple[int, ...]:
    """Return by which position each pair turns: sections are those of rows and of columns, which take turns, and that
    of time. Raises CheckpointError."""
    is_three = isinstance(sections, list) and len(sections) == 3 and all(type(each) is int for each in sections)
    if not is_three or min(sections) < 0 or sections[0] != sections[1] or sum(sections) != num_pairs:
        raise rope.error("mrope_section", f"three numbers of pairs that are {num_pairs} together, the first two equal")
    return (1, 2) * sections[0] + (0,) * sections[2]


def _axes_of_elements(rope: Section, name: str, num_pairs: int) -> tuple[int, ...]:
    """Return by which position each element of a head turns: sections of elements turn by time, columns, rows and the
    number of an image, of which time may be left out. Raises CheckpointError."""
    sections, order = rope.values[name], (0, 2, 1, 3)
    if not isinstance(sections, list) or len(sections) not in (3, 4) or not all(type(each) is int for each in sections):
        raise rope.error(name, "three or four numbers of pairs")
    if min(sections) < 0 or sum(sections) != num_pairs:
        raise rope.error(name, f"numbers of pairs that are {num_pairs} together")
    by_section = zip(order[-len(sections) :], sections, strict=True)
    return tuple(axis for axis, count in by_section for _ in range(2 * count))


def _turning_share(rope: Section, default: float) -> float:
    """Return the share of a head that turns: the config's, else `default`. Raises CheckpointError."""
    share = rope.positive_float("partial_rotary_factor", default)
    if share > 1.0:
        raise rope.error("partial_rotary_factor", "the share of a head that turns, at most 1")
    return share


def _check_whole_heads_turn(c: Checkpoint, rope: Section, head_dim: int) -> None:
    """Refuse a `partial_rotary_factor` that would change the result.

    In transformers, which the families here follow, plain frequencies ignore it; the scaled ones are as many as it
    says, which then do not fit the heads.
    """
    factor = rope.values.get("partial_rotary_factor")
    if rope.str("rope_type") == "default" or factor is None:
        return
    # of latents the share is that of a query with the elements that do not turn
    whole = c.positive("head_dim", head_dim) if c.values.get("qk_rope_head_dim") is not None else head_dim
    if int(whole * _turning_share(rope, 1.0)) != head_dim:
        where = rope.origin("partial_rotary_factor", "rope_type", "type")
        raise UnsupportedModel(
            f"{where}: partial_rotary_factor is {shown(factor)} and rope_type is {shown(rope.values['rope_type'])}; "
            'expected 1, or rope_type "default", which turns whole heads whatever the factor is'
        )


def _read_scaling(c: Checkpoint, rope: Section, turned: int) -> Scaling | None:
    kind = rope.str("rope_type")
    if kind == "dynamic" and rope.values.get("alpha") and c.str("model_type", "").startswith("hunyuan"):
        return BaseScaling(rope.positive_float("alpha"))
    # dynamic frequencies are the plain ones up to max_position_embeddings, which is the longest context here: beyond,
    # they change with the length, and keys that are cached would have been rotated by others
    if kind in ("default", "dynamic"):
        return None
    if kind == "linear":
        return LinearScaling(rope.positive_float("factor"))
    if kind == "ntk" and rope.values.get("mixed_b") is None:
        return NtkScaling(rope.positive_float("factor"))
    if kind == "llama3":
        low, high = rope.positive_float("low_freq_factor"), rope.positive_float("high_freq_factor")
        if low >= high:
            raise rope.error("low_freq_factor", f"a number below high_freq_factor, which is {high:g}")
        original = rope.positive("original_max_position_embeddings")
        return Llama3Scaling(rope.positive_float("factor"), low, high, original)
    if kind == "yarn":
        return _read_yarn(c, rope)
    if kind in ("longrope", "su"):
        return _read_longrope(c, rope, turned // 2)
    where = rope.origin("rope_type", "type")
    raise UnsupportedModel(
        f'{where}: rope_type is "{kind}", expected "default", "linear", "ntk", "llama3", "yarn", "longrope", '
        '"dynamic" or "proportional"; '
        "this way to stretch the context is not implemented"
    )


def _read_yarn(c: Checkpoint, rope: Section) -> YarnScaling:
    original = rope.positive("original_max_position_embeddings", c.positive("max_position_embeddings"))
    factor = _read_stretch(c, rope, original)
    if rope.values.get("attention_factor") is not None:
        attention_factor = rope.positive_float("attention_factor")
    elif rope.values.get("mscale") and rope.values.get("mscale_all_dim"):
        attention_factor = YarnScaling.default_attention_factor(
            factor, rope.positive_float("mscale")
        ) / YarnScaling.default_attention_factor(factor, rope.positive_float("mscale_all_dim"))
    else:
        attention_factor = YarnScaling.default_attention_factor(factor)
    for name in ("beta_fast", "beta_slow"):
        if not 1 / LARGEST_SIZE <= rope.positive_float(name, 1.0) <= LARGEST_SIZE:
            raise rope.error(name, "how many times a pair turns over the original context")
    if rope.float("rope_theta") == 1.0:
        raise rope.error("rope_theta", "another number than 1, with which all pairs turn alike")
    fast, slow = rope.positive_float("beta_fast", 32.0), rope.positive_float("beta_slow", 1.0)
    return YarnScaling(factor, original, attention_factor, fast, slow, rope.bool("truncate", True))


def _read_longrope(c: Checkpoint, rope: Section, pairs: int) -> LongScaling:
    original = rope.positive("original_max_position_embeddings", c.positive("max_position_embeddings"))
    factor = _read_stretch(c, rope, original)
    if rope.values.get("attention_factor") is not None:
        attention_factor = rope.positive_float("attention_factor")
    elif rope.values.get("short_mscale") is not None:
        attention_factor = rope.expect("short_mscale", rope.positive_float("long_mscale"))
    else:
        attention_factor = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 < original else 1.0
    short, long = (_read_factors(rope, name, pairs) for name in ("short_factor", "long_factor"))
    return LongScaling(short, long, original, attention_factor)


def _read_stretch(c: Checkpoint, rope: Section, original: int) -> float:
    """Return the ratio of the context's length to that of the training, `original` positions."""
    if rope.values.get("factor") is not None:
        return rope.positive_float("factor")
    return c.positive("max_position_embeddings") / original


def _read_factors(rope: Section, name: str, pairs: int) -> tuple[float, ...]:
    expected = f"a list of {pairs} numbers above 0, one for each pair of elements that turns"
    found = rope.listed(name, pairs, lambda each: type(each) in (int, float) and 0 < each < 1e300, expected)
    return tuple(map(float, found))
