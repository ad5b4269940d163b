"""A checkpoint written again with quantised weights, in the format of compressed-tensors, one tensor at a time.

Weights are rounded to the nearest code, without a calibration. Files beside the weights (tokenizer, chat
template, generation config) is copied.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from octavo.config.checkpoint import CONFIG, QUANTIZATION, Checkpoint
from octavo.config.own_adapters import own_adapter_files
from octavo.config.pooling.task_adapters import task_adapter
from octavo.config.section import read_json_object
from octavo.distributed.mesh import Mesh
from octavo.errors import CheckpointError, ConfigError
from octavo.layers.layer import WHOLE
from octavo.models.loader import LoadedModel
from octavo.models.stored_names import strip_prefix
from octavo.models.weight_files import DTYPE_NAMES, FLOATS, StoredTensor, stored_tensors
from octavo.ops.codes import SMALLEST, check_finite
from octavo.quantization.method import UNQUANTIZED, WeightMethod

_DIVISORS: Final = (7.0, 7.5, 8.0, 8.5, 9.0)
"""The scale of a group is its largest magnitude over one of these, the one with the least squared error."""
_WEIGHTS: Final = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")
_INDEX: Final = "model.safetensors.index.json"


class Saved(NamedTuple):
    """The weights that were written and kept, and the bytes."""

    quantized: int
    """Weights that are quantised."""
    kept: list[str]
    """Names of matrices that stay as they are."""
    bytes_before: int
    bytes_after: int


class _Written(NamedTuple):
    """A tensor to be written: its values are made when their turn comes."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    source: str
    """The stored tensor that it is made of."""
    part: str
    """The part of that tensor: `codes`, `scales`, `shape`, or nothing for the tensor as it is."""


def save_quantized(checkpoint: Checkpoint, folder: Path, kind: str, group: int) -> Saved:
    """Write the checkpoint to `folder` as int4, in which `group` inputs share a scale, or as int8.

    Raises ConfigError for a folder that is not empty or cannot be written, and CheckpointError for weights that cannot
    be quantised.
    """
    if checkpoint.section(QUANTIZATION) is not None:
        why = "is quantised already" if checkpoint.gguf is None else "is a GGUF file"
        raise ConfigError(f"{checkpoint.path} {why}; quantise the checkpoint that it was made from")
    if task_adapter(checkpoint, checkpoint.path) is not None:
        raise ConfigError(f"{checkpoint.path} has adapters of tasks, which are not added to quantised weights")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} is there already, expected an empty directory or none; name another one")
    files = {file.path: list(stored_tensors(file.path)) for file in checkpoint.weight_files()}
    wanted = _weights(checkpoint, group if kind == "int4" else 1, [each for own in files.values() for each in own])
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be made: {error.strerror}; name another directory") from error
    with _whole_or_nothing(folder):
        after = _write_weights(folder, [*files.values()], wanted, kind, group)
        matrices = [each for own in files.values() for each in own if len(each.shape) > 1]
        kept = [each.name.removesuffix(".weight") for each in matrices if each.name not in wanted]
        _copy_other_files(checkpoint, folder)
        config = {**read_json_object(checkpoint.path / CONFIG), QUANTIZATION: _config(kind, group, kept)}
        (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return Saved(len(wanted), kept, sum(each.nbytes for own in files.values() for each in own), after)


def _write_weights(folder: Path, files: list[list[StoredTensor]], wanted: set[str], kind: str, group: int) -> int:
    """Write a file for each of these lists of tensors, and the index of several; return their bytes."""
    places: dict[str, str] = {}
    for number, tensors in enumerate(files, 1):
        name = f"model-{number:05}-of-{len(files):05}.safetensors" if len(files) > 1 else "model.safetensors"
        places.update(dict.fromkeys(_write(folder / name, tensors, wanted, kind, group), name))
    num_bytes = sum((folder / name).stat().st_size for name in set(places.values()))
    if len(files) > 1:
        index = {"metadata": {"total_size": num_bytes}, "weight_map": places}
        (folder / _INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return num_bytes


def _copy_other_files(checkpoint: Checkpoint, folder: Path) -> None:
    """Copy the checkpoint's tokenizer, its adapters, and all else but its config and its weights."""
    for path in sorted(checkpoint.path.iterdir()):
        if path.is_file() and path.name != CONFIG and not path.name.endswith(_WEIGHTS):
            shutil.copyfile(path, folder / path.name)
    for adapter in own_adapter_files(checkpoint):
        copied = folder / adapter.relative_to(checkpoint.path)
        copied.parent.mkdir(exist_ok=True)
        shutil.copyfile(adapter, copied)


@contextmanager
def _whole_or_nothing(folder: Path) -> Iterator[None]:
    """Remove what was written to the folder when the rest cannot be. Raises ConfigError instead of OSError."""
    try:
        yield
    except BaseException as error:
        for path in folder.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        if isinstance(error, OSError):
            place = error.filename or folder
            raise ConfigError(f"{place}: {error.strerror}; what was written to {folder} is removed") from error
        raise


def _weights(checkpoint: Checkpoint, group: int, stored: list[StoredTensor]) -> set[str]:
    """Return the names of the tensors that linear layers multiply with and that can be cut into groups. Raises
    UnsupportedModel where there are none."""
    names: list[str] = []

    def note(name: str) -> WeightMethod:
        names.append(f"{name}.weight")
        return UNQUANTIZED

    model = LoadedModel.open(checkpoint, Mesh.single()).model
    for path, layer in model.layers_by_path():
        if not path.startswith(("embed_tokens", "lm_head")) and not getattr(layer, "transposed", False):
            layer.use(note, path)
    linear = set(names)
    wanted = {
        each.name
        for each in stored
        if strip_prefix(model, each.name) in linear
        and each.dtype in FLOATS
        and len(each.shape) == 2
        and each.shape[1] % group == 0
        and each.shape[1] % 8 == 0
    }
    if not wanted:
        raise CheckpointError(f"{checkpoint.path}: has no linear weights whose inputs are a multiple of {group}")
    return wanted


def _write(path: Path, tensors: list[StoredTensor], wanted: set[str], kind: str, group: int) -> list[str]:
    """Write the tensors of one file, and return their names."""
    planned = [each for tensor in tensors for each in _planned(tensor, tensor.name in wanted, kind, group)]
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for each in planned:
        start, end = end, end + prod(each.shape) * each.dtype.itemsize
        header[each.name] = {"dtype": DTYPE_NAMES[each.dtype], "shape": each.shape, "data_offsets": (start, end)}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    rounding = _four_bits if kind == "int4" else _eight_bits
    stored = {each.name: each for each in tensors}
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for values in _values(planned, stored, lambda weight: rounding(weight, group)):
            flat = values.contiguous().view(-1).view(torch.uint8)
            file.write(memoryview(flat.numpy()))  # type: ignore[arg-type]
    return [each.name for each in planned]


def _planned(tensor: StoredTensor, is_wanted: bool, kind: str, group: int) -> Iterator[_Written]:
    if not is_wanted:
        dtype = next((dtype for dtype, name in DTYPE_NAMES.items() if name == tensor.dtype), None)
        if dtype is None:
            raise CheckpointError(f"{tensor.file}: {tensor.name} is stored as {tensor.dtype}, which is not copied")
        yield _Written(tensor.name, dtype, tensor.shape, tensor.name, "")
        return
    (outputs, inputs), name = tensor.shape, tensor.name.removesuffix(".weight")
    if kind == "int4":
        yield _Written(f"{name}.weight_packed", torch.int32, (outputs, inputs // 8), tensor.name, "codes")
        yield _Written(f"{name}.weight_scale", torch.bfloat16, (outputs, inputs // group), tensor.name, "scales")
        yield _Written(f"{name}.weight_shape", torch.int64, (2,), tensor.name, "shape")
    else:
        yield _Written(f"{name}.weight", torch.int8, (outputs, inputs), tensor.name, "codes")
        yield _Written(f"{name}.weight_scale", torch.bfloat16, (outputs, 1), tensor.name, "scales")


def _values(
    planned: list[_Written], stored: dict[str, StoredTensor], rounding: Callable[[Tensor], dict[str, Tensor]]
) -> Iterator[Tensor]:
    made: tuple[str, dict[str, Tensor]] = ("", {})
    for each in planned:
        tensor = stored[each.source]
        if not each.part:
            yield tensor.values(WHOLE)
            tensor.release()
            continue
        if made[0] != each.source:
            weight = tensor.values(WHOLE).float()
            try:
                check_finite(weight)
            except CheckpointError as error:
                raise CheckpointError(f"{tensor.file}: {tensor.name}: {error}; it cannot be quantised") from error
            made = (each.source, {**rounding(weight), "shape": torch.tensor(tensor.shape)})
            tensor.release()
        yield made[1][each.part]


def _four_bits(weight: Tensor, group: int) -> dict[str, Tensor]:
    """Return the codes of a weight [outputs, inputs], eight in a word, and the scales of groups."""
    values = weight.view(len(weight), -1, group)
    largest = values.abs().amax(-1, keepdim=True)
    best = torch.full_like(largest, torch.inf)
    codes, scales = torch.zeros_like(values), torch.ones_like(largest)
    for divisor in _DIVISORS:
        scale = (largest / divisor).bfloat16().float().clamp_min(SMALLEST)
        tried = torch.round(values / scale).clamp(-8, 7)
        error = (tried * scale - values).square().sum(-1, keepdim=True)
        codes, scales = torch.where(error < best, tried, codes), torch.where(error < best, scale, scales)
        best = torch.minimum(error, best)
    unsigned = (codes.flatten(1) + 8).to(torch.uint8)
    packed = (unsigned[:, 0::2] | (unsigned[:, 1::2] << 4)).contiguous().view(torch.int32)
    return {"codes": packed, "scales": scales[..., 0].bfloat16()}


def _eight_bits(weight: Tensor, group: int) -> dict[str, Tensor]:
    scales = (weight.abs().amax(1, keepdim=True) / 127.0).bfloat16().float().clamp_min(SMALLEST)
    return {"codes": torch.round(weight / scales).clamp(-127, 127).to(torch.int8), "scales": scales.bfloat16()}


def _config(kind: str, group: int, kept: list[str]) -> dict[str, Any]:
    """Return the `quantization_config` of the written weights."""
    weights = {"type": "int", "symmetric": True, "dynamic": False, "block_structure": None, "actorder": None}
    if kind == "int4":
        own: dict[str, Any] = {"num_bits": 4, "strategy": "group", "group_size": group}
        activations = None
    else:
        own = {"num_bits": 8, "strategy": "channel", "group_size": None}
        activations = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    groups = {"targets": ["Linear"], "weights": {**weights, **own}, "input_activations": activations}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized" if kind == "int4" else "int-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": {**groups, "output_activations": None}},
        "ignore": [*dict.fromkeys((*kept, "lm_head"))],  # a tied head is not stored
        "kv_cache_scheme": None,
    }
