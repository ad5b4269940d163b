"""The interface of every model for the loader and the runner."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import ClassVar, Protocol, Self

from torch import Tensor, nn

from octavo.attention.metadata import ModelInput
from octavo.config.checkpoint import Checkpoint
from octavo.distributed.mesh import Mesh
from octavo.layers.layer import Layer
from octavo.models.config import DecoderConfig
from octavo.ops.prepare_linear import TensorSpec
from octavo.ops.registry import Ops


class ConfigReader(Protocol):
    """The config class of a model, as the loader uses it."""

    @classmethod
    def read(cls, c: Checkpoint) -> Self:
        """Read the config of `c`. Raises CheckpointError or UnsupportedModel."""
        ...


class CausalLM(nn.Module):
    """A decoder with a head over the vocabulary.

    The names of its modules are the checkpoint's names, except that a checkpoint may put one of `PREFIXES` before all
    names of the decoder, and that `RENAMED` maps modules of the model itself to their names there. Tensors that match a
    pattern of `IGNORED` (a regular expression for the whole name, without prefix) are known and not needed.
    """

    Config: ClassVar[type[ConfigReader]]
    PREFIXES: ClassVar[tuple[str, ...]] = ("model.",)
    RENAMED: ClassVar[Mapping[str, str]] = {}
    IGNORED: ClassVar[tuple[str, ...]] = (r".*rotary_emb\.inv_freq",)

    config: DecoderConfig

    @abstractmethod
    def __init__(self, config: DecoderConfig, mesh: Mesh) -> None:
        super().__init__()
        self.config = config

    @abstractmethod
    def forward(self, batch: ModelInput) -> Tensor:
        """Return the last hidden state of every token, [tokens, hidden], for `compute_logits`."""

    @abstractmethod
    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Multiply rows of `forward`'s result, [rows, hidden] → float32 [rows, vocabulary]."""

    def owns(self, name: str) -> bool:
        """Return whether a tensor with this name, without prefix, belongs to this rank's part of the model.

        A tensor that does belong to it and that no layer reads is an error of the checkpoint.
        """
        return True

    def layers_by_path(self) -> Iterator[tuple[str, Layer]]:
        """Yield every layer with its path in the checkpoint."""
        for path, module in self.named_modules():
            if isinstance(module, Layer):
                part, dot, rest = path.partition(".")
                yield f"{self.RENAMED.get(part, part)}{dot}{rest}", module

    def plain_bytes(self) -> int:
        """Return the bytes of all parameters before any layer is finished."""
        return sum(parameter.nbytes for parameter in self.parameters())

    def state_specs(self, ops: Ops) -> dict[str, TensorSpec]:
        """Return the specs of the tensors of `state`, before the model is loaded."""
        layers = ((path, layer.state_specs(ops)) for path, layer in self.layers_by_path())
        return {f"{path}.{name}": spec for path, specs in layers for name, spec in specs.items()}

    def planned_bytes(self, ops: Ops) -> int:
        """Return the bytes that `state` will take, before the model is loaded."""
        return sum(spec.nbytes for spec in self.state_specs(ops).values())

    def state(self) -> dict[str, Tensor]:
        """Return all tensors that the loaded model keeps, by layer and name."""
        layers = ((path, layer.state()) for path, layer in self.layers_by_path())
        return {f"{path}.{name}": tensor for path, tensors in layers for name, tensor in tensors.items()}

    def restore(self, state: Mapping[str, Tensor], ops: Ops) -> None:
        """Set what `state` returned instead of loading; the tensors meet `state_specs`."""
        for path, layer in self.layers_by_path():
            layer.restore({name: state[f"{path}.{name}"] for name in layer.state_specs(ops)}, ops)
