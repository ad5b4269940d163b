"""What DeepSeek's descendants share: attention over latents, and mixtures of experts behind the first layers."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.config.checkpoint import Checkpoint
from octavo.distributed.mesh import Mesh
from octavo.models.blocks import GatedMLP
from octavo.models.latent import LatentConfig, LatentDecoder
from octavo.models.sparse import Mixture, SparseMLP, read_stored
from octavo.ops.experts import RouterRule


def read_mixture(c: Checkpoint, rule: RouterRule, *, correction: str | None = None) -> Mixture:
    """Read the sizes of experts that DeepSeek's descendants share. Raises CheckpointError."""
    experts, width = c.positive("n_routed_experts"), c.positive("moe_intermediate_size")
    if experts % rule.num_groups or rule.groups_kept > rule.num_groups:
        raise c.error("n_group", f"a divisor of n_routed_experts, which is {experts}, and at least topk_group")
    if rule.top_k > experts // rule.num_groups * rule.groups_kept:
        raise c.error("num_experts_per_tok", "at most the experts of topk_group groups")
    return Mixture(
        experts=experts,
        width=width,
        rule=rule,
        stored=read_stored(c),
        correction=correction,
        shared_width=width * (c.optional_positive("n_shared_experts") or 0),
    )


def corrected(c: Checkpoint, *, groups: tuple[int, int], factor: float) -> Mixture:
    """Read a mixture whose router adds a correction to sigmoids; `groups` and `factor` where the config is silent."""
    c.expect("scoring_func", "sigmoid", default="sigmoid")
    c.expect("topk_method", "noaux_tc", default="noaux_tc")
    rule = RouterRule(
        c.positive("num_experts_per_tok"),
        "sigmoid",
        is_normalized=c.bool("norm_topk_prob", True),
        factor=c.positive_float("routed_scaling_factor", factor),
        num_groups=c.positive("n_group", groups[0]),
        groups_kept=c.positive("topk_group", groups[1]),
    )
    return read_mixture(c, rule, correction="gate.e_score_correction_bias")


def dense_first(c: Checkpoint, default: int) -> tuple[bool, ...]:
    """Return which layers are mixtures: all from `first_k_dense_replace` on."""
    first = c.values.get("first_k_dense_replace")
    first = default if first is None else c.int("first_k_dense_replace")
    return tuple(layer >= first for layer in range(c.positive("num_hidden_layers")))


@dataclass(frozen=True, kw_only=True)
class SparseLatentConfig(LatentConfig):
    """`sparse[layer]` says which layers have the mixture."""

    mixture: Mixture
    sparse: tuple[bool, ...]


class SparseLatentDecoder(LatentDecoder):
    """Mixtures of experts where the config says so, gated MLPs elsewhere."""

    def __init__(self, c: SparseLatentConfig, mesh: Mesh) -> None:
        super().__init__(c, mesh, lambda layer: SparseMLP(c, c.mixture, mesh) if c.sparse[layer] else GatedMLP(c, mesh))
