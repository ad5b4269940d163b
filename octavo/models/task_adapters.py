"""Adds the adapter of a task to the weights of a model for vectors, while they are read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from octavo.config.checkpoint import Checkpoint
from octavo.config.pooling.task_adapters import FILES, TaskAdapter, task_adapter
from octavo.config.section import read_section
from octavo.errors import CheckpointError
from octavo.layers.layer import WHOLE, Parts
from octavo.models.weight_files import StoredTensor, checkpoint_tensors, stored_tensors

_BESIDE: Final = ".parametrizations.weight."
"""The part of names in v3 between a module and its weight (`original`) or adapters (`0.lora_A`, `0.lora_B`)."""


def adapter_weights(checkpoint: Checkpoint) -> list[Path]:
    """Return the files whose weights are added to those of the checkpoint. Raises CheckpointError."""
    found = task_adapter(checkpoint, checkpoint.path)
    return [] if found is None or found.folder is None else [found.folder / FILES[1]]


def adapted_tensors(checkpoint: Checkpoint) -> list[StoredTensor] | None:
    """Return every tensor of a checkpoint with the adapter of its task added; None where there is no adapter. Raises
    CheckpointError."""
    found = task_adapter(checkpoint, checkpoint.path)
    if found is None:
        return None
    stored = list(checkpoint_tensors(checkpoint))
    return list(_of_v3(stored, found)) if found.folder is None else list(_of_folder(stored, found.folder))


def _of_v3(stored: Iterable[StoredTensor], adapter: TaskAdapter) -> Iterator[StoredTensor]:
    by_name = {tensor.name: tensor for tensor in stored}
    for name, tensor in by_name.items():
        module, beside, kind = name.partition(_BESIDE)
        if not beside:
            yield tensor
        elif kind == "original":
            factors = [by_name.get(f"{module}{_BESIDE}0.lora_{each}") for each in "BA"]
            if (b := factors[0]) is None or (a := factors[1]) is None or len(a.shape) != 3 or len(b.shape) != 3:
                raise CheckpointError(f"{tensor.file}: the adapters of {module} are missing; download it again")
            if b.shape[1] != tensor.shape[0]:  # the adapters of embeddings are in the other order
                a, b = b, a
            yield _added(replace(tensor, name=f"{module}.weight"), b, a, adapter.scale, adapter.place)


def _of_folder(stored: Iterable[StoredTensor], folder: Path) -> Iterator[StoredTensor]:
    config = read_section(folder / FILES[0])
    config.expect("peft_type", "LORA")
    config.refuse(
        *("alpha_pattern", "rank_pattern", "use_dora", "use_rslora", "fan_in_fan_out"), because="no release has it"
    )
    scale = config.positive_float("lora_alpha", 8.0) / config.positive("r", 8)
    if not (file := folder / FILES[1]).is_file():
        raise CheckpointError(f"{file}: does not exist; download the model again")
    factors = {_plain(tensor.name.removeprefix("base_model.model.")): tensor for tensor in stored_tensors(file)}
    if not factors:
        raise CheckpointError(f"{file}: has no tensors; download it again")
    for tensor in stored:
        module = _plain(tensor.name).removesuffix(".weight")
        names = [f"{module}.lora_{each}.weight" for each in "BA"]
        if all(name in factors for name in names):
            b, a = map(factors.pop, names)
            tensor = _added(tensor, b, a, scale)
        yield tensor
    if factors:
        raise CheckpointError(
            f"{file}: {next(iter(factors.values())).name} belongs to no weight of the model, or lacks the other "
            "factor; download the adapter of this model again"
        )


def _plain(name: str) -> str:
    return name.removeprefix("model.")


def _added(
    tensor: StoredTensor, b: StoredTensor, a: StoredTensor, scale: float, place: int | None = None
) -> StoredTensor:
    """Return a tensor with `scale` times the product of two others, of each of which `place` names one of several."""
    if scale > torch.finfo(torch.float32).max:
        raise CheckpointError(f"{b.file}: lora_alpha over the rank is {scale}, expected a number of float32")
    sizes = [each.shape if place is None else each.shape[1:] for each in (b, a)]
    is_fit = all(place is None or place < each.shape[0] for each in (b, a))
    if not is_fit or sizes[0][1:] != sizes[1][:1] or (*sizes[0][:1], *sizes[1][1:]) != tensor.shape:
        raise CheckpointError(
            f"{b.file}: {b.name} and {a.name} have shapes {list(b.shape)} and {list(a.shape)}, expected matrices whose "
            f"product is {list(tensor.shape)}; download it again"
        )
    return replace(tensor, values=partial(_sum, tensor, b, a, scale, place), release=lambda: None)


def _sum(
    tensor: StoredTensor, b: StoredTensor, a: StoredTensor, scale: float, place: int | None, parts: Parts
) -> Tensor:
    first, second = (each.values(WHOLE) if place is None else each.values(WHOLE)[place] for each in (b, a))
    weight = tensor.values(parts)
    return torch.addmm(weight.float(), first.float(), second.float(), alpha=scale).to(weight.dtype)
