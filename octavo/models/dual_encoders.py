"""CLIP and SigLIP, which make vectors of one space of a text or of an image: a text model beside an encoder of images.

An image is a prompt of its own, of one token, whose vector the encoder makes; what the text model computes for that
token is not used.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from octavo.attention.metadata import IntermediateTensors, ModelInput, NotedStates
from octavo.config.checkpoint import Checkpoint
from octavo.distributed.mesh import Mesh
from octavo.layers.elementwise import OPERATOR_OF
from octavo.layers.linear import ColumnLinear
from octavo.layers.norm import LayerNorm
from octavo.models.blocks import GatedDecoder, PlainMLP
from octavo.models.config import DecoderConfig
from octavo.models.vision import ImageReader


@dataclass(frozen=True, kw_only=True)
class DualConfig(DecoderConfig):
    """vector_size: elements of the vectors of texts and images."""

    vector_size: int


class DualReader(ImageReader):
    """A text model with the encoder of images, which transformers' class has."""

    IGNORED = (*ImageReader.IGNORED, r"logit_(scale|bias)")
    UNUSED = ("text_projection", "logit_scale", "logit_bias")

    @property
    def encoding_size(self) -> int:
        """Width of the vectors that `encode` makes."""
        size: int = self.config.vector_size  # type: ignore[attr-defined]
        return size

    def forward(self, batch: ModelInput) -> Tensor | IntermediateTensors | NotedStates:
        return super(ImageReader, self).forward(batch)


class CLIPModel(GatedDecoder):
    """CLIP: learned positions, plain MLPs, a causal mask, and the vector of the last token, projected. Source:
    https://arxiv.org/abs/2103.00020."""

    PREFIXES = ("text_model.",)
    NAMES = {
        r"^text_model\.embeddings\.token_embedding\.": "text_model.embed_tokens.",
        r"^text_model\.embeddings\.position_embedding\.": "text_model.embed_positions.",
        r"^text_model\.encoder\.layers\.": "text_model.layers.",
        r"^text_model\.final_layer_norm\.": "text_model.norm.",
        r"^(text_model\..*)\.layer_norm1\.": r"\1.input_layernorm.",
        r"^(text_model\..*)\.layer_norm2\.": r"\1.post_attention_layernorm.",
        r"^(text_model\..*)\.out_proj\.": r"\1.o_proj.",
        r"^(text_model\..*)\.mlp\.fc1\.": r"\1.mlp.up_proj.",
        r"^(text_model\..*)\.mlp\.fc2\.": r"\1.mlp.down_proj.",
        r"^text_model\.head\.": "text_projection.",
    }
    IGNORED = (r"logit_(scale|bias)", r".*\.position_ids")
    HAS_BIAS: ClassVar[bool] = False
    """Whether the projection has a bias."""

    @classmethod
    def read(cls, c: Checkpoint) -> DualConfig:
        return DualConfig.common(
            c,
            vector_size=cls.vector_size(c),
            rope=None,
            windows=(),
            norm=LayerNorm,
            norm_eps=c.positive_float("layer_norm_eps", 1e-5),
            position_offset=0,
            activation=c.expect("hidden_act", "quick_gelu", *OPERATOR_OF),
            mlp=PlainMLP,
            bias=True,
            mlp_bias=True,
            tied=False,
            has_head=False,
        )

    @classmethod
    def vector_size(cls, c: Checkpoint) -> int:
        """Return the elements of vectors. Raises CheckpointError."""
        return c.stored.positive("projection_dim", 512)

    def __init__(self, c: DualConfig, mesh: Mesh) -> None:
        super().__init__(c, mesh)
        single = Mesh.single()  # small: whole on every rank
        self.text_projection = ColumnLinear(c.hidden_size, c.vector_size, single, bias=self.HAS_BIAS)
        self.need_one_stage("the vectors of images go around the layers of this model, which are to be on one rank")

    def _embed_tokens(self, batch: ModelInput) -> Tensor:
        assert self.embed_tokens is not None, "only the first stage embeds tokens"
        return self.embed(self.embed_tokens(batch.token_ids), batch)

    def forward(self, batch: ModelInput) -> Tensor | IntermediateTensors | NotedStates:
        """Return the vectors [tokens, vector_size], those of images as their encoder made them."""
        hidden = super().forward(batch)
        assert isinstance(hidden, Tensor), "there is one stage, and no head reads streams"
        made: Tensor = self.text_projection(hidden)
        return made if batch.embeddings is None else batch.embeddings.put_into(made)


class SiglipModel(CLIPModel):
    """SigLIP: CLIP without a causal mask, whose texts are filled up with padding. Source:
    https://arxiv.org/abs/2303.15343."""

    HAS_BIAS = True

    @classmethod
    def vector_size(cls, c: Checkpoint) -> int:
        return c.positive("projection_size", c.positive("hidden_size"))
