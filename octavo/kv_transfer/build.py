"""Makes the connector that the configuration asks for."""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.core.process.authentication import read_secret
from octavo.errors import ConfigError
from octavo.kv_cache.block_manager import BlockManager
from octavo.kv_transfer.file_store import open_store
from octavo.kv_transfer.host_folder import HostFolder
from octavo.kv_transfer.messages import PeerHello, TierFolder
from octavo.kv_transfer.peer_link import listen
from octavo.kv_transfer.peer_server import PeerServer
from octavo.kv_transfer.peer_source import PeerSource
from octavo.kv_transfer.sources import PrefixSource, Sources
from octavo.kv_transfer.tier import Tier

if TYPE_CHECKING:
    from octavo.config.schema import EngineConfig


_log = logging.getLogger(__name__)


def make_connector(
    config: EngineConfig,
    call: Callable[..., list[Any]],
    wake: Callable[[], None],
    block_manager: BlockManager,
    prefill_tokens_per_s: Callable[[], float | None],
) -> Sources:
    """Return the connector of an engine whose pools are these.

    call: makes a control call on every rank. wake: lets a core that waits or is idle plan a step; from any thread.
    prefill_tokens_per_s: returns how fast prompts are computed; None where that is not known yet. Raises ConfigError.
    """
    transfer, device = config.transfer, config.device
    if block_manager.encodings:
        raise ConfigError(
            "role, kv_disk or kv_host_size is set, but what this model's encoder makes of sounds or images does not "
            "move between engines and tiers; leave them out"
        )
    sources: list[PrefixSource] = []
    address = None
    if transfer.role is not None:
        secret, epoch = bytes.fromhex(transfer.secret) or read_secret(device.cluster_secret_file), os.urandom(16)
        gives = transfer.role == "prefill"
        ranks = call("open_transfer", transfer.kv_host if gives else "", secret.hex(), epoch.hex())
        attention = next(value for name, value, _ in call("op_choices")[0] if name == "attention")
        hello = PeerHello(
            identity=call("identity")[0],
            layout=f"{attention}, {config.cache.dtype}",
            block_size=block_manager.block_size,
            epoch=epoch,
            ranks=ranks if gives else [],
        )
        if gives:
            listener, address = listen(transfer.kv_host, transfer.kv_port, f"control-{epoch.hex()[:16]}")
            # if the server is killed, the last core removes the folder; a folder of the user is not removed
            folder = HostFolder(Path(transfer.kv_host)) if transfer.secret else None
            sources.append(PeerServer(listener, secret, hello, block_manager, transfer.kv_lease_s, wake, folder))
        else:
            sources.append(PeerSource(secret, hello, transfer.kv_lease_s, wake))
    if transfer.kv_disk is not None or transfer.kv_host_size is not None:
        sources += _tiers(call("open_tiers")[0], block_manager, prefill_tokens_per_s)
    return Sources(sources, device.num_ranks, wake, address)


def _tiers(
    folders: list[TierFolder], block_manager: BlockManager, prefill_tokens_per_s: Callable[[], float | None]
) -> list[Tier]:
    save_ids = itertools.count()
    for each in folders:
        _log.info("KV blocks are kept in %s (%s, at most %s bytes)", each.folder, each.tier, f"{each.max_bytes:,}")
    return [Tier(each.tier, open_store(each), block_manager, prefill_tokens_per_s, save_ids) for each in folders]
