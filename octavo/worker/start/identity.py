"""What must be the same on every rank of a model, so that they compute parts of one result. Imports no torch."""

from __future__ import annotations

import hashlib
from importlib.metadata import version
from typing import TYPE_CHECKING, Final, Self

import msgspec

from octavo.config.checkpoint import Checkpoint
from octavo.platform import native_build

if TYPE_CHECKING:
    from octavo.config.schema import EngineConfig

_SAMPLES: Final = 64
"""Places of each weight file that the digest of a model reads, evenly spread: reading all would take minutes."""
_SAMPLE_BYTES: Final = 4096


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """Versions and digests, in text for messages. `files` is a digest of the files at the model's path."""

    octavo: str
    torch: str
    native_module: str
    kernels: str
    files: str

    @classmethod
    def of(cls, config: EngineConfig) -> Self:
        """Return the identity of this process and of the model at its path. Raises CheckpointError."""
        from octavo import __version__

        module, levels = native_build()
        wanted = config.device.instruction_set
        return cls(
            octavo=__version__,
            torch=version("torch"),
            native_module=module,
            kernels=levels[0] if wanted == "auto" and levels else wanted,
            files=model_digest(Checkpoint.of(config.model), with_weights=config.model.load_format != "dummy"),
        )

    def difference(self, other: Self) -> str | None:
        """Return what differs, first of all in the versions, and the remedy; None when nothing does."""
        for name, remedy in _REMEDIES.items():
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                return f"{name.replace('_', ' ')} is {theirs} here and {mine} on rank 0; {remedy}"
        return None


_REMEDIES: Final = {
    "octavo": "install the same version on all machines",
    "torch": "install the same version on all machines",
    "native_module": "install the same build of octavo on all machines",
    "kernels": "set instruction_set to one that all machines have",
    "files": "give every machine the same files of the model, and the same hf_overrides",
}


def model_digest(checkpoint: Checkpoint, *, with_weights: bool = True) -> str:
    """Return 16 hexadecimal digits of SHA-256 over config.json with its overrides, and weight sizes and samples."""
    digest = hashlib.sha256(msgspec.json.encode(checkpoint.values, order="sorted"))
    for file in checkpoint.weight_files() if with_weights else ():
        size = file.path.stat().st_size
        digest.update(f"{file.path.name} {size}".encode())
        with file.path.open("rb") as stream:
            for sample in range(_SAMPLES):
                stream.seek(size * sample // _SAMPLES)
                digest.update(stream.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:16]
