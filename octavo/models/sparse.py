"""Mixtures of experts as configs describe them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from octavo.config.checkpoint import Checkpoint
from octavo.config.section import REQUIRED
from octavo.errors import CheckpointError
from octavo.layers.experts import StoredExperts
from octavo.ops.experts import RouterRule


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """A mixture of experts as a config describes it."""

    experts: int
    width: int
    """Activations of an expert."""
    rule: RouterRule
    stored: StoredExperts
    router_bias: bool = False
    correction: str | None = None
    """The tensor that is added to scores for the choice: its name beside the router's."""
    is_correction_row: bool = False
    """It is stored as [1, experts]."""
    bias: bool = False
    activation: str = "silu"
    """That of experts; `numbers` are its parameters (`layers.experts.Experts`)."""
    numbers: tuple[float, ...] = ()
    latent_width: int = 0
    """What experts are given and return has so many elements, between two projections; 0 for that of the stream."""
    shared_width: int = 0
    """Activations of the expert that all tokens take; 0 where there is none."""
    are_inputs_weighted: bool = False
    """The one expert of a token is given the weighted input, and its output is taken as it is."""
    idle: int = 0
    """So many more experts return their inputs."""
    has_output_bias: bool = False
    """A stored vector is added to what all experts return together."""
    output_factor: float = 1.0
    """What the sum of all experts, the shared one included, is multiplied with."""
    is_shared_gated: bool = False
    """The shared expert's output is multiplied with the sigmoid of a gate's."""

    def __post_init__(self) -> None:
        """Raises CheckpointError for a rule that chooses what is not there."""
        rule, groups = self.rule, self.rule.num_groups
        if (self.experts + self.idle) % groups or rule.groups_kept > groups:
            raise CheckpointError(
                f"config.json: n_group is {groups} and topk_group {rule.groups_kept}, expected a divisor of the "
                f"{self.experts} experts, and no more than it"
            )
        if rule.top_k > (self.experts + self.idle) // groups * (rule.groups_kept if groups > 1 else 1):
            raise CheckpointError(
                f"config.json: num_experts_per_tok is {rule.top_k}, expected at most the experts that are chosen from, "
                f"of {self.experts} in {groups} groups"
            )


NUMBERED: Final = StoredExperts("w1", "w3", "w2")
"""Experts whose tensors have numbers, as in Mixtral."""


def numbered_names(c: Checkpoint) -> dict[str, str]:
    """Return the name of a mixture of `NUMBERED` experts, which is the usual one where they are stacked."""
    return {"mlp": "mlp" if read_stored(c, NUMBERED).is_stacked else "block_sparse_moe"}


def read_stored(c: Checkpoint, like: StoredExperts | None = None, inputs: int = 0) -> StoredExperts:
    """Return how the tensors of `c` hold experts: stacked, in either order of rows and columns, or one by one `like`.

    `inputs` are those of an expert, 0 for the hidden size. Without headers (archives, random weights) it is one by one,
    unless `like` is stacked.
    """
    like = like or StoredExperts()
    try:
        tensors = c.tensors
    except CheckpointError:  # there are no weights: whoever needs them says so
        return like
    name = "experts.up_proj" if like.gate is None else "experts.gate_up_proj"
    found = next((each for each in tensors.values() if each.name.endswith(name) and len(each.shape) == 3), None)
    if found is None:
        return like
    hidden, (rows, columns) = inputs or c.positive("hidden_size"), found.shape[1:]
    is_transposed = like.is_transposed if rows == columns else columns != hidden
    return replace(like, is_stacked=True, is_transposed=is_transposed)


def lacks_tensor(c: Checkpoint, end: str) -> bool:
    """Return whether the headers of `c` are known and no tensor's name ends with `end`."""
    try:
        return not any(each.name.endswith(end) for each in c.tensors.values())
    except CheckpointError:  # there are no weights: whoever needs them says so
        return False


def has_tensor(c: Checkpoint, end: str) -> bool:
    """Return whether the headers of `c` are known and some tensor's name ends with `end`."""
    try:
        return any(each.name.endswith(end) for each in c.tensors.values())
    except CheckpointError:  # there are no weights: whoever needs them says so
        return False


def stated_counts(c: Checkpoint) -> tuple[str, str]:
    """Return the config's names of the numbers of experts and of shared ones, where releases differ in them."""
    if c.values.get("num_experts") is not None:
        return "num_experts", "num_shared_experts"
    return "n_routed_experts", "n_shared_experts"


def sparse_layers(c: Checkpoint) -> tuple[bool, ...]:
    """Return which layers are mixtures, from `decoder_sparse_step` and `mlp_only_layers`. Raises CheckpointError."""
    step, dense = c.positive("decoder_sparse_step", 1), c.values.get("mlp_only_layers") or []
    if not isinstance(dense, list) or any(not isinstance(each, int) for each in dense):
        raise c.error("mlp_only_layers", "a list of layers")
    layers = range(c.positive("num_hidden_layers"))
    return tuple(layer not in dense and (layer + 1) % step == 0 for layer in layers)


def read_mixture(
    c: Checkpoint,
    rule: RouterRule,
    *,
    correction: str | None = None,
    counts: tuple[str, str] = ("n_routed_experts", "n_shared_experts"),
) -> Mixture:
    """Read the sizes of experts that DeepSeek's descendants share. Raises CheckpointError.

    counts: the config's names of the numbers of experts and of shared ones.
    """
    experts, width = c.positive(counts[0]), c.positive("moe_intermediate_size")
    if experts % rule.num_groups or rule.groups_kept > rule.num_groups:
        raise c.error("n_group", f"a divisor of {counts[0]}, which is {experts}, and at least topk_group")
    if rule.top_k > experts // rule.num_groups * rule.groups_kept:
        raise c.error("num_experts_per_tok", "at most the experts of topk_group groups")
    return Mixture(
        experts=experts,
        width=width,
        rule=rule,
        stored=read_stored(c),
        correction=correction,
        shared_width=width * (c.optional_positive(counts[1]) or 0),
    )


def usual_mixture(
    c: Checkpoint,
    experts: str | None = None,
    width: str = "moe_intermediate_size",
    *,
    score: Literal["softmax", "sigmoid"] = "softmax",
    norm_topk_prob: bool | None = None,
    like: StoredExperts | None = None,
    **own: Any,
) -> Mixture:
    """Read a mixture without groups. Raises CheckpointError.

    experts, width: keys of the config, num_local_experts or num_experts unless given. norm_topk_prob: holds where the
    config is silent, None where weights are always normalised. like: as in `read_stored`. own: other fields.
    """
    experts = experts or ("num_local_experts" if c.values.get("num_local_experts") else "num_experts")
    count, size = c.positive(experts), c.positive(width)
    top_k = c.positive("num_experts_per_tok")
    is_normalized = norm_topk_prob is None or c.bool("norm_topk_prob", norm_topk_prob)
    rule = RouterRule(top_k, score, is_normalized=is_normalized)
    return Mixture(experts=count, width=size, rule=rule, stored=read_stored(c, like), **own)


def read_shared_mixture(
    c: Checkpoint,
    *,
    norm_topk_prob: bool,
    score: Literal["softmax", "sigmoid"] = "softmax",
    is_shared_gated: bool = True,
) -> Mixture:
    """Read Qwen's mixture beside an expert that all tokens take; `norm_topk_prob` where the config is silent."""
    made = usual_mixture(c, "num_experts", norm_topk_prob=norm_topk_prob, score=score, is_shared_gated=is_shared_gated)
    return replace(made, shared_width=c.positive("shared_expert_intermediate_size"))


def softmax_mixture(c: Checkpoint, *, norm_topk_prob: bool, top_k: int = REQUIRED, has_groups: bool = False) -> Mixture:
    """Read a mixture beside shared experts, whose router chooses by softmax. top_k, norm_topk_prob: hold where the
    config is silent."""
    rule = RouterRule(
        c.positive("num_experts_per_tok", top_k),
        is_normalized=c.bool("norm_topk_prob", norm_topk_prob),
        factor=c.positive_float("routed_scaling_factor", 1.0),
        num_groups=c.positive("n_group", 1) if has_groups else 1,
        groups_kept=c.positive("topk_group", 1) if has_groups else 1,
    )
    return read_mixture(c, rule)


def corrected(
    c: Checkpoint,
    *,
    groups: tuple[int, int] = (1, 1),
    is_normalized: bool = True,
    factor: float = 1.0,
    correction: str = "gate.e_score_correction_bias",
    counts: tuple[str, str] = ("n_routed_experts", "n_shared_experts"),
) -> Mixture:
    """Read a mixture whose router adds a correction to sigmoids.

    `groups`, `is_normalized` and `factor` hold where the config is silent; `counts` are those of `read_mixture`.
    """
    c.expect("scoring_func", "sigmoid", "noaux_tc")
    c.expect("topk_method", "noaux_tc", default="noaux_tc")
    rule = RouterRule(
        c.positive("num_experts_per_tok"),
        "sigmoid",
        is_normalized=c.bool("norm_topk_prob", is_normalized),
        factor=c.positive_float("routed_scaling_factor", factor),
        num_groups=c.positive("n_group", groups[0]),
        groups_kept=c.positive("topk_group", groups[1]),
    )
    return read_mixture(c, rule, correction=correction, counts=counts)


def sparse_by_kind(c: Checkpoint, default: int) -> tuple[bool, ...]:
    """Return which layers are mixtures: those that `mlp_layer_types` names, else as `dense_first`."""
    name, sparse = "mlp_layer_types", dense_first(c, default)
    if c.values.get(name) is None:
        return sparse
    expected = f'"dense" or "sparse" for each of {len(sparse)} layers'
    kinds = c.listed(name, len(sparse), lambda each: each in ("dense", "sparse"), expected)
    return tuple(kind == "sparse" for kind in kinds)


def dense_first(c: Checkpoint, default: int) -> tuple[bool, ...]:
    """Return which layers are mixtures: all from `first_k_dense_replace` on."""
    first = c.values.get("first_k_dense_replace")
    first = default if first is None else c.int("first_k_dense_replace")
    return tuple(layer >= first for layer in range(c.positive("num_hidden_layers")))
