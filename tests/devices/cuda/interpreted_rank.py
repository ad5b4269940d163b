"""The process of a rank whose device is CUDA with its kernels interpreted."""

from __future__ import annotations

import os
import sys

from octavo.devices import DEVICES
from octavo.executor.executor import open_rank
from octavo.executor.rank_process import main
from tests.devices.cuda.interpreted import NAME

if __name__ == "__main__":
    DEVICES["cuda"] = NAME
    exit_code = main(open_rank)
    sys.stderr.flush()
    os._exit(exit_code)
