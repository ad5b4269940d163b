"""Models that read sounds in the place of tokens: a text model of octavo with the encoder of transformers' class."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.config.checkpoint import Checkpoint
from octavo.distributed.mesh import Mesh
from octavo.errors import CheckpointError
from octavo.models.config import DecoderConfig
from octavo.models.decoder import DecoderStack
from octavo.models.encoder import keep_in_one_thread
from octavo.models.vision import ImageReader

_OLD_NAMES: Final = {f"audio_tower.proj{place}": f"multi_modal_projector.linear_{place}" for place in (1, 2)}
"""Maps names of modules in the layout of Qwen3-ASR's release to their names in transformers."""


def whisper_vectors(tower: Any, features: Tensor, unseen: Callable[[Tensor], Tensor] | None = None) -> Tensor:
    """Return the vectors [vectors, width] of transformers' Whisper encoder, for any number of frames.

    features: [bands, frames]. unseen: returns which vectors a vector does not attend to, [vectors, vectors], by their
    places [vectors]; None where each attends to all.
    """
    x = F.gelu(tower.conv2(F.gelu(tower.conv1(features[None])))).transpose(1, 2)
    places, mask = torch.arange(x.shape[1], device=x.device), None
    x = x + tower.embed_positions(places)
    if unseen is not None:
        hidden = unseen(places)
        mask = torch.zeros_like(hidden, dtype=x.dtype).masked_fill(hidden, torch.finfo(x.dtype).min)[None, None]
    for layer in tower.layers:
        x = layer(x, mask)
    return tower.layer_norm(x)[0]


class SoundReader(ImageReader):
    """Placed as the base before a text model's class, it lets that class read sounds."""

    IGNORED = (*DecoderStack.IGNORED, r".*\.(?:position_ids|num_batches_tracked)")
    UNUSED = ()

    @classmethod
    def read(cls, c: Checkpoint) -> DecoderConfig:
        config = super().read(c)
        width = getattr(getattr(config.library, "audio_config", None), "output_dim", config.hidden_size)
        if width != config.hidden_size:
            raise CheckpointError(
                f"{c.where}: audio_config.output_dim is {width}, expected the text model's hidden_size, which is "
                f"{config.hidden_size}"
            )
        return config

    def __init__(self, c: DecoderConfig, mesh: Mesh, *arguments: Any, **named: Any) -> None:
        super().__init__(c, mesh, *arguments, **named)
        if self.is_first:
            keep_in_one_thread(self.encoder)

    def own_name(self, name: str) -> str:
        name = super().own_name(name.removeprefix("thinker."))
        module, dot, kind = name.rpartition(".")
        return f"{_OLD_NAMES.get(module, module)}{dot}{kind}"

    def encode(self, kind: str, arrays: Mapping[str, Tensor]) -> Tensor:
        """Return [vectors, hidden] of one sound, or of one window of it.

        arrays: input_features [bands, frames], silence behind the sound included, and either num_frames [1], those of
        it, or what else the encoder reads, by name.
        """
        num_frames = arrays.get("num_frames")
        encoder: Any = self.encoder
        features = self.received(arrays["input_features"])
        if num_frames is None:
            given: dict[str, Any] = {name: each[None] for name, each in {**arrays, "input_features": features}.items()}
            if "window" in given:  # which is counted from the tokens of a whole prompt there
                encoder._build_audio_timestamps = partial(_times, encoder.config, int(given.pop("window")))
                given["input_ids"] = None
            found = encoder.get_audio_features(**given)
            heard: Tensor = found.pooler_output
            heard = heard.reshape(-1, heard.shape[-1])
            mask = getattr(found, "attention_mask", None)  # some of Gemma 4's vectors belong to no frame
            return heard if mask is None else heard[mask.reshape(-1).bool()]
        tower = encoder.audio_tower
        num_heard, num_vectors = (int(each) for each in tower._get_feat_extract_output_lengths(num_frames))
        width = (features.shape[-1] - 2) // 2 + 1
        mask = torch.zeros(1, 1, width, width, dtype=features.dtype, device=features.device)
        mask[..., num_heard:] = torch.finfo(features.dtype).min
        states = tower(features[None], attention_mask=mask).last_hidden_state
        return encoder.multi_modal_projector(states)[0, :num_vectors]


def _times(config: Any, window: int, token_ids: None, lengths: Tensor, size: int) -> Tensor:
    """Return the seconds at which the vectors of a window begin in its sound, [1, size]."""
    step = config.audio_frame_step * 4
    offsets = torch.arange(size, device=lengths.device, dtype=torch.float32) * step
    return torch.tensor([[window]], device=lengths.device) * size * step + offsets


class SamplesReader(SoundReader):
    """Placed as the base before a text model's class, it lets that class read the samples of sounds (VibeVoice ASR).
    The noise that transformers adds to the vectors of one of the encoders is left out, so that results are the same
    each time."""

    def encode(self, kind: str, arrays: Mapping[str, Tensor]) -> Tensor:
        """Return [vectors, hidden] of one sound. arrays: input_features [1, samples]."""
        encoder: Any = self.encoder
        samples = self.received(arrays["input_features"])[None]
        heard: Tensor = encoder.get_audio_features(samples, sample=False).pooler_output[0]
        return heard


class MossReader(SoundReader):
    """Placed as the base before a text model's class, it lets that class read sounds (MOSS-Transcribe-Diarize)."""

    def encode(self, kind: str, arrays: Mapping[str, Tensor]) -> Tensor:
        """Return [vectors, hidden] of a window. arrays: input_features [bands, frames] and their mask [frames]."""
        features, mask = self.received(arrays["input_features"])[None], arrays["input_features_mask"][None]
        encoder: Any = self.encoder
        heard: Tensor = encoder.get_audio_features(features, mask, padding_mask=mask).pooler_output
        return heard


class BothReader(SoundReader):
    """Placed as the base before a text model's class, it lets that class read images and sounds, or images alone."""

    def encode(self, kind: str, arrays: Mapping[str, Tensor]) -> Tensor:
        return SoundReader.encode(self, kind, arrays) if kind == "audio" else ImageReader.encode(self, kind, arrays)


class OmniReader(SoundReader):
    """Placed as the base before a text model's class, it lets that class read images, videos and sounds: the thinker of
    a model that also speaks, whose other parts are left out."""

    IGNORED = (*SoundReader.IGNORED, r"(?:talker|token2wav|code2wav)\..*")

    def own_name(self, name: str) -> str:
        return ImageReader.own_name(self, name.removeprefix("thinker."))

    def encode(self, kind: str, arrays: Mapping[str, Tensor]) -> Tensor:
        """Return [vectors, hidden], or with DeepStack [vectors, levels · hidden], of which a sound fills the first.

        arrays: of a sound input_features [bands, frames], one chunk or several whole ones, and num_frames [1], those
        of it; else as the processor in transformers names them.
        """
        if kind != "audio":
            return ImageReader.encode(self, kind, arrays)
        features, num_frames = arrays["input_features"], arrays["num_frames"]
        self.fill(features.device)
        tower: Any = self.encoder.audio_tower
        bands, length = features.shape
        size = min(length, 2 * tower.n_window)
        chunks = features.view(bands, -1, size).transpose(0, 1)  # [chunks, bands, frames]
        lengths = (num_frames - size * torch.arange(len(chunks), device=features.device)).clamp(max=size)
        found: Tensor = tower(None, feature_lens=num_frames, padded_feature=chunks, chunk_lengths=lengths).pooler_output
        return torch.nn.functional.pad(found, (0, self.encoding_size - found.shape[-1]))
