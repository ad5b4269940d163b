"""The metadata of a GGUF file's architecture."""

from __future__ import annotations

from typing import Any

from octavo.config.section import LARGEST_SIZE, Section
from octavo.errors import CheckpointError
from octavo.gguf.reader import Array, GGUFFile


class Metadata(Section):
    """The metadata of one architecture, by keys without its name."""

    def __init__(self, file: GGUFFile) -> None:
        name = file.metadata.get("general.architecture")
        if not isinstance(name, str):
            raise CheckpointError(f"{file.path}: general.architecture is missing, expected the name of one")
        own = {
            key.removeprefix(f"{name}."): value for key, value in file.metadata.items() if key.startswith(f"{name}.")
        }
        super().__init__(own, str(file.path), f"{name}.")
        self.architecture, self.file = name, file
        self.types = {tensor.name: tensor for tensor in file.tensors}

    @property
    def num_layers(self) -> int:
        """How many layers there are, without those that guess further tokens. Raises CheckpointError."""
        if self.positive("block_count") > len(self.types):
            raise self.error("block_count", f"at most the {len(self.types):,} tensors of the file")
        return max(1, self.positive("block_count") - (self.optional_int("nextn_predict_layers") or 0))

    def one(self, name: str, *, may_lack: bool = False, may_vary: bool = False) -> int:
        """Return a size that is the same in all layers; may_lack: in all that have it, 1 where none has; may_vary: that
        of the first one.

        Raises CheckpointError.
        """
        value = self.values.get(name)
        if may_vary and isinstance(value, Array):
            return Section({name: next(iter(value.values()), None)}, self.where, self._prefix).positive(name)
        if may_lack and value == 0:
            return 1
        if isinstance(value, Array):
            listed = set(value.values()) - ({0} if may_lack else set())
            if may_lack and not listed:
                return 1
            if len(listed) != 1:
                raise self.error(name, "the same number for all layers")
            return Section({name: listed.pop()}, self.where, self._prefix).positive(name)
        return self.positive(name)

    def each(self, name: str) -> list[int]:
        """Return a size, at least 0, of each layer. Raises CheckpointError."""
        value = self.array(name)
        if value is None:
            return [self.count(name)] * self.num_layers
        found = value[: self.num_layers]
        if len(found) != self.num_layers or not all(type(size) is int and 0 <= size <= LARGEST_SIZE for size in found):
            raise self.error(name, f"a number for each of {self.num_layers} layers")
        return found

    def array(self, name: str) -> list[Any] | None:
        """Return the elements of an array; None where the value is none."""
        value = self.values.get(name)
        return value.values() if isinstance(value, Array) else None

    def has(self, tensor: str) -> bool:
        """Return whether the first layer has a tensor."""
        return f"blk.0.{tensor}" in self.types
