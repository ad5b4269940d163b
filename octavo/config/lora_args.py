"""The engine's arguments about adapters (LoRA)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from octavo.config.fields import Arg


@dataclass(frozen=True, kw_only=True)
class LoRAArgs:
    """Whether requests may use adapters, and the memory for them."""

    heading: ClassVar = "Adapters (LoRA)"

    enable_lora: Annotated[bool, Arg("Let requests use adapters: PEFT's LoRA beside the model's weights.")] = False
    max_loras: Annotated[int, Arg("Different adapters that run at once; requests with others wait.", ge=1, le=1024)] = 1
    max_cpu_loras: Annotated[
        int | None,
        Arg(
            "Adapters that are kept in host memory, so that their files are not read again; those that were used "
            "longest ago are dropped. At least max_loras, which is the default.",
            ge=1,
            le=1 << 16,
        ),
    ] = None
    max_lora_rank: Annotated[
        int, Arg("Largest rank of an adapter; the memory of every slot is made for it.", ge=1, le=1024)
    ] = 16
    enable_lora_experts: Annotated[
        bool,
        Arg("Take adapters of experts (target_parameters of PEFT), too; the memory of every slot is made for them."),
    ] = False
    lora_dtype: Annotated[
        str,
        Arg("Number format of adapters; auto takes the model's.", choices=("auto", "float32", "bfloat16", "float16")),
    ] = "auto"
    lora_modules: Annotated[
        tuple[str, ...],
        Arg(
            "Adapter of a server: the name by which clients ask for it and its folder, as name=path or as a JSON "
            "object with name, path and base_model_name; may be given several times."
        ),
    ] = ()
    lora_resolver_cache_dir: Annotated[
        str | None,
        Arg(
            "Folder of adapters, which a server loads when clients ask for a model with the name of one: the path "
            "below this folder."
        ),
    ] = None
