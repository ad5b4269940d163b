"""LongCat-Flash: each layer has two attentions and two MLPs, and a mixture beside the second half.

A half is a layer here: the first one of each pair hands the mixture's output to the second one, which adds it.
Source: https://arxiv.org/abs/2509.01322.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from torch import Tensor

from octavo.attention.metadata import ModelInput
from octavo.config.checkpoint import Checkpoint
from octavo.config.section import COUNTS
from octavo.core.model_shape import LayerCache, State
from octavo.distributed.mesh import Mesh
from octavo.errors import ConfigError
from octavo.layers.elementwise import addition
from octavo.layers.ngrams import NgramInputs, SplitNgrams
from octavo.models.blocks import GatedLayer, GatedMLP, SparseMLP
from octavo.models.decoder import DecoderStack
from octavo.models.latent import LatentBlock, LatentConfig
from octavo.models.sparse import read_mixture
from octavo.ops.ngrams import MOST_TOKENS

_OF_A_HALF: Final = re.compile(r"(?:model\.)?layers\.([0-9]{1,9})\.(\w+)\.([01])\.(.*)")
_OF_A_MIXTURE: Final = re.compile(r"(?:model\.)?layers\.([0-9]{1,9})\.mlp\.(.*)")
_MOST_TABLES: Final = 1024
_EXPERT: Final = re.compile(r"experts\.([0-9]{1,9})\.")


class Half(GatedLayer):
    """Latent attention and an MLP; beside the MLP of the first half of a pair stands a mixture."""

    def __init__(self, c: LatentConfig, mesh: Mesh, index: int) -> None:
        super().__init__(c, LatentBlock(c, mesh, index), GatedMLP(c, mesh))
        assert c.mixture is not None
        self.shortcut = SparseMLP(c, c.mixture, mesh) if index % 2 == 0 else None
        self.add = addition()

    def forward(self, x: Any, residual: Tensor | None, batch: ModelInput) -> tuple[Any, Tensor]:
        """x [tokens, hidden], or of a second half a pair of them, one of which bypasses it → the same the other way."""
        made = None
        if self.shortcut is None:
            x, made = x
        x, residual = self.input_layernorm.add(x, residual)
        x, residual = self.post_attention_layernorm.add(self.self_attn(x, batch), residual)
        if self.shortcut is None:
            return self.add(self.mlp(x), made), residual
        return (self.mlp(x), self.shortcut(x)), residual


class LongcatFlashForCausalLM(DecoderStack):
    """The whole model. Some of its experts return their inputs."""

    RENAMED = {"gate": "router.classifier"}
    # weights of experts that return their inputs
    IGNORED = (*DecoderStack.IGNORED, r"layers\.[0-9]+\.shortcut\.idle\..*")

    @classmethod
    def read(cls, c: Checkpoint) -> LatentConfig:
        c.expect_all(attention_method="MLA", zero_expert_type="identity")
        idle, most = c.int("zero_expert_num", 0), COUNTS["n_routed_experts"]
        if not 0 <= idle <= most:
            raise c.error("zero_expert_num", f"an integer from 0 to {most}")
        mixture = read_mixture(
            c,
            width="expert_ffn_hidden_size",
            top_k="moe_topk",
            is_normalized=False,
            factor=("routed_scaling_factor", 6.0),
            router_bias=c.bool("router_bias", False),
            correction="e_score_correction_bias",
            idle=idle,
        )
        config = LatentConfig.common_latent(
            c,
            num_layers=2 * c.positive("num_layers"),
            intermediate_size=c.positive("ffn_hidden_size"),
            norm_eps=c.positive_float("rms_norm_eps", 1e-5),
            mixture=mixture,
        )
        assert config.attention_scale is not None
        scale, hidden = config.attention_scale, config.hidden_size
        if config.q_rank is None:
            raise c.error("q_lora_rank", "the width that queries are made from")
        if c.bool("mla_scale_q_lora", True):
            scale *= (hidden / config.q_rank) ** 0.5
        factor = (hidden / config.latent_heads.latent) ** 0.5 if c.bool("mla_scale_kv_lora", True) else 1.0
        return replace(config, attention_scale=scale, latent_factor=factor)

    def __init__(self, c: LatentConfig, mesh: Mesh) -> None:
        super().__init__(c, mesh, lambda index: self.make_half(c, mesh, index))
        assert c.mixture is not None
        self._num_experts = c.mixture.experts
        if self.layer_range.start % 2 or self.layer_range.stop % 2:
            raise ConfigError(
                f"pipeline_parallel_size: a stage would have halves of layers, of {c.num_layers // 2} layers in all; "
                "take a divisor of their number, or tensor_parallel_size"
            )

    def make_half(self, c: LatentConfig, mesh: Mesh, index: int) -> Half:
        """Make a half of a layer."""
        return Half(c, mesh, index)

    def note_layers(self, layers: Iterable[int]) -> None:
        raise ConfigError(
            "speculative_config: the head reads the streams between layers, and in LongCat-Flash mixtures bypass them; "
            "take the method eagle, draft_model, ngram or suffix"
        )

    def own_name(self, name: str) -> str:
        if found := _OF_A_HALF.fullmatch(name):
            layer, part, half, rest = found.groups()
            return f"layers.{2 * int(layer) + int(half)}.{'mlp' if part == 'mlps' else part}.{rest}"
        if found := _OF_A_MIXTURE.fullmatch(name):
            expert = _EXPERT.match(found[2])
            is_idle = expert is not None and int(expert[1]) >= self._num_experts
            return f"layers.{2 * int(found[1])}.shortcut.{'idle.' if is_idle else ''}{found[2]}"
        return name


@dataclass(frozen=True, kw_only=True)
class NgramConfig(LatentConfig):
    """Adds the tables of n-grams. The first layer keeps the tokens before the next one, too."""

    ngrams: SplitNgrams

    def caches_of(self, layer: int, mesh: Mesh) -> Sequence[LayerCache]:
        own = super().caches_of(layer, mesh)
        return own if layer else (*own, LayerCache(State(self.ngrams.longest - 1)))


class LongcatFlashNgramForCausalLM(LongcatFlashForCausalLM):
    """LongCat-Flash-Lite: embeddings of tokens and of the n-grams that they end. Source: Meituan's releases."""

    IGNORED = (*LongcatFlashForCausalLM.IGNORED, r"ngram_embeddings\.word_embeddings\.weight")

    @classmethod
    def read(cls, c: Checkpoint) -> NgramConfig:
        config, vocab = super().read(c), c.positive("vocab_size")
        longest, splits = c.positive("emb_neighbor_num"), c.positive("emb_split_num")
        if longest < 2:
            raise c.error("emb_neighbor_num", "at least 2")
        if (longest - 1) * splits > _MOST_TABLES or config.hidden_size % ((longest - 1) * splits):
            raise c.error("emb_split_num", f"tables of n-grams, at most {_MOST_TABLES}, that share hidden_size evenly")
        num_rows, stop = c.positive_float("ngram_vocab_size_ratio") * vocab, c.int("eos_token_id")
        if num_rows * vocab >= 1 << 62 or vocab > MOST_TOKENS:
            raise c.error("ngram_vocab_size_ratio", f"a table whose rows times vocab_size, {vocab}, can be counted")
        return NgramConfig(**vars(config), ngrams=SplitNgrams(longest, splits, int(num_rows), vocab, stop))

    def make_half(self, c: LatentConfig, mesh: Mesh, index: int) -> Half:
        made = super().make_half(c, mesh, index)
        if index == 0:
            assert isinstance(c, NgramConfig)
            made.ngrams = NgramInputs(c.ngrams, c.hidden_size, mesh)
        return made

    def embed(self, x: Tensor, batch: ModelInput) -> Tensor:
        """Make the first layer's input [tokens, hidden] from the token embeddings x [tokens, hidden]."""
        first: Any = self.layers["0"]
        made: Tensor = first.ngrams(super().embed(x, batch), batch)
        return made

    def own_name(self, name: str) -> str:
        if name.endswith(".word_embeddings.weight"):
            return name
        return super().own_name(name.replace("ngram_embeddings.", "layers.0.ngrams."))
