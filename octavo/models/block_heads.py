"""Heads that guess a block of tokens in one pass: DFlash and DSpark. Source: https://arxiv.org/abs/2602.06036.

The keys and values of known tokens are made of the model's streams at their positions. Behind them stands the block:
the last known token, and masks, which all see each other. Their states give the guesses; those of DSpark follow from
the token before, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from torch import Tensor, nn

from octavo.attention.metadata import ModelInput
from octavo.config.checkpoint import Checkpoint
from octavo.config.section import Section
from octavo.distributed.mesh import Mesh
from octavo.layers.embedding import Embedding
from octavo.layers.linear import ColumnLinear
from octavo.layers.routers import ExactLinear
from octavo.models.blocks import GatedLayer, GatedMLP, RotaryAttention, head_norms, stream_norm
from octavo.models.decoder import DecoderStack
from octavo.models.draft_heads import DraftHead, HeadConfig, mask_token, tensor_names

_USUAL_BLOCK = 16


@dataclass(frozen=True, kw_only=True)
class BlockConfig(HeadConfig):
    """Adds the sizes of a block, and the streams of the model that are read."""

    noted_layers: tuple[int, ...]
    """Layers of the model before which its streams are read."""
    target_size: int
    """Width of the model's streams."""
    mask_token: int
    block_size: int
    """Tokens of a block, the last known one included."""
    is_anchor_first: bool
    """Whether the last known token's state gives the first guess, and not that of the first mask."""

    @classmethod
    def read_block(cls, c: Checkpoint, **own_fields: Any) -> Self:
        """Read the config of a head; `own_fields` adds or replaces fields. Raises CheckpointError or
        UnsupportedModel."""
        names, own = tensor_names(c), c.section("dflash_config") or c
        layers, name = _stated((own, c), "target_layer_ids", "dspark_target_layer_ids")
        behind, noted = layers.values.get(name), c.values.get("aux_hidden_state_layer_ids")
        if isinstance(behind, list) and all(type(each) is int for each in behind):
            noted = [each + 1 for each in behind]  # they count the streams behind layers
        if not isinstance(noted, list) or not noted or not all(type(each) is int for each in noted):
            raise own.error("target_layer_ids", "a list of layers")
        return cls.read_head(
            c,
            names,
            vocab_size=c.optional_positive("draft_vocab_size") or c.positive("vocab_size"),
            has_head="lm_head.weight" in names,
            qk_norms=head_norms if "layers.0.self_attn.q_norm.weight" in names else None,
            is_bidirectional=not own.bool("causal", False),
            noted_layers=tuple(noted),
            target_size=c.optional_positive("target_hidden_size") or c.positive("hidden_size"),
            mask_token=_mask_token(c, own),
            block_size=c.optional_positive("block_size") or c.positive("dspark_block_size", _USUAL_BLOCK),
            **{"is_anchor_first": own.bool("sample_from_anchor", False), **own_fields},
        )


def _mask_token(c: Checkpoint, own: Section) -> int:
    section, name = _stated((own, c), "mask_token_id", "dspark_noise_token_id")
    return mask_token(section, c.positive("vocab_size"), name)


def _stated(sections: Sequence[Section], *names: str) -> tuple[Section, str]:
    """Return the first section and name that have a value; the first of both where none has."""
    pairs = [(section, name) for section in sections for name in names]
    return next((each for each in pairs if each[0].values.get(each[1]) is not None), pairs[0])


class BlockHead(DraftHead):
    """DFlash. Its input has the model's streams as `received` where it only makes keys and values of known tokens;
    without them it is a block of each row."""

    config: BlockConfig
    IGNORED = (*DecoderStack.IGNORED, "d2t", "t2d")

    @classmethod
    def read(cls, c: Checkpoint) -> BlockConfig:
        return BlockConfig.read_block(c)

    def __init__(self, c: BlockConfig, mesh: Mesh) -> None:
        super().__init__(c, mesh, lambda index: GatedLayer(c, RotaryAttention(c, mesh, index), GatedMLP(c, mesh)))
        self.hidden_norm: nn.Module = stream_norm(c)
        self.fc = ColumnLinear(self.states_size, c.hidden_size, mesh, bias=c.fc_bias)

    @property
    def states_size(self) -> int:
        return len(self.config.noted_layers) * self.config.target_size

    def forward(self, batch: ModelInput) -> Tensor:
        """Return the streams of blocks [tokens, hidden]; for known tokens the inputs of keys and values, [tokens,
        hidden]."""
        residual: Tensor | None = None
        if batch.received is not None:
            known: Tensor = self.hidden_norm(self.fc(batch.received.hidden))
            layer: Any
            for layer in self.layers.values():
                layer.self_attn(known, batch)  # only the keys and values that it stores are needed
            return known
        x = self.embedded(batch)
        for layer in self.layers.values():
            x, residual = layer(x, residual, batch)
        return self.add(x, residual)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        assert self.norm is not None
        return super().compute_logits(self.norm(hidden))


@dataclass(frozen=True, kw_only=True)
class MarkovConfig(BlockConfig):
    """Adds the width of the vectors of tokens before a guess."""

    markov_rank: int


class MarkovHead(BlockHead):
    """DSpark: DFlash, with logits that the token before each guess changes. Its estimates of confidence are not read.

    Source: DeepSeek's releases for Qwen3.
    """

    config: MarkovConfig
    IGNORED = (*BlockHead.IGNORED, r"confidence_head\..*", "mask_embedding")

    @classmethod
    def read(cls, c: Checkpoint) -> MarkovConfig:
        c.expect("markov_head_type", "vanilla")
        is_first = c.bool("sample_from_anchor", c.values.get("speculators_model_type") is None)
        return MarkovConfig.read_block(c, is_anchor_first=is_first, markov_rank=c.positive("markov_rank"))

    def __init__(self, c: MarkovConfig, mesh: Mesh) -> None:
        super().__init__(c, mesh)
        parts = {"markov_w1": Embedding(c.embedded_tokens, c.markov_rank)}
        self.markov_head = nn.ModuleDict({**parts, "markov_w2": ExactLinear(c.markov_rank, c.vocab_size)})

    def logits_behind(self, states: Tensor, before: Tensor) -> Tensor:
        """Return float32 logits [rows, tokens] behind streams [rows, hidden] and the tokens before, int64 [rows]."""
        changes: Tensor = self.markov_head["markov_w2"](self.markov_head["markov_w1"](before))
        return self.compute_logits(states) + changes
