"""The encoders of Gemma 3n: MobileNetV5 for images, transformers' Universal Speech Model for sounds.

Both encoders have an embedder, with a small table for the tokens that belong to their kind. Of these the token behind
an image or a sound stands in prompts, and the last one fills a sound up: a sound always has as many vectors as half a
minute. Sources: https://ai.google.dev/gemma/docs/gemma-3n; https://arxiv.org/abs/2303.01037.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from octavo.config.checkpoint import Checkpoint
from octavo.models.config import DecoderConfig
from octavo.models.hearing import SoundReader
from octavo.models.mobilenet import OUTPUTS, MobileNet


class _Encoders(nn.Module):
    def __init__(self, library: Any) -> None:
        super().__init__()
        from transformers.models.gemma3n import modeling_gemma3n as gemma3n

        vision, given = library.vision_config, library.vision_config.model_args or {}
        self.vision_tower: Any = nn.Module()
        side = round(library.vision_soft_tokens_per_image**0.5)
        self.vision_tower.timm_model = MobileNet(given.get("channel_multiplier", 1.0), side)
        audio: Any = gemma3n.Gemma3nAudioEncoder
        self.audio_tower: Any = audio._from_config(library.audio_config)
        self.embed_vision: Any = gemma3n.Gemma3nMultimodalEmbedder(vision, library.text_config)
        self.embed_audio: Any = gemma3n.Gemma3nMultimodalEmbedder(library.audio_config, library.text_config)
        self._vision_scale = vision.hidden_size**0.5
        self._num_heard = library.audio_soft_tokens_per_image
        self._image_end, self._sound_end = library.eoi_token_id, library.eoa_token_id
        self._filler = library.text_config.vocab_size - 1

    def see(self, pixels: Tensor) -> Tensor:
        """pixels [1, 3, height, width] → [vectors, hidden], that of the token behind the image last."""
        seen = self.embed_vision(inputs_embeds=self.vision_tower.timm_model(pixels) * self._vision_scale)
        return torch.cat([seen, self.embed_vision(torch.tensor([self._image_end], device=pixels.device))])

    def hear(self, features: Tensor, mask: Tensor) -> Tensor:
        """features [1, frames, bands], mask [1, frames], True where a frame is none → [vectors, hidden], that of the
        token behind the sound last."""
        tokens = torch.tensor([self._filler, self._sound_end], device=features.device)
        filler, end = torch.split(self.embed_audio(tokens), 1)
        found = self.audio_tower(features, mask)
        heard = self.embed_audio(inputs_embeds=found.last_hidden_state)[0]
        heard = torch.where(found.audio_mel_mask[0, :, None], filler, heard)
        return torch.cat([heard, filler.expand(self._num_heard - len(heard), -1), end])


class Gemma3nReader(SoundReader):
    """The base class that lets the text model read images and sounds."""

    ENCODER = _Encoders
    encoder: _Encoders

    @classmethod
    def read(cls, c: Checkpoint) -> DecoderConfig:
        where = c.stored.part("vision_config")
        where.expect_all(architecture="mobilenetv5_300m_enc", hidden_size=OUTPUTS)
        config = super().read(c)
        library: Any = config.library
        tokens = {"eoi_token_id": library.vision_config, "eoa_token_id": library.audio_config}
        for name, part in tokens.items():
            token = getattr(library, name)
            if not part.vocab_offset <= token < part.vocab_offset + part.vocab_size:
                raise c.stored.error(name, f"a token of the encoder's table, from {part.vocab_offset:,} on")
        audio, num_tokens = library.audio_config, library.text_config.vocab_size
        if not audio.vocab_offset < num_tokens <= audio.vocab_offset + audio.vocab_size:
            raise c.stored.error("audio_config", "a table with the last token of the vocabulary")
        return config

    def encode(self, kind: str, arrays: Mapping[str, Tensor]) -> Tensor:
        """Return [vectors, hidden] of an image or a sound, and of the token behind it.

        arrays: pixel_values [1, 3, height, width]; or input_features [frames, bands] and input_features_mask [frames],
        1 where a frame is one of the sound.
        """
        given = next(arrays[name] for name in ("pixel_values", "input_features") if name in arrays)
        self.fill(given.device)
        given = given.to(next(self.encoder.audio_tower.parameters()).dtype)
        if kind == "image":
            return self.encoder.see(given)
        return self.encoder.hear(given[None], arrays["input_features_mask"][None] == 0)
