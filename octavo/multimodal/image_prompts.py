"""From a prompt with markers and its images to the tokens and arrays that the workers read."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np

from octavo.config.blamed_keys import blamed_keys
from octavo.config.checkpoint import Checkpoint
from octavo.config.media.images import MOST_CROSS_IMAGES
from octavo.config.media.media_families import media_family
from octavo.config.section import Section, read_json_object
from octavo.core.media import MediaInput, digest_of, typed_array
from octavo.errors import CheckpointError, ConfigError, MissingLibrary, one_line
from octavo.multimodal.image_writer import Context, first_positive
from octavo.multimodal.image_writers import IMAGE_WRITERS
from octavo.multimodal.images import decoded
from octavo.multimodal.placeholders import JoinedLines, matched, no_text, spans_of
from octavo.multimodal.processors.image_processors import OWN_PROCESSORS
from octavo.multimodal.video_writers import VIDEO_WRITERS
from octavo.multimodal.videos import decoded_video

if TYPE_CHECKING:
    from numpy.typing import NDArray

_log = logging.getLogger(__name__)

_MOST_NUMBERED: Final = 1 << 8
"""Images of a prompt that are named by their number."""
_EDGES: Final = {"min_pixels": "shortest_edge", "max_pixels": "longest_edge"}
"""Where image processors that do not have these settings keep the same numbers, in their size."""


class ImagePrompts:
    """Writes the images and videos of prompts out. Safe to use from several threads."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        settings: Mapping[str, Any],
        encode: Callable[[str], list[int]],
        limits: Mapping[str, int],
        changes: Mapping[str, Any] | None = None,
        token_text: Callable[[int], str] = no_text,
    ) -> None:
        """settings: of the image processor. encode: returns the ids of a text. limits: images and videos of one prompt.
        changes: in place of the settings. token_text: returns the text of a token.

        Raises CheckpointError for settings that do not fit.
        """
        family, self._path = media_family(checkpoint.architecture), checkpoint.path
        self.writer = IMAGE_WRITERS[family.images]
        self.is_alone = self.writer.is_alone
        """Whether an image is a prompt of its own."""
        self.has_whole_prompts = family.has_whole_prompts
        self._limits, self._token_text = limits, token_text
        self._changes = changes or {}
        self._settings = settings = {**settings, **self._changes}
        config = checkpoint.stored
        self._context = Context(config, settings, encode, path=self._path)
        self._lines = JoinedLines(encode)
        marker, self._token = self._tokens(config, encode)
        self._vectors = frozenset({self._token, *self.writer.others(config)})
        word = self.writer.word
        if word is not None and "{}" not in word and len(ids := encode(word)) == 1:
            marker, word = ids[0], None
        numbers = range(1, 1 + min(limits["image"], _MOST_NUMBERED))
        self.words = {} if word is None else dict.fromkeys((word.format(number) for number in numbers), "image")
        """The words that stand for an image in a text and are not tokens, with the kind."""
        self.marker = marker
        """The token that stands for an image before it is written out."""
        self._markers = {marker: "image"}
        self._videos = VIDEO_WRITERS.get(family.videos)
        if self._videos is not None and any(key in config.values for key in self._videos.marker):
            self._video_token = first_positive(config, self._videos.token)
            own = first_positive(config, self._videos.marker)
            if own == marker:
                key = next(each for each in self._videos.marker if config.values.get(each) is not None)
                raise config.error(key, "another token than the one that stands for an image")
            read = Section(self._video_settings, f"{checkpoint.path} (video processor)")
            if (lacking := self._videos.check(read, self._path)) is None:
                self._markers[own] = "video"
            else:
                _log.warning("%s: videos are not read: %s", self._path, lacking)
        self._processor: Any = None

    def _tokens(self, config: Section, encode: Callable[[str], list[int]]) -> tuple[int, int]:
        """Return the tokens that stand for an image, and for one of its vectors. Raises CheckpointError."""
        writer = self.writer
        if writer.token_word is not None and not any(key in config.values for key in writer.token):
            found = encode(writer.token_word)
            if len(found) != 1:
                raise CheckpointError(
                    f"{config.where}: the tokenizer beside it has no token {writer.token_word}, which stands for images"
                )
            return found[0], found[0]
        return first_positive(config, writer.marker), first_positive(config, writer.token)

    @property
    def kinds(self) -> frozenset[str]:
        """The kinds of inputs that prompts may have: images, and in most families videos."""
        return frozenset(self._markers.values())

    def expand(self, token_ids: Sequence[int], given: Mapping[str, Any]) -> tuple[list[int], tuple[MediaInput, ...]]:
        """Return a prompt's tokens with each marker written out, and what the markers stand for.

        given: by kind, an image or video or a list of them. Raises InvalidRequest.
        """
        if self.is_alone and not given:
            return [*token_ids], ()
        if self.writer.arranged is not None:
            context = self._context._replace(num_images=len(_images_of(given)))
            token_ids = self.writer.arranged(context, self.marker, token_ids)
        waiting = {kind: self._listed(kind, marker, token_ids, given) for marker, kind in self._markers.items()}
        written: list[int] = []
        media: list[MediaInput] = []
        is_behind, left_out = False, None
        num_images = sum(self._markers.get(token_id) == "image" for token_id in token_ids)
        for token_id in token_ids:
            kind = self._markers.get(token_id)
            if kind is not None:
                context = self._context._replace(place=sum(each.kind == kind for each in media), num_images=num_images)
                write = self._image if kind == "image" else self._video
                tokens, made, left_out = write(context, next(waiting[kind]), written)
                media.append(made)
                if self.writer.are_marks_seen:
                    span = len(written), len(tokens)
                    media.append(MediaInput("prompt", made.digest, (span,), 0, {}, is_whole=True))
                written += tokens
            elif token_id != left_out or not is_behind:
                written += self._with_lines(written, [token_id]) if is_behind else [token_id]
            is_behind = kind is not None
        if self.has_whole_prompts:
            media.append(_whole(written, media))
        return written, tuple(media)

    def _listed(self, kind: str, marker: int, token_ids: Sequence[int], given: Mapping[str, Any]) -> Iterator[Any]:
        """Return what the markers of a kind stand for. Raises InvalidRequest for another number of them."""
        if kind == "video":
            brought = given.get(kind, [])
            brought = brought if _are_videos(brought) else [brought]
        else:
            brought = _images_of(given)
        room = self.writer.most if self.writer.num_vectors is None else MOST_CROSS_IMAGES
        return matched(kind, (marker, self._token_text(marker)), token_ids, brought, self._limits[kind], room)

    def _with_lines(self, written: list[int], tokens: list[int]) -> list[int]:
        return self._lines.behind(written, tokens) if self.writer.joins_lines else tokens

    def _image(self, context: Context, image: Any, written: list[int]) -> tuple[list[int], MediaInput, None]:
        """Return the tokens of an image; `written` loses its last line breaks where they are joined with the
        image's."""
        most = self.writer.most_cut
        made = self.arrays(decoded(image), **({} if most is None else {"is_cut": context.num_images <= most}))
        tokens = self._with_lines(written, self.writer.tokens(context, self._token, made))
        offset = len(written)
        arrays = {name: typed_array(made[name]) for name in self.writer.reads if name in made}
        digest = digest_of(arrays)
        if self.writer.num_vectors is not None:
            num_vectors = self.writer.num_vectors(context, made)
            return tokens, MediaInput("image", digest, (), num_vectors, arrays, offset=offset), None
        spans = tuple(spans_of(tokens, self._vectors, offset))
        num_embeddings = sum(length for _, length in spans)
        grid = None if self.writer.grid is None else self.writer.grid(self._context, made)
        is_whole, num_before = self.writer.is_whole(self._context.config), self.writer.num_before
        made_of = digest, spans, num_embeddings, arrays, is_whole, grid
        return tokens, MediaInput("image", *made_of, is_apart=self.writer.is_apart, num_before=num_before), None

    def _video(self, context: Context, given: Any, written: list[int]) -> tuple[list[int], MediaInput, int | None]:
        """Return the tokens of a video after `written`, and the token after the marker that is left out."""
        assert self._videos is not None
        made = self._videos.write(context, self._video_token, self._video_settings, self.arrays, decoded_video(given))
        left_out = None
        if made.replaces is not None and written[-1:] == [made.replaces[0]]:
            del written[-1:]
            left_out = made.replaces[1]
        arrays = {name: typed_array(each) for name, each in made.arrays.items()}
        spans = tuple(spans_of(made.tokens, {self._video_token}, len(written)))
        num_embeddings = sum(length for _, length in spans)
        digest = digest_of({**arrays, "times": typed_array(np.array(made.times, dtype=np.int64))})
        video = MediaInput("video", digest, spans, num_embeddings, arrays, grid=made.grid, times=made.times)
        video = msgspec.structs.replace(video, num_before=self.writer.num_before)
        return made.tokens, video, left_out

    @cached_property
    def _video_settings(self) -> Mapping[str, Any]:
        """The settings for videos of the checkpoint, else those for images. Raises CheckpointError."""
        for name in ("video_preprocessor_config.json", "processor_config.json"):
            values = read_json_object(self._path / name) if (self._path / name).is_file() else {}
            found = values if name.startswith("video") else values.get("video_processor")
            if found and isinstance(found, dict):
                return found
        return self._settings

    def open(self) -> Any:
        """Return transformers' image processor, made at the first call. Raises CheckpointError or ConfigError."""
        if self._processor is None:
            self._processor = _image_processor(self._path, self._settings, self._changes, self._context.config)
        return self._processor

    def arrays(self, *images: Any, **options: Any) -> dict[str, NDArray[Any]]:
        """Return what transformers' image processor makes of decoded images. options: in place of its settings."""
        made = self.open()(images=[*images], return_tensors="np", **{**self.writer.options, **options})
        return {name: np.asarray(values) for name, values in made.items()}


def _whole(tokens: Sequence[int], media: Iterable[MediaInput]) -> MediaInput:
    """Return what says that all tokens of a prompt attend to each other; its digest is that of the prompt."""
    parts = {str(place): typed_array(np.frombuffer(each.digest, np.uint8)) for place, each in enumerate(media)}
    digest = digest_of({**parts, "tokens": typed_array(np.array(tokens, dtype=np.int64))})
    return MediaInput("prompt", digest, ((0, len(tokens)),), 0, {}, is_whole=True)


def _images_of(given: Mapping[str, Any]) -> list[Any]:
    """Return the images that a prompt is given."""
    images = given.get("image", [])
    return list(images) if isinstance(images, list | tuple) else [images]


def _are_videos(given: Any) -> bool:
    """Return whether something is a list of videos, and not the frames of one."""
    if not isinstance(given, list):
        return False
    return all(isinstance(each, tuple | list | Mapping) or getattr(each, "ndim", 0) == 4 for each in given)


def _image_processor(path: Path, settings: Mapping[str, Any], changes: Iterable[str], config: Section) -> Any:
    """Return the image processor of a checkpoint, which computes with Pillow and numpy: mostly transformers' own.

    changes: names of the settings that a person has made. Raises CheckpointError, ConfigError, UnsupportedModel or
    MissingLibrary.
    """
    name = str(settings["image_processor_type"]).removesuffix("Fast").removesuffix("Pil")
    if (own := OWN_PROCESSORS.get(name)) is not None:
        if others := [change for change in changes if change not in own.KNOWN]:
            raise ConfigError(f"mm_processor_kwargs has {others[0]}, which {name} does not have; leave it out")
        return own(Section(settings, f"{path} (image processor)"), config)
    try:
        import transformers
    except ImportError as error:
        said = "images need transformers: pip install 'octavo[images]'"
        raise MissingLibrary(said, field="multi_modal_data") from error
    name += "Pil"
    made = getattr(transformers, name, None)
    if made is None:
        raise CheckpointError(f"{path}: transformers {transformers.__version__} has no image processor {name}")
    for change in changes:
        if change in made.valid_kwargs.__annotations__:
            continue
        size = settings.get("size") or {}
        if change not in _EDGES or size.keys() != set(_EDGES.values()):
            raise ConfigError(f"mm_processor_kwargs has {change}, which {name} does not have; leave it out")
        settings = {**settings, "size": {**size, _EDGES[change]: settings[change]}}
    given = {key: value for key, value in settings.items() if key != "image_processor_type"}
    try:
        return made(**given)
    except Exception as error:  # whatever it raises is about the settings
        keys = blamed_keys(error, given, lambda values: made(**values))
        raise CheckpointError(
            f"{path}: {keys and f'{keys}: '}{name} refuses the settings of images ({one_line(error)}); download the "
            "JSON files again"
        ) from error
