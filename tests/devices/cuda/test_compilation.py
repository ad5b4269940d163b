"""What the kernels become for Hopper, compiled where there may be no GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="the kernels of the device cuda need Triton")


KINDS = ("", ", int8", ", fp8")
"""Of caches."""


def test_no_register_is_spilled_and_tensor_cores_multiply() -> None:
    # in a process of its own: here kernels are interpreted
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "benchmarks.gpu.compiled"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    found = {each["kernel"]: each for each in map(json.loads, done.stdout.splitlines())}
    assert {name: each["stack"] for name, each in found.items()} == dict.fromkeys(found, 0)
    assert all(found[f"attend a prompt{kind}"]["hgmma"] > 0 for kind in KINDS)
    single = [f"attend {what}{kind}" for what in ("one token", "a chunk") for kind in KINDS]
    for name in (*single, "linear", "linear gated"):
        # by the same instructions for any number of rows
        assert (found[name]["hmma"] > 0, found[name]["hgmma"]) == (True, 0), name
    products = [name for name in found if name.startswith("coded")]
    assert len(products) == 11
    assert all(found[name]["imma"] > 0 for name in products)
    assert sum(each["bytes"] for each in found.values()) < 3 << 20
