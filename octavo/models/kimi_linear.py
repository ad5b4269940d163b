"""Kimi Linear: three layers of Kimi's delta attention for each one of attention over latents in which nothing turns.

Ling 3.0 has such layers, too. Source: https://arxiv.org/abs/2510.26692.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from octavo.attention.metadata import ModelInput
from octavo.config.checkpoint import Checkpoint
from octavo.config.section import MOST_LAYERS
from octavo.distributed.mesh import Mesh
from octavo.layers.elementwise import Elementwise
from octavo.layers.experts import StoredExperts
from octavo.layers.layer import TensorSlot
from octavo.layers.linear import ColumnLinear, joined_linear
from octavo.layers.norm import RMSNorm
from octavo.layers.picked import Pick, PickedLinear
from octavo.layers.recurrent import RecurrentLayer, RecurrentSizes, convolution
from octavo.layers.turns import in_turns
from octavo.models.hybrid import ATTENTION, RECURRENT, HybridConfig, HybridDecoder, read_kinds, stored_convolutions
from octavo.models.latent import LatentBlock, LatentConfig
from octavo.models.sparse import corrected, read_stored, sparse_by_kind, stated_counts


@dataclass(frozen=True, kw_only=True)
class KimiLinearConfig(HybridConfig, LatentConfig):
    """Layers with a state, and attention over latents in the others."""


class KimiDeltaAttention(RecurrentLayer):
    """The gated delta rule with a decay for each element of keys; decays and gates are made by products of low rank, or
    by one product each where decays have a `bound` (`bounded_delta_rule`)."""

    def __init__(
        self, c: KimiLinearConfig, mesh: Mesh, *, convolutions: Mapping[str, int], bound: float | None = None
    ) -> None:
        assert isinstance(c.sizes, RecurrentSizes)
        sizes, hidden = c.sizes, c.hidden_size
        super().__init__(("A_log",), sizes.heads, sizes.rows(mesh, of_keys=False))
        self.sizes = own = sizes.share(mesh)
        self._wide = wide = sizes.rows(mesh, of_keys=True, width=sizes.key_dim)
        self.dt_bias = nn.Parameter(torch.empty(own.key_size), requires_grad=False)
        self._bound, rank = bound, sizes.key_dim
        picks = [Pick(f"{each}_proj", sizes.key_size, (wide,)) for each in "qkv"]
        picks.append(Pick("b_proj", sizes.heads, (self._rows,)))
        self.f_b_proj = self.g_b_proj = None
        if bound is None:
            picks += [Pick(f"{each}_a_proj", rank, (slice(0, rank),)) for each in "fg"]
            self.f_b_proj = ColumnLinear(rank, sizes.key_size, mesh)
            self.g_b_proj = ColumnLinear(rank, sizes.value_size, mesh)
        else:
            picks += [Pick(f"{each}_proj", sizes.key_size, (wide,)) for each in "fg"]
        self.in_proj = PickedLinear(hidden, picks)
        self.conv1d = convolution(sizes, mesh, convolutions)
        self.o_norm, self.gate = RMSNorm(sizes.value_dim, c.norm_eps), Elementwise("gated_by_sigmoid")
        self.o_proj = joined_linear(sizes.value_size, hidden, mesh)
        self._tail, self._widths = (
            (own.taps - 1) * own.channels,
            [own.channels, own.heads, *(each.length for each in picks[-2:])],
        )

    def forward(self, x: Tensor, batch: ModelInput) -> Tensor:
        """x [tokens, hidden] → [tokens, hidden]."""
        states, metadata = self.states(batch)
        own, tokens = self.sizes, len(x)
        mixed, beta, step, gate = torch.split(self.in_proj(x), self._widths, dim=1)
        mixed = self.conv1d(mixed, states[:, : self._tail], metadata)
        q, k, v = (each.view(tokens, own.heads, -1) for each in torch.split(mixed, own.key_size, dim=1))
        if self.f_b_proj is not None and self.g_b_proj is not None:
            step, gate = self.f_b_proj(step), self.g_b_proj(gate)
        numbers: tuple[Any, ...] = self.A_log, self.dt_bias
        rule = self.ops.gated_delta_rule
        if self._bound is not None:
            numbers, rule = (*numbers, self._bound), self.ops.bounded_delta_rule
        out = in_turns(rule, (q, k, v, step, beta), (numbers, states[:, self._tail :]), metadata)
        return self.o_proj(self.gate(self.o_norm(out).view(tokens, -1), gate))

    def tensor_slots(self, path: str) -> Iterator[TensorSlot]:
        rows, wide, every = self._rows, self._wide, slice(None)
        is_plain, biases = self._bound is not None, (self._count * self.sizes.key_dim,)
        logs = (self._count,) if is_plain else (1, 1, self._count, 1)

        def fill(stored: Tensor) -> None:
            self.hold("A_log", stored.flatten()[rows])

        yield TensorSlot(f"{path}.A_log", logs, fill, parts=((rows,) if is_plain else (every, every, rows),))
        yield self.rows_slot(f"{path}.dt_bias", biases, wide, "dt_bias")


class KimiLinearForCausalLM(HybridDecoder):
    """The whole model."""

    RECURRENT_NAME = "self_attn"
    RENAMED = {}

    @classmethod
    def read(cls, c: Checkpoint) -> KimiLinearConfig:
        c.expect("mla_use_nope", True)
        c.expect("moe_router_activation_func", "sigmoid")
        c.expect("moe_layer_freq", 1, default=1)
        sizes = _read_sizes(c)
        mixture = corrected(c, factor=2.446, counts=stated_counts(c))
        return KimiLinearConfig.common_latent(
            c,
            rope=None,
            norm_eps=c.positive_float("rms_norm_eps", 1e-5),
            windows=(),
            mixture=replace(mixture, stored=read_stored(c, StoredExperts("w1", "w3", "w2"))),
            sparse=sparse_by_kind(c, 1),
            kinds=read_kinds(c, _default_kinds(c)),
            sizes=sizes,
            attention=lambda c, mesh, layer: LatentBlock(c, mesh),
            recurrence=partial(KimiDeltaAttention, convolutions=stored_convolutions(c, sizes)),
        )

    def own_name(self, name: str) -> str:
        # adapters have transformers' names of modules, which are not those of its checkpoints
        return name.replace(".block_sparse_moe.", ".mlp.").replace(".self_attn.forget_gate.", ".self_attn.")


class HeadGatedLatentBlock(LatentBlock):
    """Attention over latents, whose heads are each multiplied with the sigmoid of a gate."""

    def __init__(self, c: LatentConfig, mesh: Mesh) -> None:
        super().__init__(c, mesh)
        heads = c.latent_heads
        start, count = mesh.share(heads.count, "attention heads")
        rows = [slice(head, head + 1) for head in range(start, start + count) for _ in range(heads.value)]
        self.head_gates = PickedLinear(c.hidden_size, [Pick("g_proj", heads.count, rows)])
        self.gate = Elementwise("gated_by_sigmoid")

    def attended(self, x: Tensor, batch: ModelInput) -> Tensor:
        """Return what heads attend to, times their gates: x [tokens, hidden] → [tokens, heads · value]."""
        return self.gate(super().attended(x, batch), self.head_gates(x))


class BailingHybridForCausalLM(HybridDecoder):
    """Ling 3.0: five layers of Kimi's delta attention with bounded decays for each one of attention over latents, whose
    heads have gates, and mixtures of DeepSeek V3.

    Source: https://huggingface.co/inclusionAI/Ling-3.0-Flash.
    """

    RECURRENT_NAME = "self_attn"
    RENAMED = {}

    @classmethod
    def read(cls, c: Checkpoint) -> KimiLinearConfig:
        c.expect("kda_safe_gate", True)
        c.refuse("attention_bias", because="no release has it, and it is not implemented")
        layers, group = min(c.positive("num_hidden_layers"), MOST_LAYERS), c.positive("layer_group_size", 6)
        kinds = [RECURRENT if (layer + 1) % group else ATTENTION for layer in range(layers)]
        # transformers writes the sizes of these layers apart, and that of a key's turning part as head_dim
        heads = c.optional_positive("linear_num_heads") or c.positive("num_attention_heads")
        dim = c.optional_positive("linear_head_dim") or c.positive("head_dim", 128)
        taps = c.optional_positive("linear_conv_kernel_dim") or c.positive("short_conv_kernel_size", 4)
        sizes = RecurrentSizes(heads, heads, dim, dim, taps)
        bound = -c.float("kda_lower_bound", -5.0)
        if not 0 < bound <= 1e6:
            raise c.error("kda_lower_bound", "a number below 0, at least -1,000,000")
        return KimiLinearConfig.common_latent(
            c,
            windows=(),
            mixture=corrected(c, groups=(8, 4), factor=2.5, counts=stated_counts(c)),
            sparse=sparse_by_kind(c, 2),
            kinds=read_kinds(c, kinds),
            sizes=sizes,
            attention=lambda c, mesh, layer: HeadGatedLatentBlock(c, mesh),
            recurrence=partial(KimiDeltaAttention, convolutions=stored_convolutions(c, sizes), bound=bound),
        )

    def own_name(self, name: str) -> str:
        for stored, own in (
            *((".word_embeddings.", ".embed_tokens."), (".attention.", ".self_attn."), (".dense.", ".o_proj.")),
            *((".forget_gate.", "."), (".mlp.gate.expert_bias", ".mlp.gate.e_score_correction_bias")),
        ):
            name = name.replace(stored, own)
        return name


def _read_sizes(c: Checkpoint) -> RecurrentSizes:
    """Return the sizes of layers with a state, which the release has in a section of their own."""
    section = c.section("linear_attn_config")
    heads, dim, taps = (
        c.positive(own, default) if section is None or section.values.get(name) is None else section.positive(name)
        for name, own, default in (
            ("num_heads", "linear_num_heads", 32),
            ("head_dim", "linear_head_dim", 128),
            ("short_conv_kernel_size", "linear_conv_kernel_dim", 4),
        )
    )
    return RecurrentSizes(heads, heads, dim, dim, taps)


def _default_kinds(c: Checkpoint) -> list[str]:
    """Return the kinds of layers where `layer_types` is absent: `full_attn_layers` counts them from 1."""
    layers, linear = range(min(c.positive("num_hidden_layers"), MOST_LAYERS)), c.section("linear_attn_config")
    stated = None if linear is None else linear.values.get("full_attn_layers")
    if stated is None:
        return [ATTENTION if layer and layer % 4 == 0 else RECURRENT for layer in layers]
    if not isinstance(stated, list):
        assert linear is not None
        raise linear.error("full_attn_layers", "a list of layers")
    return [ATTENTION if layer + 1 in stated else RECURRENT for layer in layers]
