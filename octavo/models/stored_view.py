"""A quantised checkpoint as layers see it: codes and scales, or plain weights, that are decoded on reading."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from math import prod

import torch
from torch import Tensor

from octavo.config.checkpoint import Checkpoint
from octavo.config.pooling.task_adapters import task_adapter
from octavo.errors import CheckpointError, UnsupportedModel
from octavo.layers.layer import Parts
from octavo.models.decoder import DecoderStack
from octavo.models.stored_names import strip_prefix, tensor_slots
from octavo.models.weight_files import DTYPE_NAMES, FLOATS, StoredTensor, checkpoint_tensors
from octavo.ops.coded import CodeSpec
from octavo.quantization.method import DEFAULT_CODES, UNQUANTIZED, Coded, KeptAs, WeightMethod
from octavo.quantization.stored import ALL, OF_ACTIVATIONS, TENSORS, StoredFormat, StoredWeight

_log = logging.getLogger(__name__)


class StoredView:
    """The weights of a checkpoint in a format. They are opened when their layer asks for its method."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        model: DecoderStack,
        kept: StoredFormat,
        kept_as: KeptAs = DEFAULT_CODES,
        requantized_by: WeightMethod | None = None,
    ) -> None:
        """requantized_by: the method of all weights, which are dequantised for it. Without weight files only the config
        describes them. Raises CheckpointError for a damaged file."""
        if task_adapter(checkpoint, checkpoint.path) is not None:
            raise UnsupportedModel(f"{checkpoint.path}: adapters of tasks are not added to quantised weights")
        self._checkpoint, self._model, self._format = checkpoint, model, kept
        self._kept_as = kept_as
        self.requantized_by = requantized_by
        self._plain: dict[str, StoredTensor] = {}
        self._parts: dict[str, dict[str, StoredTensor]] = {}
        self._opened: dict[str, StoredWeight] = {}
        ignored: list[str] = []
        try:
            checkpoint.weight_files()
            stored: Iterator[StoredTensor] = checkpoint_tensors(checkpoint)
        except CheckpointError:  # reading the weights raises it
            stored = iter(())
        for tensor in stored:
            suffix = next((each for each in (*kept.suffixes, *OF_ACTIVATIONS) if tensor.name.endswith(each)), None)
            if suffix in OF_ACTIVATIONS:
                ignored.append(tensor.name)
            elif suffix is None:
                self._plain[tensor.name] = tensor
            else:
                self._parts.setdefault(tensor.name.removesuffix(suffix), {})[suffix] = tensor
        for name, parts in self._parts.items():
            if (weight := self._plain.pop(f"{name}.weight", None)) is not None:
                parts[".weight"] = weight
        for name in [
            name for name, each in self._plain.items() if each.dtype not in FLOATS and name.endswith(".weight")
        ]:
            self._parts[name.removesuffix(".weight")] = {".weight": self._plain.pop(name)}
        if ignored:
            _log.info(
                "%s: ignored %s and %d more, which scale activations of all tokens alike: octavo scales each token",
                checkpoint.path,
                ignored[0],
                len(ignored) - 1,
            )
        self._full = {strip_prefix(model, f"{name}.weight").removesuffix(".weight"): name for name in self._parts}

    def method_of(self, name: str) -> WeightMethod:
        """Return the method of a weight by its name without prefix. Raises CheckpointError."""
        opened = self._weight(name) if name in self._full else None
        if self.requantized_by is not None:
            return self.requantized_by
        if opened is not None:
            if opened.spec is None:
                return UNQUANTIZED
            return Coded(replace(opened.spec, activation_bits=self._kept_as.activation_bits), opened.order)
        if self._plain or self._parts or name.endswith("embed_tokens"):
            return UNQUANTIZED
        prefix = "" if name.startswith("lm_head") else next(iter(self._model.PREFIXES), "")
        spec = self._format.spec_of(prefix + name)
        return UNQUANTIZED if spec is None else Coded(replace(spec, activation_bits=self._kept_as.activation_bits))

    def tensors(self) -> Iterator[StoredTensor]:
        """Yield what layers read, and all tensors that no quantised weight of theirs has. Raises CheckpointError."""
        slots = tensor_slots(self._model)
        yield from self._plain.values()
        for short, name in self._full.items():
            # the stacked weights of experts have no suffix
            asked = {
                each: suffix
                for each in TENSORS
                for suffix in (f".{each}", "" if each == "weight" else None)
                if suffix is not None and f"{short}{suffix}" in slots
            }
            if not asked:
                yield from self._parts[name].values()
            for wanted, suffix in asked.items():
                yield self._tensor(short, wanted, name + suffix)

    def explain(self, dtype: torch.dtype) -> list[tuple[str, str, str]]:
        """Return (weights, the form kept in memory, the stored form) for each kind of opened weight."""
        kinds: dict[tuple[str, CodeSpec | None], int] = {}
        slots = tensor_slots(self._model)
        for short, weight in self._opened.items():
            spec = weight.spec if f"{short}.codes" in slots else None
            kinds[weight.label, spec] = kinds.get((weight.label, spec), 0) + 1
        plain = str(dtype).removeprefix("torch.")
        found = []
        for (label, spec), count in kinds.items():
            is_float = label in FLOATS
            if self.requantized_by is not None:
                how = "quantised while loading" if is_float else "dequantised and quantised again"
                found.append(
                    ("weights", self.requantized_by.name, f"{count} stored as {label} ({self._format.name}), {how}")
                )
                continue
            kept = plain if spec is None else spec.layout
            if spec is not None and spec.is_plain:
                how = "kept as they are, decoded where they are multiplied"
            elif spec is not None:
                how = f"kept as they are, times activations of {self._kept_as.activation_bits} bits"
            else:
                how = "in parts that are joined" if is_float else "dequantised"
            found.append(("weights", kept, f"{count} stored as {label} ({self._format.name}), {how}"))
        return found

    def _weight(self, short: str) -> StoredWeight:
        if short not in self._opened:
            name = self._full[short]
            parts = self._parts[name]
            if ".weight" in parts and parts[".weight"].dtype in FLOATS:
                other = next(each.name for suffix, each in parts.items() if suffix != ".weight")
                raise CheckpointError(
                    f"{self._checkpoint.path}: {parts['.weight'].name} is stored in {parts['.weight'].dtype} and "
                    f"quantised as {other} too, expected one of both"
                )
            try:
                with torch.device("cpu"):  # models are made on the meta device
                    opened = self._format.open(name, parts)
            except CheckpointError as error:
                raise CheckpointError(f"{self._checkpoint.path}: {error}") from error
            is_decoded = opened.spec is not None and opened.spec.is_plain and not self._kept_as.has_float8
            self._opened[short] = opened.plain() if is_decoded else opened
        return self._opened[short]

    def _tensor(self, short: str, wanted: str, name: str) -> StoredTensor:
        """Return the tensor `wanted` of a weight under this name."""
        weight, parts = self._weight(short), self._parts[self._full[short]]
        spec = weight.tensors()[wanted]
        dtype = DTYPE_NAMES.get(spec.dtype, str(spec.dtype))
        path = next(iter(parts.values())).file

        def values(of: Parts) -> Tensor:
            try:
                if len(of) == 1 and (not of[0] or torch.arange(spec.shape[0])[of[0][0]].numel() == spec.shape[0]):
                    return weight.rows(wanted)
                # memory of rows that nothing reads is never touched
                whole = torch.empty(spec.shape, dtype=spec.dtype)
                for part in of:
                    rows = part[0] if part else ALL
                    whole[rows] = weight.rows(wanted, rows)
            except CheckpointError as error:
                raise CheckpointError(f"{self._checkpoint.path}: {error}") from error
            return whole

        def release() -> None:
            for each in parts.values():
                each.release()

        return StoredTensor(name, dtype, spec.shape, prod(spec.shape) * spec.dtype.itemsize, path, values, release)
