"""Whom the policy puts behind requests that come, and what they find in the cache: asked before one is too late."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceABC
from functools import cached_property
from typing import Any

from octavo.core.messages import EngineCoreRequest
from octavo.core.sequence import SequenceGroup, SequenceStatus
from octavo.kv_cache.block_manager import BlockManager
from octavo.scheduler.policy import Policy


class Standing:
    """Of requests that come together at time `now`. Whatever costs a pass over the groups is done when it is asked for.

    groups_with_prompts: running and queued groups with the prompt tokens that each has left to compute.
    """

    def __init__(
        self,
        requests: SequenceABC[EngineCoreRequest],
        virtual_starts: SequenceABC[float],
        groups_with_prompts: Callable[[], Iterable[tuple[SequenceGroup, int]]],
        policy: Policy,
        block_manager: BlockManager,
        now: float,
    ) -> None:
        self._requests = requests
        self._virtual_starts = virtual_starts
        self._groups_with_prompts = groups_with_prompts
        self._policy = policy
        self._block_manager = block_manager
        self._now = now

    def among_themselves(self) -> Standing:
        """The same where nothing else runs or waits."""
        return Standing(self._requests, self._virtual_starts, lambda: (), self._policy, self._block_manager, self._now)

    def num_cached_tokens(self, index: int) -> int:
        """Tokens of this request's prompt that admission would find in the cache now."""
        return self._block_manager.num_cached_tokens(self._requests[index])

    def num_tokens_behind(self, index: int) -> int:
        """Prompt tokens of groups that are here, and of requests before this one, that the policy computes after it."""
        group, place = self._newcomers[index], self._places[index]
        waiting, running = self._others
        earlier = zip(self._places[:index], self._newcomers[:index], strict=True)
        return (
            sum(num_tokens for other, num_tokens in waiting if place < other)
            + sum(each.num_prompt_tokens for other, each in earlier if place < other)
            + sum(num_tokens for each, num_tokens in running if self._policy.outranks(group, each, self._now))
        )

    @cached_property
    def _newcomers(self) -> list[SequenceGroup]:
        arrival = 1 + max((group.arrival for group, _ in self._groups_with_prompts()), default=-1)
        each = zip(self._requests, self._virtual_starts, strict=True)
        return [SequenceGroup(request, arrival + index, -1, start) for index, (request, start) in enumerate(each)]

    @cached_property
    def _places(self) -> list[tuple[Any, ...]]:
        return [self._policy.place(group, self._now) for group in self._newcomers]

    @cached_property
    def _others(self) -> tuple[list[tuple[tuple[Any, ...], int]], list[tuple[SequenceGroup, int]]]:
        """Waiting groups by their places, and running ones."""
        waiting, running = [], []
        for group, num_tokens in self._groups_with_prompts():
            if group.status is SequenceStatus.RUNNING:
                running.append((group, num_tokens))
            else:
                waiting.append((self._policy.place(group, self._now), num_tokens))
        return waiting, running
