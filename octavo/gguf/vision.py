"""The metadata of a vision encoder in a GGUF file."""

from __future__ import annotations

from math import prod
from typing import Any

from octavo.errors import CheckpointError
from octavo.gguf.metadata import Metadata
from octavo.gguf.reader import GGUFFile
from octavo.gguf.tokenizer import token_id


class Vision(Metadata):
    """The metadata of a vision encoder, by keys without `clip.`, beside those of its text model."""

    def __init__(self, file: GGUFFile, text: GGUFFile) -> None:
        """Raise CheckpointError where one of the files has no `general.architecture`."""
        super().__init__(file)
        self.text = Metadata(text)

    def token(self, *texts: str) -> int:
        """Return the id of the first of these tokens that the tokenizer has. Raises CheckpointError."""
        ids = (token_id(self.text.file, text) for text in texts)
        found = next((each for each in ids if each is not None), None)
        if found is None:
            raise CheckpointError(
                f"{self.where}: its images are written with {texts[0]}, which is no token of {self.text.where}; "
                "name the mmproj file of this model"
            )
        return found

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor that has to be there. Raises CheckpointError."""
        if name not in self.types:
            raise CheckpointError(f"{self.where}: {name} is missing; download it again")
        return self.types[name].shape

    @property
    def width(self) -> int:
        """The width of hidden states in the encoder."""
        return self.positive("vision.embedding_length")

    @property
    def num_layers(self) -> int:
        """Number of layers of the encoder."""
        count = self.positive("vision.block_count")
        if count > len(self.types):
            raise self.error("vision.block_count", f"at most the {len(self.types):,} tensors of the file")
        return count

    @property
    def deepstack(self) -> list[int]:
        """The layers whose results are added to those of the text model, in order. Raises CheckpointError."""
        flags = self.array("vision.is_deepstack_layers") or []
        return [number for number, flag in enumerate(flags) if flag]

    @property
    def is_swapped(self) -> bool:
        """Whether the two products of MLPs have each other's names, as in older files."""
        shape = self.shape("v.blk.0.ffn_down.weight")
        return shape[-1] == self.width != shape[0]

    @property
    def is_cut(self) -> bool:
        """Whether images are cut into pieces of the size that the encoder reads, as in LLaVA 1.6."""
        return not {"v.image_newline", "model.image_newline"}.isdisjoint(self.types)

    @property
    def num_heads(self) -> int:
        """Number of attention heads."""
        return self.divisor("vision.attention.head_count", "embedding_length", self.width)

    @property
    def patch(self) -> int:
        """Pixels of a patch's side."""
        size, shape = self.positive("vision.patch_size"), self.shape("v.patch_embd.weight")
        if shape[-1] != (3 * size * size if len(shape) == 2 else size):
            raise self.error("vision.patch_size", f"the last of {list(shape)}, the shape of v.patch_embd.weight")
        return size

    def merged(self, tensor: str) -> int:
        """Return patches in each direction of one vector, of which the columns of a tensor hold the elements.

        Raises CheckpointError.
        """
        size, shape = self.positive("vision.spatial_merge_size", 2), self.shape(tensor)
        if shape[-1] != size**2 * self.width:
            columns = f"the columns of {tensor} {list(shape)} by vision.embedding_length, which is {self.width}"
            raise self.error("vision.spatial_merge_size", f"the root of {columns}")
        return size

    def side(self, scale: int) -> int:
        """Return rows and columns of the vectors that an image becomes. scale: patches in each direction of one.

        Raises CheckpointError.
        """
        patches = self.positive("vision.image_size") // self.patch
        count = prod(self.shape("v.position_embd.weight")) // self.width - ("v.class_embd" in self.types)
        if patches**2 != count:
            raise self.error("vision.image_size", f"that of {count} patches, as v.position_embd.weight has")
        if not 0 < scale <= patches:
            raise self.error("vision.projector.scale_factor", f"at most the {patches} patches of a row")
        return patches // scale

    def sizes(self, *, layers: str = "num_hidden_layers", heads: str = "num_attention_heads") -> dict[str, Any]:
        """Return the sizes that all encoders have. layers, heads: names of two of them."""
        return {
            "hidden_size": self.width,
            layers: self.num_layers,
            heads: self.num_heads,
            # older files state another one
            "intermediate_size": prod(self.shape("v.blk.0.ffn_down.weight")) // self.width,
            "patch_size": self.patch,
        }

    def image_size(self) -> dict[str, int]:
        """Return height and width, in pixels, of the images that the encoder reads."""
        side = self.positive("vision.image_size")
        return {"height": side, "width": side}

    def settings(self, processor: str, **more: Any) -> dict[str, Any]:
        """Return the settings of an image processor."""
        found: dict[str, Any] = {"image_processor_type": f"{processor}ImageProcessor"}
        for name in ("image_mean", "image_std"):
            numbers = self.array(f"vision.{name}") or []
            if len(numbers) != 3 or not all(isinstance(each, float) for each in numbers):
                raise self.error(f"vision.{name}", "three numbers")
            found[name] = numbers
        return {**found, **more}
