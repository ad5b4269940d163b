"""Adapters as PEFT saves them, random, and the dense model that computes the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from octavo.engine.adapter_files import digest_of

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
LINEAR = (*ATTENTION, "gate_proj", "up_proj", "down_proj")


def make_adapter(
    base: Path,
    folder: Path,
    targets: tuple[str, ...] = ATTENTION,
    *,
    rank: int = 4,
    seed: int = 1,
    within: str = "",
    **config: Any,
) -> Path:
    """Write an adapter for all modules of `base` with these last names, and with `within` in their whole names. config:
    further fields of its config; the rank of a module is that of a name in rank_pattern that its name ends with."""
    folder.mkdir(parents=True, exist_ok=True)
    generator, ranks = torch.Generator().manual_seed(seed), config.get("rank_pattern", {})
    tensors = {}
    for name, weight in load_file(base / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] in targets and weight.dim() == 2 and within in module:
            own = next((each for key, each in ranks.items() if module.endswith(key)), rank)
            outputs, inputs = weight.shape
            for which, shape in (("A", (own, inputs)), ("B", (outputs, own))):
                values = torch.randn(shape, generator=generator) / shape[1] ** 0.5
                tensors[f"base_model.model.{module}.lora_{which}.weight"] = values
    save_file(tensors, folder / "adapter_model.safetensors")
    fields = {"peft_type": "LORA", "r": rank, "lora_alpha": 6, "target_modules": list(targets), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps({**fields, **config}))
    return folder


def edit(folder: Path, remove: tuple[str, ...] = (), tensors: dict[str, Tensor] | None = None, **fields: Any) -> Path:
    """Change fields of an adapter's config, and tensors by the ends of their names."""
    config, path = folder / "adapter_config.json", folder / "adapter_model.safetensors"
    config.write_text(json.dumps({**json.loads(config.read_text()), **fields}))
    stored = {name: each for name, each in load_file(path).items() if not name.endswith(remove or ("\0",))}
    save_file({**stored, **(tensors or {})}, path)
    return folder


def merge(base: Path, folder: Path, out: Path, scale: float) -> Path:
    """Write a copy of a checkpoint with W + scale · B · A."""
    out.mkdir()
    for each in base.iterdir():
        (out / each.name).write_bytes(each.read_bytes())
    tensors, added = load_file(base / "model.safetensors"), load_file(folder / "adapter_model.safetensors")
    for name, a in added.items():
        if ".lora_A" in name:
            module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            delta = scale * added[name.replace("lora_A", "lora_B")].double() @ a.double()
            weight = tensors[f"{module}.weight"].double()
            tensors[f"{module}.weight"] = (weight + delta).float()
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return out


def digest(folder: Path) -> str:
    return digest_of(folder)
