"""The process of a rank whose device is CUDA with its kernels interpreted."""

from __future__ import annotations

import os
import sys

from octavo.devices import DEVICES
from octavo.distributed.process_group import ProcessGroup
from octavo.executor.executor import open_rank
from octavo.executor.rank_process import main
from tests.devices.cuda.interpreted import NAME

if __name__ == "__main__":
    DEVICES["cuda"] = NAME
    # the fake graph makes gloo's calls again, as a graph of CUDA does with NCCL's
    setattr(ProcessGroup, "is_recordable", True)  # noqa: B010
    exit_code = main(open_rank)
    sys.stderr.flush()
    os._exit(exit_code)
