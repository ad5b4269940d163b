"""Phi-3-vision's encoder of images: CLIP by tiles; two by two neighbouring vectors are joined.

The rows of all tiles together come first, each with a vector for its end; then one vector, and the rows of the whole
image. Source: https://arxiv.org/abs/2404.14219.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octavo.config.checkpoint import Checkpoint
from octavo.distributed.mesh import Mesh
from octavo.models.config import DecoderConfig
from octavo.models.encoder import layers_up_to
from octavo.models.sparse import has_tensor
from octavo.models.vision import ImageReader

_WTE = "vision_embed_tokens.wte.weight"


class _Embedding(nn.Module):
    def __init__(self, library: Any) -> None:
        super().__init__()
        import transformers

        vision = library.vision_config
        made: Any = transformers.CLIPVisionModel
        tower = made._from_config(vision)
        tower.encoder.layers = tower.encoder.layers[: layers_up_to(vision, library.vision_feature_layer)]
        del tower.post_layernorm
        self.img_processor: Any = tower
        width = 4 * vision.hidden_size
        self.glb_GN = nn.Parameter(torch.empty(1, 1, width))
        self.sub_GN = nn.Parameter(torch.empty(1, 1, 1, width))
        hidden = library.text_config.hidden_size
        self.img_projection = nn.ModuleDict({"0": nn.Linear(width, hidden), "2": nn.Linear(hidden, hidden)})


class _Encoder(nn.Module):
    def __init__(self, library: Any) -> None:
        super().__init__()
        self.vision_embed_tokens = _Embedding(library)

    def forward(self, pixels: Tensor, rows: int, columns: int) -> Tensor:
        """pixels [1 + rows · columns, 3, side, side], the whole image first → [vectors, hidden]."""
        embed = self.vision_embed_tokens
        tower = embed.img_processor
        x = tower.pre_layrnorm(tower.embeddings(pixels))
        for layer in tower.encoder.layers:
            x = layer(x, None)
        x = x[:, 1:]
        side = round(x.shape[1] ** 0.5) // 2
        joined = x.view(len(x), side, 2, side, 2, -1).transpose(2, 3).reshape(len(x), side, side, -1)
        grid = joined[1:].view(rows, columns, side, side, -1).transpose(1, 2).reshape(rows * side, columns * side, -1)
        end = embed.sub_GN[0]
        lines = [torch.cat([each, end.expand(len(each), 1, -1)], 1).flatten(0, 1) for each in (grid, joined[0])]
        first, second = (embed.img_projection[name] for name in ("0", "2"))
        return second(F.gelu(first(torch.cat([lines[0], embed.glb_GN[0], lines[1]]))))


class Phi3VReader(ImageReader):
    """The base class that lets the text model read images."""

    ENCODER = _Encoder
    encoder: _Encoder

    @classmethod
    def read(cls, c: Checkpoint) -> DecoderConfig:
        config = super().read(c)
        config.library.has_own_embeddings = has_tensor(c, "embed_tokens.weight")
        return config

    def __init__(self, c: DecoderConfig, mesh: Mesh, *arguments: Any, **named: Any) -> None:
        super().__init__(c, mesh, *arguments, **named)
        tower = r"vision_embed_tokens\.img_processor"
        vision = c.library.vision_config
        unread = range(layers_up_to(vision, c.library.vision_feature_layer), vision.num_hidden_layers)
        self.ignore(
            r"vision_embed_tokens\.wte\.weight",  # the embeddings once more
            rf"{tower}\.(?:post_layernorm|encoder\.layers\.(?:{'|'.join(map(str, unread))}))\..*",
        )

    def own_name(self, name: str) -> str:
        name = super().own_name(name).replace(".img_processor.vision_model.", ".img_processor.")
        if name.endswith(_WTE) and not self.config.library.has_own_embeddings:
            return name.replace(_WTE, "embed_tokens.weight")
        return name

    def encode(self, kind: str, arrays: Mapping[str, Tensor]) -> Tensor:
        """Return [vectors, hidden] of an image.

        arrays: pixel_values [1, 1 + tiles, 3, side, side] and image_sizes [1, (height, width)] of the grid of tiles.
        """
        pixels = self.received(arrays["pixel_values"][0])
        rows, columns = (side // pixels.shape[-1] for side in arrays["image_sizes"][0].tolist())
        return self.encoder(pixels, rows, columns)
