"""The adapter of Phi-4-multimodal for prompts with images, and the layout of its release."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.fakes.checkpoints import edit_config

_RANK, _ALPHA = 4, 8
_PARTS = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
_NAMES = {
    "img_projection_up.": "img_projection.0.",
    "img_projection_down.": "img_projection.2.",
    "global_img_feature_extensor": "glb_GN",
    "sub_img_feature_extensor": "sub_GN",
}


def write_adapter(model: Any, path: Path) -> None:
    """Write a random adapter for the layers of transformers' model into the folder that the release has for images."""
    import torch
    from safetensors.torch import save_file

    generator, made = torch.Generator().manual_seed(7), {}
    for name, module in model.named_modules():
        if name.startswith("model.layers.") and name.endswith(_PARTS):
            rows, columns = module.weight.shape
            for which, shape in (("A", (_RANK, columns)), ("B", (rows, _RANK))):
                made[f"base_model.model.{name}.lora_{which}.weight"] = torch.randn(shape, generator=generator) * 0.2
    folder = path / "vision-lora"
    folder.mkdir()
    save_file(made, folder / "adapter_model.safetensors")
    pattern = r"model.layers.\d+.((self_attn.(qkv|o)_proj)|(mlp.(gate_up|down)_proj))"
    values = {"peft_type": "LORA", "r": _RANK, "lora_alpha": _ALPHA, "target_modules": pattern}
    (folder / "adapter_config.json").write_text(json.dumps(values))


def merge_adapter(model: Any, path: Path) -> None:
    """Add the adapter to the weights of transformers' model."""
    import torch
    from safetensors.torch import load_file

    found = load_file(path / "vision-lora" / "adapter_model.safetensors")
    with torch.no_grad():
        for name, b in found.items():
            if ".lora_B." in name:
                module = model.get_submodule(name.removeprefix("base_model.model.").removesuffix(".lora_B.weight"))
                module.weight += b @ found[name.replace(".lora_B.", ".lora_A.")] * (_ALPHA / _RANK)


def as_released(path: Path) -> Path:
    """Change names and settings of a checkpoint to those of the release, but for the sizes of its small encoder."""
    from safetensors.torch import load_file, save_file

    tensors, adapter = (load_file(each) for each in (path / "model.safetensors", next(path.glob("*/*.safetensors"))))
    renamed = {}
    for name, tensor in tensors.items():
        for own, old in _NAMES.items():
            name = name.replace(own, old)
        is_adapted = name.startswith("model.layers.") and name.removesuffix(".weight").endswith(_PARTS)
        renamed[name.replace(".weight", ".base_layer.weight") if is_adapted else name] = tensor
    for name, tensor in adapter.items():
        for kind in ("speech", "vision"):
            renamed[name.removeprefix("base_model.model.").replace(".weight", f".{kind}.weight")] = tensor.clone()
    save_file(renamed, path / "model.safetensors")
    edit_config(path, architectures=["Phi4MMForCausalLM"], model_type="phi4mm", remove=("audio_config",))
    (path / "preprocessor_config.json").write_text(
        json.dumps({"image_processor_type": "Phi4MMImageProcessor", "dynamic_hd": 4, "audio_compression_rate": 8})
    )
    return path
