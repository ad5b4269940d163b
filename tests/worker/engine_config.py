"""The configuration of a tiny engine on a checkpoint directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from octavo.config.args import EngineArgs
from octavo.config.checkpoint import Checkpoint
from octavo.config.resolve import resolve
from octavo.config.schema import EngineConfig
from octavo.platform import Platform
from octavo.worker.start.ahead import Ahead
from octavo.worker.worker import Worker


def make_config(path: Path, **arguments: Any) -> EngineConfig:
    """`arguments` are those of `EngineArgs`."""
    args = EngineArgs(model=str(path), **{"max_num_seqs": 8, "max_num_batched_tokens": 64, **arguments})
    return resolve(args, Checkpoint.open(path), Platform.detect(), tokenizer_path=path)


def start_worker(config: EngineConfig, ahead: Ahead | None = None) -> Worker:
    """Return a worker that is ready for steps."""
    worker = Worker(config, ahead)
    plan = worker.prepare()
    num_groups = len(plan.cache.groups)
    num_host_blocks = [plan.cache.num_host_blocks] * num_groups
    worker.load(plan.max_model_len, num_host_blocks)
    worker.allocate([plan.cache.num_blocks] * num_groups, num_host_blocks)
    return worker
