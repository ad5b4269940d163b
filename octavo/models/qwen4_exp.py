"""Qwen4-Exp: residual streams behind gates, the gated delta rule, attention to chosen tokens, and tables of n-grams.

Source: Qwen's releases.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, cast

import torch
from torch import Tensor, nn

from octavo.attention.metadata import ModelInput
from octavo.config.checkpoint import Checkpoint
from octavo.core.model_shape import Indexed, LayerCache
from octavo.distributed.mesh import Mesh
from octavo.layers.block_sparse import ChosenKeysAttention
from octavo.layers.compressed import Compression, OpenWindows, PoolChoice, PoolKeys
from octavo.layers.elementwise import Elementwise
from octavo.layers.hyper import MeanOfStreams, StreamSizes
from octavo.layers.layer import Binding, Layer
from octavo.layers.linear import ColumnLinear, joined_linear
from octavo.layers.ngrams import NgramSizes, NgramStreams, StreamNorms
from octavo.layers.norm import RMSNorm
from octavo.layers.recurrent import GatedDeltaNet, RecurrentSizes, SigmoidGatedNorm
from octavo.layers.rotary import Rotary
from octavo.models.blocks import attention_of, head_norms, qkv_linear
from octavo.models.hybrid import ATTENTION, RECURRENT, HybridConfig, delta_picks, read_delta_sizes, read_kinds
from octavo.models.sparse import NORMALIZED, has_tensor, read_shared_mixture, sparse_layers
from octavo.models.streams import StreamsConfig, StreamsDecoder
from octavo.ops.compressed import SmallQueries
from octavo.ops.ngrams import MOST_TOKENS

_MOST_TABLES: Final = 1024
_MOST_PARTS: Final = 1 << 14
"""Stored tensors of the tables of a layer."""


@dataclass(frozen=True, kw_only=True)
class Qwen4ExpConfig(HybridConfig, StreamsConfig):
    """Layers with a state, and attention to tokens that queries choose in the others."""

    choice: PoolChoice
    mixer_rank: int
    """Elements between the two products that make the gates of streams."""
    ngrams: NgramSizes | None
    ngram_layers: tuple[int, ...]
    """The layers with tables of n-grams."""
    is_gate_sigmoid: bool
    """Whether the gate behind the delta rule is a sigmoid, not SiLU."""

    def caches_of(self, layer: int, mesh: Mesh) -> Sequence[LayerCache]:
        if self.kinds[layer] != RECURRENT:
            heads, by = self.heads.share(mesh), self.choice
            keys = Indexed(heads.kv, heads.dim, 0, by.num_tokens)
            return (LayerCache(keys), *Compression(by.rate, by.size).caches())
        states = super().caches_of(layer, mesh)
        if self.ngrams is None or layer not in self.ngram_layers:
            return states
        return (*states, LayerCache(self.ngrams.state(self.streams.width)))


class StreamShares(Layer):
    """Shares of a block's output in each stream, from products with the streams, and the streams behind it."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self._count = count

    def forward(self, products: Tensor) -> Tensor:
        """products [tokens, streams] → float32 [tokens, streams], up to 2."""
        return self.ops.stream_weights(products.float(), self._scale, self._base, 0.0) * 2.0

    def join(self, x: Tensor, out: Tensor, shares: Tensor) -> Tensor:
        """Return x [tokens, streams · hidden] with shares of `out` [tokens, hidden]."""
        return self.ops.mixed_streams(x, out, shares, self._same.expand(len(x), -1, -1))

    def bind(self, binding: Binding) -> None:
        """Store the operators, and the numbers of a matrix that leaves streams as they are."""
        super().bind(binding)
        made = partial(torch.full, device=binding.device)
        self._scale, self._base = made((1,), 1.0 / self._count), made((self._count,), 0.0)
        self._same = torch.eye(self._count, device=binding.device)[None]


class StreamGates(nn.Module):
    """Makes a block's input from the streams: their mean, after all their elements are gated.

    writes: whether the block's output joins the streams. Every rank has all of it.
    """

    def __init__(self, sizes: StreamSizes, rank: int, *, writes: bool = True) -> None:
        super().__init__()
        reads, single = ["input_mix_weight_down", "block_inject_weight"], Mesh.single()
        self._widths = [rank, sizes.count] if writes else [rank]
        self.hc_norm = StreamNorms(sizes.count, sizes.dim, sizes.norm_eps)
        self.down = ColumnLinear(sizes.width, self._widths, single, reads=reads[: len(self._widths)])
        self.input_mix_weight_up = ColumnLinear(rank, sizes.width, single)
        self.scale, self.gate = Elementwise("scaled", 1.0 / sizes.count), Elementwise("gated_by_sigmoid")
        self.mean = MeanOfStreams(sizes)
        self.shares = StreamShares(sizes.count)

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        """x [tokens, streams · hidden] → the block's input [tokens, hidden], and the arguments for `shares.join`."""
        normed = self.hc_norm(x)
        low, *products = self.down(normed).split(self._widths, 1)
        low = self.scale(low.contiguous())
        opened = self.gate(normed, self.input_mix_weight_up(self.gate(low, low)))
        return self.mean(opened), [self.shares(each) for each in products]

    def join(self, x: Tensor, out: Tensor, shares: Sequence[Tensor]) -> Tensor:
        """Return the streams behind a block that has read those of x and returned `out` [tokens, hidden]."""
        return self.shares.join(x, out, *shares)


class StreamsHead(StreamGates):
    """Makes one stream of all streams behind the last layer."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        """x [tokens, streams · hidden] → [tokens, hidden]."""
        return super().forward(x)[0]


class KeyIndexer(nn.Module):
    """Makes small keys of windows, which are means, and queries that choose among them. Every rank has all of it."""

    def __init__(self, c: Qwen4ExpConfig) -> None:
        super().__init__()
        assert c.rope is not None
        by, norm = c.choice, partial(RMSNorm, offset=1.0)
        self._by, self._turned = by, c.rope.dim
        self.index_qk_proj = ColumnLinear(c.hidden_size, (by.count + 1) * by.size, Mesh.single())
        self.q_layernorm, self.k_layernorm = norm(by.size, c.norm_eps), norm(by.size, c.norm_eps)
        self.rope = Rotary(c.rope)
        self.windows = OpenWindows(Compression(by.rate, by.size))
        self.pools = PoolKeys(by.rate, by.num_chosen, by.num_tokens)

    def forward(self, x: Tensor, batch: ModelInput) -> Tensor:
        """Return which tokens queries attend to, as of `choose_pools`; x [tokens, hidden]."""
        by = self._by
        small = self.index_qk_proj(x).view(len(x), by.count + 1, by.size)
        queries = self._turn(self.q_layernorm(small[:, : by.count].contiguous()), batch.positions)
        keys = small[:, by.count]
        # where all gates are the same, the sum by their softmax is the mean
        even = torch.zeros(by.rate, by.size, device=x.device)
        ends, (made,) = self.windows.ended(torch.cat((keys, torch.zeros_like(keys)), 1), [even], batch)
        if len(ends.positions):
            firsts = ends.positions - (by.rate - 1)
            turned = self._turn(self.k_layernorm(made).unsqueeze(1), firsts)
            self.pools.store(turned.squeeze(1), batch, ends)
        weights = torch.full((len(x), by.count), by.size**-0.5, device=x.device)
        return self.pools.choose(SmallQueries(queries, weights), batch)

    def _turn(self, x: Tensor, positions: Tensor) -> Tensor:
        turned = self.rope.at(x[..., : self._turned].contiguous(), positions)
        return torch.cat((turned, x[..., self._turned :]), -1)


class ChosenAttention(nn.Module):
    """Grouped-query attention with gates to the tokens in chosen windows, and to those behind the last window."""

    def __init__(self, c: Qwen4ExpConfig, mesh: Mesh, layer: int) -> None:
        super().__init__()
        assert c.rope is not None
        self.qkv_proj = qkv_linear(c, mesh)
        self._norms = cast("tuple[RMSNorm, RMSNorm]", head_norms(c, mesh))
        self.q_norm, self.k_norm = self._norms
        self.rope, self.gate = Rotary(c.rope), Elementwise("gated_by_sigmoid")
        self.attend = ChosenKeysAttention(c.heads.dim**-0.5)
        self.indexer = KeyIndexer(c)
        self.o_proj = joined_linear(c.heads.q_size, c.hidden_size, mesh, bias=c.out_bias)

    def forward(self, x: Tensor, batch: ModelInput) -> Tensor:
        """x [tokens, hidden] → [tokens, hidden]."""
        q, k, v, gates = self.qkv_proj(x)  # each [tokens, heads, dim]
        q, k = self.rope(q, k, batch, self._norms)
        attended = self.attend(q, k, v, self.indexer(x, batch), batch)
        return self.o_proj(self.gate(attended, gates.flatten(1)))


class NgramDeltaNet(GatedDeltaNet):
    """The gated delta rule; `ple` stands before the layer's blocks where it has tables of n-grams."""

    def __init__(self, c: HybridConfig, sizes: RecurrentSizes, mesh: Mesh) -> None:
        super().__init__(sizes, c.hidden_size, c.norm_eps, mesh, delta_picks(sizes, mesh))
        self.ple: NgramStreams | None = None


class StreamsLayer(nn.Module):
    """Attention or the delta rule, and a mixture of experts, between streams. `carries_residual` is False."""

    def __init__(self, c: Qwen4ExpConfig, attention: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.self_attn = self.linear_attn = None
        if isinstance(attention, NgramDeltaNet):
            self.linear_attn = attention
        else:
            self.self_attn = attention
        self.mlp = mlp
        self.attn_hyper_connection, self.mlp_hyper_connection = (StreamGates(c.streams, c.mixer_rank) for _ in range(2))

    def forward(self, x: Tensor, residual: None, batch: ModelInput) -> tuple[Tensor, None]:
        """Return (the streams [tokens, streams · hidden], None)."""
        if self.linear_attn is not None and self.linear_attn.ple is not None:
            x = self.linear_attn.ple(x, batch)
        stream, shares = self.attn_hyper_connection(x)
        mix = self.self_attn if self.linear_attn is None else self.linear_attn
        assert mix is not None
        x = self.attn_hyper_connection.join(x, mix(stream, batch), shares)
        stream, shares = self.mlp_hyper_connection(x)
        return self.mlp_hyper_connection.join(x, self.mlp(stream), shares), None


class Qwen4ExpForCausalLM(StreamsDecoder):
    """The text model. Its last streams become one behind gates, which no norm follows."""

    RENAMED = {"shared_experts": "shared_expert", "gated_norm": "norm", "hc_head": "hyper_connection_mixer"}
    NAMES = {r"\b(layers\.\d+)\.ple\.": r"\1.linear_attn.ple."}
    LAST_STAGE = (*StreamsDecoder.LAST_STAGE, "hyper_connection_mixer")
    IGNORED = (*StreamsDecoder.IGNORED, r"hyper_connection_mixer\.block_inject_weight\.weight", r"mtp\..*")

    @classmethod
    def read(cls, c: Checkpoint) -> Qwen4ExpConfig:
        num_layers, interval = c.positive("num_hidden_layers"), c.positive("full_attention_interval", 4)
        kinds = [RECURRENT if (layer + 1) % interval else "indexed_attention" for layer in range(num_layers)]
        known = (ATTENTION, "indexed_attention", RECURRENT)
        kinds = [ATTENTION if each == known[1] else each for each in read_kinds(c, kinds, known)]
        eps = c.positive_float("rms_norm_eps", 1e-6)
        width = c.positive("moe_intermediate_size")
        streams = StreamSizes(c.positive("hc_count", 4), c.positive("hidden_size"), 0, 0.0, eps)
        if streams.count < 2:
            raise c.error("hc_count", "at least 2")
        c.expect("hidden_act", "silu")
        gate = c.expect("output_gate_type", "silu", "sigmoid")
        config = Qwen4ExpConfig.common(
            c,
            intermediate_size=width,
            head_dim=c.positive("head_dim", 256),
            rotary_share=0.25,
            norm=partial(RMSNorm, offset=1.0),
            norm_eps=eps,
            qk_norms=head_norms,
            attention_gate="q_proj",
            bias=c.bool("attention_bias", False),
            windows=(),
            kinds=tuple(kinds),
            sizes=read_delta_sizes(c),
            recurrence=_delta_net,
            attention=ChosenAttention,
            mixture=read_shared_mixture(c, is_normalized=NORMALIZED[True]),
            sparse=sparse_layers(c),
            layer=StreamsLayer,
            streams=streams,
            mixer_rank=c.positive("hc_lowrank", 320),
            choice=_read_choice(c),
            ngrams=None,
            ngram_layers=(),
            is_gate_sigmoid=gate == "sigmoid",
        )
        if config.rope is not None and config.rope.dim > config.choice.size:
            raise c.error("indexer_head_dim", f"at least the {config.rope.dim} elements of a head that turn")
        layers = _read_ngram_layers(c, config)
        return replace(config, ngrams=_read_ngrams(c, len(layers)), ngram_layers=layers) if layers else config

    def __init__(self, c: Qwen4ExpConfig, mesh: Mesh) -> None:
        def mix(layer: int) -> nn.Module:
            made: Any = attention_of(c, mesh, layer)
            if c.ngrams is not None and layer in c.ngram_layers:
                place, (count, hidden) = c.ngram_layers.index(layer), (c.streams.count, c.hidden_size)
                made.ple = NgramStreams(c.ngrams, place, count, hidden, c.norm_eps, mesh)
            return made

        super().__init__(c, mesh, mix)
        self.norm = None

    def make_head(self, c: Qwen4ExpConfig) -> nn.Module:
        return StreamsHead(c.streams, rank=c.mixer_rank, writes=False)

    def normalize(self, x: Tensor, residual: Tensor | None) -> Tensor:
        """Return one stream [tokens, hidden]."""
        assert self.hc_head is not None, "only the last stage has the head"
        stream: Tensor = self.hc_head(x)
        return stream


def _delta_net(c: Any, mesh: Mesh, layer: int) -> NgramDeltaNet:
    made = NgramDeltaNet(c, c.sizes, mesh)
    if c.is_gate_sigmoid:
        dim = c.sizes.value_dim
        made.gated_norm = SigmoidGatedNorm(dim, slice(0, dim), dim, c.norm_eps, is_gate_first=False)
    return made


def _read_choice(c: Checkpoint) -> PoolChoice:
    c.expect("indexer_kv_heads", 1)
    rate, tokens = c.positive("indexer_compress_ratio"), c.positive("indexer_budget")
    if tokens % rate:
        raise c.error("indexer_budget", f"a multiple of indexer_compress_ratio, which is {rate}")
    return PoolChoice(rate, tokens // rate, c.positive("indexer_n_heads"), c.positive("indexer_head_dim"))


def _read_ngram_layers(c: Checkpoint, config: Qwen4ExpConfig) -> tuple[int, ...]:
    """Return the layers with tables, which the config counts from 1. Raises CheckpointError."""
    stated = c.values.get("ple_layer_ids") or []
    recurrent = [layer + 1 for layer, kind in enumerate(config.kinds) if kind == RECURRENT]
    if not isinstance(stated, list) or any(type(each) is not int or each not in recurrent for each in stated):
        raise c.error("ple_layer_ids", "a list of layers of linear_attention, counted from 1")
    return tuple(each - 1 for each in sorted(set(stated)))


def _read_ngrams(c: Checkpoint, num_layers: int) -> NgramSizes:
    longest, heads = c.positive("ngram_size", 3), c.positive("heads_per_ngram", 8)
    dim, vocab = c.positive("ple_embed_dim", c.positive("hidden_size")), c.positive("vocab_size")
    if longest < 2:
        raise c.error("ngram_size", "at least 2")
    if (longest - 1) * heads * num_layers > _MOST_TABLES:
        raise c.error("heads_per_ngram", f"at most {_MOST_TABLES} tables of n-grams in all layers")
    if dim % ((longest - 1) * heads):
        raise c.error("ple_embed_dim", f"a multiple of the {(longest - 1) * heads} tables of n-grams")
    if vocab > MOST_TOKENS:
        raise c.error("vocab_size", f"at most {MOST_TOKENS} with tables of n-grams")
    stops = c.values.get("eos_token_id")
    stop = stops[0] if isinstance(stops, list) and stops else stops
    if type(stop) is not int or not 0 <= stop < vocab:
        raise c.error("eos_token_id", "a token, which ends n-grams")
    parts = 0 if has_tensor(c, ".ngram_embedding.weight") else c.positive("split_ngram_parts", 512)
    if parts > _MOST_PARTS:
        raise c.error("split_ngram_parts", f"at most {_MOST_PARTS}")
    return NgramSizes(
        longest=longest,
        heads=heads,
        dim=dim,
        vocab=vocab,
        stop=stop,
        base=c.positive("ngram_vocab_size_base", 20_000_000),
        multiple=c.positive("make_ngram_vocab_size_divisible_by", 128),
        parts=parts,
        seed=c.int("seed", 1234),
        taps=c.positive("ple_conv_kernel_size", 4),
    )
