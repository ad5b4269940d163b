"""Decoders whose blocks are joined by hyper-connections: the layer, and the stack of these layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from octavo.attention.metadata import ModelInput
from octavo.config.checkpoint import Checkpoint
from octavo.distributed.mesh import Mesh
from octavo.errors import ConfigError
from octavo.layers.elementwise import Elementwise
from octavo.layers.hyper import Connection, HyperConnection, HyperHead, StreamSizes
from octavo.models.blocks import GatedDecoder, stream_norm
from octavo.models.config import DecoderConfig


@dataclass(frozen=True, kw_only=True)
class StreamsConfig(DecoderConfig):
    """Adds the residual streams."""

    streams: StreamSizes


def read_streams(c: Checkpoint, norm_eps: float) -> StreamSizes:
    """Return the streams of a config. Raises CheckpointError."""
    rounds, eps = c.positive("hc_sinkhorn_iters", 20), c.positive_float("hc_eps", 1e-6)
    return StreamSizes(c.positive("hc_mult", 4), c.positive("hidden_size"), rounds, eps, norm_eps)


class HyperLayer(nn.Module):
    """Attention and MLP between streams, each behind a norm. `carries_residual` is False."""

    def __init__(self, c: Any, attention: nn.Module, mlp: nn.Module) -> None:
        """c: a `StreamsConfig`."""
        super().__init__()
        self.attn_hc, self.ffn_hc = self.connection(c), self.connection(c)
        self.input_layernorm, self.post_attention_layernorm = stream_norm(c), stream_norm(c)
        self.self_attn, self.mlp = attention, mlp

    def forward(self, x: Tensor, residual: None, batch: ModelInput) -> tuple[Tensor, None]:
        """Return (the streams [tokens, streams · hidden], None)."""
        stream, mixing = self.attn_hc(x)
        x = self.attn_hc.join(x, self.self_attn(self.input_layernorm(stream), batch), mixing)
        stream, mixing = self.ffn_hc(x)
        return self.ffn_hc.join(x, self.feed_forward(self.post_attention_layernorm(stream), batch), mixing), None

    def connection(self, c: Any) -> Connection:
        """Make the module that joins a block and the streams."""
        return HyperConnection(c.streams)

    def feed_forward(self, x: Tensor, batch: ModelInput) -> Tensor:
        """x [tokens, hidden], one normalised stream, → [tokens, hidden]."""
        out: Tensor = self.mlp(x)
        return out


class StreamsDecoder(GatedDecoder):
    """A stack of these layers; behind them `hc_head` makes one stream of all."""

    LAST_STAGE = (*GatedDecoder.LAST_STAGE, "hc_head")
    HEAD: ClassVar[type[nn.Module]] = HyperHead
    """Makes `hc_head`."""
    carries_residual = False

    def __init__(
        self,
        c: Any,
        mesh: Mesh,
        attention: Callable[[int], nn.Module] | None = None,
        mlp: Callable[[int], nn.Module] | None = None,
    ) -> None:
        """c: a `StreamsConfig`. attention, mlp: as of `GatedDecoder`."""
        super().__init__(c, mesh, attention, mlp)
        self.hc_head = self.make_head(c) if self.is_last else None
        self._streams: StreamSizes = c.streams
        self.copies = Elementwise("repeated_streams", c.streams.count)

    def make_head(self, c: Any) -> nn.Module:
        """Make `hc_head` from a `StreamsConfig`."""
        return self.HEAD(c.streams)

    @property
    def received_size(self) -> int | None:
        """Width of what each step receives beside tokens; None for nothing."""
        return None if self.is_first else self._streams.width

    def note_layers(self, layers: Iterable[int]) -> None:
        raise ConfigError("speculative_config: a head reads one stream of its model, and this model has several")

    def begin(self, batch: ModelInput) -> tuple[Tensor, Tensor | None]:
        """Return the streams [tokens, streams · hidden], which all hold the embeddings."""
        streams: Tensor = self.copies(super().begin(batch)[0])
        return streams, None

    def normalize(self, x: Tensor, residual: Tensor | None) -> Tensor:
        """Return the norm of one stream [tokens, hidden]."""
        assert self.hc_head is not None, "only the last stage has the head"
        return super().normalize(self.hc_head(x), None)
