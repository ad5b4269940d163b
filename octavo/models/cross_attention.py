"""Attention to the output of an encoder, which layers read through caches."""

from __future__ import annotations

from torch import Tensor, nn

from octavo.attention.metadata import ModelInput
from octavo.distributed.mesh import Mesh
from octavo.layers.attention import CrossAttention
from octavo.layers.heads import Heads
from octavo.layers.linear import HeadsLinear, joined_linear
from octavo.models.config import DecoderConfig


class EncoderAttention(nn.Module):
    """Attention to an encoder's vectors, without positions, behind norms of query and key heads where there are any."""

    def __init__(self, c: DecoderConfig, mesh: Mesh, norms: tuple[nn.Module, nn.Module] | None = None) -> None:
        super().__init__()
        queries = Heads(c.heads.query, c.heads.query, c.heads.dim)
        self.query = HeadsLinear(c.hidden_size, queries, mesh, reads=("q_proj",), bias=c.qkv_bias)
        self.key_value = HeadsLinear(
            c.hidden_size, c.heads, mesh, reads=("k_proj", "v_proj"), bias=c.qkv_bias, unbiased=c.qkv_unbiased
        )
        self.q_norm, self.k_norm = norms or (nn.Identity(), nn.Identity())
        self.attention = CrossAttention(c.heads.share(mesh))
        self.o_proj = joined_linear(c.heads.q_size, c.hidden_size, mesh, bias=c.out_bias)

    def store(self, batch: ModelInput) -> None:
        """Write the keys and values of what is encoded in this step."""
        for each in batch.encoded:  # one by one: the bits of one do not depend on others
            with batch.products_of(each):
                k, v = self.key_value(each.states)
            self.attention.store(self.k_norm(k), v, each.written, batch)

    def forward(self, x: Tensor, batch: ModelInput) -> Tensor:
        """x [tokens that attend, hidden] → the same shape."""
        (q,) = self.query(x)
        return self.o_proj(self.attention.attend(self.q_norm(q), batch))
