"""Models that read sounds in the place of tokens: a text model of octavo with the encoder of transformers' class."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from octavo.config.checkpoint import Checkpoint
from octavo.errors import CheckpointError
from octavo.models.config import DecoderConfig
from octavo.models.decoder import DecoderStack
from octavo.models.vision import ImageReader


class SoundReader(ImageReader):
    """What a text model's class becomes one that reads sounds with, as the base before it."""

    IGNORED = (*DecoderStack.IGNORED, r".*\.position_ids")
    UNUSED = ()

    @classmethod
    def read(cls, c: Checkpoint) -> DecoderConfig:
        config = super().read(c)
        width = getattr(config.library.audio_config, "output_dim", config.hidden_size)
        if width != config.hidden_size:
            raise CheckpointError(
                f"{c.where}: audio_config.output_dim is {width}, expected the text model's hidden_size, which is "
                f"{config.hidden_size}"
            )
        return config

    def encode(self, kind: str, arrays: Mapping[str, Tensor]) -> Tensor:
        """Return [vectors, hidden] of one sound, or of one window of it.

        arrays: input_features [bands, frames], silence behind the sound included, and either num_frames [1], those of
        it, or what else the encoder reads, by name.
        """
        num_frames = arrays.get("num_frames")
        self.fill(arrays["input_features"].device)
        encoder: Any = self.encoder
        dtype = next(encoder.parameters()).dtype
        features = arrays["input_features"].to(dtype)
        if num_frames is None:
            given = {name: each[None] for name, each in {**arrays, "input_features": features}.items()}
            heard: Tensor = encoder.get_audio_features(**given).pooler_output
            return heard
        tower = encoder.audio_tower
        num_heard, num_vectors = (int(each) for each in tower._get_feat_extract_output_lengths(num_frames))
        width = (features.shape[-1] - 2) // 2 + 1
        mask = torch.zeros(1, 1, width, width, dtype=dtype, device=features.device)
        mask[..., num_heard:] = torch.finfo(dtype).min
        states = tower(features[None], attention_mask=mask).last_hidden_state
        found: Tensor = encoder.multi_modal_projector(states)[0, :num_vectors]
        return found
