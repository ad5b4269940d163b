"""The encoders of MiniCPM-V 2.6 to 4.5 and MiniCPM-o. Images: SigLIP by slices, each of which becomes as many vectors
as there are queries. Sounds (MiniCPM-o): Whisper's encoder, in which each second sees the seconds before it;
neighbouring vectors are averaged.

Source: https://arxiv.org/abs/2408.01800.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octavo.config.checkpoint import Checkpoint
from octavo.config.media.sounds import sound_section
from octavo.distributed.mesh import Mesh
from octavo.models.config import DecoderConfig
from octavo.models.fallback.swap import stack
from octavo.models.hearing import SoundReader, whisper_vectors

_HEAD = 128
_EPS = 1e-6


class _Attention(nn.Module):
    """Attention of queries [queries, width] to keys and values [patches, width]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(width, width) for _ in range(4))

    def forward(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        parts = ((self.q_proj, queries), (self.k_proj, keys), (self.v_proj, values))
        heads = [project(x).view(len(x), -1, _HEAD).transpose(0, 1) for project, x in parts]
        return self.out_proj(F.scaled_dot_product_attention(*heads).transpose(0, 1).flatten(1))


class _Resampler(nn.Module):
    def __init__(self, library: Any) -> None:
        super().__init__()
        width = library.text_config.hidden_size
        self.query = nn.Parameter(torch.empty(library.query_num, width))
        self.kv_proj = nn.Linear(library.vision_config.hidden_size, width, bias=False)
        self.ln_q, self.ln_kv, self.ln_post = (nn.LayerNorm(width, eps=_EPS) for _ in range(3))
        self.attn = _Attention(width)
        self.proj = nn.Parameter(torch.empty(width, width))

    def forward(self, x: Tensor, rows: int, columns: int) -> Tensor:
        """x [patches, width of the encoder] → [queries, hidden]."""
        x = self.ln_kv(self.kv_proj(x))
        places = _places(rows, columns, x.shape[1]).to(x)
        return self.ln_post(self.attn(self.ln_q(self.query), x + places, x)) @ self.proj


def _places(rows: int, columns: int, width: int) -> Tensor:
    """Return [rows · columns, width]: sines and cosines of the column, and behind them those of the row."""
    count = width // 4
    rates = 10_000.0 ** -(torch.arange(count, dtype=torch.float32) / count)
    row, column = torch.meshgrid(torch.arange(float(rows)), torch.arange(float(columns)), indexing="ij")
    angles = [each.reshape(-1, 1) * rates for each in (column, row)]
    return torch.cat([part for each in angles for part in (each.sin(), each.cos())], 1)


class _Projector(nn.Module):
    def __init__(self, width: int, hidden_size: int) -> None:
        super().__init__()
        self.linear1, self.linear2 = nn.Linear(width, hidden_size), nn.Linear(hidden_size, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """x [vectors, width] → [vectors, hidden]."""
        return self.linear2(F.relu(self.linear1(x)))


class _Encoder(nn.Module):
    def __init__(self, library: Any) -> None:
        super().__init__()
        from transformers.models.idefics2 import modeling_idefics2 as idefics2

        made: Any = idefics2.Idefics2VisionTransformer
        self.vpm = made._from_config(library.vision_config)
        if library.drop_vision_last_layer:
            self.vpm.encoder.layers = self.vpm.encoder.layers[:-1]
        self.resampler = _Resampler(library)
        self._sounds = library.sounds
        if library.sounds is not None:
            from transformers.models.whisper import modeling_whisper as whisper

            encoder: Any = whisper.WhisperEncoder
            self.apm = encoder._from_config(library.sounds, attn_implementation="sdpa")
            self.audio_projection_layer = _Projector(library.sounds.d_model, library.text_config.hidden_size)

    def hear(self, features: Tensor) -> Tensor:
        """features [bands, frames] → [vectors, hidden]."""
        seconds, pooled = self._sounds.audio_chunk_length, self._sounds.audio_pool_step

        def later_chunks(places: Tensor) -> Tensor:
            chunks = places // int(seconds * 50)
            return chunks[:, None] < chunks

        x = self.audio_projection_layer(whisper_vectors(self.apm, features, later_chunks if seconds > 0 else None))
        return x[: len(x) // pooled * pooled].view(-1, pooled, x.shape[1]).mean(1)

    def forward(self, pixels: Tensor) -> Tensor:
        """pixels [3, height, width] of a slice → [queries, hidden]."""
        embed = self.vpm.embeddings
        x = embed.patch_embedding(pixels[None])
        rows, columns = x.shape[-2:]
        side = embed.num_patches_per_side
        # places of patches among those that the table has, as the release rounds them
        bounds = torch.arange(1 / side, 1.0, 1 / side)
        places = [torch.arange(0, 1 - 1e-6, 1 / count)[:count] for count in (rows, columns)]
        row, column = (torch.bucketize(each, bounds, right=True).to(x.device) for each in places)
        x = x.flatten(2).transpose(1, 2) + embed.position_embedding((row[:, None] * side + column).flatten())
        for layer in self.vpm.encoder.layers:
            x = layer(x, None)
        return self.resampler(self.vpm.post_layernorm(x)[0], rows, columns)


class MiniCPMReader(SoundReader):
    """The base class that lets the text model read images and sounds, or images alone."""

    ENCODER = _Encoder
    encoder: _Encoder
    IGNORED = (
        *SoundReader.IGNORED,
        r"tts\..*",
        r"resampler\.(?:pos_embed|temporal_pos_embed)",
    )

    @classmethod
    def read(cls, c: Checkpoint) -> DecoderConfig:
        config = super().read(c)
        if config.hidden_size % _HEAD:
            raise c.error("hidden_size", f"a multiple of {_HEAD}, as many as a head of the resampler has")
        config.library.sounds, sounds = None, sound_section(c)
        if sounds is not None:
            made: Any = import_module("transformers").WhisperConfig
            config.library.sounds = made.from_dict(dict(sounds.values))
        config.library.drop_vision_last_layer = c.stored.bool("drop_vision_last_layer", False)
        return config

    def __init__(self, c: DecoderConfig, mesh: Mesh, *arguments: Any, **named: Any) -> None:
        super().__init__(c, mesh, *arguments, **named)
        if self.is_first:
            stack(self.encoder.resampler, ("q_proj", "k_proj", "v_proj"), "in_proj")
        if c.library.sounds is None:
            self.ignore(r"(?:apm|audio_projection_layer)\..*")
        depth = c.library.vision_config.num_hidden_layers
        if c.library.drop_vision_last_layer:
            self.ignore(rf"vpm\.encoder\.layers\.{depth - 1}\..*")

    def own_name(self, name: str) -> str:
        return super().own_name(name).replace(".attn.in_proj_", ".attn.in_proj.")

    def encode(self, kind: str, arrays: Mapping[str, Tensor]) -> Tensor:
        """Return [vectors, hidden] of an image, or of a window of a sound.

        arrays: input_features [bands, frames]; or pixel_values [slices, 3, height, width], each on the upper left, and
        target_sizes [slices, (rows, columns)] of its patches.
        """
        if kind == "audio":
            return self.encoder.hear(self.received(arrays["input_features"]))
        pixels, size = self.received(arrays["pixel_values"]), self.config.library.vision_config.patch_size
        sides = [(rows * size, columns * size) for rows, columns in arrays["target_sizes"].tolist()]
        slices = [each[:, :height, :width] for each, (height, width) in zip(pixels, sides, strict=True)]
        return torch.cat([self.encoder(each) for each in slices])
