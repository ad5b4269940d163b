"""What is stated of a family of models that read images, videos or sounds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from octavo.config.media.encoder_sizes import checked_audio
from octavo.config.media.listeners import Listener
from octavo.config.section import Section

Values = Mapping[str, Any]


class Side(NamedTuple):
    """Images of one size, which an encoder reads."""

    default: int | None = None
    """The side in pixels where config.json leaves it out; None for no side: the size is not checked then."""
    setting: str = "size"
    """The setting of the image processor that has the side, too."""
    of: str | None = None
    """The only `model_type` of encoders that read one size; None for all."""


class MediaFamily(NamedTuple):
    """A row: every field has a default, and most rows state a few. Functions raise CheckpointError for a damaged file
    and UnsupportedModel for values that are not implemented."""

    architectures: tuple[str, ...] = ()
    """The architectures in config.json in the layout of transformers' class."""
    released: tuple[str, ...] = ()
    """Other names of them, in releases whose code stands beside their weights; of one without any, its `model_type`."""
    layout: Callable[[Values, str], Values] = lambda config, where: config
    """Returns the config of such a release in the layout of transformers' class, and any other config as it is.
    (config, file for messages)"""
    text: Mapping[str, str] = {}
    """Families of text models by their `model_type` without `_text`, where that is not the family's name."""

    images: str = ""
    """How an image is written into a prompt: a name in `IMAGE_WRITERS`; empty for a family that reads no images."""
    videos: str = ""
    """How a video is written into a prompt: a name in `VIDEO_WRITERS`; empty for a family that reads no videos."""
    sounds: str = ""
    """How a sound is written into a prompt: a name in `SOUND_WRITERS`; empty for a family that reads no sounds so."""
    speech: str = ""
    """How the model is asked to write a sound down: a name in `STYLES`; empty for one that is not."""
    listener: Listener | None = None
    """The preprocessing of a family that reads whole sounds through caches; None for any other."""
    has_whole_prompts: bool = False
    """All tokens of a prompt attend to each other."""
    is_dual: bool = False
    """A prompt is a text or an image, and becomes a vector in one space."""

    settings: Callable[[Section], Values] | None = None
    """Translates the settings of the image processor in a file."""
    computed: Callable[[Section, Callable[[str], Section]], Values | None] | None = None
    """Makes the settings from config.json and files read by name instead; returns None where no image is read."""
    unstated: Callable[[Section], Values] | None = None
    """Makes the settings from config.json where no file has any."""
    processors: Mapping[str, str] = {}
    """transformers' names of image processors by those of releases."""
    fit: Callable[[Section, Section], Values] = lambda settings, config: {}
    """Returns what settings follow from config.json, and checks those that are stated. (settings, config)"""
    side: Side | None = None
    """The side of images, where the encoder reads images of one size."""

    sound_part: Callable[[Section], Section | None] = checked_audio
    """Returns the part of config.json with the encoder of sounds."""
    needs_settings: bool = False
    """Sounds are read only where a file beside the weights has settings for them."""

    reader: str = ""
    """The file in octavo/models and the class that encodes, with a dot between them; empty for `vision.ImageReader`
    or `hearing.SoundReader`, which run the encoder of transformers' class."""
    library: str = ""
    """The name of transformers' class, where it is not the architecture."""
    library_config: str = ""
    """The name of its config, where it is not called as the class."""
    is_apart: bool = False
    """The encoder is made without the config of the text model."""
    width: str = "vision_config.out_hidden_size"
    """The key of config.json with the width of the encoder's vectors."""
    names: str = ""
    """How tensors are stored, where not as in transformers' class: a name in `STORED` of models/vision_names.py."""

    @property
    def is_around_text(self) -> bool:
        """Whether the architecture stands for a text model with encoders, which may be left out."""
        return bool(self.architectures) and self.listener is None
