"""The tiers of a rank: files of KV blocks on the host and on disk."""

from __future__ import annotations

from octavo.config.schema import TransferConfig
from octavo.errors import ConfigError
from octavo.worker.transfer.block_io import BlockIO
from octavo.worker.transfer.rank_transfer import Tiers


def open_tiers(config: TransferConfig, blocks: BlockIO) -> Tiers:
    """Return the tiers of the configuration. Raises ConfigError."""
    raise ConfigError("kv_disk and kv_host_size are not supported by this version; leave them out")
