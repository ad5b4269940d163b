"""Solar Pro: Llama in which streams before some layers join those before later ones.

Source: https://huggingface.co/upstage/solar-pro-preview-instruct.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from octavo.attention.metadata import ModelInput
from octavo.config.checkpoint import Checkpoint
from octavo.distributed.mesh import Mesh
from octavo.errors import ConfigError
from octavo.layers.elementwise import Elementwise, addition
from octavo.models.blocks import GatedDecoder
from octavo.models.config import DecoderConfig

_LISTS = (("bskcn_1", "bskcn_3"), ("bskcn_2", "bskcn_4"))
"""Keys of the layers before which a stream is kept, with those of the layers before which it joins."""


@dataclass(frozen=True, kw_only=True)
class SkipConfig(DecoderConfig):
    """Adds the earlier streams that join later ones."""

    joins: Mapping[int, tuple[int, ...]]
    """For each layer the earlier layers whose streams join its own, in this order."""
    kept_share: float
    """The share of the earlier stream in the sum."""


class SolarForCausalLM(GatedDecoder):
    """The whole model; in `bskcn_tv` its config has the share of an earlier stream in training, and afterwards."""

    @classmethod
    def read(cls, c: Checkpoint) -> SkipConfig:
        layers, expected = c.positive("num_hidden_layers"), "two numbers from 0 to 1, in training and afterwards"
        shares = c.listed("bskcn_tv", 2, lambda each: type(each) in (int, float) and 0 <= each <= 1, expected)
        joins: dict[int, tuple[int, ...]] = {}
        for start, end in _LISTS:
            kept = _layers(c, start, layers)
            for layer in _layers(c, end, layers):
                before = [each for each in kept if each <= layer]
                if not before:
                    raise c.error(end, f"layers that are none before the first of {start}")
                joins[layer] = (*joins.get(layer, ()), max(before))
        bias = c.bool("attention_bias", c.bool("bias", False))
        own: dict[str, Any] = {"logit_multiplier": c.positive_float("logit_scale", 1.0)}
        own |= {"bias": bias, "mlp_bias": c.bool("mlp_bias", False)}
        return SkipConfig.common(c, joins=joins, kept_share=float(shares[1]), **own)

    def __init__(self, c: SkipConfig, mesh: Mesh) -> None:
        super().__init__(c, mesh)
        self.need_one_stage("streams of this model join later ones, which stages do not pass on")
        self._joins = c.joins
        self.kept, self.own = Elementwise("scaled", c.kept_share), Elementwise("scaled", 1.0 - c.kept_share)
        self.add_streams = addition()

    def note_layers(self, layers: Iterable[int]) -> None:
        raise ConfigError("speculative_config: heads that read streams are not implemented for Solar Pro; use ngram")

    def note_stream(self) -> None:
        self.note_layers(())

    def forward(self, batch: ModelInput) -> Tensor:
        """Return the normalised last hidden state of every token, [tokens, hidden]."""
        x, residual = self.begin(batch)
        kept: dict[int, Tensor] = {}
        wanted = {start for starts in self._joins.values() for start in starts}
        for index, layer in self.layers.items():
            number = int(index)
            if number in wanted:
                kept[number] = self._stream(x, residual)
            for start in self._joins.get(number, ()):
                x, residual = self.add_streams(self.kept(kept[start]), self.own(self._stream(x, residual))), None
            x, residual = layer(x, residual, batch)
        return self.normalize(x, residual)


def _layers(c: Checkpoint, name: str, count: int) -> list[int]:
    found = c.values.get(name)
    if not isinstance(found, list) or not all(type(each) is int and 0 <= each < count for each in found):
        raise c.error(name, f"a list of layers, from 0 to {count - 1}")
    return found
