"""What each family supports, found by opening its small models: octavo/models/families.json and a page about it.

The table is made with the reference pages: python -m tools.reference docs/reference
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch

from octavo.config.checkpoint import Checkpoint
from octavo.core.model_shape import CacheGroup, Encoded, KeysAndValues, Latent, State
from octavo.distributed.mesh import Mesh
from octavo.errors import OctavoError
from octavo.models.loader import LoadedModel
from octavo.models.registry import ModelClass, known_architectures, resolve_model
from octavo.ops.registry import bind
from octavo.quantization.method import WeightMethod
from octavo.quantization.registry import QUANTIZED, method_named
from tests.fakes.checkpoints import ENCODERS, FAMILIES, WITH_ENCODERS, family_config
from tests.models.test_against_transformers import VARIANTS

FILE = Path(__file__).parents[1] / "octavo" / "models" / "families.json"
_TWO = {
    "tensor": Mesh.of_rank(0, tensor=2),
    "pipeline": Mesh.of_rank(0, pipeline=2),
    "experts": Mesh.of_rank(0, tensor=2, whole_experts=True),
}
_KINDS = ("full", "window", "latent", "state", "cross")
_PAGE = """\
<!-- Made by `python -m tools.reference docs/reference`; edit the families in octavo/models instead. -->
# Models

`octavo models` prints this table. A family is a class in `octavo/models`; its architectures are the names in
`config.json`. Caches: what layers keep of a sequence, the keys and values of all tokens (full) or of those in a window,
latents, recurrent states, or the keys and values of an encoder's output (cross); families without caches (none) make
vectors and scores of whole prompts ([vectors](../recipes/vectors.md)), which the others can do, too. Quantization is
made while loading, by `--quantization`. Parallel: by `--tensor-parallel-size`, by `--pipeline-parallel-size`, and with
experts by `--enable-expert-parallel` beside the first. No family has adapters (LoRA) yet.

| family | caches | quantization | parallel | architectures |
|---|---|---|---|---|
{rows}

An architecture without a family runs by transformers' class for it (`pip install 'octavo[transformers]'`), where a
small copy of it is proved to compute over the paged cache what it computes alone; it has quantization and one rank.
Classes that the proof refuses, and those with recurrent layers, are refused by name.
"""


@cache
def families() -> dict[str, dict[str, list[str]]]:
    """Return architectures, caches, quantization and parallel of each family, by its name."""
    ops = bind()
    found: dict[ModelClass, dict[str, set[str]]] = {}
    classes = {each: _class_of(each) for each in known_architectures()}
    names: dict[ModelClass, str] = {}
    for family, overrides in sorted(
        [(name, {}) for name in FAMILIES | WITH_ENCODERS | ENCODERS] + list(VARIANTS.values()), key=str
    ):
        checkpoint = _checkpoint(family, overrides)
        model = resolve_model(checkpoint)
        name = str(checkpoint.values["model_type"]).removesuffix("_text")
        if getattr(model, "__name__", "").lower().startswith(name.replace("_", "")) or model not in names:
            names[model] = name
        row = found.setdefault(model, {key: set() for key in ("architectures", "caches", "quantization", "parallel")})
        row["architectures"] = {each for each, its_class in classes.items() if its_class is model}
        opened = _open(checkpoint)
        assert opened is not None, f"{family} with {overrides} cannot be opened"
        is_encoder = opened.model.config.ahead_of(0) > 0
        row["caches"] |= {"none"} if is_encoder else {_kind(group) for group in opened.shape.cache_groups}
        if overrides:
            continue
        row["parallel"] |= {way for way, mesh in _TWO.items() if not is_encoder and _open(checkpoint, mesh)}
        plain = opened.model.state_specs(ops)
        for method in map(method_named, QUANTIZED):
            held = _open(checkpoint, method=method)
            if held is not None and held.model.state_specs(ops) != plain:
                row["quantization"].add(method.name)
    order = {name: place for place, name in enumerate((*_KINDS, *QUANTIZED, *_TWO))}
    return {
        names[model]: {key: sorted(values, key=lambda each: (order.get(each, 0), each)) for key, values in row.items()}
        for model, row in sorted(found.items(), key=lambda item: names[item[0]])
    }


def _class_of(architecture: str) -> ModelClass:
    return resolve_model(Checkpoint(Path(__file__).parent, {"architectures": [architecture]}))


def _checkpoint(family: str, overrides: dict[str, Any]) -> Checkpoint:
    config = family_config(family, **overrides)
    # a folder without weights: what they hold does not matter
    return Checkpoint(Path(__file__).parent, json.loads(config.to_json_string(use_diff=False)))


def _open(checkpoint: Checkpoint, mesh: Mesh | None = None, method: WeightMethod | None = None) -> LoadedModel | None:
    try:
        return LoadedModel.open(checkpoint, mesh or Mesh.single(), torch.float32, method)
    except OctavoError:
        return None


def _kind(group: CacheGroup) -> str:
    match group.keeps:
        case KeysAndValues():
            return "full" if group.window is None else "window"
        case Latent():
            return "latent"
        case State():
            return "state"
        case Encoded():
            return "cross"


def page() -> str:
    """Return the page as Markdown."""
    rows = [
        f"| {name} | {', '.join(row['caches'])} | {', '.join(row['quantization'])} | {', '.join(row['parallel'])} | "
        f"{', '.join(f'`{each}`' for each in row['architectures'])} |"
        for name, row in families().items()
    ]
    return _PAGE.format(rows="\n".join(rows))


def text() -> str:
    """Return the content of `FILE`."""
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in families().items())
    return f"{{\n{lines}\n}}\n"
