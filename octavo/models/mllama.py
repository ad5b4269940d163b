"""Llama 3.2 Vision: some layers of Llama read images through caches of an encoder's output.

A token sees the last image before it, and those that stand directly before that one. A token that sees no image passes
such layers unchanged. transformers lets it attend to all images there, which the released model was not trained with.
Source: https://arxiv.org/abs/2407.21783.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn

from octavo.attention.metadata import ModelInput
from octavo.config.checkpoint import Checkpoint
from octavo.config.media.images import MOST_CROSS_IMAGES
from octavo.config.text_config import NUM_UNDRAWN
from octavo.core.model_shape import Encoded, LayerCache
from octavo.distributed.mesh import Mesh
from octavo.layers.elementwise import TanhGate
from octavo.layers.embedding import LMHead
from octavo.models.blocks import GatedLayer, GatedMLP, RotaryAttention, head_norms, stream_norm
from octavo.models.config import DecoderConfig, even_share
from octavo.models.cross_attention import EncoderAttention
from octavo.models.decoder import DecoderStack
from octavo.models.vision import ImageReader

_CROSS_LAYERS: Final = [3, 8, 13, 18, 23, 28, 33, 38]
_EPS: Final = 1e-5


@dataclass(frozen=True, kw_only=True)
class MllamaConfig(DecoderConfig):
    """cross_layers: the layers that read images. num_encoded: vectors of one image, 0 where the model reads none."""

    cross_layers: tuple[int, ...]
    num_encoded: int = 0

    def caches_of(self, layer: int, mesh: Mesh) -> Sequence[LayerCache]:
        if layer not in self.cross_layers:
            return super().caches_of(layer, mesh)
        if not self.num_encoded:
            return ()
        heads = self.heads.share(mesh)
        return (LayerCache(Encoded(heads.kv, heads.dim, self.num_encoded, MOST_CROSS_IMAGES)),)


class CrossLayer(nn.Module):
    """Attention to images and an MLP, each behind a norm and before a gate."""

    def __init__(self, c: MllamaConfig, mesh: Mesh) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = stream_norm(c), stream_norm(c)
        self.cross_attn, self.mlp = EncoderAttention(c, mesh, head_norms(c, mesh)), GatedMLP(c, mesh)
        self.cross_attn_attn_gate, self.cross_attn_mlp_gate = TanhGate(c.hidden_size), TanhGate(c.hidden_size)

    def forward(self, x: Tensor, residual: Tensor | None, batch: ModelInput) -> tuple[Tensor, Tensor | None]:
        """Return (x, residual), each [tokens, hidden]; the stream is their sum."""
        self.cross_attn.store(batch)
        if batch.seeing is None:
            return self._seen(x, residual, batch)
        if not len(batch.seeing):
            return x, residual
        residual = torch.zeros_like(x) if residual is None else residual
        with batch.products_of_tokens(batch.seeing):
            own_x, own_residual = self._seen(x[batch.seeing], residual[batch.seeing], batch)
        return x.index_copy(0, batch.seeing, own_x), residual.index_copy(0, batch.seeing, own_residual)

    def _seen(self, x: Tensor, residual: Tensor | None, batch: ModelInput) -> tuple[Tensor, Tensor]:
        x, residual = self.input_layernorm.add(x, residual)
        x = self.cross_attn_attn_gate(self.cross_attn(x, batch))
        x, residual = self.post_attention_layernorm.add(x, residual)
        return self.cross_attn_mlp_gate(self.mlp(x)), residual


class PassedLayer(nn.Module):
    """The rest of a layer that reads images, in a model that reads none."""

    def forward(self, x: Tensor, residual: Tensor | None, batch: ModelInput) -> tuple[Tensor, Tensor | None]:
        """Return x and residual."""
        return x, residual


class CrossReader(ImageReader):
    """The base class that lets the text model read images: its layers read the encoder's output through caches."""

    replaces_tokens = False

    @classmethod
    def read(cls, c: Checkpoint) -> DecoderConfig:
        config = super().read(c)
        assert isinstance(config, MllamaConfig)
        vision, where = config.library.vision_config, c.stored.section("vision_config") or c.stored
        even_share(c, "vision_config.hidden_size", vision.hidden_size, vision.attention_heads)
        read, depth = vision.intermediate_layers_indices, vision.num_hidden_layers
        if not all(0 <= each < depth for each in read):
            raise where.error("intermediate_layers_indices", f"layers of the encoder, which has {depth}")
        width = vision.hidden_size * (1 + len(read))
        if vision.vision_output_dim != width:
            raise where.error("vision_output_dim", f"hidden_size times {1 + len(read)}, which is {width}")
        num_patches = (vision.image_size // vision.patch_size) ** 2 + 1
        return dataclasses.replace(config, num_encoded=vision.max_num_tiles * num_patches)

    def __init__(self, c: MllamaConfig, mesh: Mesh) -> None:
        super().__init__(c, mesh)
        self.need_one_stage("images are read by several layers of this model, which are to be on one rank")

    def encode(self, kind: str, arrays: Mapping[str, Tensor]) -> Tensor:
        """Return [vectors, hidden] of the tiles of one image, without those that fill it up.

        arrays: pixel_values [1, 1, tiles, 3, side, side], aspect_ratio_ids [1, 1], aspect_ratio_mask [1, 1, tiles].
        """
        encoder, mask = self.encoder, arrays["aspect_ratio_mask"]
        given = {**arrays, "pixel_values": self.received(arrays["pixel_values"])}
        states = encoder.get_submodule("vision_model")(**given).last_hidden_state[0, 0, : int(mask.sum())]
        made: Tensor = encoder.get_submodule("multi_modal_projector")(states)
        return made.flatten(0, 1)


class MllamaForConditionalGeneration(DecoderStack):
    """The text model, which passes the layers that read images."""

    config: MllamaConfig

    @classmethod
    def read(cls, c: Checkpoint) -> MllamaConfig:
        layers, num_layers = c.values.get("cross_attention_layers"), c.positive("num_hidden_layers")
        layers = _CROSS_LAYERS if layers is None else layers
        are_layers = isinstance(layers, list) and all(type(each) is int and 0 <= each < num_layers for each in layers)
        if not are_layers or not 0 < len({*layers}) == len(layers) < num_layers:
            raise c.error("cross_attention_layers", f"different layers of {num_layers}, not all of them")
        return MllamaConfig.common(c, norm_eps=c.positive_float("rms_norm_eps", _EPS), cross_layers=tuple(layers))

    def __init__(self, c: MllamaConfig, mesh: Mesh) -> None:
        def layer(index: int) -> nn.Module:
            if index not in c.cross_layers:
                return GatedLayer(c, RotaryAttention(c, mesh, index), GatedMLP(c, mesh))
            return CrossLayer(c, mesh) if c.num_encoded else PassedLayer()

        super().__init__(c, mesh, layer)
        if self.lm_head is not None:
            self.lm_head = LMHead(c.hidden_size, c.vocab_size, mesh, num_unstored=NUM_UNDRAWN)

    def owns(self, name: str) -> bool:
        part, _, rest = name.partition(".")
        is_passed = part == "layers" and rest.partition(".")[0] in map(str, self.config.cross_layers)
        return super().owns(name) and not (is_passed and not self.config.num_encoded)
