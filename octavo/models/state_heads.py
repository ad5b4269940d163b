"""Heads without attention that guess several tokens from one state of the model: Medusa, and MLP speculators.

Sources: https://arxiv.org/abs/2401.10774, https://arxiv.org/abs/2404.19124.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from octavo.attention.metadata import ModelInput
from octavo.config.checkpoint import Checkpoint
from octavo.core.model_shape import LayerCache
from octavo.distributed.mesh import Mesh
from octavo.layers.elementwise import Elementwise, activation, addition
from octavo.layers.embedding import Embedding, LMHead
from octavo.layers.heads import Heads
from octavo.layers.linear import ColumnLinear
from octavo.layers.norm import RMSNorm, UnscaledRMSNorm
from octavo.models.config import DecoderConfig
from octavo.models.decoder import DecoderStack

_EPS: Final = 1e-6


@dataclass(frozen=True, kw_only=True)
class StateHeadConfig(DecoderConfig):
    """The numbers of a head without attention. intermediate_size: width of the input of the last layer before
    logits."""

    most: int
    """The number of tokens that the head guesses."""
    depth: int = 0
    """Layers of a block of Medusa."""
    has_bias: bool = False
    """Whether the linear layers have biases."""
    is_shared: bool = False
    """Whether all guesses are made with the same weights, or in Medusa with the same last layer."""
    is_scaled: bool = False
    """Whether the state is normalised first."""

    def caches_of(self, layer: int, mesh: Mesh) -> Sequence[LayerCache]:
        return ()

    @classmethod
    def of(cls, c: Checkpoint, **own: Any) -> StateHeadConfig:
        """Read the keys of both kinds of heads, which have no attention. Raises CheckpointError."""
        return cls(
            num_layers=1,
            hidden_size=c.positive("hidden_size"),
            heads=Heads(1, 1, 1),
            vocab_size=c.positive("vocab_size"),
            max_positions=1,
            norm_eps=_EPS,
            tied=False,
            has_head=False,
            **own,
        )


class StateHead(DecoderStack):
    """A head that makes each guess in a stage of its own."""

    config: StateHeadConfig

    def __init__(self, c: StateHeadConfig, mesh: Mesh) -> None:
        super().__init__(c, mesh, lambda _: nn.Identity())
        self.norm = self.embed_tokens = None

    @property
    def received_size(self) -> int | None:
        return self.config.hidden_size

    @property
    def most(self) -> int:
        """The number of tokens that the head guesses."""
        return self.config.most

    def carried(self, features: Tensor, states: Tensor) -> Tensor:
        """Return the input of the next stage: the output of this one, or the model's states."""
        raise NotImplementedError

    def features(self, stage: int, states: Tensor, token_ids: Tensor) -> Tensor:
        """Return the output of a stage, [rows, width], from states [rows, width] and the tokens before its guess."""
        raise NotImplementedError

    def logits(self, stage: int, features: Tensor) -> Tensor:
        """Return float32 logits [rows, tokens] of a stage's output."""
        raise NotImplementedError

    def forward(self, batch: ModelInput) -> Tensor:
        assert batch.received is not None, "a head reads hidden states"
        return self.features(0, batch.received.hidden, batch.token_ids)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return self.logits(0, hidden)


class _Block(nn.Module):
    """Layers whose activations join the stream."""

    def __init__(self, c: StateHeadConfig) -> None:
        super().__init__()
        size = c.hidden_size
        self.layers = _stages(c.depth, lambda _: ColumnLinear(size, size, Mesh.single(), bias=c.has_bias))
        self.gate, self.add = Elementwise("gated_by_sigmoid"), addition()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers.values():
            y = layer(x)
            x = self.add(x, self.gate(y, y))  # its SiLU
        return x


class MedusaHead(StateHead):
    """Medusa, in the layout of vLLM's checkpoints: a block and a last layer for each guess."""

    PREFIXES = ("medusa_heads.",)
    REPLACED = {"lm_head.": "lm_heads.0."}

    @classmethod
    def read(cls, c: Checkpoint) -> StateHeadConfig:
        c.expect("truncated_vocab_size", c.positive("vocab_size"))
        return StateHeadConfig.of(
            c,
            intermediate_size=c.positive("hidden_size"),
            most=c.positive("num_heads"),
            depth=c.positive("num_hidden_layers", 1),
            has_bias=c.bool("medusa_fc_bias", False),
            is_shared=c.bool("original_lm_head", False),
        )

    def __init__(self, c: StateHeadConfig, mesh: Mesh) -> None:
        super().__init__(c, mesh)
        self.blocks = _stages(c.most, lambda _: _Block(c))
        num_heads = 1 if c.is_shared else c.most
        self.lm_heads = _stages(num_heads, lambda _: LMHead(c.hidden_size, c.vocab_size, Mesh.single()))

    def features(self, stage: int, states: Tensor, token_ids: Tensor) -> Tensor:
        return self.blocks[str(stage)](states)

    def carried(self, features: Tensor, states: Tensor) -> Tensor:
        return states

    def logits(self, stage: int, features: Tensor) -> Tensor:
        return _of(self.lm_heads, stage)(features)


class _ShiftedNorm(RMSNorm):
    """An `RMSNorm` to whose result a learned bias [dim] is added."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__(dim, eps)
        self.bias = nn.Parameter(torch.empty(dim), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.bias


class SpeculatorHead(StateHead):
    """An MLP speculator: each stage adds the embedding of the token before to the output of the last stage."""

    PREFIXES = ("speculator.",)

    @classmethod
    def read(cls, c: Checkpoint) -> StateHeadConfig:
        return StateHeadConfig.of(
            c,
            intermediate_size=c.optional_positive("inner_dim") or c.positive("hidden_size"),
            most=c.positive("n_predict"),
            is_shared=c.bool("tie_weights", False),
            is_scaled=c.bool("scale_input", False),
        )

    def __init__(self, c: StateHeadConfig, mesh: Mesh) -> None:
        super().__init__(c, mesh)
        inner, count, single = c.intermediate_size, 1 if c.is_shared else c.most, Mesh.single()
        self.emb = _stages(count, lambda _: Embedding(c.vocab_size, inner))
        # the first one reads the model's state, which may be of another width
        num_proj = min(2, c.most) if c.is_shared else c.most
        self.proj = _stages(num_proj, lambda i: ColumnLinear(inner if i else c.hidden_size, inner, single))
        self.ln = _stages(count, lambda _: _ShiftedNorm(inner, _EPS))
        self.head = _stages(count, lambda _: LMHead(inner, c.vocab_size, single))
        self.ln0 = UnscaledRMSNorm(c.hidden_size, _EPS) if c.is_scaled else None
        self.shrink = Elementwise("scaled", 0.5**0.5)
        kept = 0.5 ** (0.5 / c.most)
        self.weigh = Elementwise("scaled", ((1 - kept**2) * inner / 2) ** 0.5 / kept)
        self.act, self.add = activation("gelu"), addition()

    def owns(self, name: str) -> bool:
        part, _, rest = name.partition(".")
        stages = getattr(self, part, None)
        # weights that all stages share may be stored for each of them
        return not (
            self.config.is_shared and isinstance(stages, nn.ModuleDict) and rest.partition(".")[0] not in stages
        )

    def features(self, stage: int, states: Tensor, token_ids: Tensor) -> Tensor:
        if stage == 0 and self.ln0 is not None:
            states = self.shrink(self.ln0(states))
        embedded = self.weigh(_of(self.emb, stage)(token_ids))
        return self.act(_of(self.ln, stage)(self.add(_of(self.proj, stage)(states), embedded)))

    def carried(self, features: Tensor, states: Tensor) -> Tensor:
        return features

    def logits(self, stage: int, features: Tensor) -> Tensor:
        return _of(self.head, stage)(features)


def _stages(count: int, make: Callable[[int], nn.Module]) -> nn.ModuleDict:
    return nn.ModuleDict({str(stage): make(stage) for stage in range(count)})


def _of(stages: nn.ModuleDict, stage: int) -> Any:
    """Return the module of a stage; all stages after the last module share it."""
    return stages[str(min(stage, len(stages) - 1))]
