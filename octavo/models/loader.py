"""From a checkpoint to a model that computes: build without memory, compare with the headers, allocate, fill, bind."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import torch
from torch import Tensor, nn

from octavo.attention.backend import AttentionBackend
from octavo.config.checkpoint import Checkpoint
from octavo.config.safetensors_header import TensorInfo
from octavo.distributed.mesh import Mesh
from octavo.errors import CheckpointError
from octavo.layers.layer import Binding, TensorSlot
from octavo.models.causal_lm import CausalLM
from octavo.models.registry import resolve_model
from octavo.models.weight_files import progress_bar, read_tensors
from octavo.ops.registry import Ops

LoadFormat = Literal["auto", "dummy"]

_STORED_AS: Mapping[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
}
_FLOATS = frozenset(_STORED_AS.values())
DTYPES: Mapping[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def load_model(
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype,
    mesh: Mesh,
    backend: AttentionBackend,
    ops: Ops,
    device: torch.device | str = "cpu",
    progress: bool = False,
    load_format: LoadFormat = "auto",
    seed: int = 0,
) -> CausalLM:
    """A model ready to run, in `dtype` on `device`.

    `load_format` "dummy" draws random weights from `seed` instead of reading any. Weights are read through memory maps:
    at no time is there a second copy of more than one tensor. Raises CheckpointError for whatever does not fit.
    """
    model = make_model(checkpoint, mesh)
    slots = tensor_slots(model)
    if load_format == "auto":
        check_tensors(checkpoint, model, slots)
    allocate(model, dtype, device)
    with torch.no_grad():
        if load_format == "dummy":
            randomize(model, seed)
        else:
            _fill(checkpoint, model, progress)
    binding = Binding(ops, backend)
    for _, layer in model.layers_by_path():
        layer.bind(binding)
    return model


def make_model(checkpoint: Checkpoint, mesh: Mesh) -> CausalLM:
    """The checkpoint's model on the meta device: shapes and names, no memory."""
    model_class = resolve_model(checkpoint)
    config = model_class.Config.read(checkpoint)
    with torch.device("meta"):
        return model_class(config, mesh)  # type: ignore[arg-type]


def tensor_slots(model: CausalLM) -> dict[str, TensorSlot]:
    """Everything that the model's layers read, by name without prefix."""
    slots: dict[str, TensorSlot] = {}
    for path, layer in model.layers_by_path():
        for slot in layer.tensor_slots(path):
            assert slot.name not in slots, f"two layers read {slot.name}"
            slots[slot.name] = slot
    return slots


def check_tensors(checkpoint: Checkpoint, model: CausalLM, slots: Mapping[str, TensorSlot]) -> None:
    """Compare what the model reads with what the headers promise. Files without a header are compared when read."""
    stored = checkpoint.tensors()
    if not stored:
        return
    for name, info in stored.items():
        slot = slots.get(strip_prefix(model, name))
        if slot is None:
            continue
        _check_type(name, info.dtype, str(info.file))
        _check_shape(name, info.shape, slot, str(info.file))
    _check_names(checkpoint, model, slots, stored)


def strip_prefix(model: CausalLM, name: str) -> str:
    """A checkpoint's name for a tensor, in the model's words."""
    for prefix in model.PREFIXES:
        if name.startswith(prefix):
            return name.removeprefix(prefix)
    return name


def allocate(model: nn.Module, dtype: torch.dtype, device: torch.device | str) -> None:
    """Give every parameter memory; one that two modules share stays one."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if id(parameter) not in made:
                memory = torch.empty(parameter.shape, dtype=dtype, device=device)
                made[id(parameter)] = nn.Parameter(memory, requires_grad=False)
            module.register_parameter(name, made[id(parameter)])


def randomize(model: nn.Module, seed: int) -> None:
    """Weights like those of a fresh model: vectors of norms are one, biases zero, matrices uniform around zero."""
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)
        else:
            generator = torch.Generator(parameter.device).manual_seed(seed)
            bound = (3.0 / parameter.shape[1]) ** 0.5
            parameter.uniform_(-bound, bound, generator=generator)
        seed += 1


def _fill(checkpoint: Checkpoint, model: CausalLM, progress: bool) -> None:
    """Read every file once and hand each tensor to its slot; optional ones last."""
    slots = tensor_slots(model)
    late: list[tuple[TensorSlot, Tensor]] = []
    found: set[str] = set()
    show: AbstractContextManager[Callable[[int], None]] = nullcontext(lambda _: None)
    if progress:
        show = progress_bar(f"Loading {checkpoint.path.name}", checkpoint.weights_bytes())
    with show as advance:
        for file in checkpoint.weight_files():
            for name, stored in read_tensors(file.path):
                found.add(name)
                slot = slots.get(strip_prefix(model, name))
                if slot is not None:
                    _check_type(name, _STORED_AS.get(stored.dtype, str(stored.dtype)), str(file.path))
                    _check_shape(name, tuple(stored.shape), slot, str(file.path))
                    if slot.required:
                        slot.fill(stored)
                    else:
                        late.append((slot, stored))
                advance(stored.nbytes)
    for slot, stored in late:
        try:
            slot.fill(stored)
        except CheckpointError as error:
            raise CheckpointError(f"{checkpoint.path}: {error}") from error
    _check_names(checkpoint, model, slots, dict.fromkeys(found))


def _check_names(
    checkpoint: Checkpoint, model: CausalLM, slots: Mapping[str, TensorSlot], stored: Mapping[str, TensorInfo | None]
) -> None:
    plain = {strip_prefix(model, name): name for name in stored}
    missing = [slot.name for slot in slots.values() if slot.required and slot.name not in plain]
    architecture = checkpoint.architecture
    if missing:
        raise CheckpointError(
            f"{checkpoint.path}: {_counted(missing)} missing, which {architecture} needs by its config.json; "
            "the checkpoint is incomplete or its config.json belongs to another: download it again"
        )
    ignored = [re.compile(pattern) for pattern in model.IGNORED]
    surplus = [
        name
        for short, name in plain.items()
        if short not in slots and not any(pattern.fullmatch(short) for pattern in ignored)
    ]
    if surplus:
        raise CheckpointError(
            f"{checkpoint.path}: {_counted(surplus)} left over, which {architecture} does not read by its config.json; "
            "the weights belong to another config.json, or to a variant that is not implemented"
        )


def _check_type(name: str, stored_as: str, file: str) -> None:
    if stored_as not in _FLOATS:
        raise CheckpointError(
            f"{file}: {name} is stored as {stored_as}, expected F32, F16 or BF16; "
            "quantised weights are not implemented, use the unquantised checkpoint"
        )


def _check_shape(name: str, shape: tuple[int, ...], slot: TensorSlot, file: str) -> None:
    if shape != slot.shape:
        raise CheckpointError(
            f"{file}: {name} has shape {list(shape)}, config.json asks for {list(slot.shape)}; "
            "the two do not belong together"
        )


def _counted(names: list[str]) -> str:
    """`a.weight is` or `a.weight and 3 more are`."""
    return f"{names[0]} is" if len(names) == 1 else f"{names[0]} and {len(names) - 1} more are"
