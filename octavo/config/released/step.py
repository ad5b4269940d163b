"""Keys of Step 3, and of Step 3.5 and 3.7 Flash, as their releases have them, in the layout of transformers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from octavo.config.section import Section

_LISTS: Final = ("layer_types", "mlp_layer_types", "swiglu_limits", "swiglu_limits_shared")
"""Lists whose last elements are those of layers that predict further tokens."""
_KINDS: Final = ("layer_types", "mlp_layer_types")


def step_layout(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of today that follow from those of the releases; what is malformed stays as it is."""
    made: dict[str, Any] = {}
    layers = values.get("num_hidden_layers")
    if not isinstance(layers, int):
        return made
    made |= {name: values[name][:layers] for name in _LISTS if isinstance(values.get(name), list)}
    made |= {f"mtp_{name}": values[name][layers:] for name in _KINDS if isinstance(values.get(name), list)}
    others, sparse = values.get("attention_other_setting"), values.get("moe_layers_enum")
    if isinstance(others, Mapping) and values.get("num_sliding_attention_heads") is None:
        made["num_sliding_attention_heads"] = others.get("num_attention_heads")
    if values.get("mlp_layer_types") is None and 0 < layers < 1 << 10:
        named = set(sparse.replace(" ", "").split(",")) if isinstance(sparse, str) else set(map(str, range(3, layers)))
        made["mlp_layer_types"] = ["sparse" if str(layer) in named else "dense" for layer in range(layers)]
    if values.get("rope_parameters") is None and isinstance(values.get("layer_types"), list):
        made["rope_parameters"] = {
            kind: _rotation(values, kind) for kind in made["layer_types"] if isinstance(kind, str)
        }
    return made


def step3_layout(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the kinds of MLPs of Step 3, whose layers with experts are named: all but the first unless they are."""
    layers, sparse = values.get("num_hidden_layers"), values.get("moe_layers_enum")
    if not isinstance(layers, int) or not 0 < layers < 1 << 10:
        return {}
    named = {*map(str, range(1, layers))}
    if isinstance(sparse, str | list):
        named = set(sparse.replace(" ", "").split(",")) if isinstance(sparse, str) else {*map(str, sparse)}
    return {"mlp_layer_types": ["sparse" if str(layer) in named else "dense" for layer in range(layers)]}


def _rotation(values: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Return the rotary parameters of a kind of layers: those of its first one."""
    place, kinds = values["layer_types"].index(kind), values.get("yarn_only_types")
    found = {}
    for ours, name, default in (
        ("rope_theta", "rope_theta", 10_000.0),
        ("partial_rotary_factor", "partial_rotary_factors", 1.0),
    ):
        stated = values.get(name)
        found[ours] = stated[place] if isinstance(stated, list) and place < len(stated) else stated or default
    scaling = values.get("rope_scaling")
    if isinstance(scaling, Mapping) and (kind in kinds if isinstance(kinds, list) else kind == "full_attention"):
        found |= scaling
    return found


def step_settings(settings: Section) -> Mapping[str, Any]:
    """Return the settings of the image processor, in which `patch_size` is that of windows."""
    kept = {name: value for name, value in settings.values.items() if name != "patch_size"}
    tile = settings.values.get("tile_size", settings.values.get("patch_size"))
    found = {} if tile is None else {"tile_size": tile}
    return {**kept, **found, "image_processor_type": "Step3p7ImageProcessor"}
