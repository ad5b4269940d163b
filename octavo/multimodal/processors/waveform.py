"""Sounds for encoders that read samples."""

from __future__ import annotations

from typing import Final

import msgspec

from octavo.config.checkpoint import Checkpoint
from octavo.config.media.listeners import RATE, Listener
from octavo.config.media.media_families import media_family
from octavo.config.section import read_section
from octavo.core.media import MediaInput
from octavo.multimodal.processors.log_mel import PREPROCESSOR_CONFIG, LogMel
from octavo.multimodal.sound import Samples, sound_input, too_short

_SHORTEST_S: Final = 0.1


class Waveform(msgspec.Struct, frozen=True):
    """What the encoder of an architecture reads: the samples as they are. start: the first token of the text."""

    architecture: str
    start: int
    sampling_rate: int = RATE

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> Waveform:
        """Read the settings of a checkpoint. Raises CheckpointError or UnsupportedModel for others than these."""
        settings = read_section(checkpoint.path / PREPROCESSOR_CONFIG, may_lack=True)
        settings.expect("sampling_rate", RATE, default=RATE)
        if settings.values.get("do_normalize"):  # which may be null
            settings.expect("do_normalize", False)
        start = checkpoint.int("decoder_start_token_id", 1)
        if not 0 <= start < checkpoint.positive("vocab_size"):
            raise checkpoint.error("decoder_start_token_id", "a token of the vocabulary")
        return cls(checkpoint.architecture, start)

    @property
    def _listener(self) -> Listener:
        found = media_family(self.architecture).listener
        assert found is not None, "encoders of other families read spectrograms"
        return found

    @property
    def seconds(self) -> float:
        """Longest sound in seconds."""
        return self._listener.seconds

    @property
    def piece_s(self) -> float:
        """Longest piece of a sound in seconds: all of it, because a sound takes no room in the context."""
        return self.seconds

    def features(self, samples: Samples) -> Samples:
        """Return what the encoder reads of a sound. Raises InvalidRequest for one of which it makes nothing."""
        if len(samples) < _SHORTEST_S * self.sampling_rate:
            raise too_short(samples, self.sampling_rate, _SHORTEST_S)
        return samples

    def window(self, features: Samples) -> MediaInput:
        """Return the input of the encoder for a sound."""
        return sound_input({"input_values": features}, self._listener.num_vectors(len(features)))


def listener_of(checkpoint: Checkpoint) -> LogMel | Waveform:
    """Return the preprocessing of a model that reads sounds through caches. Raises CheckpointError."""
    if media_family(checkpoint.architecture).listener is not None:
        return Waveform.of(checkpoint)
    return LogMel.of(checkpoint.path, checkpoint.values)
