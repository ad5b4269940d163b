"""What is stated of a family of models that read images, videos or sounds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from octavo.config.encoder_sizes import checked_audio
from octavo.config.listeners import Listener
from octavo.config.section import Section

Values = Mapping[str, Any]


class Side(NamedTuple):
    """Images of one size, which an encoder reads. default: the side where config.json leaves it out; None for none, so
    that the size is not checked. setting: of the processor that has the side, too. of: the only `model_type` of
    encoders for which it is so."""

    default: int | None = None
    setting: str = "size"
    of: str | None = None


class MediaFamily(NamedTuple):
    """architectures: as config.json has them, when it is in the layout of today. released: other names of them, in
    releases whose code stands beside their weights. layout: returns the config of such a release, which it recognises,
    in today's layout (config, file for messages); raises CheckpointError or UnsupportedModel. text: families of text
    models by their `model_type` without `_text`, where that is not the family's name.

    How prompts are written, all by name: images, videos, sounds: one of `IMAGE_WRITERS` in
    octavo/multimodal/image_writers.py, and so on; empty for a family that reads none. speech: one of `STYLES` in
    octavo/server/speech_prompts.py, by which it writes sounds down. listener: of a family that reads whole sounds
    through caches. has_whole_prompts: all tokens of a prompt attend to each other. is_dual: a prompt is a text or
    an image, and becomes a vector in one space.

    Settings of image processors, of which errors are CheckpointError or UnsupportedModel: settings: translates those of
    a file. computed: makes them of config.json and of files by name; None for images that are not read. unstated:
    makes them of config.json where no file has any. processors: transformers' names of processors by those of
    releases. fit: returns what settings follow from config.json, and checks them. side: of images.

    sound_part: returns the part of config.json with the encoder of sounds. needs_settings: sounds are read where a
    file has settings beside the weights.

    The encoder: reader: the file in octavo/models and the class, with a dot between them. library, library_config:
    transformers' class and config, where they are not called as the architecture. is_apart: the encoder is made
    without the config of the text model. width: the key of config.json with the width of its vectors. names: of stored
    tensors, one of `STORED` in octavo/models/vision_names.py."""

    architectures: tuple[str, ...] = ()
    released: tuple[str, ...] = ()
    layout: Callable[[Values, str], Values] = lambda config, where: config
    text: Mapping[str, str] = {}
    images: str = ""
    videos: str = ""
    sounds: str = ""
    speech: str = ""
    listener: Listener | None = None
    has_whole_prompts: bool = False
    is_dual: bool = False
    settings: Callable[[Section], Values] | None = None
    computed: Callable[[Section, Callable[[str], Section]], Values | None] | None = None
    unstated: Callable[[Section], Values] | None = None
    processors: Mapping[str, str] = {}
    fit: Callable[[Section, Section], Values] = lambda settings, config: {}
    side: Side | None = None
    sound_part: Callable[[Section], Section | None] = checked_audio
    needs_settings: bool = False
    reader: str = ""
    library: str = ""
    library_config: str = ""
    is_apart: bool = False
    width: str = "vision_config.out_hidden_size"
    names: str = ""

    @property
    def is_around_text(self) -> bool:
        """Whether the architecture stands for a text model with encoders, which may be left out."""
        return bool(self.architectures) and self.listener is None
