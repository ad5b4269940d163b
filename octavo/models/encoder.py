"""Encoders of images and sound: transformers' modules, whose weights the loader fills like those of other layers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final

import torch
from torch import nn

from octavo.config.blamed_keys import blamed_keys
from octavo.config.checkpoint import Checkpoint
from octavo.config.media.media_families import media_family
from octavo.config.section import COUNTS
from octavo.core.light_torch import import_meta_registrations
from octavo.errors import CheckpointError, UnsupportedModel, one_line
from octavo.layers.layer import Layer, TensorSlot
from octavo.models.fallback.library import library_version, refusal

_STACKS: Final = ("layers", "layer", "blocks", "block")
"""The names that transformers gives to the list of an encoder's layers."""
_IN_TUPLES: Final = ("Llama4VisionEncoderLayer",)
"""Layers that return their result in a tuple."""


class Held(Layer):
    """Parameters of a module that computes by itself: they are loaded and kept as they are."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        # the dictionary itself: what is filled here is there
        self._parameters = module._parameters

    def tensor_slots(self, path: str) -> Iterator[TensorSlot]:
        """Yield the tensors of the module; at the root of the checkpoint its names have nothing before them."""
        return (replace(slot, name=slot.name.removeprefix(".")) for slot in super().tensor_slots(path))


_OF_PRODUCTS: Final = (
    *("Blip2QFormerMultiHeadAttention", "GraniteSpeechConformerAttention", "GraniteSpeechConformerConvModule"),
    *("FunAsrNanoAttention", "FunAsrNanoFSMN"),
    *("Gemma3nAudioAttention", "Gemma3nAudioConformerLightConv1d", "Gemma3nAudioSubSampleConvProjection"),
    *("Gemma4AudioAttention", "Gemma4AudioCausalConv1d", "Gemma4AudioSubSampleConvProjection"),
    *("ParakeetEncoderAttention", "ParakeetEncoderConvolutionModule", "ParakeetEncoderSubsamplingConv2D"),
    *("Phi4MultimodalAudioAttention", "Phi4MultimodalAudioConvModule", "Phi4MultimodalAudioNemoConvSubsampling"),
)
"""Classes with products in batches or convolutions of one frame, whose bits depend on torch's threads; the linear
layers in them have octavo's."""


def held_layers(module: nn.Module, path: str) -> Iterator[tuple[str, Layer]]:
    """Yield the layers within `module`, which is at `path` in the checkpoint, and the parameters of other modules."""
    for name, part in module.named_modules(prefix=path):
        part._buffers.pop("num_batches_tracked", None)  # only training reads it
        for buffer in [each for each in part._buffers if each not in part._non_persistent_buffers_set]:
            # which is loaded like a weight
            part._parameters[buffer] = nn.Parameter(part._buffers.pop(buffer), requires_grad=False)
        if isinstance(part, Layer):
            yield name.removesuffix(".octavo"), part
        elif any(each is not None for each in part._parameters.values()):
            yield name, Held(part)


def library_config(checkpoint: Checkpoint, name: str, changes: Mapping[str, Any] | None = None) -> Any:
    """Return transformers' config of this class name for a checkpoint. changes: in place of its values.

    Raises UnsupportedModel without transformers, and CheckpointError for values that it refuses.
    """
    if library_version() is None:
        raise UnsupportedModel(
            f"{checkpoint.where}: the encoder of this model is transformers' own: {_install(checkpoint)}"
        )
    import_meta_registrations()
    import transformers

    stored = checkpoint.stored
    parts = [stored, *filter(None, (stored.section(key) for key in stored.values if key.endswith("_config")))]
    for part, count in itertools.product(parts, COUNTS):
        if part.values.get(count) is not None:  # transformers makes lists of this length
            part.count(count)
    values = {key: value for key, value in stored.values.items() if key != "auto_map"}
    values.update(changes or {})
    make = getattr(transformers, name).from_dict
    try:
        return make(values)
    except Exception as error:  # whatever it raises is about the values
        raise refusal(checkpoint, error, values, make) from error


def _install(checkpoint: Checkpoint) -> str:
    """Return the command that installs what the encoders of a checkpoint need, with readers of their files."""
    family = media_family(checkpoint.architecture)
    hears = family.sounds or family.listener or checkpoint.architecture == "WhisperForConditionalGeneration"
    extras = [name for name, is_read in (("audio", hears), ("images", family.images)) if is_read]
    return f"pip install 'octavo[{','.join(extras) or 'transformers'}]'"


def library_module(make: Callable[[Any], nn.Module], library: Any) -> nn.Module:
    """Return the module that `make` makes of a config, without memory for its weights, as it computes results.

    library: transformers' config. Raises CheckpointError for sizes that no tensor can have, and for names that
    transformers does not know.
    """

    def made(library: Any) -> nn.Module:
        with torch.device("meta"):
            return make(library).eval().requires_grad_(False)

    try:
        return made(library)
    except Exception as error:  # whatever it raises is about the config
        keys = blamed_keys(error, library.to_dict(), lambda values: made(type(library).from_dict(values)))
        raise CheckpointError(
            f"config.json: {keys and f'{keys}: '}transformers {library_version()} cannot make the encoder that it "
            f"describes ({one_line(error)}); download config.json again"
        ) from error


def in_one_thread(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that computes the same in one thread of torch, whatever others use."""

    def call(*arguments: Any, **named: Any) -> Any:
        num_threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return forward(*arguments, **named)
        finally:
            torch.set_num_threads(num_threads)

    return call


def keep_in_one_thread(encoder: nn.Module) -> None:
    """Let the modules whose bits depend on torch's threads compute in one."""
    for module in encoder.modules():
        if type(module).__name__ in _OF_PRODUCTS:
            module.forward = in_one_thread(module.forward)


def layers_up_to(config: Any, layer: int) -> int:
    """Return the number of layers of an encoder up to the states of number `layer`, counted from the end below 0."""
    return int(layer if layer >= 0 else config.num_hidden_layers + 1 + layer)


@contextmanager
def without_layers(encoder: nn.Module) -> Iterator[None]:
    """Let the layers of an encoder return their inputs, which in most layers have the shape of the outputs."""
    lists = [part for name, part in encoder.named_modules() if name.rpartition(".")[2] in _STACKS]
    layers = [layer for part in lists if isinstance(part, nn.ModuleList) for layer in part]
    own = [layer.__dict__.get("forward") for layer in layers]
    for layer in layers:
        layer.forward = _in_tuple if type(layer).__name__ in _IN_TUPLES else _unchanged
    try:
        yield
    finally:
        for layer, forward in zip(layers, own, strict=True):
            del layer.__dict__["forward"]
            if forward is not None:
                layer.forward = forward


def _unchanged(*arguments: Any, **named: Any) -> Any:
    return next(iter((*arguments, *named.values())))


def _in_tuple(*arguments: Any, **named: Any) -> Any:
    return (_unchanged(*arguments, **named),)
