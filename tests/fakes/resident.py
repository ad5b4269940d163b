"""How much of a tensor's memory is really there."""

from __future__ import annotations

import re
from pathlib import Path

import torch


def resident_bytes(memory: torch.Tensor) -> int:
    """How much of the pages of `memory` is there, as the system says."""
    address, is_found = memory.data_ptr(), False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if match := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            is_found = int(match[1], 16) <= address < int(match[2], 16)
        elif is_found and line.startswith("Rss:"):
            return int(line.split()[1]) << 10
    raise AssertionError("no such mapping")
