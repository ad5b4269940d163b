"""The adapters of Phi-4-multimodal for prompts with images and with sounds, and the layout of its release."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.fakes.checkpoints import edit_config

_RANK, _ALPHA = 4, 8
_FOLDERS = ("vision-lora", "speech-lora")
_PARTS = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
_NAMES = {
    "img_projection_up.": "img_projection.0.",
    "img_projection_down.": "img_projection.2.",
    "global_img_feature_extensor": "glb_GN",
    "sub_img_feature_extensor": "sub_GN",
    **{
        f"{way}_proj_for_{own}.": f"audio_projection.{old}.{place}."
        for own, old in (("speech", "speech"), ("vision_speech", "vision"))
        for way, place in (("up", 0), ("down", 2))
    },
}
_OF_SOUNDS = {
    ".gate_up_proj.": ".net.0.linear.",
    ".down_proj.": ".net.2.",
    **{f".self_attn.{each}_proj.": f".self_attn.linear_{each}." for each in "qkv"},
    ".self_attn.o_proj.": ".self_attn.linear_out.",
}
_AUDIO = {"hidden_size": "attention_dim", "num_attention_heads": "attention_heads", "intermediate_size": "linear_units"}
_AUDIO |= {"depthwise_separable_out_channel": "depthwise_seperable_out_channel"}
_AUDIO |= {name: name for name in ("num_blocks", "ext_pw_out_channel", "kernel_size", "time_reduction", "input_size")}


def write_adapter(model: Any, path: Path) -> None:
    """Write random adapters for the layers of transformers' model into the folders that the release has."""
    for seed, folder in enumerate(_FOLDERS, 7):
        _write(model, path / folder, seed)


def _write(model: Any, folder: Path, seed: int) -> None:
    import torch
    from safetensors.torch import save_file

    generator, made = torch.Generator().manual_seed(seed), {}
    for name, module in model.named_modules():
        if name.startswith("model.layers.") and name.endswith(_PARTS):
            rows, columns = module.weight.shape
            for which, shape in (("A", (_RANK, columns)), ("B", (rows, _RANK))):
                made[f"base_model.model.{name}.lora_{which}.weight"] = torch.randn(shape, generator=generator) * 0.2
    folder.mkdir()
    save_file(made, folder / "adapter_model.safetensors")
    pattern = r"model.layers.\d+.((self_attn.(qkv|o)_proj)|(mlp.(gate_up|down)_proj))"
    values = {"peft_type": "LORA", "r": _RANK, "lora_alpha": _ALPHA, "target_modules": pattern}
    (folder / "adapter_config.json").write_text(json.dumps(values))


def merge_adapter(model: Any, path: Path, folder: str) -> None:
    """Add an adapter to the weights of transformers' model."""
    import torch
    from safetensors.torch import load_file

    found = load_file(path / folder / "adapter_model.safetensors")
    with torch.no_grad():
        for name, b in found.items():
            if ".lora_B." in name:
                module = model.get_submodule(name.removeprefix("base_model.model.").removesuffix(".lora_B.weight"))
                module.weight += b @ found[name.replace(".lora_B.", ".lora_A.")] * (_ALPHA / _RANK)


def as_released(path: Path) -> Path:
    """Change names and settings of a checkpoint to those of the release, but for the sizes of its small encoder."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(path / "model.safetensors")
    renamed = {}
    for name, tensor in tensors.items():
        for own, old in _NAMES.items():
            name = name.replace(own, old)
        for own, old in _OF_SOUNDS.items() if ".audio_embed." in name else ():
            name = name.replace(own, old)
        is_adapted = name.startswith("model.layers.") and name.removesuffix(".weight").endswith(_PARTS)
        renamed[name.replace(".weight", ".base_layer.weight") if is_adapted else name] = tensor
    for folder in _FOLDERS:
        kind = folder.removesuffix("-lora")
        for name, tensor in load_file(path / folder / "adapter_model.safetensors").items():
            renamed[name.removeprefix("base_model.model.").replace(".weight", f".{kind}.weight")] = tensor
    save_file(renamed, path / "model.safetensors")
    audio = json.loads((path / "config.json").read_text())["audio_config"]
    own = {old: audio[name] for name, old in _AUDIO.items()} | {"causal": True, "input_layer": "nemo_conv"}
    own["nemo_conv_settings"] = {"conv_channels": audio["nemo_conv_channels"]}
    own["relative_attention_bias_args"] = {"type": "t5", "t5_bias_max_distance": audio["bias_max_distance"]}
    edit_config(
        path,
        architectures=["Phi4MMForCausalLM"],
        model_type="phi4mm",
        audio_token_id=audio["audio_token_id"],
        audio_processor={"name": "cascades", "config": {**own, "chunk_size": -1, "left_chunk": 18}},
        remove=("audio_config",),
    )
    (path / "preprocessor_config.json").write_text(
        json.dumps({"image_processor_type": "Phi4MMImageProcessor", "dynamic_hd": 4, "audio_compression_rate": 8})
    )
    return path
