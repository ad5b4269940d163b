"""Checkpoints of models that read images as two GGUF files, written by gguf-py as llama.cpp's converter writes them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.fakes.gguf_files import content_of, gguf_bytes, permuted, plain
from tests.fakes.vision import make_vision_checkpoint

Array = NDArray[Any]
Named = Iterator[tuple[str, Tensor]]

_QWEN3 = {"qwen3_vl": "qwen3vl", "qwen3_vl_moe": "qwen3vlmoe", "qwen3_5": "qwen35"}
TEXT_TOKENS = {
    "gemma3": {4: "<start_of_image>", 5: "<end_of_image>", 6: "<image_soft_token>"},
    **{family: {4: "<|image_pad|>"} for family in ("qwen2_vl", "qwen2_5_vl", *_QWEN3)},
    "gemma4": {4: "<|image|>", 5: "<image|>", 6: "<|image>"},
    "llama4": {4: "<|patch|>", 5: "<|image_end|>", 6: "<|image_start|>"},
    "smolvlm": {4: "<image>"},
    "internvl": {4: "<IMG_CONTEXT>"},
    **{family: {4: "<image>"} for family in ("llava", "llava_next")},
    **{family: {4: "[IMG]"} for family in ("pixtral", "mistral3")},
}
"""What tokens of the small tokenizer are called in that of the releases."""
ARCHITECTURES = {
    "gemma3": "gemma3",
    "gemma4": "gemma4",
    "llama4": "llama4",
    "qwen2_vl": "qwen2vl",
    "qwen2_5_vl": "qwen2vl",
    **_QWEN3,
    "internvl": "qwen2",
    "mistral3": "mistral3",
    **dict.fromkeys(("smolvlm", "pixtral", "llava", "llava_next"), "llama"),
}
"""`general.architecture` of the text model."""
AS_RELEASED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "gemma3": ({"text_config": {"layer_types": ["sliding_attention"] * 3}}, {"do_pan_and_scan": None}),
    "qwen2_vl": ({}, {"size": {"shortest_edge": 3136, "longest_edge": 12_845_056}}),
    "qwen2_5_vl": (
        {"vision_config": {"window_size": 112, "tokens_per_second": 2}},
        {"size": {"shortest_edge": 3136, "longest_edge": 12_845_056}},
    ),
    **dict.fromkeys(_QWEN3, ({}, {"size": {"shortest_edge": 65_536, "longest_edge": 16_777_216}})),
    "gemma4": (
        {"text_config": {"use_bidirectional_attention": None}},
        {"max_soft_tokens": 280},
    ),
    "llama4": (
        {
            "boi_token_index": 6,
            "eoi_token_index": 5,
            "text_config": {
                "floor_scale": 8192,
                "no_rope_layers": [1, 1],
                "layer_types": ["chunked_attention"] * 2,
                "attention_chunk_size": 8192,
            },
        },
        {"max_patches": 16, "image_processor_type": "Llama4ImageProcessor"},
    ),
    "smolvlm": ({}, {}),
    "internvl": ({}, {}),
    **dict.fromkeys(("pixtral", "llava", "llava_next"), ({}, {})),
    "mistral3": ({}, {}),
}
"""Values of releases, which files do not state: of the config and of the image processor."""
_OF_TEXT = re.compile(
    r"(?:model\.language_model|language_model\.model|model\.text_model|model)\.(?!vision|visual|connector|embed_vision)"
    r"|language_model\.(?=lm_head)"
)


def _gemma3(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    vision = config["vision_config"]
    writer.add_clip_projector_type(gguf.VisionProjectorType.GEMMA3)
    writer.add_vision_attention_layernorm_eps(vision["layer_norm_eps"])
    writer.add_vision_use_gelu(True)
    scale = vision["image_size"] // vision["patch_size"] // int(config["mm_tokens_per_image"] ** 0.5)
    if scale != 4:
        writer.add_vision_projector_scale_factor(scale)


def _gemma3_tensors(name: str, tensor: Tensor, config: dict[str, Any]) -> Named:
    name = name.replace("_weight", ".weight")
    yield name, tensor + 1 if "soft_emb_norm" in name else tensor


def _gemma4(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_key_value("clip.vision.projector_type", "gemma4v", gguf.GGUFValueType.STRING)
    writer.add_vision_attention_layernorm_eps(config["vision_config"]["rms_norm_eps"])


def _gemma4_tensors(name: str, tensor: Tensor, config: dict[str, Any]) -> Named:
    name = name.replace("model.vision_tower.encoder.", "vision_model.model.")
    name = name.replace(".linear.weight", ".weight") + ".weight" * name.endswith("position_embedding_table")
    if "input_proj." in name:
        side = config["vision_config"]["patch_size"]
        tensor = tensor.unflatten(1, (side, side, 3)).permute(0, 3, 1, 2).contiguous()
    yield name, tensor.reshape(1) if tensor.dim() == 0 else tensor


def _llama4(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    vision = config["vision_config"]
    writer.add_clip_projector_type(gguf.VisionProjectorType.LLAMA4)
    writer.add_vision_attention_layernorm_eps(vision["norm_eps"])
    writer.add_vision_projector_scale_factor(int(1 / vision["pixel_shuffle_ratio"]))


def _llama4_tensors(name: str, tensor: Tensor, config: dict[str, Any]) -> Named:
    name += ".weight" * name.endswith("embedding_vlm")
    yield "mm.model.fc.weight" if "projector.linear_1" in name else name, tensor


def _qwen2(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    if config["model_type"] == "qwen2_vl":
        writer.add_clip_projector_type(gguf.VisionProjectorType.QWEN2VL)
    else:
        writer.add_clip_projector_type(gguf.VisionProjectorType.QWEN25VL)
        writer.add_vision_use_silu(True)
        writer.add_vision_n_wa_pattern(config["vision_config"]["fullatt_block_indexes"][0] + 1)
    writer.add_vision_attention_layernorm_eps(1e-6)


def _qwen2_tensors(name: str, tensor: Tensor, config: dict[str, Any]) -> Named:
    if "qkv" in name:
        for part, rows in zip("qkv", tensor.chunk(3), strict=True):
            yield name.replace("qkv", part), rows
    else:
        yield from _frames(name, tensor)


def _frames(name: str, tensor: Tensor) -> Named:
    """Kernels of the two frames of a patch apart."""
    if name != "visual.patch_embed.proj.weight":
        yield name, tensor
        return
    yield "v.patch_embd.weight", tensor[:, :, 0]
    yield "v.patch_embd.weight.1", tensor[:, :, 1]


def _qwen3(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    vision = config["vision_config"]
    writer.add_clip_projector_type(gguf.VisionProjectorType.QWEN3VL)
    writer.add_vision_use_gelu(True)
    writer.add_vision_spatial_merge_size(vision["spatial_merge_size"])
    writer.add_vision_attention_layernorm_eps(config["text_config"]["rms_norm_eps"])
    indexes = vision.get("deepstack_visual_indexes", [])
    writer.add_vision_is_deepstack_layers([layer in indexes for layer in range(vision["depth"])])


def _qwen3_tensors(name: str, tensor: Tensor, config: dict[str, Any]) -> Named:
    name = name.removeprefix("model.")
    if match := re.fullmatch(r"visual\.deepstack_merger_list\.(\d+)\.(?:linear_)?(\w+)(\.\w+)", name):
        layer = config["vision_config"]["deepstack_visual_indexes"][int(match[1])]
        yield f"v.deepstack.{layer}.{match[2]}{match[3]}", tensor
    elif match := re.fullmatch(r"visual\.merger\.(norm|linear_fc1|linear_fc2)(\.\w+)", name):
        yield {"norm": "v.post_ln", "linear_fc1": "mm.0", "linear_fc2": "mm.2"}[match[1]] + match[2], tensor
    else:
        yield from _frames(name, tensor)


def _smolvlm(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_clip_projector_type(gguf.VisionProjectorType.IDEFICS3)
    writer.add_vision_attention_layernorm_eps(config["vision_config"]["layer_norm_eps"])
    writer.add_vision_projector_scale_factor(config["scale_factor"])
    writer.add_vision_use_gelu(True)
    writer.add_vision_preproc_image_size(config["settings"]["size"]["longest_edge"])


def _internvl(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_clip_projector_type(gguf.VisionProjectorType.INTERNVL)
    writer.add_vision_attention_layernorm_eps(config["vision_config"]["layer_norm_eps"])
    writer.add_vision_use_gelu(True)
    writer.add_vision_projector_scale_factor(int(1 / config["downsample_ratio"]))
    writer.add_vision_preproc_min_tiles(config["settings"]["min_patches"])
    writer.add_vision_preproc_max_tiles(config["settings"]["max_patches"])


_OF_INTERN_S1 = {"layer_norm": "mlp1.0", "linear_1": "mlp1.1", "linear_2": "mlp1.3"}


def _internvl_tensors(name: str, tensor: Tensor, config: dict[str, Any]) -> Named:
    if match := re.fullmatch(r"multi_modal_projector\.(\w+)(\.\w+)", name):
        yield _OF_INTERN_S1[match[1]] + match[2], tensor
    else:
        ends = ("lambda_1", "lambda_2", "position_embeddings")
        yield f"model.{name.replace('vision_model.', '')}" + ".weight" * name.endswith(ends), tensor


def _pixtral(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_clip_projector_type(gguf.VisionProjectorType.PIXTRAL)
    writer.add_vision_attention_layernorm_eps(1e-5)
    is_silu = config["vision_config"]["hidden_act"] == "silu"
    (writer.add_vision_use_silu if is_silu else writer.add_vision_use_gelu)(True)
    if "spatial_merge_size" in config:
        writer.add_vision_spatial_merge_size(config["spatial_merge_size"])


def _pixtral_tensors(name: str, tensor: Tensor, config: dict[str, Any]) -> Named:
    is_turned = re.search(r"\.[qk]_proj\.", name)
    yield name, permuted(tensor, config["vision_config"]["num_attention_heads"]) if is_turned else tensor
    if name == "vision_tower.ln_pre.weight":  # of the table of embeddings
        yield "v.token_embd.img_break", tensor


def _llava(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """As the older script does, which leaves out the last layer."""
    vision = config["vision_config"]
    own = {"block_count": vision["num_hidden_layers"] - 1, "projection_dim": 768}
    for key, value in own.items():
        writer.kv_data[0].pop(f"clip.vision.{key}")
        writer.add_uint32(f"clip.vision.{key}", value)
    writer.add_bool("clip.has_llava_projector", True)
    writer.add_bool("clip.use_gelu", False)
    writer.add_vision_attention_layernorm_eps(vision["layer_norm_eps"])
    if "image_grid_pinpoints" in config:
        sides = [side for pair in config["image_grid_pinpoints"] for side in pair]
        writer.add_array("clip.vision.image_grid_pinpoints", sides)


def _llava_tensors(name: str, tensor: Tensor, config: dict[str, Any]) -> Named:
    if "post_layernorm" in name or f"layers.{config['vision_config']['num_hidden_layers'] - 1}." in name:
        return
    name = re.sub(r"multi_modal_projector\.linear_([12])", lambda m: f"mm.{2 * int(m[1]) - 2}", name)
    yield {"image_newline": "model.image_newline", _CLASS: "v.class_embd"}.get(name, name), tensor


_CLASS = "vision_tower.vision_model.embeddings.class_embedding"


def _as_they_are(name: str, tensor: Tensor, config: dict[str, Any]) -> Named:
    yield name, tensor


FAMILIES: dict[str, tuple[Callable[[gguf.GGUFWriter, dict[str, Any]], None], Callable[..., Named]]] = {
    "gemma3": (_gemma3, _gemma3_tensors),
    "gemma4": (_gemma4, _gemma4_tensors),
    "llama4": (_llama4, _llama4_tensors),
    "qwen2_vl": (_qwen2, _qwen2_tensors),
    "qwen2_5_vl": (_qwen2, _qwen2_tensors),
    **dict.fromkeys(_QWEN3, (_qwen3, _qwen3_tensors)),
    **dict.fromkeys(("llava", "llava_next"), (_llava, _llava_tensors)),
    "smolvlm": (_smolvlm, _as_they_are),
    "internvl": (_internvl, _internvl_tensors),
    "pixtral": (_pixtral, _pixtral_tensors),
    "mistral3": (_pixtral, _pixtral_tensors),
}


def make_released(family: str, path: Path) -> Path:
    """Write a random model of a family to `path` in float16, with settings that its releases have, and return it."""
    make_vision_checkpoint(family, path)
    for file, changes in zip(("config.json", "preprocessor_config.json"), AS_RELEASED[family], strict=True):
        values = json.loads((path / file).read_text())
        for key, value in changes.items():
            values[key] = {**values[key], **value} if isinstance(value, dict) else value
        (path / file).write_text(json.dumps({**values, **({"dtype": "float16"} if file == "config.json" else {})}))
    weights = load_file(path / "model.safetensors")
    save_file({name: each.half() for name, each in weights.items()}, path / "model.safetensors", {"format": "pt"})
    return path


def as_converted(name: str, tensor: Tensor) -> Array:
    """What the converter makes of a tensor of a checkpoint in float16: those of one dimension are in float32."""
    return (tensor.float() if tensor.dim() == 1 or "position_embd" in name else tensor.half()).contiguous().numpy()


def convert_both(
    checkpoint: Path,
    family: str,
    *,
    store: Callable[[str, Tensor], Array] = as_converted,
    rename: Callable[[str], str] = str,
    changes: Mapping[str, Any] | None = None,
    tokenizer: Mapping[str, Any] | None = None,
) -> tuple[Path, Path]:
    """Write the files of text model and vision encoder to a folder beside a checkpoint, and return their paths.

    Of the encoder's file, store: returns a tensor as it is written, of type uint8 in blocks of Q8_0, by its name there.
    rename: returns another name. changes: values of metadata, None to leave one out. tokenizer: metadata of the other.
    """
    config = json.loads((checkpoint / "config.json").read_text())
    config["settings"] = json.loads((checkpoint / "preprocessor_config.json").read_text())
    weights = {name: each.float() for name, each in load_file(checkpoint / "model.safetensors").items()}
    folder = checkpoint.with_name(f"{checkpoint.name}-gguf")
    folder.mkdir(exist_ok=True)
    text, encoder = folder / "model.gguf", folder / "mmproj-model.gguf"
    text.write_bytes(_text_model(family, config, weights, tokenizer or {}))
    writer = gguf.GGUFWriter(encoder, gguf.MODEL_ARCH_NAMES[gguf.MODEL_ARCH.MMPROJ])
    _describe(writer, family, config)
    for key, value in (changes or {}).items():
        writer.kv_data[0].pop(key, None)
        if value is not None:
            writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    for name, tensor in _encoder_tensors(family, config, weights):
        stored = store(name, tensor)
        blocks = gguf.GGMLQuantizationType.Q8_0 if stored.dtype == "uint8" else None
        writer.add_tensor(rename(name), stored, raw_dtype=blocks)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return text, encoder


def _text_model(
    family: str, config: dict[str, Any], weights: Mapping[str, Tensor], tokenizer: Mapping[str, Any]
) -> bytes:
    architecture, inner = ARCHITECTURES[family], config["text_config"]
    own = {
        re.sub(r"^(?!lm_head)", "model.", _OF_TEXT.sub("", name, count=1)): tensor
        for name, tensor in weights.items()
        if _OF_TEXT.match(name) or name.startswith("lm_head")
    }
    tokens = [f"w{number}" for number in range(inner["vocab_size"])]
    for number, token in TEXT_TOKENS[family].items():
        tokens[number] = token
    sections = (inner.get("rope_parameters") or {}).get("mrope_section")
    described, tensors = content_of(architecture, inner, own)
    metadata = {
        **described,
        **({f"{architecture}.rope.dimension_sections": [*sections, 0]} if sections else {}),
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.eos_token_id": inner["eos_token_id"],
        "tokenizer.ggml.bos_token_id": inner["bos_token_id"],
        **tokenizer,
    }
    return gguf_bytes(
        metadata, {name: plain(torch.from_numpy(as_converted(name, each))) for name, each in tensors.items()}
    )


_ENDS = (".weight", ".bias", *(f".{each}put_{end}" for each in ("in", "out") for end in ("min", "max")))


def _describe(writer: gguf.GGUFWriter, family: str, config: dict[str, Any]) -> None:
    vision, settings = config["vision_config"], config["settings"]
    writer.add_type(gguf.GGUFType.MMPROJ)
    writer.add_clip_has_vision_encoder(True)
    writer.add_vision_projection_dim(config["text_config"]["hidden_size"])
    for name, add in (("image_size", writer.add_vision_image_size), ("patch_size", writer.add_vision_patch_size)):
        size = vision.get(name, 560)
        add(size[0] if isinstance(size, list) else size)
    is_first_qwen = "embed_dim" in vision  # whose hidden_size is that of the text model
    writer.add_vision_embedding_length(vision["embed_dim" if is_first_qwen else "hidden_size"])
    writer.add_vision_feed_forward_length(vision["hidden_size" if is_first_qwen else "intermediate_size"])
    writer.add_vision_block_count(vision.get("num_hidden_layers") or vision["depth"])
    writer.add_vision_head_count(vision.get("num_attention_heads") or vision["num_heads"])
    writer.add_vision_image_mean(settings["image_mean"])
    writer.add_vision_image_std(settings["image_std"])
    FAMILIES[family][0](writer, config)


def _encoder_tensors(family: str, config: dict[str, Any], weights: Mapping[str, Tensor]) -> Named:
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, 8)
    for old, tensor in weights.items():
        if _OF_TEXT.match(old) or old.startswith("lm_head") or "vision_tower.head." in old:
            continue
        # as releases have it
        name = re.sub(
            r"^(vision_tower\.)(?=embeddings|encoder\.layers|post_layernorm|pre_lay)", r"\1vision_model.", old
        )
        for modified, each in FAMILIES[family][1](name, tensor, config):
            new = names.get_name(modified, try_suffixes=_ENDS) or modified
            assert new.startswith(("v.", "mm.", "model.image")), modified
            yield new, each
