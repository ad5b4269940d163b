"""What a core does once at its start: it loads the ranks, tries their encoders, and finds the longest context."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from octavo.config.explain import MemoryPlan
from octavo.config.kv_events import kv_events_config
from octavo.config.schema import ModelConfig, SpeculativeConfig
from octavo.core.cache_limits import CacheLimits
from octavo.core.media import MediaInput
from octavo.core.messages import CoreReady
from octavo.errors import ConfigError
from octavo.executor.executor import Executor
from octavo.kv_cache.listener import BlockListener
from octavo.multimodal.reader import MediaReader
from octavo.scheduler.drafts import Proposer
from octavo.speculation.speculation import Speculation

if TYPE_CHECKING:
    from octavo.kv_cache.publisher import KvPublisher


def agreed(plans: list[MemoryPlan]) -> list[MemoryPlan]:
    """Return the plans of ranks with as many blocks of each group as every rank has room for."""
    groups = list(zip(*(each.cache.groups for each in plans), strict=True))
    num_blocks = [min(each.num_blocks for each in group) for group in groups]
    num_host_blocks = [min(each.num_host_blocks for each in group) for group in groups]
    return [each.limited_to(num_blocks, num_host_blocks) for each in plans]


def loaded(executor: Executor) -> list[MemoryPlan]:
    """Load the ranks and allocate their caches; return their plans. Raises ConfigError or CheckpointError."""
    plans = agreed(executor.call("prepare"))
    num_host_blocks = [group.num_host_blocks for group in plans[0].cache.groups]
    plans = agreed(executor.call("load", min(each.max_model_len for each in plans), num_host_blocks))
    executor.call("allocate", [group.num_blocks for group in plans[0].cache.groups], num_host_blocks)
    return plans


def publish_events(
    given: dict[str, Any], limits: CacheLimits, listeners: list[BlockListener], replica: int
) -> KvPublisher | None:
    """Add a publisher of changes of the prefix cache over ZeroMQ to the listeners, and return it; None where events are
    off.
    given: `kv_events_config`. Raises ConfigError where it cannot listen."""
    if (publishing := kv_events_config(given)) is None:
        return None
    from octavo.kv_cache.publisher import KvPublisher

    publisher = KvPublisher(publishing, limits, replica)
    listeners.append(publisher)
    return publisher


def try_encoders(executor: Executor, model: ModelConfig, ready: CoreReady, max_num_tokens: int) -> None:
    """Encode an image and a sound where the model reads such. Raises CheckpointError where it cannot."""
    if examples := encoder_examples(model, ready, max_num_tokens):
        executor.call("encode_media", [msgspec.to_builtins(each, builtin_types=(bytes,)) for each in examples])


def encoder_examples(model: ModelConfig, ready: CoreReady, max_num_tokens: int) -> list[MediaInput]:
    """Return what encoders read of an image and a sound, where the model reads such. Raises CheckpointError where its
    files cannot be read."""
    ids: dict[str, int] = {}  # for the texts around an image, whose tokens the config does not name

    def encode(text: str, _: bool) -> list[int]:
        return [~ids.setdefault(text, len(ids))]

    reader = MediaReader(model, ready, encode, max_num_tokens, splits_images=False)
    reader.warn_of_unread()
    return reader.examples()


def fitting_max_model_len(model: ModelConfig, limits: CacheLimits) -> int:
    """Return the context length that one request can have in this cache: less than wanted only where no length was
    set. Raises ConfigError."""
    wanted, size = model.max_model_len, limits.block_size
    tight = [
        (group, needed)
        for group in limits.groups
        if (needed := group.max_blocks(wanted, 1 + limits.num_lookahead, 1, size)) > group.num_blocks
    ]
    if not tight:
        return wanted
    group, needed = tight[0]
    fitting = limits.num_tokens - limits.num_lookahead
    if model.user_set_max_model_len:
        shorter_steps = "" if group.max_live_tokens is None else "lower max_num_batched_tokens, "
        raise ConfigError(
            f"max_model_len = {wanted} needs {needed} KV blocks of {size} tokens, the cache has {group.num_blocks}; "
            f"lower max_model_len to {fitting} or less, {shorter_steps}or give the cache more memory"
        )
    return fitting


def proposer_of(config: SpeculativeConfig | None, limits: CacheLimits, *, is_prefill: bool) -> Proposer | None:
    """Return the proposer of draft tokens; None without speculation."""
    if config is None:
        return None
    return Speculation(config, is_prefill=is_prefill, repeats=any(each.is_state for each in limits.groups))
