"""What each family supports, found by opening its small models: octavo/models/families.json and a page about it.

The table is made with the reference pages: python -m tools.reference docs/reference
"""

from __future__ import annotations

import json
from collections.abc import Collection
from functools import cache
from pathlib import Path
from typing import Any

import torch

from octavo.config.checkpoint import Checkpoint
from octavo.config.media.media_families import family_of_release, media_family
from octavo.config.released.names import SAME
from octavo.core.model_shape import CacheGroup, Encoded, Indexed, IndexedLatent, KeysAndValues, Latent, Spaced, State
from octavo.distributed.mesh import Mesh
from octavo.errors import OctavoError
from octavo.models.loader import LoadedModel
from octavo.models.registry import ModelClass, known_architectures, resolve_model
from octavo.ops.registry import Ops, bind
from octavo.quantization.method import WeightMethod
from octavo.quantization.registry import QUANTIZED, method_named
from tests.fakes.checkpoints import family_config
from tests.fakes.families import ENCODERS, FAMILIES, WITH_ENCODERS
from tests.fakes.hearing import ALL_KINDS, GEMMAS, HOURS
from tests.fakes.hearing import FAMILIES as HEARING
from tests.fakes.vision_families import FAMILIES as VISION
from tests.models.test_against_transformers import VARIANTS

FILE = Path(__file__).parents[1] / "octavo" / "models" / "families.json"
_TWO = {
    "tensor": Mesh.of_rank(0, tensor=2),
    "pipeline": Mesh.of_rank(0, pipeline=2),
    "experts": Mesh.of_rank(0, tensor=2, whole_experts=True),
}
_KEYS = ("architectures", "reads", "caches", "quantization", "parallel")
_READ = ("text", "images", "video", "sound")
_ALSO = {
    "NemotronH_Omni_Reasoning_V3": {"NemotronH_Nano_Omni_Reasoning_V3", "NemotronH_Super_Omni_Reasoning_V3"},
    "InternVLForConditionalGeneration": {
        *media_family("InternVLChatModel").architectures,
        "InternS1ForConditionalGeneration",
    },
    "Kimi_K25ForConditionalGeneration": {*media_family("Kimi_K25ForConditionalGeneration").released},
    "Qwen3_5ForConditionalGeneration": {
        "InternS2PreviewForConditionalGeneration",
        "Qwen3_5MoeForConditionalGeneration",
    },
    "SmolVLMForConditionalGeneration": {"Idefics3ForConditionalGeneration"},
}
"""Architectures that are read like another one."""
_AROUND = {
    "bee": ("qwen3", {"BeeForConditionalGeneration"}),
    "deepseek_vl_v2": ("deepseek_v2", {"DeepseekVLV2ForCausalLM"}),
    "eagle_2_5_vl": ("qwen2", {"Eagle2_5_VLForConditionalGeneration"}),
    "keye": ("qwen3", {"KeyeForConditionalGeneration", "KeyeVL1_5ForConditionalGeneration"}),
    "llama_nemotron_nano_vl": ("llama", {"Llama_Nemotron_Nano_VL"}),
    "llama_nemotron_vl": ("llama", {*media_family("LlamaNemotronVLModel").architectures}),
    "minicpmo": ("qwen2", {"MiniCPMO"}),
    "minicpmv": ("qwen2", {"MiniCPMV"}),
    "nemotron_nano_vl": ("nemotron_h", {"NemotronH_Nano_VL_V2"}),
    "nvlm_d": ("qwen2", {"NVLM_D"}),
    "opencua": ("qwen2", {"OpenCUAForConditionalGeneration"}),
    "ovis2_5": ("qwen3", {"Ovis2_5", "Ovis2_6ForCausalLM"}),
    "ovis2_6_moe": ("qwen3_moe", {"Ovis2_6_MoeForCausalLM"}),
    "step_vl": ("qwen3", {"StepVLForConditionalGeneration"}),
    "phi3_v": ("phi3", {"Phi3VForCausalLM"}),
    "ultravox": ("llama", {"UltravoxModel"}),
}
"""Families that read images or sounds and that no class of transformers computes: that of the text model, and
architectures."""
_LIKE = {
    "alice_ai": ("qwen3_next", "AliceAIForCausalLM"),
    "bailing_moe": ("bailing_moe_v2", "BailingMoeForCausalLM"),
    "baichuan": ("llama", "BaichuanForCausalLM"),
    "bailing_moe_v3": ("bailing_hybrid", "BailingMoeV3ForCausalLM"),
    "chatglm": ("glm", "ChatGLMForCausalLM"),
    "deepseek": ("glm4_moe", "DeepseekForCausalLM"),
    "domyn_edge": ("qwen3", "DomynEdgeForCausalLM"),
    "internlm": ("llama", "InternLMForCausalLM"),
    "clip": ("bert", "CLIPModel"),
    "jais": ("gpt2", "JAISLMHeadModel"),
    "jina_bert": ("bert", "JinaBertModel"),
    "siglip": ("bert", "SiglipModel"),
    "kimi_k3": ("kimi_linear", "KimiK3ForConditionalGeneration"),
    "longcat_flash_ngram": ("longcat_flash", "LongcatFlashNgramForCausalLM"),
    "mimo_v2": ("mimo_v2_flash", "MiMoV2ForCausalLM"),
    "nanbeige": ("llama", "NanbeigeForCausalLM"),
    "nemotron_h_puzzle": ("nemotron_h", "NemotronHPuzzleForCausalLM"),
    "ouro": ("llama", "OuroForCausalLM"),
    "pangu_embedded": ("llama", "PanguEmbeddedForCausalLM"),
    "pangu_ultra_moe": ("deepseek_v3", "PanguUltraMoEForCausalLM"),
    "param2moe": ("bailing_moe_v2", "Param2MoEForCausalLM"),
    "plamo3": ("llama", "Plamo3ForCausalLM"),
    "qwen": ("llama", "QWenLMHeadModel"),
    "rnj1": ("gemma", "Rnj1ForCausalLM"),
    "solar": ("llama", "SolarForCausalLM"),
    "step3_text": ("qwen2_moe", "Step3TextForCausalLM"),
    "telechat": ("llama", "TeleChatForCausalLM"),
    "teleflm": ("llama", "TeleFLMForCausalLM"),
}
"""Families whose text model no class of transformers is: a family whose config has their keys, and their
architecture."""
_OWN_KEYS: dict[str, dict[str, Any]] = {
    "alice_ai": {
        **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 4),
        **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 8),
        "block_attn_res_block_size": 2,
        "kda_allow_negative_eigenvalues": False,
        "mlp_only_layers": [],
        "router_bias_correction": True,
        "router_score_function": "sigmoid",
    },
    "domyn_edge": {"window_sizes": [[6, 0], [-1, -1]], "position_layers": ["rope", "nope"], "num_hidden_layers": 2},
    "jais": {"activation_function": "swiglu"},
    "kimi_k3": {"attn_res_block_size": 2, "routed_expert_hidden_size": 32},
    "longcat_flash_ngram": {"ngram_vocab_size_ratio": 1.5, "emb_neighbor_num": 3, "emb_split_num": 2},
    "nemotron_h_puzzle": {
        "block_configs": [{"block_type": "mamba"}, {"block_type": "moe"}, {"block_type": "attention"}],
        **dict.fromkeys(("layer_types", "layers_block_type"), None),
        "num_hidden_layers": 3,
    },
    "pangu_ultra_moe": {"n_group": 1, "topk_group": 1, "sandwich_norm": True, "router_enable_expert_bias": True},
    "plamo3": {"sliding_window_pattern": 2},
    "solar": {"bskcn_1": [0], "bskcn_2": [], "bskcn_3": [1], "bskcn_4": [], "bskcn_tv": [0.9, 0.8]},
    "step3_text": {
        "head_dim": 8,
        "max_position_embedding": 128,
        "max_position_embeddings": None,
        "moe_layers_enum": "1",
        "moe_num_experts": 8,
        "moe_top_k": 2,
        "norm_expert_weight": True,
        "num_attention_groups": 1,
        "num_key_value_heads": None,
        "share_expert_dim": 24,
        "share_q_dim": 24,
    },
}
"""Keys that they need beside these."""
_KINDS = ("full", "window", "latent", "chosen", "compressed", "state", "cross")
_PAGE = """\
<!-- Made by `python -m tools.reference docs/reference`; edit the families in octavo/models instead. -->
# Models

`octavo models` prints this table. A family is a class in `octavo/models`; its architectures are the names in
`config.json`. Reads: what prompts may bring ([images and video](../recipes/images.md), [sound](../recipes/sound.md)).
LLaVA, InternVL and the like may have any text model of the table; here it is the most common one. Caches: what layers
keep of a sequence, the keys and values of all tokens (full) or of those in a window, keys and values or latents of
which queries choose some (chosen), latents, vectors of several tokens each (compressed; what tokens add to the next one
is kept in a window), recurrent states, or the keys and values of an encoder's output (cross); families without caches
(none) make vectors and scores of whole prompts ([vectors](../recipes/vectors.md)), which the others can do, too.
Quantization is made while loading, by `--quantization`. Parallel: by `--tensor-parallel-size`, by
`--pipeline-parallel-size`, and with experts by `--enable-expert-parallel` beside the first.

| family | reads | caches | quantization | parallel | architectures |
|---|---|---|---|---|---|
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
        [(name, {}) for name in FAMILIES | WITH_ENCODERS | ENCODERS | _LIKE] + list(VARIANTS.values()), key=str
    ):
        checkpoint = _checkpoint(family, overrides)
        model = resolve_model(checkpoint)
        name = str(checkpoint.values["model_type"]).removesuffix("_text")
        if getattr(model, "__name__", "").lower().startswith(name.replace("_", "")) or model not in names:
            names[model] = name
        row = found.setdefault(model, {key: set() for key in _KEYS})
        row["reads"] = {"sound" if family in WITH_ENCODERS else "text"}
        row["reads"] |= {"images"} if media_family(checkpoint.architecture).is_dual else set()
        row["architectures"] = {each for each, its_class in classes.items() if its_class is model}
        row["architectures"] |= {each for each, (ours, _) in SAME.items() if ours in row["architectures"]}
        opened = _open(checkpoint)
        assert opened is not None, f"{family} with {overrides} cannot be opened"
        is_encoder = opened.model.config.ahead_of(0) > 0
        row["caches"] |= {"none"} if is_encoder else {_kind(group) for group in opened.shape.cache_groups}
        if overrides:
            continue
        row["parallel"] |= {way for way, mesh in _TWO.items() if not is_encoder and _open(checkpoint, mesh)}
        row["quantization"] |= _quantization(checkpoint, opened, ops, row["quantization"])
    rows = {names[model]: row for model, row in found.items()}
    for name, row in _with_images(rows, ops).items():
        for key, values in row.items():
            rows.setdefault(name, {each: set() for each in _KEYS})[key] |= values
    for name, (text, own) in _AROUND.items():
        families = [family_of_release(each) for each in own]
        fields = (("images", "images"), ("sound", "sounds"))
        reads = {"text"} | {kind for kind, field in fields if any(getattr(each, field) for each in families)}
        rows[name] = {**rows[text], "architectures": own, "reads": reads}
    order = {name: place for place, name in enumerate((*_READ, *_KINDS, *QUANTIZED, *_TWO))}
    return {
        name: {key: sorted(values, key=lambda each: (order.get(each, 0), each)) for key, values in row.items()}
        for name, row in sorted(rows.items())
    }


def _quantization(
    checkpoint: Checkpoint, opened: LoadedModel, ops: Ops, known: Collection[str] = frozenset()
) -> set[str]:
    """Return the methods, beside those that are known, that change how a model keeps its weights."""
    plain, found = opened.model.state_specs(ops), set[str]()
    for method in (method_named(name) for name in QUANTIZED if name not in known):
        held = _open(checkpoint, method=method)
        if held is not None and held.model.state_specs(ops) != plain:
            found.add(method.name)
    return found


def _with_images(rows: dict[str, dict[str, set[str]]], ops: Ops) -> dict[str, dict[str, set[str]]]:
    """Return what is to be added to the rows of families: those of models around a text model, which is a row."""
    added: dict[str, dict[str, set[str]]] = {}
    models = [*VISION.values(), *HEARING.values(), *ALL_KINDS.values(), *GEMMAS.values(), *HOURS.values()]
    for make, architecture in models:
        values = json.loads(make()[0].to_json_string(use_diff=False)) | {"architectures": [architecture]}
        checkpoint = Checkpoint(Path(__file__).parent, values)
        text = getattr(resolve_model(checkpoint, reads_images=False), "__name__", "")
        found = next((row for row in rows.values() if text in row["architectures"]), None)
        name = str(checkpoint.stored.values["model_type"]).removesuffix("_thinker")
        name = name.replace("unlimited", "deepseek")  # whose encoders those of DeepSeek-OCR are
        row = added.setdefault(name, {key: set() for key in _KEYS})
        opened = _open(checkpoint)
        assert opened is not None, f"{architecture} cannot be opened"
        if found is None:  # a text model that is in no other
            checkpoint.image_processor = {"image_processor_type": "of another file"}
            opened = _open(checkpoint) or opened
            found = {
                "caches": {_kind(group) for group in opened.shape.cache_groups},
                "quantization": _quantization(checkpoint, opened, ops),
                "parallel": {way for way, mesh in _TWO.items() if _open(checkpoint, mesh)},
            }
        row["architectures"] |= {architecture} | _ALSO.get(architecture, set())
        family = media_family(architecture)
        read = {"images": family.images, "sound": family.sounds, "video": family.videos}
        row["reads"] |= {"text", *filter(read.get, read)}
        for key in ("caches", "quantization", "parallel"):
            row[key] |= found[key]
    return added


def _class_of(architecture: str) -> ModelClass:
    return resolve_model(Checkpoint(Path(__file__).parent, {"architectures": [architecture]}))


def _checkpoint(family: str, overrides: dict[str, Any]) -> Checkpoint:
    like, architecture = _LIKE.get(family, (family, None))
    values = json.loads(family_config(like, **overrides).to_json_string(use_diff=False))
    if architecture is not None:
        values |= {"architectures": [architecture], "model_type": family, **_OWN_KEYS.get(family, {})}
    # a folder without weights: what they hold does not matter
    return Checkpoint(Path(__file__).parent, values)


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
        case Indexed(num_seen=0):
            return "full"
        case Indexed() | IndexedLatent():
            return "chosen" if group.window is None else "window"
        case Spaced():
            return "compressed" if group.window is None else "window"
        case State():
            return "state"
        case Encoded():
            return "cross"


def page() -> str:
    """Return the page as Markdown."""
    keys = ("reads", "caches", "quantization", "parallel")
    rows = [
        " | ".join((f"| {name}", *(", ".join(row[key]) for key in keys), _codes(row["architectures"])))
        for name, row in families().items()
    ]
    return _PAGE.format(rows="\n".join(rows))


def _codes(names: list[str]) -> str:
    return ", ".join(f"`{each}`" for each in names) + " |"


def text() -> str:
    """Return the content of `FILE`."""
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in families().items())
    return f"{{\n{lines}\n}}\n"
