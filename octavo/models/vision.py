"""Models that read images: a text model of octavo with the encoder of transformers' class."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import reduce
from typing import Any, ClassVar, Final

import torch
from torch import Tensor, nn

from octavo.attention.metadata import EmbeddingOverride, IntermediateTensors, ModelInput, NotedStates
from octavo.config.checkpoint import Checkpoint
from octavo.config.media.images import image_settings
from octavo.config.media.media_families import media_family
from octavo.config.media.media_family import MediaFamily
from octavo.config.released.mistral import NATIVE
from octavo.distributed.mesh import Mesh
from octavo.errors import CheckpointError, ConfigError
from octavo.layers.layer import Layer
from octavo.models.config import DecoderConfig
from octavo.models.decoder import DecoderStack
from octavo.models.encoder import held_layers, library_config, library_module
from octavo.models.fallback.library import fill_buffers
from octavo.models.fallback.swap import swap_encoder
from octavo.models.vision_levels import check_features, check_levels, levels_of
from octavo.models.vision_names import STORED, StoredNames

_TEXT_MODELS: Final = ("language_model", "text_model")
"""Names of the text model in transformers' classes."""
_SMALL: Final = {
    "model_type": "qwen2",
    "intermediate_size": 1,
    "num_attention_heads": 1,
    "num_hidden_layers": 1,
    "num_key_value_heads": 1,
    "pad_token_id": 0,
    "vocab_size": 1,
}
"""A text model that is made beside an encoder, and left out."""
_CLASS: Final = re.compile(r"For[A-Z]\w+$")
"""The end of transformers' class names, behind the name of their config."""


class ImageReader(DecoderStack):
    """Placed as the base before a text model's class, it lets that class read images."""

    ARCHITECTURE: ClassVar[str]
    FAMILY: ClassVar[MediaFamily]
    ENCODER: ClassVar[type[nn.Module] | None] = None
    """The encoder, made of transformers' config; None for that of transformers' class."""
    IGNORED = (
        *DecoderStack.IGNORED,
        r".*\.position_ids",
        r"(?:audio_tower|embed_audio|time_series|vqmodel|generation_\w+)\..*",
    )
    UNUSED: ClassVar[tuple[str, ...]] = (
        *("audio_tower", "embed_audio"),
        *("vqmodel", "generation_embeddings", "generation_aligner", "generation_head"),
    )
    """Names of encoders, and of parts that make images, that are left out."""
    replaces_tokens = True

    @classmethod
    def of_text(cls, architecture: str, text_model: type[DecoderStack]) -> type[DecoderStack]:
        """Return the class of an architecture whose text model is of a class."""
        own = {"ARCHITECTURE": architecture, "FAMILY": media_family(architecture)}
        return type(architecture, (cls, text_model), own)

    @classmethod
    def library_name(cls) -> str:
        """Return the name of transformers' class."""
        return cls.FAMILY.library or cls.ARCHITECTURE

    @classmethod
    def read_library(cls, c: Checkpoint) -> Any:
        """Return transformers' config of the encoder. Raises CheckpointError or UnsupportedModel."""
        # transformers lacks some of InternVL's text models, and refuses an infinite number in Nemotron-H's config
        small = {"text_config": {**_SMALL, "hidden_size": c.positive("hidden_size")}}
        name = cls.FAMILY.library_config or f"{_CLASS.sub('', cls.library_name())}Config"
        return library_config(c, name, small if cls.FAMILY.is_apart else {})

    @classmethod
    def read(cls, c: Checkpoint) -> DecoderConfig:
        library = cls.read_library(c)
        config = dataclasses.replace(super().read(c), library=library)
        width = reduce(lambda part, key: getattr(part, key, config.hidden_size), cls.FAMILY.width.split("."), library)
        if width != config.hidden_size:
            raise CheckpointError(
                f"{c.stored.where}: {cls.FAMILY.width} is {width}, expected the text model's hidden_size, which is "
                f"{config.hidden_size}"
            )
        if cls.FAMILY.unstated is None:  # absent keys are checked with the values that transformers fills in
            image_settings(Checkpoint(c.path, {**library.to_dict(), "architectures": [c.architecture]}))
        check_features(c.stored, library)
        check_levels(c.stored, library, config.num_layers)
        return config

    def __init__(self, c: DecoderConfig, mesh: Mesh, *arguments: Any, **named: Any) -> None:
        super().__init__(c, mesh, *arguments, **named)
        self.encoder_layers: dict[str, Layer] = {}
        if self.is_first:
            self.encoder = library_module(self.ENCODER or self._of_library, c.library)
            swap_encoder(self.encoder)
            self._stored.stack(self.encoder, getattr(c.library, "vision_config", None))
            self.encoder_layers.update(held_layers(self.encoder, ""))
            self._lacks_buffers = True
            # which a change of type makes real
            self._complex = [
                (part, name, buffer)
                for part in self.encoder.modules()
                for name, buffer in part._buffers.items()
                if buffer is not None and buffer.is_complex()
            ]
            if levels_of(c.library) and not self.is_last:
                raise ConfigError(
                    "pipeline_parallel_size: images are added to several layers of this model, which are to be on one "
                    "rank; use tensor_parallel_size"
                )

    def _of_library(self, library: Any) -> nn.Module:
        return _without(self.library_name(), library, (*_TEXT_MODELS, *self.UNUSED))

    @property
    def _stored(self) -> StoredNames:
        return STORED["mistral" if getattr(self.config.library, NATIVE, False) else self.FAMILY.names]

    @property
    def encoding_size(self) -> int:
        """Width of the vectors that `encode` makes: of all levels, with DeepStack."""
        return self.config.hidden_size * (1 + len(levels_of(self.config.library)))

    def fill(self, device: torch.device) -> None:
        """Compute the buffers of the encoder that no checkpoint has, the first time."""
        if self._lacks_buffers:
            for part, name, buffer in self._complex:
                part._buffers[name] = buffer
            fill_buffers(self.encoder, device)
            self._lacks_buffers = False

    def received(self, values: Tensor) -> Tensor:
        """Return an input in the dtype of the encoder, after the buffers of the encoder are filled on the device of the
        input."""
        self.fill(values.device)
        return values.to(next(self.encoder.parameters()).dtype)

    def encode(self, kind: str, arrays: Mapping[str, Tensor]) -> Tensor:
        """Return [vectors, hidden] of one image, or with DeepStack [vectors, levels · hidden].

        arrays: as its processor in transformers names them.
        """
        given: dict[str, Any] = {
            name: self.received(each) if each.is_floating_point() else each for name, each in arrays.items()
        }
        given |= {name: given[name].tolist() for name in ("num_local_patches", "patches_grid") if name in given}
        grid = given.pop("grids", None)
        read: Any = self.encoder.get_video_features if kind == "video" else self.encoder.get_image_features
        found = read(**given, return_dict=True)
        made, levels = found.pooler_output, getattr(found, "deepstack_features", None) or ()
        if made is None and levels:  # Granite's, which replaces no token
            levels = [_joined(each) for each in dict(levels).values()]
            made = torch.zeros_like(levels[0])
        if made is None:  # Llama 4's encoder does not project
            made = self.encoder.get_submodule("multi_modal_projector")(found.last_hidden_state)
        if grid is not None:
            made = _indicated(made, found.visual_indicator_features, *grid[0].tolist())
        return torch.cat([_joined(each) for each in (made, *levels)], 1)

    def forward(self, batch: ModelInput) -> Tensor | IntermediateTensors | NotedStates:
        found, width = batch.embeddings, self.config.hidden_size
        if found is None or found.values.shape[1] == width:
            return super().forward(batch)
        # DeepStack: the encoder's vectors from several depths are added behind several layers
        assert self.is_last, "the layers that images are added to are on one rank"
        first, *levels = torch.split(found.values, width, 1)
        places = levels_of(self.config.library)
        override = EmbeddingOverride(found.token_indices, first, dict(zip(places, levels, strict=True)))
        return super().forward(dataclasses.replace(batch, embeddings=override))

    def own_name(self, name: str) -> str:
        return super().own_name(STORED[self.FAMILY.names].todays(name))

    def layers_by_path(self) -> Iterator[tuple[str, Layer]]:
        yield from (each for each in super().layers_by_path() if not each[0].startswith("encoder."))
        yield from self.encoder_layers.items()


def _joined(features: Any) -> Tensor:
    """Return [vectors, hidden] of what an encoder returns for one image."""
    made: Tensor = torch.cat(list(features)) if isinstance(features, list | tuple) else features
    return made.reshape(-1, made.shape[-1])


def _indicated(tiles: Tensor, indicators: Tensor, rows: int, columns: int) -> Tensor:
    """Return [vectors, hidden] of Ovis' whole image and tiles [tiles, vectors, hidden] with what is around them."""
    begin, grid, between, line_end, end = torch.split(indicators, 1)
    made = [begin, tiles[0], grid]
    for place, tile in enumerate(tiles[1:], 1):
        behind = () if place == rows * columns else (between if place % columns else line_end,)
        made += [tile, *behind]
    return torch.cat([*made, end])


def _without(architecture: str, config: Any, names: Iterable[str]) -> Any:
    import transformers

    made = getattr(transformers, architecture)
    # some classes have the plain attention alone, also of text models, which are left out
    attention = {"": "sdpa" if made._supports_sdpa else "eager", "text_config": "eager"}
    if architecture.startswith("Gemma4"):
        attention["audio_config"] = "eager"
    whole = made._from_config(config, attn_implementation=attention)
    model = getattr(whole, "model", whole)
    for name in names:
        if hasattr(model, name):
            delattr(model, name)
    return model
