"""Molmo 2: Qwen3 or OLMo 2 beside an encoder of images whose vectors are added to the embedding of their token.

Queries, keys and values are one stored tensor, as are both halves of the MLP, of which `up` comes first. The last
tokens of the vocabulary have embeddings in a tensor of their own, and no logits. Source: https://arxiv.org/abs/2601.10611.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

from torch import Tensor

from octavo.attention.metadata import ModelInput
from octavo.config.checkpoint import Checkpoint
from octavo.distributed.mesh import Mesh
from octavo.layers.embedding import ExtendedEmbedding, LMHead
from octavo.layers.linear import UpGateLinear
from octavo.models.blocks import GatedDecoder, GatedMLP, LateNormLayer, head_norms, width_norms
from octavo.models.config import DecoderConfig
from octavo.models.fields import Read, chosen, fields
from octavo.models.sparse import known_tensors

_NORMS: Final = {"qwen3": head_norms, "olmo": width_norms}
_PATCH: Final = 151_938


@dataclass(frozen=True, kw_only=True)
class Molmo2Config(DecoderConfig):
    """num_added: tokens behind those of the head. num_first: rows of the first of both tables of embeddings. patch_id:
    the token that stands for one vector of an image."""

    num_added: int
    num_first: int
    patch_id: int

    @classmethod
    def added(cls, c: Checkpoint, **own: Any) -> Molmo2Config:
        """Read it. Raises CheckpointError or UnsupportedModel."""
        total, num_added = c.positive("vocab_size"), c.count("additional_vocab_size", 128)
        # transformers writes two tables of half the rows each
        tables = (each.shape for each in known_tensors(c) if each.name.endswith("wte.embedding"))
        first = next((shape[0] for shape in tables if shape), None)
        made: Molmo2Config = cls.common(
            c,
            num_added=num_added,
            num_first=total - num_added if first is None else min(first, total),
            patch_id=c.stored.positive("image_patch_id", _PATCH),
            **own,
        )
        if made.patch_id >= made.vocab_size:
            raise c.stored.error("image_patch_id", f"a token below {made.vocab_size:,}")
        scaled = c.values.get("rope_scaling_layers")
        if scaled is None or made.rope is None:
            return made
        layers = range(made.num_layers)
        if not isinstance(scaled, list) or not all(type(each) is int and each in layers for each in scaled):
            raise c.error("rope_scaling_layers", f"numbers of layers, 0 to {layers[-1]}")
        plain = replace(made.rope, scaling=None)
        return replace(made, ropes=tuple(made.rope if layer in scaled else plain for layer in layers))


class UpFirstMLP(GatedMLP):
    """A gated MLP whose two halves are one stored tensor, `up` first."""

    def __init__(self, c: DecoderConfig, mesh: Mesh) -> None:
        super().__init__(c, mesh)
        self.gate_up_proj = UpGateLinear(c.hidden_size, c.intermediate_size, mesh, reads=())


class Molmo2ForConditionalGeneration(GatedDecoder):
    """The text model."""

    PREFIXES = ("model.transformer.", "model.")
    RENAMED = {
        "embed_tokens": "wte",
        "layers": "blocks",
        "norm": "ln_f",
        **dict.fromkeys(("input_layernorm", "attention_output_norm"), "attn_norm"),
        "qkv_proj": "att_proj",
        "o_proj": "attn_out",
        **dict.fromkeys(("post_attention_layernorm", "mlp_output_norm"), "ff_norm"),
        "gate_up_proj": "ff_proj",
        "down_proj": "ff_out",
    }
    COMMON = Molmo2Config.added
    EXPECTED = fields(tie_word_embeddings=False, use_qk_norm=True)
    FIELDS = fields(
        norm_eps=Read(lambda c: c.positive_float("rms_norm_eps", c.positive_float("layer_norm_eps", 1e-6))),
        qkv_bias=Read(lambda c: c.bool("attention_bias", c.bool("qkv_bias", False))),
        qkv_reads=(),
        qk_norms=Read(lambda c: _NORMS[c.expect("qk_norm_type", *_NORMS, default="qwen3")]),
        layer=chosen("norm_after", False, LateNormLayer),
        mlp=UpFirstMLP,
        has_whole_spans=True,
    )
    config: Molmo2Config

    def __init__(self, c: Molmo2Config, mesh: Mesh) -> None:
        super().__init__(c, mesh)
        self.carries_residual = c.layer is None
        if self.embed_tokens is not None:
            self.embed_tokens = ExtendedEmbedding(c.vocab_size, c.hidden_size, mesh, num_first=c.num_first)
        if self.lm_head is not None:
            self.lm_head = LMHead(c.hidden_size, c.vocab_size, mesh, num_unstored=c.num_added)

    def embed(self, x: Tensor, batch: ModelInput) -> Tensor:
        """Add the embedding of their token to vectors of images; those that a prompt brings stay as they are."""
        if batch.embeddings is None:
            return x
        assert self.embed_tokens is not None, "only the first stage embeds tokens"
        places = batch.embeddings.token_indices
        ids = batch.token_ids[places]
        own = self.embed_tokens(ids) * (ids == self.config.patch_id)[:, None]
        return x.index_add(0, places, own)
