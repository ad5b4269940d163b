"""The second GGUF file of a model that reads images, beside that of its text model: both as one checkpoint."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from math import prod
from typing import Any, Final

from octavo.errors import CheckpointError, UnsupportedModel
from octavo.gguf.layout import Placed
from octavo.gguf.projectors import PROJECTORS, Projector
from octavo.gguf.reader import GGUFFile, GGUFTensor
from octavo.gguf.vision import Vision

_TENSOR: Final = re.compile(r"(?:v\.(blk|deepstack)\.(\d{1,9})\.)?(.+?)(\.weight|\.bias)?(\.1)?")
_UNREAD: Final = re.compile(r"v\.token_embd\.img_break|(mm\.)?a\..*")
"""Tensors that are not read: those that the text model has, too, and those of encoders of sounds."""
_OF_THE_WHOLE: Final = ("bos_token_id", "dtype", "quantization_config", "tie_word_embeddings")
"""Keys of a text model's config that stand beside its `text_config`."""
_SWAPPED: Final = {"ffn_up": "ffn_down", "ffn_down": "ffn_up"}


class Mmproj:
    """A vision encoder with its projector, which fits the text model of another file."""

    def __init__(self, file: GGUFFile, text: GGUFFile) -> None:
        """Raise CheckpointError, and UnsupportedModel for a kind that octavo does not have or that is another's."""
        self.file = file
        self._meta = Vision(file, text)
        self._kind = _projector(self._meta)
        self._made = self._kind.make(self._meta)
        self.settings: Mapping[str, Any] = self._made.settings
        """Settings of the image processor."""

    def config(self, text: Mapping[str, Any]) -> dict[str, Any]:
        """Return the `config.json` of the whole model. text: the config of its text model."""
        left_out = {"architectures", *_OF_THE_WHOLE} | ({"rope_scaling"} if "rope_parameters" in text else set())
        inner = {name: value for name, value in text.items() if name not in left_out}
        return {
            "architectures": [f"{self._kind.family}ForConditionalGeneration"],
            **{name: text[name] for name in _OF_THE_WHOLE},
            **self._made.own,
            "text_config": {**inner, **self._made.text, "model_type": self._kind.texts[self._meta.text.architecture]},
            "vision_config": dict(self._made.vision),
        }

    def placed(self) -> Iterator[Placed]:
        """Yield the tensors under their names in a checkpoint. Raises CheckpointError for one that is not known."""
        found: dict[str, list[tuple[str, GGUFTensor, str]]] = {}
        for tensor in self.file.tensors:
            if _UNREAD.fullmatch(tensor.name):
                continue
            stem, name, order = self._name(tensor)
            if name is not None:
                found.setdefault(name, []).append((order, tensor, stem))
        for name, other_name in self._kind.stand_ins.items():
            if name not in found and other_name in self._meta.types:
                yield Placed(name, self._meta.types[other_name])
        for name, parts in found.items():
            (_, first, stem), *others = sorted(parts, key=lambda each: each[0])
            for _, other, _ in others:
                if (other.type, other.shape) != (first.type, first.shape):
                    raise CheckpointError(
                        f"{self.file.path}: {other.name} is {other.type} {list(other.shape)}, expected "
                        f"{first.type} {list(first.shape)}, as {first.name} is; download it again"
                    )
            shift = float(stem == self._kind.shifted)
            heads = self._meta.num_heads if stem in self._kind.permuted else 0
            if heads and first.shape[0] % (2 * heads):
                raise CheckpointError(
                    f"{self.file.path}: {first.name} has {first.shape[0]} rows, expected {heads} heads"
                )
            behind = tuple(other for _, other, _ in others)
            form, is_kernel = _form(name, first.shape), stem == self._kind.flattened
            if is_kernel and (len(first.shape) != 4 or first.type not in ("F32", "F16", "BF16")):
                raise CheckpointError(
                    f"{self.file.path}: {first.name} is {first.type} {list(first.shape)}, expected kernels of floats"
                )
            if is_kernel:
                form = first.shape[0], prod(first.shape[1:])
            yield Placed(name, first, None, "", heads, shift, behind, form, is_kernel=is_kernel)

    def _name(self, tensor: GGUFTensor) -> tuple[str, str | None, str]:
        """Return a tensor's name without numbers, its name in a checkpoint and its order among those that are joined.

        There is no name for a layer behind the last one. Raises CheckpointError for a tensor that is not known.
        """
        match = _TENSOR.fullmatch(tensor.name)
        block, layer, stem, suffix, number = match.groups("") if match else ("",) * 5
        if layer:
            own = _SWAPPED.get(stem, stem) if self._meta.is_swapped else stem
            stem = f"v.{block}.{{}}.{own}"
        if stem not in self._kind.names:
            raise CheckpointError(f"{self.file.path}: holds {tensor.name}, which {self._kind.family} does not read")
        if block == "blk" and int(layer) >= self._meta.num_layers:
            return stem, None, ""
        if block == "deepstack":
            layers = self._meta.deepstack
            if int(layer) not in layers:
                raise self._meta.error("vision.is_deepstack_layers", f"a list with true for the layer of {tensor.name}")
            layer = str(layers.index(int(layer)))
        path, _, order = self._kind.names[stem].partition("/")
        path = path.format(layer)
        return stem, path[:-1] if path.endswith("!") else path + suffix, order or number


def _projector(meta: Vision) -> Projector:
    """Return the kind of a file that belongs to a text model. Raises CheckpointError, and UnsupportedModel."""
    if meta.architecture != "clip":
        raise CheckpointError(
            f"{meta.where}: general.architecture is {meta.architecture!r}, expected clip, as in the file with the "
            "vision encoder of a model (mmproj-*.gguf)"
        )
    key = "projector_type" if "projector_type" in meta.values else "vision.projector_type"
    # the first files do not say it
    kind = meta.str(key, *(["mlp"] if meta.values.get("has_llava_projector") is True else []))
    if kind == "mlp" and meta.is_cut:
        kind = "mlp (cut)"
    if kind == "pixtral" and "mm.patch_merger.weight" in meta.types:
        kind = "pixtral (merged)"
    text = meta.text
    others = [each for name, each in PROJECTORS.items() if name.partition(" ")[0] == kind.partition(" ")[0]]
    if not others:
        known = ", ".join(dict.fromkeys(each.partition(" ")[0] for each in PROJECTORS))
        raise UnsupportedModel(
            f"{meta.where}: clip.{key} is {kind!r}, expected one of {known}; a checkpoint in Hugging Face layout of "
            "such a model may be read, and without the file (limit_mm_per_prompt image=0) its text model"
        )
    found = PROJECTORS.get(kind) or PROJECTORS.get(f"{kind} ({text.architecture})")
    if found is None or text.architecture not in found.texts:
        texts = dict.fromkeys(name for each in others for name in each.texts)
        raise UnsupportedModel(
            f"{meta.where}: clip.{key} is {kind.partition(' ')[0]!r}, which belongs to models of "
            f"{' or '.join(texts)}, but general.architecture of {text.where} is {text.architecture!r}; name the "
            "mmproj file of this model"
        )
    size = text.positive("embedding_length")
    if kind.startswith("mlp"):
        if meta.shape("mm.2.weight")[0] != size:
            raise CheckpointError(
                f"{meta.where}: mm.2.weight has shape {list(meta.shape('mm.2.weight'))}, but "
                f"{text.architecture}.embedding_length of {text.where} is {size}; name the mmproj file of this model"
            )
    elif meta.positive("vision.projection_dim") != size:
        raise CheckpointError(
            f"{meta.where}: clip.vision.projection_dim is {meta.values['vision.projection_dim']}, but "
            f"{text.architecture}.embedding_length of {text.where} is {size}; name the mmproj file of this model"
        )
    return found


def _form(name: str, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the shape in a checkpoint of a tensor whose dimensions of size 1 differ in files; None for others."""
    if name.endswith(("_min", "_max")) and prod(shape) == 1:
        return ()
    if not name.endswith(("cls_token", "position_embeddings")):
        return None
    return 1, prod(shape) // shape[-1], shape[-1]
