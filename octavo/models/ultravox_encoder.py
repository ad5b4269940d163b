"""Ultravox's encoder of sounds: Whisper's, where several neighbouring vectors become one.

Source: Fixie's releases.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from octavo.config.checkpoint import Checkpoint
from octavo.config.media.sounds import sound_section
from octavo.models.fallback.library import refusal
from octavo.models.hearing import SoundReader, whisper_vectors

_EPS = 1e-6


class _Projector(nn.Module):
    def __init__(self, library: Any) -> None:
        super().__init__()
        from transformers.models.llama.modeling_llama import LlamaRMSNorm

        width, middle, hidden_size = library.d_model * library.stacked, library.projected, library.text_width
        self._stacked, make = library.stacked, LlamaRMSNorm
        self.ln_pre = make(width, _EPS)
        self.linear_1 = nn.Linear(width, middle, bias=False)
        self.linear_2 = nn.Linear(middle // 2, hidden_size, bias=False)
        is_between = library.is_norm_between
        self.ln_mid = make(middle // 2, _EPS) if is_between else nn.Identity()
        self.ln_post = nn.Identity() if is_between else make(hidden_size, _EPS)

    def forward(self, x: Tensor) -> Tensor:
        """x [vectors of the encoder, width] → [vectors, hidden]; zeros fill the last one up."""
        x, gate = self.linear_1(self.ln_pre(_joined(x, self._stacked))).chunk(2, -1)
        return self.ln_post(self.linear_2(self.ln_mid(F.silu(gate) * x)))


class _LayersProjector(nn.Module):
    """A projector of Whisper's encoder layers over the joined vectors."""

    def __init__(self, library: Any) -> None:
        super().__init__()
        from transformers.models.llama.modeling_llama import LlamaRMSNorm
        from transformers.models.whisper.modeling_whisper import WhisperEncoderLayer

        width, make, layer = library.d_model, LlamaRMSNorm, WhisperEncoderLayer
        self._stacked = library.stacked
        self.ln_pre = make(width * library.stacked, _EPS)
        self.linear_in = nn.Linear(width * library.stacked, width)
        self.embed_positions = nn.Embedding(library.max_source_positions, width)
        self.layers = nn.ModuleList(layer(library) for _ in range(library.projector_layers))
        self.ln_post = make(width, _EPS)
        self.linear_out = nn.Linear(width, library.text_width)

    def forward(self, x: Tensor) -> Tensor:
        """x [vectors of the encoder, width] → [vectors, hidden]; zeros fill the last one up."""
        x = self.linear_in(self.ln_pre(_joined(x, self._stacked)))
        x = (x + self.embed_positions.weight[: len(x)])[None]
        for layer in self.layers:
            x = layer(x, None)
        return self.linear_out(self.ln_post(x[0]))


def _joined(x: Tensor, stacked: int) -> Tensor:
    """Return [vectors / stacked, stacked · width] of x [vectors, width]; zeros fill the last one up."""
    return F.pad(x, (0, 0, 0, -len(x) % stacked)).view(-1, stacked * x.shape[1])


class _Encoder(nn.Module):
    def __init__(self, library: Any) -> None:
        super().__init__()
        from transformers.models.whisper import modeling_whisper as whisper

        encoder: Any = whisper.WhisperEncoder
        self.audio_tower = encoder._from_config(library, attn_implementation="sdpa")
        self.multi_modal_projector = (_LayersProjector if library.projector_layers else _Projector)(library)

    def forward(self, features: Tensor) -> Tensor:
        """features [bands, frames] → [vectors, hidden]."""
        return self.multi_modal_projector(whisper_vectors(self.audio_tower, features))


class UltravoxReader(SoundReader):
    """The base class that lets the text model read sounds.

    Each window of a sound is encoded without silence behind it, as releases encode sounds of one window.
    """

    ENCODER = _Encoder
    encoder: _Encoder
    IGNORED = (*SoundReader.IGNORED, r"(?:model\.)?decoder\..*|proj_out\.weight")

    @classmethod
    def read_library(cls, c: Checkpoint) -> Any:
        section, config = sound_section(c), c.stored
        assert section is not None, "the reader is made for a checkpoint with an encoder"
        make: Any = import_module("transformers").WhisperConfig.from_dict
        values = dict(section.values)
        try:
            library = make(values)
        except Exception as error:  # whatever it raises is about the values
            raise refusal(c, error, values, make) from error
        library.stacked, library.projected = section.positive("stack_factor"), config.positive("hidden_size", 4096)
        library.projector_layers = config.count("num_projector_layers", 0)
        library.is_norm_between, library.text_width = config.bool("projector_ln_mid", False), c.positive("hidden_size")
        return library

    def own_name(self, name: str) -> str:
        for before in ("audio_tower.model.encoder.", "model.encoder."):
            if name.startswith(before):
                return f"audio_tower.{name.removeprefix(before)}"
        return super().own_name(name)

    def encode(self, kind: str, arrays: Mapping[str, Tensor]) -> Tensor:
        """Return [vectors, hidden] of a window of a sound. arrays: input_features [bands, frames] of the window."""
        return self.encoder(self.received(arrays["input_features"]))
