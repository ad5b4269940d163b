"""An adapter of PEFT, read and checked against a model, and packed for the layers of one rank."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from octavo.core.adapter import UnfitFile, file_heading, files_of, is_gguf_adapter, open_file
from octavo.errors import CheckpointError
from octavo.layers.embedding import LMHead
from octavo.layers.heads import Heads
from octavo.layers.layer import PreparedLayer
from octavo.layers.linear import SummedLinear
from octavo.layers.routers import ExactLinear
from octavo.lora.adapter_config import CONFIG_FILE, AdapterConfig, is_end_of
from octavo.lora.experts import ExpertTarget, ExpertTensors, without_base
from octavo.lora.gguf_adapter import read_gguf_adapter
from octavo.models.decoder import DecoderStack
from octavo.models.stored_names import strip_prefix
from octavo.ops.lora import Factors, LoRAShape, PackedFactors, Run, SlotLinear

WEIGHTS_FILE: Final = "adapter_model.safetensors"

_KEY: Final = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
_FLOATS: Final = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True, slots=True)
class Target:
    """A layer whose product adapters may change."""

    path: str
    layer: PreparedLayer
    shape: LoRAShape
    sources: tuple[str, ...]
    """The names of its stored weights in the checkpoint, without prefix and `.weight`."""
    inputs: slice
    """The columns of A that this rank multiplies."""
    total_inputs: int

    @classmethod
    def of(cls, path: str, layer: PreparedLayer, num_slots: int, dtype: torch.dtype) -> Target:
        """Return the target of a layer of a model that is at least opened."""
        parts = layer.sources(path)
        names = tuple(dict.fromkeys(name for name, _ in parts))
        starts = accumulate((length for _, length in parts), initial=0)
        runs = tuple(
            Run(start, length, names.index(name)) for start, (name, length) in zip(starts, parts, strict=False)
        )
        inputs, outputs = layer.num_inputs, layer.num_outputs
        shape = LoRAShape(inputs, outputs, runs, num_slots, dtype)
        if isinstance(layer, SummedLinear):
            start, length = layer.mesh.share(layer.inputs)
            return cls(path, layer, shape, names, slice(start, start + length), layer.inputs)
        return cls(path, layer, shape, names, slice(0, inputs), inputs)

    def num_elements(self, rank: int) -> int:
        """Return the elements of A and B of an adapter that changes all of the layer."""
        return rank * (len(self.sources) * self.shape.inputs + self.shape.outputs)

    def own_outputs(self, source: int, b: Tensor) -> Tensor:
        """Cut this rank's rows of B of a stored weight, and put them in the order of the layer's outputs.

        Rows of other weights hold anything. Raises ValueError with the shape that was expected.
        """
        if isinstance(self.layer, SummedLinear):
            _require(b, (self.layer.outputs, b.shape[1]))
            return b
        narrow = self.layer.with_inputs(b.shape[1])
        slot = next(each for each in narrow.tensor_slots(self.path) if each.name == f"{self.sources[source]}.weight")
        is_turned = getattr(self.layer, "transposed", False)
        _require(b, slot.shape[::-1] if is_turned else slot.shape)
        slot.fill(b.t().contiguous() if is_turned else b)
        return narrow.get_parameter("weight").data


def held_type(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which values of `dtype` are held."""
    return torch.float32 if dtype is torch.float16 else dtype


def layers_of(model: DecoderStack, num_slots: int, dtype: torch.dtype) -> Iterator[Target]:
    """Yield the layers that adapters may change. dtype: of their values, which are held in float32 for float16."""
    held = held_type(dtype)
    for path, layer in model.layers_by_path():
        # an encoder makes the vectors of an image for all requests
        is_of_encoder = path in model.encoder_layers
        if isinstance(layer, PreparedLayer) and not isinstance(layer, (LMHead, ExactLinear)) and not is_of_encoder:
            yield Target.of(path, layer, num_slots, held)


def read_files(
    folder: Path, digest: str | None, heads: Heads, family: str
) -> tuple[AdapterConfig, Mapping[str, Tensor]]:
    """Return the config and the tensors of an adapter whose files have this digest, None for any. heads,
    family: of the model, and its class.

    It is the SHA-256, in hexadecimal digits, of `file_heading` and content of each. Each file is read once, so what is
    used is what was digested. Raises CheckpointError.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load

    found, contents = hashlib.sha256(), []
    for name, path in files_of(folder).items():
        try:
            with open(open_file(path), "rb") as file:
                # as many bytes as are asked for are taken at once
                contents.append(file.read(os.fstat(file.fileno()).st_size))
        except UnfitFile as error:
            raise CheckpointError(f"{path}: {error}") from error
        found.update(file_heading(name, len(contents[-1])))
        found.update(contents[-1])
    if digest not in (None, found.hexdigest()):
        raise CheckpointError(f"{folder}: the files have changed since the request named them; send it again")
    if is_gguf_adapter(folder):
        return read_gguf_adapter(folder, contents[0], heads, family)
    config = AdapterConfig.parse(folder / CONFIG_FILE, contents[0])
    try:
        tensors: dict[str, Tensor] = load(contents[1])
    except (SafetensorError, ValueError, KeyError) as error:
        raise CheckpointError(f"{folder / WEIGHTS_FILE}: truncated or damaged ({error}); copy it again") from error
    return config, tensors


class AdapterReader:
    """Reads adapters for a model, of which this rank has `targets`."""

    def __init__(
        self,
        model: DecoderStack,
        targets: Iterable[Target],
        experts: Sequence[ExpertTarget],
        dtype: torch.dtype,
        max_rank: int,
    ) -> None:
        """dtype: the type that values are rounded to."""
        self._model, self._experts = model, ExpertTensors(experts)
        self._targets = {source: each for each in targets for source in each.sources}
        self._dtype, self._max_rank = dtype, max_rank

    def read(self, folder: Path, digest: str | None, slots: Mapping[str, SlotLinear]) -> dict[str, PackedFactors]:
        """Return what an adapter adds, by paths of layers. digest: as of `read_files`. slots: by paths of layers.
        Raises CheckpointError."""
        config, tensors = read_files(folder, digest, self._model.config.heads, type(self._model).__name__)
        file = folder if is_gguf_adapter(folder) else folder / WEIGHTS_FILE
        if config.parameters and not self._experts.is_enabled:
            raise CheckpointError(
                f"{config.path}: target_parameters names {config.parameters[0]}; adapters of experts need "
                "enable_lora_experts, and a model with experts"
            )
        pairs = _pairs(file, tensors)
        of_experts = {module: pairs.pop(module) for module in list(pairs) if config.names_part_of(without_base(module))}
        modules = self._modules(file, config, pairs)
        self._check_targets(file, config, pairs)
        found: dict[str, list[Factors | None]] = {}
        for module, (source, a, b) in modules.items():
            target = self._targets[source]
            factors = found.setdefault(target.path, [None] * len(target.sources))
            factors[target.sources.index(source)] = self._factors(file, config, module, target, source, (a, b))
        packed = {path: slots[path].pack(factors) for path, factors in found.items()}
        return packed | self._packed_experts(file, config, of_experts, slots)

    def _packed_experts(
        self, file: Path, config: AdapterConfig, pairs: Mapping[str, dict[str, Tensor]], slots: Mapping[str, SlotLinear]
    ) -> dict[str, PackedFactors]:
        """Return what the adapter adds to experts, by their keys. Raises CheckpointError."""
        found: dict[str, ExpertTarget] = {}
        for module, pair in pairs.items():
            if self._experts.path_of(module) is not None:
                found[module] = self._experts.target_of(file, module, pair["A"], pair["B"], config)
            elif self._model.owns(strip_prefix(self._model, without_base(module))):
                raise CheckpointError(f"{file}: {without_base(module)} has no stacked weights in this model")
        self._experts.check(file, config, found.values())
        for each in config.parameters:
            if not any(is_end_of(each.rpartition(".")[0], without_base(module)) for module in pairs):
                raise CheckpointError(f"{config.path}: target_parameters names {each}, of which {file} has no tensor")
        packed: dict[str, PackedFactors] = {}
        for module, target in found.items():
            rank, pair = config.rank_of(target.parameter), pairs[module]
            names = self._checked(file, module, rank, (pair["A"], pair["B"]))
            scale = config.scale_of(target.parameter)
            made = target.factors(pair["A"], pair["B"], rank, scale, self._dtype)
            for key, factors in zip(target.keys, made, strict=True):
                packed[key] = slots[key].pack([factors])
            self._check_finite(names, (pair["A"], pair["B"]))
        return packed

    def _modules(
        self, file: Path, config: AdapterConfig, pairs: Mapping[str, dict[str, Tensor]]
    ) -> dict[str, tuple[str, Tensor, Tensor]]:
        """Return (name of the stored weight, A, B) for each module of this rank. Raises CheckpointError."""
        modules: dict[str, tuple[str, Tensor, Tensor]] = {}
        for module, pair in pairs.items():
            if config.targets is not None and not any(is_end_of(each, module) for each in config.targets):
                raise CheckpointError(f"{file}: holds {module}, which target_modules of {config.path} does not name")
            source = strip_prefix(self._model, f"{module}.weight").removesuffix(".weight")
            if source in {known for known, _, _ in modules.values()}:
                raise CheckpointError(f"{file}: holds {source} twice, by different names")
            if source in self._targets:
                modules[module] = (source, pair["A"], pair["B"])
            elif self._model.owns(source):
                raise CheckpointError(
                    f"{file}: {module} is no linear layer of this model that adapters may change "
                    f"({', '.join(self._kinds())}); the adapter belongs to another model, or changes more"
                )
        return modules

    def _check_targets(self, file: Path, config: AdapterConfig, modules: Iterable[str]) -> None:
        for each in config.targets or ():
            if not any(is_end_of(each, module) for module in modules):
                raise CheckpointError(f"{config.path}: target_modules names {each}, of which {file} has no tensor")

    def _kinds(self) -> list[str]:
        return sorted({source.rpartition(".")[2] for source in self._targets})

    def _factors(
        self,
        file: Path,
        config: AdapterConfig,
        module: str,
        target: Target,
        source: str,
        pair: tuple[Tensor, Tensor],
    ) -> Factors:
        """Check one pair of matrices and cut this rank's share. Raises CheckpointError."""
        rank = config.rank_of(module)
        names = self._checked(file, module, rank, pair)
        a, b = pair
        try:
            _require(a, (rank, target.total_inputs))
        except ValueError as error:
            raise CheckpointError(f"{names[0]} {error}") from error
        try:
            _require(b, (b.shape[0] if b.dim() else 0, rank))
            own = target.own_outputs(target.sources.index(source), b.float())
        except ValueError as error:
            raise CheckpointError(f"{names[1]} {error}") from error
        made = [each.to(self._dtype).to(target.shape.dtype) for each in (a[:, target.inputs], own)]
        self._check_finite(names, pair)
        return Factors(made[0].contiguous(), made[1], config.scale_of(module))

    def _checked(self, file: Path, module: str, rank: int, pair: tuple[Tensor, Tensor]) -> list[str]:
        """Return the names of A and B of a module for error messages. Raises CheckpointError for a rank or a type."""
        names = [f"{file}: base_model.model.{module}.lora_{each}.weight" for each in "AB"]
        if rank > self._max_rank:
            raise CheckpointError(f"{names[0]} has rank {rank}, max_lora_rank is {self._max_rank}; raise it")
        for name, tensor in zip(names, pair, strict=True):
            if tensor.dtype not in _FLOATS:
                raise CheckpointError(f"{name} is stored as {tensor.dtype}, expected a plain type of floating point")
        return names

    def _check_finite(self, names: Iterable[str], pair: tuple[Tensor, Tensor]) -> None:
        for name, tensor in zip(names, pair, strict=True):
            if not bool(tensor.to(self._dtype).isfinite().all()):
                raise CheckpointError(f"{name} holds NaN, an infinity or what {self._dtype} has no room for")


def _pairs(file: Path, tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Return A and B of each module. Raises CheckpointError for other tensors, and where one is missing."""
    pairs: dict[str, dict[str, Tensor]] = {}
    for name, tensor in sorted(tensors.items()):  # the same error each time, and on every rank
        key = _KEY.fullmatch(name)
        if key is None:
            raise CheckpointError(f"{file}: {name} is no A or B of a linear layer, as is required")
        pairs.setdefault(key[1], {})[key[2]] = tensor
    if not pairs:
        raise CheckpointError(f"{file}: holds no tensors")
    for module, pair in pairs.items():
        if len(pair) != 2:
            missing = "B" if "A" in pair else "A"
            raise CheckpointError(f"{file}: base_model.model.{module}.lora_{missing}.weight is missing")
    return pairs


def _require(tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != tuple(shape):
        raise ValueError(f"has shape {list(tensor.shape)}, the model and adapter_config.json require {list(shape)}")
