"""Cost models of the time of a step: a roofline of a device and a model, or coefficients fitted to measured steps.

A roofline (Williams et al. 2009, doi:10.1145/1498765.1498785) is the longer of the times for moving bytes and for
arithmetic. Both kinds of models are read from JSON; `type` states the kind.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import mul
from typing import Annotated, Any, ClassVar, Final, NamedTuple

import msgspec

from octavo.core.step import SchedulerOutput
from octavo.errors import ConfigError

STEP_S: Final = 2e-3
"""Default seconds of a step besides bytes and arithmetic: planning and kernel launches."""


Amount = Annotated[float, msgspec.Meta(ge=0)]
Rate = Annotated[float, msgspec.Meta(gt=0)]
Window = Annotated[int, msgspec.Meta(ge=1)] | None


class StepWork(NamedTuple):
    """The amounts of work in a step on which its time depends. num_sequences: rows. num_tokens: computed tokens.
    num_prefill_tokens: tokens in rows of more than one token.
    num_context_tokens: tokens whose keys and values rows of one token read. num_pairs: pairs of a query and a key that
    it sees, in the rows of more than one token. num_swapped_blocks: blocks moved between device and host.
    num_copied_blocks: those copied within the device.
    """

    num_sequences: int
    num_tokens: int
    num_prefill_tokens: int = 0
    num_context_tokens: float = 0
    num_pairs: float = 0
    num_swapped_blocks: float = 0
    num_copied_blocks: float = 0


def num_pairs_of(start: int, num_tokens: int, sliding_window: int | None) -> int:
    """Return the pairs of a query and a key that it sees, for queries at `num_tokens` positions from `start` on."""
    num_pairs = num_tokens * start + num_tokens * (num_tokens + 1) // 2
    if sliding_window is not None:
        # keys before the window of the first query, and of the query after the last
        before, behind = (max(0, position - sliding_window) for position in (start, start + num_tokens))
        num_pairs -= (behind * (behind + 1) - before * (before + 1)) // 2
    return num_pairs


def work_of(step: SchedulerOutput, sliding_window: int | None = None, costs: BlockCosts | None = None) -> StepWork:
    """Return the work of a step. sliding_window: tokens that a query sees in every layer. costs: those of a model with
    several cache groups; a token or block of one group counts as its share of all layers."""
    if costs is not None and (costs.windowed_share < 1 or costs.state_bytes):
        return _weighted(step, costs)
    num_tokens = num_prefill = num_context = num_pairs = 0
    for row in step.rows:
        start, count = row.start, row.num_tokens
        end = start + count
        num_tokens += count
        if count == 1:
            num_context += end if sliding_window is None or end < sliding_window else sliding_window
        else:
            num_prefill += count
            num_pairs += num_pairs_of(start, count, sliding_window)
    ops = step.block_ops
    num_swapped = len(ops.swap_outs) + len(ops.swap_ins)
    return StepWork(len(step.rows), num_tokens, num_prefill, num_context, num_pairs, num_swapped, len(ops.copies))


def _weighted(step: SchedulerOutput, costs: BlockCosts) -> StepWork:
    full, seen = work_of(step), work_of(step, costs.sliding_window)
    share = 0.0 if costs.sliding_window is None else costs.windowed_share
    weights = [group.num_bytes / costs.kv_bytes_per_token for group in costs.cache_groups(1)]
    ops = step.block_ops
    return full._replace(
        num_context_tokens=(1 - share) * full.num_context_tokens + share * seen.num_context_tokens,
        num_pairs=(1 - share) * full.num_pairs + share * seen.num_pairs,
        num_swapped_blocks=sum(weights[copy.group] for copy in (*ops.swap_outs, *ops.swap_ins)),
        num_copied_blocks=sum(weights[copy.group] for copy in ops.copies),
    )


class CacheGroupCosts(NamedTuple):
    """The bytes of a block of one cache group, and the kind of its layers (window, recurrent state)."""

    num_bytes: float
    window: int | None = None
    is_state: bool = False


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """The errors of simulating a load that no coefficient was fitted to: (predicted - measured) / measured.

    input_len, output_len: mean tokens of its requests. utilization: share of the time in which the engine computed.
    queued_share: mean share of a request's time that it waited to be scheduled.
    """

    load: str
    input_len: float
    output_len: float
    utilization: float
    queued_share: float
    throughput_error: float
    first_token_error: float
    token_time_error: float


class BlockCosts(msgspec.Struct, frozen=True, kw_only=True):
    """The costs of moving blocks. swap_bytes_per_s: rate between device and host. num_layers: number of layers; the
    blocks of one are sent while the next one computes. windowed_share: share of kv_bytes_per_token in layers with the
    sliding window. state_bytes: the states of one sequence in recurrent layers."""

    kv_bytes_per_token: Rate
    swap_bytes_per_s: Rate
    sliding_window: Window = None
    num_layers: Annotated[int, msgspec.Meta(ge=1)] = 1
    windowed_share: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
    state_bytes: Amount = 0.0

    def cache_groups(self, block_size: int) -> list[CacheGroupCosts]:
        """Return the cache groups of the model, whose blocks have this many tokens."""
        share = 0.0 if self.sliding_window is None else self.windowed_share
        num_bytes = block_size * self.kv_bytes_per_token
        groups = [CacheGroupCosts((1 - share) * num_bytes)] if share < 1 else []
        groups += [CacheGroupCosts(share * num_bytes, self.sliding_window)] if share else []
        return groups + ([CacheGroupCosts(self.state_bytes, is_state=True)] if self.state_bytes else [])

    def swap_seconds(self, num_blocks: float, block_size: int) -> float:
        """Return the seconds that moving blocks between device and host takes."""
        return num_blocks * block_size * self.kv_bytes_per_token / self.swap_bytes_per_s

    def move_seconds(self, work: StepWork, block_size: int, copy_bytes_per_s: float) -> float:
        """Return the seconds of all block moves of a step."""
        if not (work.num_swapped_blocks or work.num_copied_blocks):
            return 0.0
        copy_s = work.num_copied_blocks * block_size * self.kv_bytes_per_token / copy_bytes_per_s
        return self.swap_seconds(work.num_swapped_blocks, block_size) + copy_s


class Roofline(BlockCosts, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="roofline"):
    """A model on a device. Sizes are bytes, times seconds; rates are achieved ones, not those of data sheets.

    kv_bytes_per_token: keys and values of one token over all layers. flops_per_pair: attention over all layers for one
    query and one key. swap_bytes_per_s: between device and host; within the device a copy reads and writes at
    bytes_per_s. step_s, sequence_s, token_s: what a step, each of its rows, and each of its tokens costs besides.
    sliding_window: tokens that a query sees in the layers that have a window. expert_bytes: the part of weight_bytes in
    experts, of which a token reads the share expert_share. num_stages: devices that a step passes one after the other,
    each with an equal part of the time, while other steps are on the others.
    """

    name: str
    weight_bytes: Amount
    flops_per_token: Amount
    flops_per_pair: Amount
    device_bytes: Amount
    bytes_per_s: Rate
    flops_per_s: Rate
    swap_bytes_per_s: Rate = 20e9
    step_s: Amount = STEP_S
    sequence_s: Amount = 10e-6
    token_s: Amount = 0.0
    expert_bytes: Amount = 0.0
    expert_share: Annotated[float, msgspec.Meta(ge=0, le=1)] = 1.0
    num_stages: Annotated[int, msgspec.Meta(ge=1)] = 1

    def step_seconds(self, work: StepWork, block_size: int) -> float:
        bytes_read = self.weight_bytes + self.kv_bytes_per_token * work.num_context_tokens
        bytes_read += 2 * self.state_bytes * work.num_sequences
        if self.expert_bytes:
            # share of experts that no token of the step chose, if tokens choose independently
            bytes_read -= self.expert_bytes * (1 - self.expert_share) ** work.num_tokens
        pairs = work.num_pairs + work.num_context_tokens
        flops = self.flops_per_token * work.num_tokens + self.flops_per_pair * pairs
        return (
            self.step_s
            + self.sequence_s * work.num_sequences
            + self.token_s * work.num_tokens
            + max(bytes_read / self.bytes_per_s, flops / self.flops_per_s)
            + self.move_seconds(work, block_size, self.bytes_per_s / 2)
        )

    def kv_tokens(self, memory_utilization: float) -> int:
        """Return the number of tokens whose keys and values fit beside the weights into this share of the device's
        memory."""
        return max(0, int((memory_utilization * self.device_bytes - self.weight_bytes) / self.kv_bytes_per_token))

    @property
    def prefill_tokens_per_s(self) -> float:
        """Return the rate of a long prefill, whose chunks are pipelined over the stages."""
        return self.num_stages / (self.flops_per_token / self.flops_per_s + self.token_s)

    def describe(self) -> str:
        """Return a line for the report."""
        return (
            f"{self.name}: {self.weight_bytes / 1e9:,.3g} GB of weights at {self.bytes_per_s / 1e9:,.0f} GB/s and "
            f"{self.flops_per_s / 1e12:,.3g} TFLOP/s, {self.kv_bytes_per_token / 1e3:,.0f} kB of KV a token"
        )


FEATURES = (
    "step_s",
    "prefill_step_s",
    "sequence_s",
    "further_sequence_s",
    "prefill_token_s",
    "context_token_s",
    "pair_s",
)
"""The names of the coefficients of `Fitted` in the order of `_features`; `COPIED_BLOCK` follows them."""
COPIED_BLOCK: Final = "copied_block_s"
"""Seconds per block that is copied within the device."""
_FEW_SEQUENCES: Final = 8
"""Up to this number of rows a step is cheaper on some processors: the data stay in the nearest cache."""
_MOST_INTERRUPTED, _WIDEST_SPREAD = 0.1, 0.5
"""`interrupted_share` and `repetition_spread` beyond which the machine was busy."""


class Fitted(BlockCosts, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="fitted"):
    """Coefficients in seconds: per step, per step with a prefill in addition, per row, per row beyond the eighth in
    addition, per prefill token, per token of context of a decoding row, and per query-key pair of a prefill.

    Made by `octavo bench calibrate`. num_kv_tokens: what the measured engine's cache holds. swap_bytes_per_s,
    copy_bytes_per_s: rates of keys and values moved between device and host, and copied within the device.
    prefill_tokens_per_s: rate of a long prompt. sliding_window: as in `Roofline`. fit_error: median of |predicted -
    measured| / measured over the measured steps. checks: loads that were held out of the fit.
    interrupted_share: share of the measured steps in which other programs got the processor. repetition_spread:
    (largest - smallest) / smallest time of a step's repetitions, the median over the steps.
    """

    name: str
    step_s: Amount
    prefill_step_s: Amount = 0.0
    sequence_s: Amount
    further_sequence_s: Amount = 0.0
    prefill_token_s: Amount
    context_token_s: Amount
    pair_s: Amount
    num_kv_tokens: Annotated[int, msgspec.Meta(ge=0)]
    swap_bytes_per_s: Rate = 4e9
    copy_bytes_per_s: Rate = 4e9
    prefill_tokens_per_s: Rate = 2000.0
    fit_error: Amount = 0.0
    checks: tuple[Check, ...] = ()
    interrupted_share: Amount = 0.0
    repetition_spread: Amount = 0.0
    num_stages: ClassVar[int] = 1

    def step_seconds(self, work: StepWork, block_size: int) -> float:
        coefficients = [getattr(self, name) for name in FEATURES]
        return _dot(coefficients, _features(work)) + self.move_seconds(work, block_size, self.copy_bytes_per_s)

    def with_prefill_rate(self, prompt_len: int, block_size: int) -> Fitted:
        """Return the model with the rate at which it computes a prompt of this length in one step."""
        num_pairs = num_pairs_of(0, prompt_len, self.sliding_window)
        seconds = self.step_seconds(StepWork(1, prompt_len, prompt_len, 0, num_pairs), block_size)
        return msgspec.structs.replace(self, prefill_tokens_per_s=prompt_len / seconds)

    def kv_tokens(self, memory_utilization: float) -> int:
        """Return the number of tokens that the measured engine's cache holds."""
        return self.num_kv_tokens

    def describe(self) -> str:
        """Return a line for the report."""
        line = f"{self.name}: fitted to measured steps"
        if not self.checks:
            line += f", median error {self.fit_error:.1%}; no load was held out to measure the error of predictions"
        if self.interrupted_share > _MOST_INTERRUPTED or self.repetition_spread > _WIDEST_SPREAD:
            line += (
                f"\nwarning: the machine was busy: other programs interrupted {self.interrupted_share:.0%} of the "
                f"steps, and repetitions of a step differ by {self.repetition_spread:.0%}; times are rough, so "
                "calibrate again on an idle one"
            )
        return line


CostModel = Roofline | Fitted


# ---- fitting ----


class MeasuredStep(NamedTuple):
    """The work of a step of a real engine, and its time."""

    work: StepWork
    seconds: float


def fit(steps: Sequence[MeasuredStep]) -> tuple[dict[str, Any], float]:
    """Return non-negative coefficients by `FEATURES` and `COPIED_BLOCK`, and the median relative error of the steps.

    Errors are weighted relative to the prediction, which is found in rounds: relative to the measured time, steps that
    were slow by chance would count less than fast ones, and predictions would be too low. Steps that took more than
    `_STALLED` times the prediction were held up by something else, and are left out. Raises ConfigError for fewer steps
    than coefficients.
    """
    if len(steps) < len(FEATURES):
        raise ConfigError(f"{len(steps)} measured steps are too few to fit {len(FEATURES)} coefficients")
    measured = [(step.seconds, _features(step.work)) for step in steps]
    scaled = [(seconds, seconds, features) for seconds, features in measured]
    coefficients: list[float] = []
    for _ in range(_FIT_ROUNDS):
        coefficients = non_negative_least_squares(
            [[value / scale for value in features] for scale, _, features in scaled],
            [seconds / scale for scale, seconds, _ in scaled],
        )
        # a prediction of 0 s would get an infinite weight
        scaled = [
            (max(_dot(coefficients, features), 1e-3 * seconds), seconds, features) for seconds, features in measured
        ]
        scaled = [each for each in scaled if each[1] < _STALLED * each[0]] or scaled
    errors = sorted(abs(_dot(coefficients, features) / seconds - 1) for seconds, features in measured)
    return dict(zip((*FEATURES, COPIED_BLOCK), coefficients, strict=True)), errors[len(errors) // 2]


_FIT_ROUNDS: Final = 6
_STALLED: Final = 4.0


def _features(work: StepWork) -> tuple[float, ...]:
    has_prefill = float(work.num_prefill_tokens > 0)
    num_further = max(0, work.num_sequences - _FEW_SEQUENCES)
    rows = 1.0, has_prefill, work.num_sequences, num_further
    return *rows, work.num_prefill_tokens, work.num_context_tokens, work.num_pairs, work.num_copied_blocks


def non_negative_least_squares(rows: Sequence[Sequence[float]], targets: Sequence[float]) -> list[float]:
    """Return the x ≥ 0 that minimises |rows · x - targets|².

    Coordinate descent gives each coefficient in turn its best value, or 0. It converges because the problem is convex
    and separable in its bounds.
    """
    columns = [list(column) for column in zip(*rows, strict=True)]
    # columns of length one: their sizes differ by many orders of magnitude
    scales = [math.sqrt(sum(value * value for value in column)) or 1.0 for column in columns]
    columns = [[value / scale for value in column] for column, scale in zip(columns, scales, strict=True)]
    gram = [[_dot(a, b) for b in columns] for a in columns]
    wanted = [_dot(column, targets) for column in columns]
    x = [0.0] * len(columns)
    for _ in range(20_000):
        change = 0.0
        for i, row in enumerate(gram):
            if row[i] == 0:
                continue
            best = max(0.0, x[i] + (wanted[i] - _dot(row, x)) / row[i])
            change = max(change, abs(best - x[i]))
            x[i] = best
        if change < 1e-12 * max(x):
            break
    return [value / scale for value, scale in zip(x, scales, strict=True)]


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    total: float = sum(map(mul, a, b))
    return total
