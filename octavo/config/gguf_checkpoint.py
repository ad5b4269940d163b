"""A model in a GGUF file, as a checkpoint: its config and generation defaults from metadata, and its tensors."""

from __future__ import annotations

import builtins
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from octavo.config.checkpoint import Checkpoint, WeightFile
from octavo.config.overrides import overridden
from octavo.config.safetensors_header import TensorInfo
from octavo.gguf.layout import placed_tensors, read_config
from octavo.gguf.reader import GGUFFile, read_gguf
from octavo.gguf.tokenizer import end_tokens

_SAMPLING: Final = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
"""Names behind `general.sampling.` in the metadata, and those in a generation_config.json."""


class GGUFCheckpoint(Checkpoint):
    """Reads what `Checkpoint` does, from a file, or from the first of several."""

    gguf: GGUFFile

    def __init__(self, path: Path, overrides: Mapping[builtins.str, Any] | None = None) -> None:
        """Raise as `Checkpoint.open` does, and UnsupportedModel for an architecture that octavo does not have."""
        self.gguf = read_gguf(path)
        super().__init__(self.gguf.path, overridden(read_config(self.gguf), overrides or {}))

    @cached_property
    def generation_config(self) -> Mapping[builtins.str, Any]:
        metadata = self.gguf.metadata
        values = {ours: metadata.get(f"general.sampling.{theirs}") for theirs, ours in _SAMPLING.items()}
        own = {name: value for name, value in values.items() if value is not None}
        return {**own, "eos_token_id": end_tokens(self.gguf)}

    def weight_files(self) -> tuple[WeightFile, ...]:
        return tuple(WeightFile(path) for path in self.gguf.files)

    @cached_property
    def tensors(self) -> Mapping[builtins.str, TensorInfo]:
        found: dict[builtins.str, TensorInfo] = {}
        for placed in placed_tensors(self.gguf):
            tensor, name, shape = placed.tensor, placed.name, placed.shape
            nbytes = tensor.nbytes if placed.expert is None else tensor.nbytes // tensor.shape[0]
            if name in found:  # the other half of a stacked tensor
                shape, nbytes = (shape[0], 2 * shape[1], *shape[2:]), nbytes + found[name].nbytes
            found[name] = TensorInfo(name, tensor.type, shape, nbytes, tensor.file, tensor.offset)
        return found
