"""Mixtures of experts as configs describe them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from octavo.config.checkpoint import Checkpoint
from octavo.config.safetensors_header import TensorInfo
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
    """The activation of experts; `numbers` are its parameters (`layers.experts.Experts`)."""
    numbers: tuple[float, ...] = ()
    latent_width: int = 0
    """The width of experts' inputs and outputs, between two projections; 0 for the width of the stream."""
    has_latent_norm: bool = False
    """The sum of their outputs is normalised before the second of these projections."""
    shared_width: int = 0
    """Activations of the expert that all tokens take; 0 where there is none."""
    are_inputs_weighted: bool = False
    """The one expert of a token receives the weighted input, and its output is not weighted."""
    idle: int = 0
    """The number of further experts, which return their inputs."""
    has_output_bias: bool = False
    """A stored vector is added to the sum of all experts' outputs."""
    output_factor: float = 1.0
    """The factor of the sum of all experts, the shared one included."""
    is_shared_gated: bool = False
    """The shared expert's output is multiplied by the sigmoid of a gate's output."""


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
    name = "experts.up_proj" if like.gate is None else "experts.gate_up_proj"
    found = next((each for each in known_tensors(c) if each.name.endswith(name) and len(each.shape) == 3), None)
    if found is None:
        return like
    hidden, (rows, columns) = inputs or c.positive("hidden_size"), found.shape[1:]
    is_transposed = like.is_transposed if rows == columns else columns != hidden
    return replace(like, is_stacked=True, is_transposed=is_transposed)


def known_tensors(c: Checkpoint) -> Sequence[TensorInfo]:
    """Return the headers of all tensors; none where there are no weights: the callers that need weights report it."""
    try:
        return [*c.tensors.values()]
    except CheckpointError:
        return ()


def lacks_tensor(c: Checkpoint, end: str) -> bool:
    """Return whether the headers of `c` are known and no tensor's name ends with `end`."""
    return bool(known_tensors(c)) and not has_tensor(c, end)


def has_tensor(c: Checkpoint, end: str) -> bool:
    """Return whether the headers of `c` are known and some tensor's name ends with `end`."""
    return any(each.name.endswith(end) for each in known_tensors(c))


def sparse_layers(c: Checkpoint) -> tuple[bool, ...]:
    """Return which layers are mixtures, from `decoder_sparse_step` and `mlp_only_layers`. Raises CheckpointError."""
    step, dense = c.positive("decoder_sparse_step", 1), c.values.get("mlp_only_layers") or []
    if not isinstance(dense, list) or any(not isinstance(each, int) for each in dense):
        raise c.error("mlp_only_layers", "a list of layers")
    layers = range(c.positive("num_hidden_layers"))
    return tuple(layer not in dense and (layer + 1) % step == 0 for layer in layers)


COUNTS: Final[Mapping[str, Any]] = {
    "experts": ("num_experts", "n_routed_experts"),
    "shared": ("num_shared_experts", ("n_shared_experts", 0)),
}
EITHER: Final[Mapping[str, Any]] = {"experts": ("num_local_experts", "num_experts")}
"""Both names of the numbers of experts and of shared ones, where releases differ in them."""
ROUTED: Final[Mapping[str, Any]] = {"factor": ("routed_scaling_factor", 1.0), "shared": ("n_shared_experts", 0)}
IN_GROUPS: Final[Mapping[str, Any]] = {"num_groups": ("n_group", 1), "groups_kept": ("topk_group", 1)}
"""The keys of groups of experts in configs of DeepSeek and its descendants."""
NORMALIZED: Final = {flag: ("norm_topk_prob", flag) for flag in (False, True)}
"""Whether weights are normalised: the config's value, or `flag` where it has none."""
MISTRAL: Final[Mapping[str, Any]] = {
    "top_k": ("num_experts_per_tok", 4),
    "is_normalized": NORMALIZED[True],
    **ROUTED,
    **IN_GROUPS,
}
"""The fields of Mistral's releases, whose routers choose by softmax."""
_NUMBERS: Final[Mapping[str, Callable[..., Any]]] = {
    **dict.fromkeys(("experts", "width", "top_k", "num_groups", "groups_kept", "shared_width"), Checkpoint.positive),
    "shared": Checkpoint.count,
    "is_normalized": Checkpoint.bool,
    "factor": Checkpoint.positive_float,
}
"""The numbers that `read_mixture` reads from the config, each with the method that reads it."""
_USUAL: Final[Mapping[str, Any]] = {
    "experts": "n_routed_experts",
    "width": "moe_intermediate_size",
    "top_k": "num_experts_per_tok",
    "is_normalized": True,
    "shared": 0,
}


def read_mixture(c: Checkpoint, like: StoredExperts | None = None, **stated: Any) -> Mixture:
    """Read a mixture. Raises CheckpointError for a rule that chooses more than there is.

    stated: fields of the mixture and of its rule, and `shared`, the number of experts as wide as others that all tokens
    take. A number is a key of the config; or a key with its default, which is stated in the same way;
    or the number itself. like: as in `read_stored`.
    """
    stated = {**_USUAL, **stated}
    found = {name: _read(c, _NUMBERS[name], each) if name in _NUMBERS else each for name, each in stated.items()}
    rule = RouterRule(**{name: found.pop(name) for name in RouterRule.__dataclass_fields__ if name in found})
    shared, count, groups = found.pop("shared"), found["experts"] + found.get("idle", 0), rule.num_groups
    top_k, of_all = (_key(c, stated[name]) for name in ("top_k", "experts"))
    if count % groups or rule.groups_kept > groups:
        if c.values.get("n_group") is not None:
            raise c.error("n_group", f"a divisor of the {count} experts, and at least topk_group")
        raise c.error(*((of_all, f"a multiple of {groups}") if count % groups else ("topk_group", f"at most {groups}")))
    if rule.top_k > (most := count // groups * (rule.groups_kept if groups > 1 else 1)):
        if c.values.get(top_k) is not None:
            raise c.error(top_k, f"at most the experts that are chosen from, of {count} in {groups} groups")
        raise c.error(of_all, f"so many that {rule.top_k} are chosen for a token, of {most} in {groups} groups")
    if "stored" not in found:
        found["stored"] = read_stored(c, like)
    return Mixture(rule=rule, **{"shared_width": shared * found["width"], **found})


def _read(c: Checkpoint, read: Callable[..., Any], stated: Any) -> Any:
    if isinstance(stated, str):
        return read(c, stated)
    if not isinstance(stated, tuple):
        return stated
    key, default = stated
    return _read(c, read, default) if c.values.get(key) is None else read(c, key)


def _key(c: Checkpoint, stated: Any) -> str:
    """Return the key of the config that has a stated number; the last one where it has none."""
    if not isinstance(stated, tuple):
        return str(stated)
    key, default = stated
    return _key(c, default) if isinstance(default, str | tuple) and c.values.get(key) is None else str(key)


def read_shared_mixture(c: Checkpoint, **stated: Any) -> Mixture:
    """Read Qwen's mixture beside an expert that all tokens take, as `read_mixture` does."""
    own = {"experts": "num_experts", "shared_width": "shared_expert_intermediate_size", "is_shared_gated": True}
    return read_mixture(c, **{**own, **stated})


def corrected(c: Checkpoint, *, groups: tuple[int, int] = (1, 1), factor: float = 1.0, **stated: Any) -> Mixture:
    """Read a mixture whose router adds a correction to sigmoids, as `read_mixture` does.

    `groups` and `factor` hold where the config is silent.
    """
    c.expect("scoring_func", "sigmoid", "noaux_tc")
    c.expect("topk_method", "noaux_tc", default="noaux_tc")
    usual = {
        **ROUTED,
        "score": "sigmoid",
        "is_normalized": NORMALIZED[True],
        "factor": ("routed_scaling_factor", factor),
        "num_groups": ("n_group", groups[0]),
        "groups_kept": ("topk_group", groups[1]),
        "correction": "gate.e_score_correction_bias",
    }
    return read_mixture(c, **{**usual, **stated})


def sparse_by_kind(c: Checkpoint, default: int) -> tuple[bool, ...]:
    """Return which layers are mixtures: those that `mlp_layer_types` names, else as `dense_first`."""
    name, sparse = "mlp_layer_types", dense_first(c, default)
    if c.values.get(name) is None:
        return sparse
    expected = f'"dense" or "sparse" for each of {len(sparse)} layers'
    kinds = c.listed(name, len(sparse), lambda each: each in ("dense", "sparse"), expected)
    return tuple(kind == "sparse" for kind in kinds)


def dense_first(c: Checkpoint, default: int, name: str = "first_k_dense_replace") -> tuple[bool, ...]:
    """Return which layers are mixtures: all from `name` on."""
    first = c.int(name, default)
    return tuple(layer >= first for layer in range(c.positive("num_hidden_layers")))
