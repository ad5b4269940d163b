"""Models that read sounds in the place of tokens: a text model of octavo with the encoder of transformers' class."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from octavo.models.decoder import DecoderStack
from octavo.models.vision import ImageReader


class SoundReader(ImageReader):
    """What a text model's class becomes one that reads sounds with, as the base before it."""

    IGNORED = (*DecoderStack.IGNORED, r".*\.position_ids")
    UNUSED = ()

    def encode(self, kind: str, arrays: Mapping[str, Tensor]) -> Tensor:
        """Return [vectors, hidden] of one sound, or of one window of it.

        arrays: input_features [bands, frames], silence behind the sound included, and num_frames [1], those of it;
        without these the encoder hears the silence, too.
        """
        features, num_frames = arrays["input_features"], arrays.get("num_frames")
        self.fill(features.device)
        encoder: Any = self.encoder
        if num_frames is None:
            heard: Tensor = encoder.get_audio_features(features[None]).pooler_output
            return heard
        tower = encoder.audio_tower
        num_heard, num_vectors = (int(each) for each in tower._get_feat_extract_output_lengths(num_frames))
        width = (features.shape[-1] - 2) // 2 + 1
        dtype = next(encoder.parameters()).dtype
        mask = torch.zeros(1, 1, width, width, dtype=dtype, device=features.device)
        mask[..., num_heard:] = torch.finfo(dtype).min
        states = tower(features[None].to(dtype), attention_mask=mask).last_hidden_state
        found: Tensor = encoder.multi_modal_projector(states)[0, :num_vectors]
        return found
