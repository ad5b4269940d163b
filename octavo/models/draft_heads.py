"""Heads that guess the token after the next one from a model's hidden states: EAGLE and EAGLE-3.

A head is a decoder of one layer. At each position it reads what the model (or the head itself, behind its own guesses)
has made of the tokens up to there, and the embedding of the next token. Sources: https://arxiv.org/abs/2401.15077,
https://arxiv.org/abs/2503.01840.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from octavo.attention.metadata import ModelInput
from octavo.config.checkpoint import Checkpoint
from octavo.distributed.mesh import Mesh
from octavo.layers.elementwise import addition
from octavo.layers.embedding import Embedding
from octavo.layers.linear import ColumnLinear
from octavo.models.blocks import GatedMLP, RotaryAttention, stream_norm
from octavo.models.config import DecoderConfig
from octavo.models.decoder import DecoderStack
from octavo.models.weight_files import checkpoint_tensors

NUM_NOTED = 3
"""Layers of the model whose streams an EAGLE-3 head reads."""


@dataclass(frozen=True, kw_only=True)
class HeadConfig(DecoderConfig):
    """Adds what a head shares with its model. vocab_size: tokens that the head itself has logits of."""

    embedded_tokens: int
    """Rows of the token embedding."""
    has_embedding: bool
    """Whether the head has a token embedding of its own."""
    fc_bias: bool
    noted_layers: tuple[int, ...] | None = None
    """Layers of the model whose streams the head reads, as they are before them; None for the usual ones."""

    @classmethod
    def read_head(cls, c: Checkpoint, **own: Any) -> HeadConfig:
        """Read the config of a head. Raises CheckpointError or UnsupportedModel."""
        c.expect("num_hidden_layers", 1)
        names = {tensor.name.removeprefix("model.") for tensor in checkpoint_tensors(c)}
        return cls.common(
            c,
            bias=c.bool("attention_bias", False),
            mlp_bias=c.bool("mlp_bias", False),
            windows=(),
            tied=False,
            embedded_tokens=c.positive("vocab_size"),
            has_embedding="embed_tokens.weight" in names,
            fc_bias="fc.bias" in names,
            **own,
        )


class DraftHead(DecoderStack):
    """A head with the part of the model that it uses, which `lend` gives it.

    Its input holds the states [tokens, states_size] as `received`, and the ids of the tokens behind each. It returns
    its stream [tokens, hidden], which are the states behind a guess.
    """

    config: HeadConfig

    def __init__(self, c: HeadConfig, mesh: Mesh, layer: nn.Module) -> None:
        super().__init__(c, mesh, lambda _: layer)
        self.embed_tokens = Embedding(c.embedded_tokens, c.hidden_size) if c.has_embedding else None
        self.add = addition()
        self._lent: tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]] | None = None

    @property
    def states_size(self) -> int:
        """Width of the states that the model gives."""
        return self.config.hidden_size

    @property
    def received_size(self) -> int | None:
        return self.states_size

    def lend(self, model: DecoderStack) -> None:
        """Use the embedding and the head of the loaded model where this one has none of its own."""
        assert model.embed_tokens is not None
        mesh, count = model.embed_tokens.mesh, self.config.vocab_size

        def compute_logits(hidden: Tensor) -> Tensor:
            return mesh.gather(model.compute_logits(hidden))[:, :count].contiguous()

        self._lent = model.embed_tokens, compute_logits

    def embedded(self, batch: ModelInput) -> Tensor:
        """Return the embeddings of the next tokens, [tokens, hidden]."""
        if self.embed_tokens is not None:
            own: Tensor = self.embed_tokens(batch.token_ids)
            return own
        if self._lent is None:  # a dry run
            return torch.empty(len(batch.token_ids), self.config.hidden_size, dtype=_states(batch).dtype, device="meta")
        return self._lent[0](batch.token_ids)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Return float32 logits [rows, tokens] of the model's head behind streams of this one, [rows, hidden]."""
        if self._lent is None:  # a dry run
            return torch.empty(len(hidden), self.config.vocab_size, device="meta")
        return self._lent[1](hidden)


def _states(batch: ModelInput) -> Tensor:
    assert batch.received is not None, "a head reads hidden states"
    return batch.received.hidden


class _EagleLayer(nn.Module):
    """Attention and MLP, without a norm before attention."""

    def __init__(self, c: HeadConfig, mesh: Mesh) -> None:
        super().__init__()
        self.self_attn = RotaryAttention(c, mesh, 0)
        self.post_attention_layernorm = stream_norm(c)
        self.mlp = GatedMLP(c, mesh)

    def forward(self, x: Tensor, batch: ModelInput) -> tuple[Tensor, Tensor]:
        x, residual = self.post_attention_layernorm.add(self.self_attn(x, batch), x)
        return self.mlp(x), residual


class EagleHead(DraftHead):
    """EAGLE: embedding and last hidden state become one vector, and one layer without a final norm makes the next."""

    IGNORED = (*DecoderStack.IGNORED, r"lm_head\.weight")

    @classmethod
    def read(cls, c: Checkpoint) -> HeadConfig:
        return HeadConfig.read_head(c, has_head=False)

    def __init__(self, c: HeadConfig, mesh: Mesh) -> None:
        super().__init__(c, mesh, _EagleLayer(c, mesh))
        self.norm = None
        self.fc = ColumnLinear(2 * c.hidden_size, c.hidden_size, mesh, bias=c.fc_bias)

    def forward(self, batch: ModelInput) -> Tensor:
        x = self.fc(torch.cat((self.embedded(batch), _states(batch)), 1))
        x, residual = self.layers["0"](x, batch)
        stream: Tensor = self.add(x, residual)
        return stream


class _Eagle3Layer(nn.Module):
    """Attention over embedding and state side by side, each behind a norm; the state is the stream."""

    def __init__(self, c: HeadConfig, mesh: Mesh) -> None:
        super().__init__()
        self.input_layernorm, self.hidden_norm = stream_norm(c), stream_norm(c)
        self.self_attn = RotaryAttention(replace(c, hidden_size=2 * c.hidden_size), mesh, 0)
        self.self_attn.o_proj = ColumnLinear(c.heads.q_size, c.hidden_size, mesh, bias=c.out_bias)
        self.post_attention_layernorm = stream_norm(c)
        self.mlp = GatedMLP(c, mesh)

    def forward(self, x: Tensor, embedded: Tensor, batch: ModelInput) -> tuple[Tensor, Tensor]:
        both = torch.cat((self.input_layernorm(embedded), self.hidden_norm(x)), 1)
        y, residual = self.post_attention_layernorm.add(self.self_attn(both, batch), x)
        return self.mlp(y), residual


class Eagle3Head(DraftHead):
    """EAGLE-3: the streams of three layers become one vector; the head has logits of its own, of some of the tokens."""

    IGNORED = (*DecoderStack.IGNORED, "d2t", "t2d")

    @classmethod
    def read(cls, c: Checkpoint) -> HeadConfig:
        eagle = c.section("eagle_config")
        noted = None if eagle is None else eagle.values.get("eagle_aux_hidden_state_layer_ids")
        if eagle is not None and noted is not None and (not isinstance(noted, list) or len(noted) != NUM_NOTED):
            raise eagle.error("eagle_aux_hidden_state_layer_ids", f"{NUM_NOTED} layers")
        size = c.optional_positive("draft_vocab_size") or c.positive("vocab_size")
        return HeadConfig.read_head(c, vocab_size=size, noted_layers=None if noted is None else tuple(noted))

    def __init__(self, c: HeadConfig, mesh: Mesh) -> None:
        super().__init__(c, mesh, _Eagle3Layer(c, mesh))
        self.fc = ColumnLinear(NUM_NOTED * c.hidden_size, c.hidden_size, mesh, bias=c.fc_bias)

    @property
    def states_size(self) -> int:
        return NUM_NOTED * self.config.hidden_size

    def own_name(self, name: str) -> str:
        return name.replace("midlayer.", "layers.0.", 1)

    def forward(self, batch: ModelInput) -> Tensor:
        states = _states(batch)
        # behind a guess the head reads its own stream
        x = self.fc(states) if states.shape[1] == self.states_size else states
        x, residual = self.layers["0"](x, self.embedded(batch), batch)
        stream: Tensor = self.add(x, residual)
        return stream

    def compute_logits(self, hidden: Tensor) -> Tensor:
        assert self.norm is not None
        return DecoderStack.compute_logits(self, self.norm(hidden))


def usual_layers(num_layers: int) -> tuple[int, ...]:
    """Return the layers before which an EAGLE-3 head reads the stream of a model with so many."""
    return 2, num_layers // 2, num_layers - 3


def target_ids(c: Checkpoint) -> Tensor | None:
    """Return for each token of a head's logits its id in the model, int64 [tokens]; None where the ids are the same."""
    for tensor in checkpoint_tensors(c):
        if tensor.name == "d2t":
            offsets = tensor.values(((),)).to(torch.int64)
            return offsets + torch.arange(len(offsets))
    return None
