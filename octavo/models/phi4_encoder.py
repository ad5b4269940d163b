"""The encoders of Phi-4-multimodal. Images: SigLIP by tiles, where four neighbouring vectors become one. Sounds: a
conformer, whose vectors are projected in another way where the prompt has images.

The rows of all tiles together, without what fills them up, come first, each with a vector for its end; then one vector,
and the rows of the whole image. Prompts with images or sounds are computed with adapters of the checkpoint.
Source: https://arxiv.org/abs/2503.01743.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octavo.config.checkpoint import Checkpoint
from octavo.config.media.sounds import sound_section
from octavo.distributed.mesh import Mesh
from octavo.models.config import DecoderConfig
from octavo.models.encoder import layers_up_to
from octavo.models.hearing import SoundReader
from octavo.models.vision import ImageReader

_TOWER = r"embed_tokens_extend\.image_embed\.img_processor"


class _Encoder(nn.Module):
    def __init__(self, library: Any) -> None:
        super().__init__()
        from transformers.models.phi4_multimodal import modeling_phi4_multimodal as phi4

        embed: Any = phi4.Phi4MultimodalImageEmbedding(library)
        tower = embed.img_processor
        del tower.head, tower.post_layernorm
        count = layers_up_to(library.vision_config, library.vision_config.feature_layer)
        tower.encoder.layers = tower.encoder.layers[:count]
        self.embed_tokens_extend = nn.ModuleDict({"image_embed": embed})
        if library.reads_sounds:
            self.embed_tokens_extend["audio_embed"] = phi4.Phi4MultimodalAudioEmbedding(library)

    def forward(self, pixels: Tensor, mask: Tensor, size: Tensor) -> Tensor:
        """pixels [tiles, 3, side, side], the whole image first; mask [tiles, rows, columns], 1 for patches of the
        image; size (height, width) of the grid of tiles → [vectors, hidden]."""
        embed: Any = self.embed_tokens_extend["image_embed"]
        seen = self._seen(embed.img_processor, pixels, mask.bool())
        side = seen.shape[1]
        rows, columns = (int(each) // pixels.shape[-1] for each in size)
        width = seen.shape[-1]
        grid = seen[1:].view(rows, columns, side, side, width).transpose(1, 2)
        # patches of the image are those on the upper left
        kept = mask[1:, ::2, ::2].view(rows, columns, side, side).transpose(1, 2).reshape(rows * side, columns * side)
        grid = grid.reshape(rows * side, columns * side, width)[: int(kept[:, 0].sum()), : int(kept[0].sum())]
        line_end = embed.sub_img_feature_extensor[0]
        lines = [torch.cat([each, line_end.expand(len(each), 1, width)], 1).view(-1, width) for each in (grid, seen[0])]
        vectors = torch.cat([lines[0], embed.global_img_feature_extensor[0], lines[1]])
        return embed.img_projection_down(F.gelu(embed.img_projection_up(vectors)))

    def hear(self, features: Tensor, *, has_images: bool) -> Tensor:
        """features [1, frames, bands] → [vectors, hidden]."""
        embed: Any = self.embed_tokens_extend["audio_embed"]
        heard = embed.encoder(features, None)
        if has_images:
            made = embed.down_proj_for_vision_speech(F.gelu(embed.up_proj_for_vision_speech(heard)))
        else:
            made = embed.down_proj_for_speech(F.gelu(embed.up_proj_for_speech(heard)))
        return made[0]

    def _seen(self, tower: Any, pixels: Tensor, mask: Tensor) -> Tensor:
        """Return [tiles, rows, columns, width] of two patches by two."""
        x = tower.embeddings(pixel_values=pixels, patch_attention_mask=mask)
        # a tile without patches of the image is left out behind the encoder
        read = (mask | ~mask.any((1, 2), keepdim=True)).flatten(1)[:, None, None]
        for layer in tower.encoder.layers:
            x = layer(x, read.expand(-1, 1, x.shape[1], -1))
        x = x.view(*mask.shape, -1).permute(0, 3, 1, 2)
        return F.avg_pool2d(x, 2).permute(0, 2, 3, 1)


class Phi4Reader(SoundReader):
    """The base class that lets the text model read images and sounds, or images alone."""

    ENCODER = _Encoder
    encoder: _Encoder

    @classmethod
    def read(cls, c: Checkpoint) -> DecoderConfig:
        config = super().read(c)
        vision = c.stored.part("vision_config")
        depth = config.library.vision_config.num_hidden_layers
        if not 0 <= layers_up_to(config.library.vision_config, config.library.vision_config.feature_layer) <= depth:
            raise vision.error("feature_layer", f"a layer of the encoder, which has {depth}")
        config.library.reads_sounds = sound_section(c) is not None
        return config

    def __init__(self, c: DecoderConfig, mesh: Mesh, *arguments: Any, **named: Any) -> None:
        super().__init__(c, mesh, *arguments, **named)
        tower = c.library.vision_config
        unread = range(layers_up_to(tower, tower.feature_layer), tower.num_hidden_layers)
        self.IGNORED = (  # type: ignore[misc]
            *ImageReader.IGNORED,
            r"layers\..*\.lora_[AB]\.(?:speech|vision)\.weight",
            *(() if c.library.reads_sounds else (r"embed_tokens_extend\.audio_embed\..*",)),
            rf"{_TOWER}\.(?:head|post_layernorm)\..*",
            rf"{_TOWER}\.encoder\.layers\.(?:{'|'.join(map(str, unread))})\..*",
        )

    def encode(self, kind: str, arrays: Mapping[str, Tensor]) -> Tensor:
        """Return [vectors, hidden] of an image or a sound.

        arrays: image_pixel_values [1, tiles, 3, side, side], image_attention_mask [1, tiles, rows, columns] of patches
        and image_sizes [1, (height, width)]; or input_features [frames, bands] and has_images [1].
        """
        if kind == "audio":
            features = self.received(arrays["input_features"])
            return self.encoder.hear(features[None], has_images=bool(arrays["has_images"]))
        pixels, mask, sizes = (
            arrays[name][0] for name in ("image_pixel_values", "image_attention_mask", "image_sizes")
        )
        return self.encoder(self.received(pixels), mask, sizes)
