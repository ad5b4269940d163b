"""The engine's arguments about adapters (LoRA)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from octavo.config.fields import arg


@dataclass(frozen=True, kw_only=True)
class LoRAArgs:
    """Whether requests may use adapters, and the memory for them."""

    heading: ClassVar = "Adapters (LoRA)"

    enable_lora: bool = arg(False, "Let requests use adapters: PEFT's LoRA beside the model's weights.")
    max_loras: int = arg(1, "Different adapters that run at once; requests with others wait.", ge=1, le=1024)
    max_cpu_loras: int | None = arg(
        None,
        "Adapters that are kept in host memory, so that their files are not read again; those that were used "
        "longest ago are dropped. At least max_loras, which is the default.",
        ge=1,
        le=1 << 16,
    )
    max_lora_rank: int = arg(16, "Largest rank of an adapter; the memory of every slot is made for it.", ge=1, le=1024)
    enable_lora_experts: bool = arg(
        False, "Take adapters of experts (target_parameters of PEFT), too; the memory of every slot is made for them."
    )
    lora_dtype: str = arg(
        "auto", "Number format of adapters; auto takes the model's.", choices=("auto", "float32", "bfloat16", "float16")
    )
    lora_modules: tuple[str, ...] = arg(
        (),
        "Adapter of a server: the name by which clients ask for it and its folder, as name=path or as a JSON "
        "object with name, path and base_model_name; may be given several times.",
    )
    lora_resolver_cache_dir: str | None = arg(
        None,
        "Folder of adapters, which a server loads when clients ask for a model with the name of one: the path "
        "below this folder.",
    )
