"""A model in a GGUF file, as a checkpoint: its config and generation defaults from metadata, and its tensors."""

from __future__ import annotations

import builtins
import logging
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from octavo.config.checkpoint import Checkpoint
from octavo.config.safetensors_header import TensorInfo, WeightFile
from octavo.errors import CheckpointError, UnsupportedModel
from octavo.gguf.layout import Placed, placed_tensors, read_config
from octavo.gguf.mmproj import Mmproj
from octavo.gguf.reader import GGUFFile, is_mmproj, read_gguf
from octavo.gguf.tokenizer import end_tokens

_log = logging.getLogger(__name__)

_SAMPLING: Final = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
"""Names in a generation_config.json, by those after `general.sampling.` in the metadata."""


def fitting_mmproj(model: Path) -> Path | None:
    """Return the file beside a GGUF file that has its vision encoder, of several of them the first by its name. None
    where there is none: for one that is not read, or belongs to another model, the log has the reason."""
    text, reasons = read_gguf(model), []
    for path in sorted(filter(is_mmproj, model.parent.glob("*.gguf")), key=lambda each: each.name.lower()):
        try:
            Mmproj(read_gguf(path), text)
        except (CheckpointError, UnsupportedModel) as error:
            reasons.append(str(error))
        else:
            return path
    if reasons:
        _log.warning("%s is run as a model for text alone: %s", model, reasons[0])
    return None


class GGUFCheckpoint(Checkpoint):
    """Reads what `Checkpoint` does, from a file, or from the first of several, and a vision encoder from another."""

    gguf: GGUFFile

    def __init__(
        self, path: Path, overrides: Mapping[builtins.str, Any] | None = None, mmproj: Path | None = None
    ) -> None:
        """Raise as `Checkpoint.open` does, and UnsupportedModel for an architecture that octavo does not have."""
        self.gguf = read_gguf(path)
        config = read_config(self.gguf)
        self._encoder = None if mmproj is None else Mmproj(read_gguf(mmproj), self.gguf)
        if self._encoder is not None:
            self.mmproj, self.image_processor = mmproj, self._encoder.settings
            config = self._encoder.config(config)
        super().__init__(self.gguf.path, config, overrides)

    @cached_property
    def generation_config(self) -> Mapping[builtins.str, Any]:
        metadata = self.gguf.metadata
        values = {ours: metadata.get(f"general.sampling.{theirs}") for theirs, ours in _SAMPLING.items()}
        own = {name: value for name, value in values.items() if value is not None}
        return {**own, "eos_token_id": end_tokens(self.gguf)}

    def weight_files(self) -> tuple[WeightFile, ...]:
        encoder = () if self._encoder is None else self._encoder.file.files
        return tuple(WeightFile(path) for path in (*self.gguf.files, *encoder))

    def placed(self) -> Iterator[Placed]:
        """Yield the tensors of all files. Raises CheckpointError for one that is not known."""
        yield from placed_tensors(self.gguf)
        if self._encoder is not None:
            yield from self._encoder.placed()

    @cached_property
    def tensors(self) -> Mapping[builtins.str, TensorInfo]:
        found: dict[builtins.str, TensorInfo] = {}
        for placed in self.placed():
            tensor, name, shape, nbytes = placed.tensor, placed.name, placed.shape, placed.nbytes
            if name in found:  # the other half of a stacked tensor
                shape, nbytes = (shape[0], 2 * shape[1], *shape[2:]), nbytes + found[name].nbytes
            found[name] = TensorInfo(name, tensor.type, shape, nbytes, tensor.file, tensor.offset)
        return found
