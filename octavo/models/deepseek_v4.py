"""DeepSeek-V4: hyper-connections, attention to a window and to compressed tokens, and experts chosen by tables.

Sources: DeepSeek's releases; https://arxiv.org/abs/2512.24880 for hyper-connections.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from torch import Tensor, nn

from octavo.attention.metadata import ModelInput
from octavo.config.checkpoint import Checkpoint
from octavo.config.released.deepseek import KINDS
from octavo.core.model_shape import LayerCache, Spaced
from octavo.distributed.mesh import Mesh
from octavo.layers.compressed import Compression, Compressor, GroupedLinear, WindowAttention, end_turned
from octavo.layers.heads import Heads
from octavo.layers.linear import ColumnLinear, joined_linear
from octavo.layers.norm import RMSNorm, UnscaledRMSNorm
from octavo.layers.rope import Rope
from octavo.layers.rotary import Rotary
from octavo.layers.routers import TableRouter
from octavo.models.blocks import SparseMLP
from octavo.models.ropes import read_rope
from octavo.models.sparse import NUMBERED, read_mixture
from octavo.models.streams import HyperLayer, StreamsConfig, StreamsDecoder, read_streams
from octavo.ops.compressed import Sight

_SLIDING: Final = "sliding_attention"
_CHOOSING: Final = "compressed_sparse_attention"
_ALL: Final = "heavily_compressed_attention"
_RELEASED: Final = {
    r"^embed\.": "embed_tokens.",
    r"^head\.": "lm_head.",
    r"^hc_head_(fn|base|scale)$": r"hc_head.hc_\1",
    r"\.attn\.": ".self_attn.",
    r"\.ffn\.": ".mlp.",
    r"\.attn_norm\.": ".input_layernorm.",
    r"\.ffn_norm\.": ".post_attention_layernorm.",
    r"\.hc_(attn|ffn)_(fn|base|scale)$": r".\1_hc.\2",
    r"\.attn_sink$": ".sinks",
    r"\.indexer\.compressor\.": ".compressor.indexer.",
    r"\.self_attn\.indexer\.": ".self_attn.compressor.indexer.",
    r"\.indexer\.scorer\.": ".indexer.",
    r"(\.self_attn(?:\..*)?)\.norm\.": r"\1.kv_norm.",
    r"\.ape$": ".position_bias",
    r"\.wq_([ab])\.": r".q_\1_proj.",
    r"\.wo_([ab])\.": r".o_\1_proj.",
    r"\.wkv\.": ".kv_proj.",
    r"\.wgate\.": ".gate_proj.",
    r"\.q_norm\.": ".q_a_norm.",
    r"\.gate\.bias$": ".gate.e_score_correction_bias",
    r"\.shared_experts\.w1\.": ".shared_experts.gate_proj.",
    r"\.shared_experts\.w2\.": ".shared_experts.down_proj.",
    r"\.shared_experts\.w3\.": ".shared_experts.up_proj.",
}
"""Names of the releases, and those here, which are transformers' but for the scorer of the indexer."""


@dataclass(frozen=True, kw_only=True)
class DeepseekV4Config(StreamsConfig):
    """`heads` share one key, which is the value too."""

    q_rank: int
    out_groups: int
    out_rank: int
    """Elements of each group of the projection behind attention."""
    window: int
    compressions: tuple[Compression | None, ...]
    """The compression of each layer, None where it has none."""
    hashed: tuple[bool, ...]
    """For each layer whether a table chooses the experts of tokens."""

    def caches_of(self, layer: int, mesh: Mesh) -> Sequence[LayerCache]:
        compression = self.compressions[layer]
        recent = LayerCache(Spaced(self.heads.dim), self.window)
        return (recent,) if compression is None else (recent, *compression.caches())


class CompressedAttention(nn.Module):
    """Attention of heads that share one key to the last tokens, and to compressed ones.

    Keys are values too, so what heads attend to is turned back. It is joined in two steps, the first one by groups.
    """

    def __init__(self, c: DeepseekV4Config, mesh: Mesh, layer: int) -> None:
        super().__init__()
        compression, rope, dim = c.compressions[layer], c.rope_of(layer), c.heads.dim
        assert rope is not None
        start, length = c.heads.query_share(mesh)
        self._heads, own = length // dim, slice(start // dim, (start + length) // dim)
        first, groups = mesh.share(c.out_groups, "groups of heads (o_groups)")
        names, sections = ["q_a_proj", "kv_proj"], [c.q_rank, dim]
        if compression is not None:
            for place, width in zip(("compressor", "compressor.indexer"), compression.widths, strict=False):
                names += [f"{place}.kv_proj", f"{place}.gate_proj"]
                sections += [width, width]
        self._sections = [c.q_rank, dim, sum(sections[2:])]
        self.a_proj = ColumnLinear(c.hidden_size, sections, Mesh.single(), reads=names)
        self.q_a_norm, self.kv_norm = RMSNorm(c.q_rank, c.norm_eps), RMSNorm(dim, c.norm_eps)
        self.q_b_proj = ColumnLinear(c.q_rank, c.heads.q_size, mesh)
        self.q_b_norm = UnscaledRMSNorm(dim, c.norm_eps)
        self.rope = Rotary(rope)
        sight = Sight(dim**-0.5, c.window)
        if compression is not None:
            sight = Sight(dim**-0.5, c.window, compression.rate, compression.num_chosen or None)
        self.attend = WindowAttention(sight, c.heads.query, own)
        self.compressor = None
        if compression is not None:
            self.compressor = Compressor(compression, c.hidden_size, c.q_rank, rope, c.norm_eps)
        inputs = c.heads.q_size // c.out_groups
        self.o_a_proj = GroupedLinear(c.out_groups, slice(first, first + groups), inputs, c.out_rank)
        self.o_b_proj = joined_linear(c.out_groups * c.out_rank, c.hidden_size, mesh)

    def forward(self, x: Tensor, batch: ModelInput) -> Tensor:
        """x [tokens, hidden] → [tokens, hidden]."""
        narrow, key, parts = self.a_proj(x).split(self._sections, 1)
        narrow, key = self.q_a_norm(narrow.contiguous()), self.kv_norm(key.contiguous())
        q = self.q_b_norm(self.q_b_proj(narrow).view(len(x), self._heads, -1))
        q = end_turned(q, self.rope, batch.positions)
        key = end_turned(key.unsqueeze(1), self.rope, batch.positions).squeeze(1)
        vectors = small = None
        if self.compressor is not None:
            self.compressor.store(parts, batch)
            vectors, indexer = self.compressor.vectors, self.compressor.indexer
            small = None if indexer is None else indexer.queries(x, narrow, self.rope, batch)
        out = end_turned(self.attend(q, key, batch, vectors, small), self.rope, batch)
        return self.o_b_proj(self.o_a_proj(out.flatten(1)))


class HashedMLP(SparseMLP):
    """A mixture of experts, which a table chooses for each token of the vocabulary where `is_hashed`."""

    def __init__(self, c: DeepseekV4Config, mesh: Mesh, *, is_hashed: bool) -> None:
        assert c.mixture is not None
        super().__init__(c, c.mixture, mesh)
        self.table: TableRouter | None = None
        if is_hashed:
            self.table = TableRouter(c.hidden_size, c.mixture.experts, c.mixture.rule, c.vocab_size)
            self.register_module("gate", self.table)

    def of_tokens(self, x: Tensor, batch: ModelInput) -> Tensor:
        """x [tokens, hidden] → [tokens, hidden]."""
        if self.table is None:
            return self(x)
        assert self.shared_experts is not None
        out: Tensor = self.experts(x, self.table(x, batch.token_ids), self.shared_experts(x))
        return out


class HashedLayer(HyperLayer):
    """A layer whose MLP is a `HashedMLP`."""

    mlp: HashedMLP

    def feed_forward(self, x: Tensor, batch: ModelInput) -> Tensor:
        return self.mlp.of_tokens(x, batch)


class DeepseekV4ForCausalLM(StreamsDecoder):
    """The whole model. Its prediction layer attends to a window alone, and chooses experts by itself.

    Of a model that reads images it is the text model: the projection of images, and the routers' corrections for their
    tokens, are left out.
    """

    NAMES = _RELEASED
    IGNORED = (
        *StreamsDecoder.IGNORED,
        r"mtp\..*",
        r"aligner\..*|image_(start|end|newline|pad)",
        r"layers\.\d+\.mlp\.gate\.(bias_vl|e_score_correction_bias)",
    )

    @classmethod
    def read(cls, c: Checkpoint) -> DeepseekV4Config:
        c.expect_all(num_key_value_heads=1, hidden_act="silu", topk_method="noaux_tc", scoring_func="sqrtsoftplus")
        c.expect_all(norm_topk_prob=True, attention_bias=False, mlp_bias=False)
        layers, heads, dim = (
            c.positive("num_hidden_layers"),
            c.positive("num_attention_heads"),
            c.positive("head_dim", 512),
        )
        _check_released(c, layers, dim)
        compressions = _read_compressions(c, layers, dim)
        main, other = (_read_rope(c, dim, kind) for kind in ("main", "compress"))
        groups = c.positive("o_groups", 8)
        if heads % groups:
            raise c.error("o_groups", f"a divisor of num_attention_heads, which is {heads}")
        eps = c.positive_float("rms_norm_eps", 1e-6)
        limit = (c.positive_float("swiglu_limit", 10.0),)
        return DeepseekV4Config.common(
            c,
            heads=Heads(heads, 1, dim),
            head_dim=dim,
            intermediate_size=c.positive("moe_intermediate_size"),
            windows=(),
            rope=None,
            ropes=tuple(main if each is None else other for each in compressions),
            activation="capped_swiglu",
            activation_numbers=limit,
            mixture=read_mixture(
                c,
                NUMBERED,
                score="softplus_root",
                factor=("routed_scaling_factor", 1.5),
                correction="gate.e_score_correction_bias",
                activation="capped_swiglu",
                numbers=limit,
                shared=("n_shared_experts", 1),
            ),
            q_rank=c.positive("q_lora_rank", 1024),
            out_groups=groups,
            out_rank=c.positive("o_lora_rank", 1024),
            window=c.positive("sliding_window", 128),
            compressions=compressions,
            streams=read_streams(c, eps),
            attention=CompressedAttention,
            layer=HashedLayer,
            hashed=_read_hashed(c, layers),
        )

    @classmethod
    def of_one_more_layer(cls, c: Checkpoint, config: Any) -> Mapping[str, Any]:
        """config: a `DeepseekV4Config`."""
        main = _read_rope(c, config.heads.dim, "main")
        own = {"compressions": None, "hashed": False, "ropes": main}
        return {name: (*getattr(config, name), each) for name, each in own.items()}

    def __init__(self, c: DeepseekV4Config, mesh: Mesh) -> None:
        super().__init__(
            c,
            mesh,
            mlp=lambda layer: HashedMLP(c, mesh, is_hashed=c.hashed[layer]),
        )


DeepseekV4ForConditionalGeneration = DeepseekV4ForCausalLM


def _read_rope(c: Checkpoint, dim: int, kind: str) -> Rope:
    return read_rope(c, dim, kind=kind, share=64 / 512, interleaved=True)


def _check_released(c: Checkpoint, layers: int, dim: int) -> None:
    """Refuse by their own names keys of a release that `deepseek_v4_layout` cannot translate."""
    stated = c.stored.values
    ratios, turned = stated.get("compress_ratios"), c.optional_positive("qk_rope_head_dim")
    if stated.get("layer_types") is None and ratios is not None:
        is_list = isinstance(ratios, list) and len(ratios) >= layers
        if not is_list or any(type(each) is not int or each not in KINDS for each in ratios[:layers]):
            raise c.error("compress_ratios", f"0, 4 or 128 for each of {layers} layers")
    if stated.get("mlp_layer_types") is None and stated.get("num_hash_layers") is not None:
        c.count("num_hash_layers")
    if stated.get("compress_rates") is None:
        for name in ("compress_rate_csa", "compress_rate_hca"):
            c.optional_positive(name)
    if turned is not None and turned > dim:
        raise c.error("qk_rope_head_dim", f"at most head_dim, which is {dim}")


def _read_compressions(c: Checkpoint, layers: int, dim: int) -> tuple[Compression | None, ...]:
    expected = f'"{_SLIDING}", "{_CHOOSING}" or "{_ALL}" for each of {layers} layers'
    kinds = c.listed("layer_types", layers, lambda each: each in (_SLIDING, _CHOOSING, _ALL), expected)
    made: dict[str, Compression | None] = {_SLIDING: None}
    rates: Any = c.section("compress_rates")
    if _ALL in kinds:
        made[_ALL] = Compression(rates.positive(_ALL, 128), dim)
    if _CHOOSING in kinds:
        made[_CHOOSING] = Compression(
            rates.positive(_CHOOSING, 4),
            dim,
            c.positive("index_topk", 512),
            c.positive("index_n_heads", 64),
            c.positive("index_head_dim", 128),
        )
    return tuple(made[each] for each in kinds)


def _read_hashed(c: Checkpoint, layers: int) -> tuple[bool, ...]:
    expected = f'"hash_moe" or "moe" for each of {layers} layers'
    kinds = c.listed("mlp_layer_types", layers, lambda each: each in ("hash_moe", "moe"), expected)
    return tuple(kind == "hash_moe" for kind in kinds)
