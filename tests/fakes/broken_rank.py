"""A rank that does not open its device, as `python -m tests.fakes.broken_rank FD`. The seed of the model says how."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any, Final

from octavo.config.schema import EngineConfig
from octavo.errors import ConfigError
from octavo.executor.rank_process import main
from tests.fakes.rank import FakeRank

REFUSES: Final = 1
RAISES: Final = 2
IS_KILLED: Final = 3


def open_broken(config: EngineConfig, *_: Any) -> FakeRank:
    """Fail as rank 1 does whose GPU is not there, out of memory or behind a broken driver."""
    if config.model.seed == REFUSES:
        raise ConfigError("needs 2 GPUs on this machine, and 1 can be seen")
    if config.model.seed == RAISES:
        raise RuntimeError("CUDA error: out of memory")
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("this process has ended")


if __name__ == "__main__":
    sys.exit(main(open_broken))
