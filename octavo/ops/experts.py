"""Mixtures of experts: which experts a token takes, products with one weight per expert, and their weighted sum.

A pair is a token with one of its experts; pair number `token * top_k + place`. Pairs are grouped by expert: a row of a
stack's product belongs to the pair that `Routing.order` has at its place.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor

from octavo.ops.registry import Operator

if TYPE_CHECKING:
    from octavo.ops.prepare_linear import PreparedLinear


@dataclass(frozen=True, slots=True)
class RouterRule:
    """How a router chooses `top_k` experts and weighs them.

    Softmax over the chosen ones alone ("top-k, then softmax") is softmax with `is_normalized`.
    """

    top_k: int
    score: Literal["softmax", "sigmoid", "softplus_root", "softmax_near"] = "softmax"
    """`softplus_root` is the root of log(1 + e^logit). `softmax_near` is softmax over an expert and those near it, of
    the experts that are not chosen before it.

    Near one of logit m is one of logit s where `(m - s) / max(|s|, m)` is at most `threshold`. Groups and a bias do not
    go with it. Source: https://arxiv.org/abs/2409.12136.
    """
    threshold: float = 0.0
    is_normalized: bool = False
    """The weights of a token are divided by their sum."""
    factor: float = 1.0
    """The final weights are multiplied by this."""
    num_groups: int = 1
    """Experts are in groups of neighbours; only those of the best groups are chosen."""
    groups_kept: int = 1
    group_best: int = 2
    """Number of a group's best scores whose sum is the score of the group."""
    corrects_logits: bool = False
    """Experts are chosen by logits plus the bias, instead of scores plus the bias."""


class Routing(NamedTuple):
    """The experts of tokens. All tensors but the first are int32."""

    weights: Tensor
    """float32 [tokens, top_k]: the weight of each pair, the best expert first."""
    order: Tensor
    """[pairs]: the pair of each row, by expert and then by token."""
    places: Tensor
    """[pairs]: the row of each pair."""
    starts: Tensor
    """[experts + 1]: the first row of each expert, and the number of rows."""


def route(logits: Tensor, rule: RouterRule, bias: Tensor | None = None, factors: Tensor | None = None) -> Routing:
    """Return the experts of tokens from logits float32 [tokens, experts].

    `bias` float32 [experts] is added to scores for the choice, not for the weights. Of equal scores the first is taken.
    The weights of each expert are multiplied with its element of `factors` float32 [experts] in the end.
    """
    chosen, weights = _near(logits, rule) if rule.score == "softmax_near" else _best(logits, rule, bias)
    weights = _final(weights, rule)
    return routing_of(chosen, weights if factors is None else weights * factors[chosen], logits.shape[1])


def route_to(logits: Tensor, rule: RouterRule, chosen: Tensor) -> Routing:
    """Return the routing of tokens to the experts `chosen` int64 [tokens, top_k], weighed by logits as `route` does."""
    return routing_of(chosen, _final(_scores(logits, rule).gather(1, chosen), rule), logits.shape[1])


def _final(weights: Tensor, rule: RouterRule) -> Tensor:
    if rule.is_normalized:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * rule.factor


def _scores(logits: Tensor, rule: RouterRule) -> Tensor:
    if rule.score == "softplus_root":
        # torch's softplus rounds an element at the end of a tensor in another way than those before it
        return torch.sqrt(torch.where(logits > 20.0, logits, torch.log1p(torch.exp(logits))))
    return torch.softmax(logits, dim=-1) if rule.score == "softmax" else torch.sigmoid(logits)


def _best(logits: Tensor, rule: RouterRule, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the chosen experts and their scores, each [tokens, top_k]."""
    tokens, experts = logits.shape
    scores = _scores(logits, rule)
    # logits have the order of scores, and differ where scores are rounded to the same number
    wanted = logits if rule.corrects_logits or (bias is None and rule.num_groups == 1) else scores
    wanted = wanted if bias is None else wanted + bias
    if rule.num_groups > 1:
        groups = wanted.view(tokens, rule.num_groups, experts // rule.num_groups)
        best = groups.sort(dim=-1, descending=True).values[..., : rule.group_best].sum(-1)
        kept = best.sort(dim=-1, descending=True, stable=True).indices[:, : rule.groups_kept]
        is_kept = torch.zeros_like(best, dtype=torch.bool).scatter_(1, kept, torch.ones_like(kept, dtype=torch.bool))
        wanted = groups.masked_fill(~is_kept[..., None], float("-inf")).view(tokens, experts)
    chosen = wanted.sort(dim=-1, descending=True, stable=True).indices[:, : rule.top_k]
    return chosen, scores.gather(1, chosen)


def _near(logits: Tensor, rule: RouterRule) -> tuple[Tensor, Tensor]:
    """Return the chosen experts and their scores, each [tokens, top_k], by the rule `softmax_near`."""
    left, chosen, weights = logits, [], []
    for _ in range(rule.top_k):
        best = left.sort(dim=-1, descending=True, stable=True).indices[:, :1]
        most = left.gather(1, best)
        is_far = (most - logits) / torch.maximum(logits.abs(), most) > rule.threshold
        weights.append(torch.softmax(left.masked_fill(is_far, float("-inf")), dim=-1).gather(1, best))
        chosen.append(best)
        left = left.scatter(1, best, float("-inf"))
    return torch.cat(chosen, 1), torch.cat(weights, 1)


def routing_of(chosen: Tensor, weights: Tensor, experts: int) -> Routing:
    """Return the routing to chosen experts, int64 [tokens, top_k], with float32 weights [tokens, top_k]."""
    order = chosen.reshape(-1).sort(stable=True).indices
    counts = torch.zeros(experts + 1, dtype=torch.int32, device=chosen.device)
    ones = torch.ones(order.shape, dtype=torch.int32, device=chosen.device)
    starts = counts.index_add(0, chosen.reshape(-1) + 1, ones).cumsum(0)
    places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=chosen.device))
    return Routing(weights, *(each.int() for each in (order, places, starts)))


def expert_sum(
    rows: Tensor, routing: Routing, dtype: torch.dtype, shared: Tensor | None = None, gate: Tensor | None = None
) -> Tensor:
    """Return for each token Σ weight · row over its pairs, the best expert first, plus `shared`, rounded to `dtype`.

    rows: float32 [pairs, width]. shared: [tokens, width] of `dtype`. gate: float32 [tokens, 1]; `shared` is multiplied
    with its sigmoid.
    """
    tokens, top_k = routing.weights.shape
    if rows.is_meta:
        return rows.new_empty((tokens, rows.shape[1]), dtype=dtype)
    of_pairs = rows[routing.places.long()].view(tokens, top_k, -1)
    total = torch.zeros_like(of_pairs[:, 0])
    for place in range(top_k):
        total = total + routing.weights[:, place, None] * of_pairs[:, place]
    if shared is not None:
        total = total + (shared.float() if gate is None else torch.sigmoid(gate) * shared)
    return total.to(dtype)


def add_inputs(out: Tensor, x: Tensor, routing: Routing, experts: int) -> Tensor:
    """Return `out` plus x, each [tokens, width], times the weights of experts that return their inputs.

    These are numbered from `experts` on. Source: https://arxiv.org/abs/2410.07348.
    """
    places = routing.places.view(routing.weights.shape)
    weights = routing.weights.masked_fill(places < routing.starts[experts], 0.0)
    total = weights[:, 0]
    for place in range(1, weights.shape[1]):
        total = total + weights[:, place]
    return (out.float() + x.float() * total[:, None]).to(out.dtype)


def weighted_inputs(x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return x [tokens, width], each row times its weight, float32 [tokens, 1], in x's type; and 1 for each weight."""
    return x * weights.to(x.dtype), torch.ones_like(weights)


class PreparedStack(ABC):
    """One weight [outputs, inputs] for each of `experts`, ready to be multiplied."""

    def __init__(self, state: Mapping[str, Tensor], first: int) -> None:
        """state: what a `PreparedLinear` keeps, of all experts on top of each other; the first is number `first`."""
        self._state = dict(state)
        self.first = first
        self.experts = len(next(iter(state.values())))

    @abstractmethod
    def __call__(self, x: Tensor, routing: Routing, *, of_tokens: bool, in_float32: bool = False) -> Tensor:
        """Return [pairs, outputs], each row of x multiplied with the weight of the row's expert.

        x is [tokens, inputs] if `of_tokens`, else [pairs, inputs] in the order of the rows. Rows of experts that are
        not in this stack are zeros. A row has the bits that `PreparedLinear` gives it alone.
        """

    def state(self) -> dict[str, Tensor]:
        """Return the tensors of the stack, each [experts, ...]."""
        return dict(self._state)


class LinearStack(PreparedStack):
    """A stack of prepared linears, which multiply one after the other."""

    def __init__(self, linears: Sequence[PreparedLinear], state: Mapping[str, Tensor], first: int) -> None:
        super().__init__(state, first)
        self._linears = linears

    def __call__(self, x: Tensor, routing: Routing, *, of_tokens: bool, in_float32: bool = False) -> Tensor:
        shape, dtype = self._linears[0].shape, torch.float32 if in_float32 else x.dtype
        out = x.new_zeros((len(routing.order), shape.columns), dtype=dtype)
        if x.is_meta:
            return out
        starts = routing.starts.tolist()
        for number, linear in enumerate(self._linears, self.first):
            own = slice(starts[number], starts[number + 1])
            if own.start < own.stop:
                rows = x[routing.order[own].long() // routing.weights.shape[1]] if of_tokens else x[own]
                out[own] = linear.in_float32(rows) if in_float32 else linear(rows)
        return out


def _logits(tokens: int, experts: int) -> Tensor:
    return torch.randn((tokens, experts), generator=torch.Generator().manual_seed(tokens)) * 2.0


def route_examples(dtype: torch.dtype) -> Iterator[tuple[Tensor, RouterRule, Tensor | None, Tensor | None]]:
    """Yield each way to choose, for one token and for several."""
    bias = torch.linspace(-0.3, 0.3, 16)
    for tokens in (1, 9):
        logits = _logits(tokens, 16)
        yield logits, RouterRule(4), None, None
        yield logits, RouterRule(1, "sigmoid"), None, None
        yield logits, RouterRule(3, is_normalized=True, factor=2.5), None, bias + 1.0
        yield logits, RouterRule(3, "softmax", is_normalized=True), bias, None
        yield (
            logits,
            RouterRule(4, "sigmoid", is_normalized=True, factor=1.5, num_groups=4, groups_kept=2),
            bias,
            bias + 0.5,
        )
        yield logits, RouterRule(2, num_groups=4, groups_kept=2, group_best=1), None, None
        yield logits, RouterRule(3, "sigmoid", is_normalized=True, corrects_logits=True), bias * 5, None
        yield logits, RouterRule(3, "softplus_root", is_normalized=True, factor=1.5), bias, None
        yield logits, RouterRule(2, "softmax_near", threshold=0.4), None, None
        yield logits - 9.0, RouterRule(2, "softmax_near", threshold=0.1), None, bias + 0.5


def route_to_examples(dtype: torch.dtype) -> Iterator[tuple[Tensor, RouterRule, Tensor]]:
    """Yield experts that are not the best, for one token and for several."""
    for tokens in (1, 9):
        chosen = (torch.arange(3 * tokens) * 5 % 16).view(tokens, 3)
        yield _logits(tokens, 16), RouterRule(3, "softplus_root", is_normalized=True, factor=1.5), chosen


def sum_examples(dtype: torch.dtype) -> Iterator[tuple[Tensor, Routing, torch.dtype, Tensor | None, Tensor | None]]:
    """Yield sums with and without what is shared."""
    for tokens, width in ((1, 64), (5, 37)):
        routing = route(_logits(tokens, 8), RouterRule(3))
        rows = torch.randn((3 * tokens, width), generator=torch.Generator().manual_seed(1))
        yield rows, routing, dtype, None, None
        yield rows, routing, dtype, rows[:tokens].to(dtype), None
        yield rows, routing, dtype, rows[:tokens].to(dtype), rows[:tokens, :1]


def weighted_examples(dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield one token and several."""
    for tokens in (1, 5):
        yield _logits(tokens, 64).to(dtype), torch.sigmoid(_logits(tokens, 1))


def input_examples(dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor, Routing, int]]:
    """Yield inputs of all experts, of some, and of none."""
    for experts in (0, 5, 8):
        x = _logits(5, 64).to(dtype)
        yield x.flip(0), x, route(_logits(5, 8), RouterRule(3)), experts


OPERATORS = (
    Operator("route", route, route_examples),
    Operator("route_to", route_to, route_to_examples),
    Operator("expert_sum", expert_sum, sum_examples),
    Operator("add_inputs", add_inputs, input_examples),
    Operator("weighted_inputs", weighted_inputs, weighted_examples),
)
