"""What the KV cache has room for, stated once: the memory plan makes it, admission and the block manager read it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from octavo.core.arithmetic import max_blocks_of_group, num_blocks_for, num_blocks_touched
from octavo.core.sampling_params import SamplingParams
from octavo.errors import RequestTooLarge

LIVE_STATES: Final = 2
"""States of one sequence that are in blocks at once, beside its snapshots: they lie next to each other."""


class GroupLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The blocks of one cache group (`octavo.core.model_shape.CacheGroup`).

    num_blocks, num_host_blocks: usable blocks on the device and in the swap space.
    block_bytes: size of a block over all layers of the group; 0 where there is no model.
    window: tokens that a query sees in these layers, itself included; None where it sees all.
    max_live_tokens: most tokens of one sequence that are in blocks at once; None for all.
    is_state: a block holds the state after its last token (`octavo.core.model_shape.State`) and not its tokens; then
        `max_live_tokens` is `LIVE_STATES`: the state that a row reads, and the one that it writes.
    num_encoded: vectors of an encoder's output (`octavo.core.model_shape.Encoded`) whose keys and values the blocks
        hold instead of those of tokens, at most for a request; 0 for none. Then it is `max_live_tokens` too.
    """

    num_blocks: int
    num_host_blocks: int = 0
    block_bytes: int = 0
    window: int | None = None
    max_live_tokens: int | None = None
    is_state: bool = False
    num_encoded: int = 0

    def max_blocks(self, num_prompt_tokens: int, max_tokens: int, num_sequences: int, block_size: int) -> int:
        """Return the most blocks that a request holds here at once."""
        if self.num_encoded:
            return num_blocks_for(self.num_encoded, block_size)
        return max_blocks_of_group(num_prompt_tokens, max_tokens, num_sequences, block_size, self.max_live_tokens)


class CacheLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The blocks of all cache groups.

    block_size: tokens in a block, the same in each group.
    num_lookahead: token slots that each sequence has beyond its tokens.
    """

    block_size: int
    groups: tuple[GroupLimits, ...]
    num_lookahead: int = 0

    @classmethod
    def of_one_group(cls, num_blocks: int, block_size: int, *, num_lookahead: int = 0, **others: Any) -> CacheLimits:
        """Return the limits of a model whose layers all keep the same tokens. others: fields of its one group."""
        group = GroupLimits(num_blocks=num_blocks, **others)
        return cls(block_size=block_size, groups=(group,), num_lookahead=num_lookahead)

    @classmethod
    def of_ranks(cls, ranks: Sequence[CacheLimits]) -> CacheLimits:
        """Return the limits of ranks that keep parts of the same blocks: a block is as large as its parts together."""
        groups = zip(*(each.groups for each in ranks), strict=True)
        whole = (
            msgspec.structs.replace(parts[0], block_bytes=sum(part.block_bytes for part in parts)) for parts in groups
        )
        return msgspec.structs.replace(ranks[0], groups=tuple(whole))

    def with_blocks(self, num_blocks: Sequence[int], num_host_blocks: Sequence[int]) -> CacheLimits:
        """Return the limits with these numbers of usable blocks in each group."""
        groups = (
            msgspec.structs.replace(group, num_blocks=blocks, num_host_blocks=host_blocks)
            for group, blocks, host_blocks in zip(self.groups, num_blocks, num_host_blocks, strict=True)
        )
        return msgspec.structs.replace(self, groups=tuple(groups))

    @property
    def num_blocks(self) -> int:
        """Usable device blocks of all groups."""
        return sum(group.num_blocks for group in self.groups)

    @property
    def num_host_blocks(self) -> int:
        """Usable host blocks of all groups."""
        return sum(group.num_host_blocks for group in self.groups)

    @property
    def block_bytes(self) -> int:
        """Size of a block in all layers; 0 where there is no model."""
        return sum(group.block_bytes for group in self.groups)

    @property
    def window(self) -> int | None:
        """Tokens that a query sees in every layer; None where layers differ or see all."""
        windows = {group.window for group in self.groups}
        return windows.pop() if len(windows) == 1 else None

    @property
    def num_tokens(self) -> int:
        """Tokens of one sequence that fit the group with the fewest blocks among those that keep all tokens."""
        return self.block_size * min(
            (group.num_blocks for group in self.groups if group.max_live_tokens is None),
            default=min(group.num_blocks for group in self.groups),
        )

    def check_runs_alone(
        self, num_prompt_tokens: int, max_tokens: int, params: SamplingParams, max_num_seqs: int
    ) -> None:
        """Raise RequestTooLarge when a request (a shared prompt and a tail for each sequence) exceeds the engine by
        itself. Both the front and the scheduler check it."""
        n, width_field = params.width, params.width_field
        if n > max_num_seqs:
            raise RequestTooLarge(
                f"{width_field} is {n}, but the engine runs at most {max_num_seqs} sequences at once; ask for fewer, "
                "or raise max_num_seqs",
                field=width_field,
            )
        max_tokens += self.num_lookahead
        for group in self.groups:
            needed = group.max_blocks(num_prompt_tokens, max_tokens, n, self.block_size)
            if needed <= group.num_blocks:
                continue
            fewer = f", ask for fewer sequences ({width_field})" if n > 1 else ""
            at_once = group.max_live_tokens
            live = "" if at_once is None else f", at most {at_once} tokens of each at once"
            live = f", at most {at_once} states of each at once" if group.is_state else live
            live = f", {at_once} vectors of an encoder" if group.num_encoded else live
            has_others = group.window is not None and len(self.groups) > 1
            where = f" for layers with a window of {group.window} tokens" if has_others else ""
            raise RequestTooLarge(
                f"the request needs {needed} KV blocks of {self.block_size} tokens ({num_prompt_tokens} of prompt, "
                f"{n} × {max_tokens} of output{live}), but the cache has {group.num_blocks}{where}; lower max_tokens, "
                f"shorten the prompt{fewer}, or give the cache more memory (kv_cache_memory, num_gpu_blocks_override)",
                field="max_tokens",
            )

    def max_tokens_that_fit(self, num_prompt_tokens: int, num_sequences: int) -> int:
        """Return the largest `max_tokens` with which a request fits, at most 0 when none does, `sys.maxsize` when any
        does. The inverse of `GroupLimits.max_blocks`."""
        fitting = (_tokens_that_fit(num_prompt_tokens, num_sequences, self.block_size, each) for each in self.groups)
        return min(fitting) - self.num_lookahead


def _tokens_that_fit(num_prompt_tokens: int, num_sequences: int, block_size: int, group: GroupLimits) -> int:
    if group.num_encoded:
        return sys.maxsize
    num_shared = num_live = num_prompt_tokens // block_size if num_sequences > 1 else 0
    if group.max_live_tokens is not None:
        most = num_blocks_touched(group.max_live_tokens, block_size)
        if num_sequences * most <= group.num_blocks:
            return sys.maxsize
        num_live = min(num_shared, most)
    blocks_per_tail = (group.num_blocks - num_live) // num_sequences
    return blocks_per_tail * block_size - (num_prompt_tokens - num_shared * block_size) + 1
