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
from octavo.config.images import DUAL, image_settings
from octavo.config.native_mistral import NATIVE
from octavo.config.released_intern import INTERN, QIANFAN
from octavo.config.released_kimi import KIMI
from octavo.config.released_minicpm import MINICPM_V
from octavo.config.released_minimax import MINIMAX_M3
from octavo.config.released_nemotron import NEMOTRON_OMNI, NEMOTRON_V2
from octavo.config.released_ovis import OVIS
from octavo.config.released_pages import NEMOTRON_PAGES
from octavo.config.released_phi3 import PHI3V
from octavo.config.released_phi4 import PHI4, RELEASED
from octavo.config.released_step import STEP
from octavo.distributed.mesh import Mesh
from octavo.errors import CheckpointError, ConfigError
from octavo.layers.layer import Layer
from octavo.models.config import DecoderConfig
from octavo.models.decoder import DecoderStack
from octavo.models.dots_ocr import DotsOcrEncoder, read_encoder
from octavo.models.encoder import held_layers, library_config, library_module
from octavo.models.fallback.library import fill_buffers
from octavo.models.fallback.swap import stack, swap_encoder
from octavo.models.keye import MergingProjector
from octavo.models.vision_levels import check_features, check_levels, levels_of
from octavo.models.vision_names import todays_name

_TEXT_MODELS: Final = ("language_model", "text_model")
"""Names of the text model in transformers' classes."""
_DOTS_OCR: Final = "DotsOCRForCausalLM"
KEYE: Final = ("KeyeForConditionalGeneration", "KeyeVL1_5ForConditionalGeneration")
"""Architectures with the encoder of PaddleOCR-VL, and another text model."""
OPEN_CUA: Final = "OpenCUAForConditionalGeneration"
"""Which has the encoder of Qwen2.5-VL, and vectors of images at the positions of their tokens."""
_MISTRAL_LARGE: Final = "MistralLarge4ForConditionalGeneration"
_LIBRARY: Final = {
    "DeepseekOCRForCausalLM": "UnlimitedOcrForConditionalGeneration",
    RELEASED: PHI4,
    **dict.fromkeys(KEYE, "PaddleOCRVLForConditionalGeneration"),
    **dict.fromkeys(STEP, STEP[0]),
    OPEN_CUA: "Qwen2_5_VLForConditionalGeneration",
    **dict.fromkeys(INTERN - {QIANFAN}, "InternVLForConditionalGeneration"),
}
"""transformers' class by architecture, where it has another name: one with the same encoders and another text model."""
_CONFIGS: Final = {
    MINIMAX_M3: "MiniMaxM3VLConfig",
    **dict.fromkeys((*MINICPM_V, *NEMOTRON_PAGES, PHI3V), "LlavaConfig"),
    **dict.fromkeys(OVIS, "PaddleOCRVLConfig"),
    **{name: name.replace("Model", "Config") for name in DUAL},
    **dict.fromkeys((*NEMOTRON_OMNI, NEMOTRON_V2), "NemotronH_Omni_Reasoning_V3_Config"),
}
"""transformers' config by architecture, where it is not called as the class."""
_WITHOUT_TEXT: Final = {
    *INTERN,
    *KEYE,
    *MINICPM_V,
    *NEMOTRON_PAGES,
    OPEN_CUA,
    *OVIS,
    PHI3V,
    *STEP,
    NEMOTRON_V2,
    *NEMOTRON_OMNI,
}
"""Architectures whose encoders are made without the config of their text models."""
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
_WIDTHS: Final = {
    "HunYuanVLForConditionalGeneration": "vision_config.text_hidden_size",
    "HyperCLOVAXVisionV2ForConditionalGeneration": "text_config.hidden_size",
    "Ovis2ForConditionalGeneration": "hidden_size",
    "PaliGemmaForConditionalGeneration": "projection_dim",
}
"""The key for the width of an encoder's vectors, where it has another name."""
_CLASS: Final = re.compile(r"For[A-Z]\w+$")
"""What classes of transformers are called behind the name of their config."""


class ImageReader(DecoderStack):
    """What a text model's class becomes one that reads images with, as the base before it."""

    ARCHITECTURE: ClassVar[str]
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
    """Names of encoders, and of what makes images, that are left out."""
    replaces_tokens = True

    @classmethod
    def of_text(cls, architecture: str, text_model: type[DecoderStack]) -> type[DecoderStack]:
        """Return the class of an architecture whose text model is of a class."""
        return type(architecture, (cls, text_model), {"ARCHITECTURE": architecture})

    @classmethod
    def library_name(cls) -> str:
        """Return the name of transformers' class."""
        return _LIBRARY.get(cls.ARCHITECTURE, cls.ARCHITECTURE)

    @classmethod
    def read(cls, c: Checkpoint) -> DecoderConfig:
        is_dots = cls.ARCHITECTURE == _DOTS_OCR
        # of InternVL's text models transformers lacks some, of Nemotron-H's config it refuses an infinite number
        changes: dict[str, Any] = {"text_config": {**_SMALL, "hidden_size": c.positive("hidden_size")}}
        name = _CONFIGS.get(cls.ARCHITECTURE, f"{_CLASS.sub('', cls.library_name())}Config")
        library = (
            read_encoder(c)
            if is_dots
            else library_config(c, name, changes if cls.ARCHITECTURE in _WITHOUT_TEXT else {})
        )
        config = dataclasses.replace(super().read(c), library=library)
        name = _WIDTHS.get(cls.ARCHITECTURE, "vision_config.out_hidden_size")
        width = reduce(lambda part, key: getattr(part, key, config.hidden_size), name.split("."), library)
        if width != config.hidden_size:
            raise CheckpointError(
                f"{c.stored.where}: {name} is {width}, expected the text model's hidden_size, which is "
                f"{config.hidden_size}"
            )
        if not is_dots and cls.ARCHITECTURE not in INTERN:  # what is left out is checked as transformers fills it in
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
            if self.ARCHITECTURE == "DeepseekOCRForCausalLM":
                clip = self.encoder.get_submodule("vision_tower.vision_encoder")
                stack(clip, ("q_proj", "k_proj", "v_proj"), "qkv_proj")
            if self.ARCHITECTURE in INTERN:
                stack(self.encoder, ("q_proj", "k_proj", "v_proj"), "qkv")
            if self.ARCHITECTURE in (KIMI, *STEP):
                num_heads = c.library.vision_config.num_attention_heads
                stored = "wqkv" if self.ARCHITECTURE == KIMI else "in_proj"
                stack(self.encoder, ("q_proj", "k_proj", "v_proj"), stored, num_heads)
            if self.ARCHITECTURE == _MISTRAL_LARGE or getattr(c.library, NATIVE, False):
                for name, stored in (("q_proj", "wq"), ("k_proj", "wk")):
                    stack(self.encoder, (name,), stored, c.library.vision_config.num_attention_heads)
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
        others = (*_TEXT_MODELS, *self.UNUSED)
        if self.ARCHITECTURE == _DOTS_OCR:
            return DotsOcrEncoder(library)
        made = _without(self.library_name(), library, others)
        if KEYE[1] == self.ARCHITECTURE:
            made.projector = MergingProjector(library)
        return made

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
        """Return an input of the encoder in its type, whose buffers are on the device of the input from now on."""
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
        if made is None and levels:  # Granite's, which takes nothing's place
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
        # DeepStack: what the encoder makes at several depths is added behind several layers
        assert self.is_last, "the layers that images are added to are on one rank"
        first, *levels = torch.split(found.values, width, 1)
        places = levels_of(self.config.library)
        override = EmbeddingOverride(found.token_indices, first, dict(zip(places, levels, strict=True)))
        return super().forward(dataclasses.replace(batch, embeddings=override))

    def own_name(self, name: str) -> str:
        return super().own_name(todays_name(self.ARCHITECTURE, name))

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
