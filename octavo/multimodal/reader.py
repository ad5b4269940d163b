"""From what a prompt brings besides text to the inputs of encoders, for the model of an engine."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import accumulate, pairwise
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np

from octavo.config.checkpoint import CONFIG, Checkpoint
from octavo.config.media.images import image_settings
from octavo.config.media.media_families import media_family
from octavo.config.media.sounds import sound_section
from octavo.config.media_args import media_limits
from octavo.config.own_adapters import own_adapter
from octavo.config.released.mistral import is_native
from octavo.config.schema import ModelConfig
from octavo.core.adapter import LoRARequest
from octavo.core.cache_key import Placeholder
from octavo.core.media import MediaInput
from octavo.core.messages import CoreReady
from octavo.core.prompt import Prompt
from octavo.core.prompt_embeds import FIELD
from octavo.core.sampling_params import SamplingParams
from octavo.errors import CheckpointError, ConfigError, InvalidRequest, MissingLibrary, one_line
from octavo.multimodal.media_urls import MediaUrls
from octavo.multimodal.parts import naming_parts, without_media
from octavo.multimodal.placeholders import alone, no_text
from octavo.multimodal.vector_parts import without_vectors

if TYPE_CHECKING:
    from octavo.multimodal.image_prompts import ImagePrompts
    from octavo.multimodal.omni_prompts import OmniPrompts
    from octavo.multimodal.processors.log_mel import LogMel
    from octavo.multimodal.processors.waveform import Waveform
    from octavo.multimodal.sound_prompts import SoundPrompts

_log = logging.getLogger(__name__)

_PLURALS: Final = {"image": "images", "video": "videos", "audio": "sounds"}
_EXAMPLES: Final[Mapping[str, Sequence[Callable[[], Any]]]] = {
    # a square is often cut into fewer tiles
    "image": (lambda: np.full((56, 84, 3), 127, np.uint8), lambda: np.full((56, 56, 3), 127, np.uint8)),
    "audio": (lambda: np.zeros(16_000, np.float32),),
}
_MOST_ELEMENTS: Final = 1 << 22
"""Most elements of arrays that an encoder without its layers reads within a fraction of a second."""
_ONE: Final = {"image": "an image", "video": "a video", "audio": "a sound"}
_NO_PROCESSOR: Final = "neither preprocessor_config.json nor processor_config.json has image_processor_type"
_NO_ENCODER: Final = "config.json has no audio_config"
_NO_SETTINGS: Final = "config.json has no audio_processor or audio_config, or there is no preprocessor_config.json"
"""Why a checkpoint whose family reads images or sounds does not."""


class MediaReader:
    """Checks the inputs of prompts. It reads and imports nothing before a prompt has an input, except in `examples`."""

    def __init__(
        self,
        model: ModelConfig,
        ready: CoreReady,
        encode: Callable[..., list[int]],
        max_num_batched_tokens: int,
        *,
        splits_images: bool = True,
        token_text: Callable[[int], str] = no_text,
    ) -> None:
        """encode: returns the ids of (text, add_special_tokens). splits_images: False leaves images whole that the
        checkpoint's settings scale up and split, each into many tiles (`do_image_splitting`). token_text: returns the
        text of a token."""
        self._splits_images, self._token_text = splits_images, token_text
        self.urls = MediaUrls(model)
        self._model = model
        self._encode = encode
        self._most_together = max_num_batched_tokens
        self._max_model_len, self._vocab_size = ready.max_model_len, ready.vocab_size
        self._has_encodings = bool(ready.cache.groups[-1].num_encoded)

    @property
    def _has_config(self) -> bool:
        path = Path(self._model.path)
        return (path / CONFIG).is_file() or is_native(path)

    @cached_property
    def _is_heard(self) -> bool:
        """Whether the model reads a sound with every prompt, through caches of its own."""
        return self._has_encodings and not media_family(Checkpoint.of(self._model).architecture).images

    @cached_property
    def listener(self) -> LogMel | Waveform:
        """The preprocessing of a model that reads sounds through caches. Raises CheckpointError."""
        from octavo.multimodal.processors.waveform import listener_of

        return listener_of(Checkpoint.of(self._model))

    @property
    def hearing(self) -> SoundPrompts | Waveform | None:
        """What reads the sounds of a model that is asked in prompts to write them down; None for any other."""
        from octavo.multimodal.processors.log_mel import LogMel

        found = self.listener if self._is_heard else self.sounds
        return None if isinstance(found, LogMel) else found

    @cached_property
    def _written(self) -> ImagePrompts | SoundPrompts | OmniPrompts | None:
        """What writes images or sounds into prompts; None for a model that reads none. Raises CheckpointError."""
        from octavo.multimodal.image_prompts import ImagePrompts
        from octavo.multimodal.omni_prompts import OmniPrompts
        from octavo.multimodal.sound_prompts import SoundPrompts

        limits, has_config = media_limits(self._model), self._has_config
        if not has_config and self._model.mmproj is None:
            return None
        checkpoint = Checkpoint.of(self._model)
        sounds = images = None

        def encode(text: str) -> list[int]:
            return self._encode(text, False)

        if limits["audio"] and (section := sound_section(checkpoint)) is not None:
            room = self._max_model_len, self._most_together
            sounds = SoundPrompts(checkpoint, section, encode, limits, *room, self._token_text)
        is_written = limits["image"] or media_family(checkpoint.architecture).has_whole_prompts
        if is_written and (settings := image_settings(checkpoint)) is not None:
            changes = self._model.mm_processor_kwargs
            if not self._splits_images and "do_image_splitting" in settings:
                settings = {**settings, "do_image_splitting": False}
            images = ImagePrompts(checkpoint, settings, encode, limits, changes, self._token_text)
        return OmniPrompts(images, sounds) if images and sounds else images or sounds

    @property
    def reads_images(self) -> bool:
        """Whether prompts may have images."""
        return self._written is not None and "image" in self._written.kinds

    @property
    def sounds(self) -> SoundPrompts | None:
        """What writes sounds into prompts in the place of tokens; None for a model that reads none so."""
        from octavo.multimodal.omni_prompts import OmniPrompts
        from octavo.multimodal.sound_prompts import SoundPrompts

        found = self._written.sounds if isinstance(self._written, OmniPrompts) else self._written
        return found if isinstance(found, SoundPrompts) else None

    @property
    def markers(self) -> dict[str, int]:
        """The tokens that stand for images and sounds in a prompt, by kind."""
        found = {} if self.sounds is None else {"audio": self.sounds.marker}
        if self.reads_images and self._written is not None:
            found["image"] = self._written.marker
        return found

    @property
    def words(self) -> Mapping[str, str]:
        """The kinds of inputs by the texts that stand for them in texts and are no tokens."""
        return getattr(self._written, "words", {})

    def spelled(self, prompt: Prompt) -> Prompt:
        """Return a prompt with the token's text for each word that stands for an input and has no cut."""
        prompt = self.sounds.timed(prompt) if prompt.multi_modal_data and self.sounds is not None else prompt
        text, cuts = prompt.text, prompt.cuts
        if not prompt.multi_modal_data or text is None:
            return prompt
        pieces = [text[start:end] for start, end in pairwise((0, *cuts, len(text)))]
        for word, kind in self.words.items():
            pieces = [piece.replace(word, self._token_text(self.markers[kind])) for piece in pieces]
        ends = tuple(accumulate(map(len, pieces[:-1])))
        return msgspec.structs.replace(prompt, text="".join(pieces), cuts=ends)

    def own_adapter(self, media: Sequence[MediaInput]) -> LoRARequest | None:
        """Return the checkpoint's adapter that a prompt is computed with where it names none itself: with images and
        sounds, that for images."""
        brought = {each.kind for each in media}
        return next((own for kind, own in self._own_adapters.items() if kind in brought), None) if brought else None

    @cached_property
    def _own_adapters(self) -> Mapping[str, LoRARequest]:
        """The checkpoint's adapters by the kind of input that they are for. Raises CheckpointError."""
        found: dict[str, LoRARequest] = {}
        for kind in ("image", "audio"):
            own = own_adapter(Checkpoint.of(self._model), kind) if kind in self._kinds else None
            if own is not None:
                found[kind] = LoRARequest(f"own-{kind}-adapter", 1, str(own.path))
        return found

    def parted(self, messages: Any) -> tuple[Any, dict[str, list[Any]], dict[str, list[str]], list[MediaInput]]:
        """Return messages as templates see them, with the images and sounds by kind and their places, or the vectors,
        that they bring.

        Raises InvalidRequest for what the model does not take.
        """
        messages, vectors = without_vectors(messages, self._check_width)
        messages, media, places = without_media(messages, self.urls, self.check)
        if vectors:
            for is_there, what in ((media, ", ".join(media)), (self._reads_whole, "a model that sees prompts whole")):
                if is_there:
                    raise InvalidRequest(f"messages with {FIELD} do not go with {what}; send text", field="messages")
        return messages, media, places, vectors

    def check(self, kind: str, field: str) -> None:
        """Raise InvalidRequest where the model takes no input of the kind that stands at `field` of a request."""
        if kind not in self._kinds:
            raise InvalidRequest(
                f"{field} is {_ONE[kind]}, and this model reads {self._reads}; leave it out", field=field
            )

    @property
    def _kinds(self) -> frozenset[str]:
        if self._is_heard:
            return frozenset({"audio"})
        return self._written.kinds if self._written else frozenset()

    @property
    def _reads(self) -> str:
        """The inputs that the model reads, for messages."""
        return " and ".join(["text", *sorted(_PLURALS[kind] for kind in self._kinds)]) if self._kinds else "text alone"

    def warn_of_unread(self) -> None:
        """Log why images or sounds are refused, where the checkpoint lacks what its architecture reads them with."""
        if self._model.mmproj is not None or not self._has_config:
            return
        checkpoint, limits = Checkpoint.of(self._model), media_limits(self._model)
        stated = checkpoint.stored.values
        family = media_family(checkpoint.architecture)
        for kind, is_stated, reason in (
            ("image", family.images, _NO_PROCESSOR),
            ("audio", family.sounds, _NO_SETTINGS if family.needs_settings else _NO_ENCODER),
        ):
            if kind == "audio" and "audio_config" in stated and stated["audio_config"] is None:
                continue  # as in the larger models of a family
            if is_stated and limits[kind] and kind not in self._kinds:
                _log.warning(
                    "%s: %s are not read: %s; download the JSON files again, or set limit_mm_per_prompt %s=0",
                    self._model.path,
                    _PLURALS[kind],
                    reason,
                    kind,
                )

    def examples(self) -> list[MediaInput]:
        """Return what encoders read of a small image and of a second of silence, where the model reads such.

        What would take an encoder seconds is left out: small images that are cut into many tiles. Raises
        CheckpointError where the settings of the checkpoint let none be read.
        """
        limits = media_limits(self._model)
        found: list[MediaInput] = []
        for kind in self.markers:
            for make in _EXAMPLES[kind] if limits[kind] else ():
                media = self._example(kind, make())
                sizes = [sum(prod(array.shape) for array in each.arrays.values()) for each in media]
                if all(size <= _MOST_ELEMENTS for size in sizes):
                    found += media
                    break
        return found

    def _example(self, kind: str, given: Any) -> list[MediaInput]:
        """Return what encoders read of an image or a sound; nothing without a library that reads it. Raises
        CheckpointError."""
        where = f"{self._model.path}: {_ONE[kind]} cannot be read with the sizes and settings of the checkpoint"
        try:
            assert self._written is not None
            token_ids, media = self._written.expand([self.markers[kind]], {kind: given})
        except MissingLibrary as error:
            _log.warning("%s: %s are refused: %s", self._model.path, _PLURALS[kind], error)
            return []
        except (CheckpointError, ConfigError):
            raise
        except Exception as error:  # whatever it raises is about them
            raise CheckpointError(f"{where} ({one_line(error)}); download its JSON files again") from error
        if not token_ids or max(token_ids) >= self._vocab_size:
            token = max(token_ids, default="no token")
            stored = Checkpoint.of(self._model).stored.values
            keys = " or ".join(key for key, value in stored.items() if value == token) or "token"
            raise CheckpointError(
                f"{where}: a prompt has {keys} {token} in its place, expected tokens below {self._vocab_size}, the "
                "size of the vocabulary; download its JSON files again"
            )
        return [each for each in media if each.kind == kind]

    def warm_up(self) -> None:
        """Import what prepares images, where the model reads them, so that forks of this process have it."""
        if self._written is not None:
            with suppress(MissingLibrary):  # `examples` has said so, and each image is refused
                self._written.open()

    def read(
        self, prompt: Prompt, token_ids: list[int], num_kept: int | None = None
    ) -> tuple[list[int], tuple[MediaInput, ...]]:
        """Return the tokens of a prompt, in which images are written out, and what the encoders read.

        num_kept: tokens to which the prompt was cut; None for none. Raises InvalidRequest where the model takes others.
        """
        with naming_parts(prompt):
            token_ids, media = self._read(prompt, token_ids, num_kept)
        longest = max((length for each in media if each.is_whole for _, length in each.spans), default=0)
        if longest > self._most_together:
            raise InvalidRequest(
                f"{longest} tokens of the prompt, of an image or all, are computed together, but a step has at most "
                f"{self._most_together}; shorten it, or raise max_num_batched_tokens",
                field="multi_modal_data" if prompt.multi_modal_data else "prompt",
            )
        return token_ids, media

    def _read(
        self, prompt: Prompt, token_ids: list[int], num_kept: int | None
    ) -> tuple[list[int], tuple[MediaInput, ...]]:
        """Return the result of `read`, before it is checked whether it fits into a step."""
        given = prompt.multi_modal_data or {}
        if any(each.kind == "embeds" for each in prompt.media):
            return token_ids, tuple(msgspec.structs.replace(each, is_whole=self._reads_whole) for each in prompt.media)
        if self._written is None or not given.keys() <= self._written.kinds:
            return token_ids, self.inputs(prompt)
        if prompt.media:
            return token_ids, prompt.media
        if given and num_kept is not None:
            raise InvalidRequest(
                "truncate_prompt_tokens cannot shorten a prompt with images or sounds; leave it out",
                field="truncate_prompt_tokens",
            )
        if given and getattr(self._written, "is_alone", False):
            token_ids = alone(token_ids, self.markers["image"], self._encode("", True))
        return self._written.expand(token_ids, given)

    def inputs(self, prompt: Prompt) -> tuple[MediaInput, ...]:
        """Return the inputs of a prompt that stand for none of its tokens. Raises InvalidRequest where the model takes
        others."""
        kinds = [each.kind for each in prompt.media] + [*(prompt.multi_modal_data or {})]
        if kinds == (["audio"] if self._is_heard else []):
            return prompt.media or tuple(self._sound(each) for each in (prompt.multi_modal_data or {}).values())
        found = ", ".join(kinds) or "nothing"
        if self._is_heard:
            raise InvalidRequest(
                f"multi_modal_data has {found}, expected audio: this model writes down one sound with each prompt; "
                "give it, or send a sound to /v1/audio/transcriptions",
                field="multi_modal_data",
            )
        raise InvalidRequest(
            f"multi_modal_data has {found}, and this model reads {self._reads}; leave it out", field="multi_modal_data"
        )

    def check_embeds(self, media: Sequence[MediaInput], params: SamplingParams) -> None:
        """Raise InvalidRequest where a prompt is given as vectors and cannot be."""
        given = [each for each in media if each.kind == "embeds"]
        if not given:
            return
        for each in given:
            self._check_width(each)
        for name, unset in (("prompt_logprobs", None), ("repetition_penalty", 1.0), ("truncate_prompt_tokens", None)):
            if getattr(params, name) != unset:
                raise InvalidRequest(
                    f"{name} is about the tokens of a prompt, and {FIELD} has none; leave one of them out", field=name
                )

    @property
    def _reads_whole(self) -> bool:
        return getattr(self._written, "has_whole_prompts", False)

    def _check_width(self, vectors: MediaInput) -> None:
        width = self._model.embedding_size
        if width is None:
            raise InvalidRequest(
                f"{FIELD} is given, and this engine takes none; start it with enable_prompt_embeds",
                field=FIELD,
                code="unsupported_parameter",
            )
        own = vectors.arrays[FIELD].shape[1]
        if own != width:
            raise InvalidRequest(
                f"{FIELD} has {own} numbers for each token, expected {width}, the width of the embeddings", field=FIELD
            )

    def _sound(self, value: object) -> MediaInput:
        from octavo.multimodal.sound import read_sound

        field, settings = "multi_modal_data.audio", self.listener
        if isinstance(value, list) and len(value) == 1 and not isinstance(value[0], int | float):
            value = value[0]
        return settings.window(settings.features(read_sound(value, settings.sampling_rate, field, settings.seconds)))


def placeholders(media: Sequence[MediaInput]) -> tuple[Placeholder, ...]:
    """Return which tokens of a prompt stand for its inputs, with those before that are computed as an input's own: of
    one that is read through caches the first that sees it."""
    found: list[Placeholder] = []
    for each in media:
        num_before = each.num_before
        for offset, length in each.spans or ((each.offset, 1),):
            found.append(Placeholder(offset - num_before, length + num_before, each.digest))
            num_before = 0
    return tuple(found)
