"""Policies by name, one per file.

`make_policy` is called by `build_scheduler`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from octavo.config.schema import SchedulerConfig
from octavo.kv_cache.block_manager import BlockManager
from octavo.scheduler.policies.deadline import EarliestDeadline
from octavo.scheduler.policies.fair_share import FairShare
from octavo.scheduler.policies.prefix_match import LongestPrefixMatch
from octavo.scheduler.policies.priority import Priority
from octavo.scheduler.policy import Policy
from octavo.scheduler.rates import Rates

Maker = Callable[[SchedulerConfig, BlockManager, Rates], Policy]

POLICIES: Mapping[str, Maker] = MappingProxyType(
    {
        "fcfs": lambda config, blocks, rates: Policy(),
        "priority": lambda config, blocks, rates: Priority(config.priority_ageing),
        "fair-share": lambda config, blocks, rates: FairShare(config.tenant_weights),
        "deadline": lambda config, blocks, rates: EarliestDeadline(rates),
        "prefix-match": lambda config, blocks, rates: LongestPrefixMatch(blocks),
    }
)


def make_policy(config: SchedulerConfig, block_manager: BlockManager, rates: Rates) -> Policy:
    """Return the policy that the configuration names."""
    return POLICIES[config.scheduling_policy](config, block_manager, rates)
