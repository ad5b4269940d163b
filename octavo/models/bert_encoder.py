"""BERT, of which most encoders are made: learned positions and types, norms behind attention and MLP.

A prompt is computed whole in one step, and nothing of it is kept: all layers write their keys and values to one cache.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from octavo.attention.metadata import ModelInput
from octavo.config.checkpoint import Checkpoint
from octavo.distributed.mesh import Mesh
from octavo.errors import UnsupportedModel
from octavo.layers.disentangled import RelativePlaces
from octavo.layers.distance import DistanceAttention, DistanceBiases
from octavo.layers.elementwise import OPERATOR_OF, addition
from octavo.layers.embedding import Embedding
from octavo.layers.norm import LayerNorm
from octavo.models.blocks import GatedDecoder, LateNormOfSumLayer, PlainMLP, RotaryAttention
from octavo.models.encoder_parts import ClassifierHead, DisentangledAttention, EncoderConfig, LabelHead, MaskedHead


class Encoder(GatedDecoder):
    """The parts that the encoders share. NAMES: patterns of stored names, and ours."""

    # heads for other tasks, and positions that older files carry along
    IGNORED: ClassVar[tuple[str, ...]] = (
        r"embeddings\.position_ids",
        r"(cls|lm_head|score|decoder|masked_head)\..*",
    )

    def __init__(self, c: EncoderConfig, mesh: Mesh) -> None:
        start, count = (width // c.heads.dim for width in c.heads.query_share(mesh))
        biases = None if c.biases is None else c.biases(slice(start, start + count))

        def attention(index: int) -> nn.Module:
            if isinstance(biases, RelativePlaces):
                made: RotaryAttention = DisentangledAttention(c, mesh, index, biases)
            else:
                made = RotaryAttention(c, mesh, index)
            if isinstance(biases, DistanceBiases):
                made.attend = DistanceAttention(made.attend.heads, biases)
            made.attend.shares_cache_of = 0 if index else None
            return made

        super().__init__(c, mesh, attention=attention)
        self.distance_biases = biases
        self.embed_types = Embedding(c.num_types, c.hidden_size) if c.num_types else None
        self.embed_tasks = Embedding(c.num_tasks, c.hidden_size) if c.num_tasks else None
        self.add_types = addition()
        self.embed_norm = c.norm(c.hidden_size, c.norm_eps)
        self.encoder_config = c
        self._first_types: list[Tensor] = []
        """Zeros for the tokens of a step, each tensor longer than the one before it."""

    def add_scores(self, num_labels: int, head: str = "classifier") -> None:
        if head == "vocabulary":
            raise UnsupportedModel(
                f"{type(self).__name__} with a value for each token of the vocabulary is not implemented"
            )
        made = LabelHead if head == "token" and not self.encoder_config.is_head_normed else ClassifierHead
        self.score = made(self.encoder_config, num_labels)

    def embed(self, x: Tensor, batch: ModelInput) -> Tensor:
        """Add the embeddings of types to those that are embedded further."""
        if self.embed_types is not None:
            x = self.add_types(x, self.embed_types(self._types(batch)))
        if self.embed_tasks is not None:
            x = self.add_types(x, self.embed_tasks(self._zeros(batch)))
        return super().embed(x, batch)

    def _types(self, batch: ModelInput) -> Tensor:
        if batch.token_types is not None and self.encoder_config.num_types > 1:
            return batch.token_types
        return self._zeros(batch)

    def _zeros(self, batch: ModelInput) -> Tensor:
        count, device = len(batch.token_ids), batch.token_ids.device
        longest = self._first_types[-1] if self._first_types else batch.token_ids[:0]
        if len(longest) < count or longest.device != device:
            # recorded steps go on reading the shorter ones, so that they stay
            longest = torch.zeros(max(count, 2 * len(longest)), dtype=torch.int64, device=device)
            self._first_types.append(longest)
        return longest[:count]


class BertEncoder(Encoder):
    """BERT: learned positions and types, norms behind attention and MLP. Source: https://arxiv.org/abs/1810.04805."""

    NAMES = {
        r"^(bert|roberta)\.": "",
        r"\bgamma$": "weight",
        r"\bbeta$": "bias",
        r"^embeddings\.word_embeddings": "embed_tokens",
        r"^embeddings\.position_embeddings": "embed_positions",
        r"^embeddings\.token_type_embeddings": "embed_types",
        r"^embeddings\.LayerNorm": "embed_norm",
        r"^encoder\.layer\.": "layers.",
        r"\.attention\.self\.(query|key|value)\.": r".self_attn.\1.",
        r"\.attention\.output\.dense": ".self_attn.o_proj",
        r"\.attention\.output\.LayerNorm": ".input_layernorm",
        r"\.intermediate\.dense": ".mlp.up_proj",
        r"\.output\.dense": ".mlp.down_proj",
        r"\.output\.LayerNorm": ".post_attention_layernorm",
        r"^pooler\.dense": "score.dense",
        r"^cls\.predictions\.transform\.dense|^lm_head\.dense": "masked_head.dense",
        r"^cls\.predictions\.transform\.LayerNorm|^lm_head\.layer_norm": "masked_head.norm",
        r"^(cls\.predictions|lm_head)\.bias": "masked_head.decoder.bias",
        r"^(cls\.predictions|lm_head)\.decoder\.bias": "masked_head.copy.bias",
        r"^(cls\.predictions|lm_head)\.decoder\.weight": "lm_head.weight",
        r"^classifier\.(weight|bias)": r"score.classifier.\1",
        r"^classifier\.dense": "score.dense",
        r"^classifier\.out_proj": "score.classifier",
    }
    carries_residual = False

    @classmethod
    def read(cls, c: Checkpoint, **own: Any) -> EncoderConfig:
        c.expect("position_embedding_type", "absolute")
        c.expect("is_decoder", False)
        given = {
            "position_offset": 0,
            "num_types": own["num_types"] if "num_types" in own else c.positive("type_vocab_size", 2),
            "norm": LayerNorm,
            "norm_eps": c.positive_float("layer_norm_eps", 1e-12),
            "bias": True,
            "mlp_bias": True,
            "qkv_reads": ("query", "key", "value"),
            "activation": own.get("activation") or c.expect("hidden_act", *OPERATOR_OF, default="gelu"),
            "mlp": PlainMLP,
            "layer": LateNormOfSumLayer,
        }
        return EncoderConfig.encoder(c, **given | own)

    def __init__(self, c: EncoderConfig, mesh: Mesh) -> None:
        super().__init__(c, mesh)
        self.norm = None
        self.masked_head: MaskedHead | None = None

    def normalize(self, x: Tensor, residual: Tensor | None) -> Tensor:
        """Return the output of the last layer, which ends in a norm."""
        return x

    def add_scores(self, num_labels: int, head: str = "classifier") -> None:
        if head != "vocabulary":
            return super().add_scores(num_labels, head)
        self.masked_head = MaskedHead(self.encoder_config)
        return None

    def compute_logits(self, hidden: Tensor) -> Tensor:
        assert self.masked_head is not None, "the model has no head for tokens"
        return self.masked_head.decoder(super().compute_logits(self.masked_head(hidden)))
