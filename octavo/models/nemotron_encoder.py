"""The encoders of Nemotron 3 Omni, Nemotron Nano 2 VL and Llama Nemotron Nano VL. Images: RADIO, whose neighbouring
vectors are joined and projected. Sounds: Parakeet.

Source: NVIDIA's releases.
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
from octavo.models.fallback.swap import stack
from octavo.models.hearing import SoundReader
from octavo.models.sparse import has_tensor


class _Encoder(nn.Module):
    def __init__(self, library: Any) -> None:
        super().__init__()
        from transformers.models.nemotron_h_omni import modeling_nemotron_h_omni as nemotron
        from transformers.models.parakeet import modeling_parakeet as parakeet
        from transformers.models.radio import modeling_radio as radio

        vision, width = library.vision_config, library.vision_hidden_size
        made: Any = radio.RadioModel
        tower = made._from_config(vision)
        tower.make_preprocessor_external()
        del tower.summary_idxs, tower.embeddings.video_patch_projection
        for layer in () if library.has_layer_scales else tower.encoder.layer:
            layer.layer_scale1 = layer.layer_scale2 = nn.Identity()
        self.vision_model: Any = tower
        self.vision_final_layernorm = (
            nn.LayerNorm(width, eps=vision.layer_norm_eps) if library.has_last_norm else nn.Identity()
        )
        self._merged, self._num_prefix = round(1 / library.downsample_ratio), vision.num_summary_tokens
        sizes = width * self._merged**2, library.projector_hidden_size, library.text_config.hidden_size
        projector: Any = nemotron.NemotronH_Omni_Reasoning_V3MultiModalProjector
        self.multi_modal_projector = projector(*sizes)
        if (sounds := library.audio_config) is not None:
            made = parakeet.ParakeetEncoder
            self.audio_tower: Any = made._from_config(sounds, attn_implementation="sdpa")
            sizes = sounds.hidden_size, sounds.projection_hidden_size, library.text_config.hidden_size
            self.embed_audio = projector(*sizes, bias=sounds.projection_bias)

    def forward(self, pixels: Tensor, grid: Tensor) -> Tensor:
        """pixels [patches, 3 · patch · patch], grid [1, (rows, columns)] → [vectors, hidden]."""
        x = self.vision_model.embeddings(pixels, grid)
        for layer in self.vision_model.encoder.layer:
            x = layer(x)
        x = self.vision_final_layernorm(x[0, self._num_prefix :])
        (rows, columns), size = grid[0].tolist(), self._merged
        joined = x.view(rows // size, size, columns // size, size, -1).transpose(1, 2)
        return self.multi_modal_projector(joined.reshape(rows * columns // size**2, -1))

    def hear(self, features: Tensor) -> Tensor:
        """features [1, frames, bands] → [vectors, hidden]."""
        return self.embed_audio(self.audio_tower(features).last_hidden_state[0])


class NemotronReader(SoundReader):
    """The base class that lets the text model read images and sounds, or images alone."""

    ENCODER = _Encoder
    encoder: _Encoder
    IGNORED = (
        *SoundReader.IGNORED,
        r"(?:sound_encoder\.encoder|audio_tower)\.feature_extractor\..*",
        r"vision_model\..*(?:input_conditioner\..*|summary_idxs|video_embedder\..*|video_patch_projection\..*)",
    )

    @classmethod
    def read(cls, c: Checkpoint) -> DecoderConfig:
        vision = c.stored.part("vision_config")
        vision.expect("use_swiglu_ffn", False, default=False)
        config = super().read(c)
        library: Any = config.library
        if library.vision_hidden_size != library.vision_config.hidden_size:
            width = library.vision_config.hidden_size
            key = "vit_hidden_size" if "vit_hidden_size" in c.stored.values else "vision_hidden_size"
            raise c.stored.error(key, f"hidden_size of vision_config, which is {width}")
        library.has_last_norm = (c.optional_int("num_nextn_predict_layers") or 0) > 0
        # releases lack them, as they are 1
        library.has_layer_scales = has_tensor(c, ".layer_scale1.lambda1")
        return config

    def __init__(self, c: DecoderConfig, mesh: Mesh, *arguments: Any, **named: Any) -> None:
        super().__init__(c, mesh, *arguments, **named)
        if self.is_first:
            stack(self.encoder.vision_model, ("q_proj", "k_proj", "v_proj"), "qkv")
        sounds = c.library.audio_config
        if sounds is None:
            self.ignore(r"(?:sound_(?:encoder|projection)|audio_tower|embed_audio)\..*")
        elif not sounds.convolution_bias:  # which releases may have nevertheless
            self.ignore(r".*\.conv\.(?:pointwise|depthwise)_conv[12]?\.bias")

    def encode(self, kind: str, arrays: Mapping[str, Tensor]) -> Tensor:
        """Return [vectors, hidden] of an image, or of a piece of a sound.

        arrays: pixel_values [patches, 3 · patch · patch] and image_grid_hw [1, (rows, columns)] of patches; or
        input_features [frames, bands].
        """
        if kind == "audio":
            return self.encoder.hear(self.received(arrays["input_features"])[None])
        pixels, grid = self.received(arrays["pixel_values"]), arrays["image_grid_hw"]
        return self.encoder(pixels, grid)


class SquaresReader(NemotronReader):
    """The reader of Nemotron Nano 2 VL, whose images become tiles."""

    def encode(self, kind: str, arrays: Mapping[str, Tensor]) -> Tensor:
        """Return [vectors, hidden] of an image. arrays: as of `NemotronReader`, of tiles below each other."""
        pixels, grid = self.received(arrays["pixel_values"]), arrays["image_grid_hw"]
        side = int(grid[0, 1])
        square = grid.new_full((1, 2), side)
        return torch.cat([self.encoder(tile, square) for tile in torch.split(pixels, side * side)])


class _Projector(nn.Module):
    def __init__(self, width: int, inner: int, hidden: int) -> None:
        super().__init__()
        self.layer_norm = nn.LayerNorm(width)
        self.linear_1, self.linear_2 = nn.Linear(width, inner), nn.Linear(inner, hidden)

    def forward(self, joined: Tensor) -> Tensor:
        """joined [vectors, width] → [vectors, hidden]."""
        return self.linear_2(F.gelu(self.linear_1(self.layer_norm(joined))))


class _TilesEncoder(_Encoder):
    def __init__(self, library: Any) -> None:
        super().__init__(library)
        width = library.vision_hidden_size * self._merged**2
        self.multi_modal_projector = _Projector(width, library.projector_hidden_size, library.text_config.hidden_size)


class TilesReader(NemotronReader):
    """The reader of Llama Nemotron Nano VL, whose images become tiles."""

    ENCODER = _TilesEncoder

    def encode(self, kind: str, arrays: Mapping[str, Tensor]) -> Tensor:
        """Return [vectors, hidden] of an image. arrays: pixel_values [tiles, 3, side, side]."""
        pixels, size = self.received(arrays["pixel_values"]), self.config.library.vision_config.patch_size
        side = pixels.shape[-1] // size
        cut = pixels.view(len(pixels), 3, side, size, side, size).permute(0, 2, 4, 1, 3, 5)
        grid = torch.full((1, 2), side, device=pixels.device)
        return torch.cat([self.encoder(tile.reshape(side * side, -1), grid) for tile in cut])
