"""What the kernels become for Hopper, compiled where there may be no GPU."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("triton", reason="the kernels of the device cuda need Triton")


KINDS = ("", ", int8", ", fp8")
"""Of caches."""
SHARED_BYTES = 227 << 10
"""What a program of Hopper may have."""


FEW = (
    *("attend one token", "attend a prompt", "merge"),
    *("linear, 16 rows", "linear, 2048 rows, gated", "coded int8, 1 rows"),
    *("linear, 4 chunks at once, dependent", "rms_norm, dependent", "rotate_and_store, dependent"),
)
"""What is compiled in any run, one of each kind: two seconds each."""
EARLY_READS = {
    "linear, 16 rows": 16,
    "linear, 16 rows, gated": 16,
    "rms_norm": 4,
    **dict.fromkeys(("linear, 2 chunks at once", "linear, 4 chunks at once"), 8),
}
"""Of 16 bytes for each of 128 threads, before the wait of a dependent launch: 512 inputs of 32 outputs of a weight, 256
of twice as many, 256 of each chunk of 16 or 8 outputs, and the whole weight of a norm."""
SPILLED_BYTES = {"attend a prompt in chunks": 48, "filters, settle": 24}
"""What Triton 3.7 spills; 3.9 spills nothing."""
MOST_INSTRUCTIONS = {
    "attend a prompt": 600,
    "coded int4, 1 rows": 290,
    "coded int4 and 16 bits, 1 rows": 290,
    "coded int8, 1 rows": 130,
}
"""Of a warp in its innermost loop: for 128 rows and 128 keys, and for 16 outputs and 256 inputs."""


def compiled(*names: str) -> dict[str, dict[str, Any]]:
    """Return the figures of kernels, of all without names, after the checks of any of them."""
    # in a process of its own: here kernels are interpreted
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "benchmarks.gpu.compiled", *(["--kernel", *names] if names else [])]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = {each["kernel"]: each for each in map(json.loads, done.stdout.splitlines())}
    assert set(names) <= set(found)
    spilled = {name: each["stack"] for name, each in found.items() if each["stack"]}
    assert all(stack <= SPILLED_BYTES.get(name, 0) for name, stack in spilled.items()), spilled
    assert not any(each["spilled_in_loops"] for each in found.values())
    assert all(found[name]["loops"][0] <= most for name, most in MOST_INSTRUCTIONS.items() if name in found)
    assert max(each["shared"] for each in found.values()) <= SHARED_BYTES
    for name, each in found.items():
        if name.endswith(", dependent"):  # what no launch of a step writes may be read before earlier ones have ended
            num_early = EARLY_READS.get(name.removesuffix(", dependent"), 0)
            assert (each["early_reads"], each["early_writes"]) == (num_early, 0), name
            assert {*each["read_early"]} - {"K", "N", "chunk"} == ({"weight"} if num_early else set()), name
    return found


def test_every_kernel_is_compiled_with_all_its_constants() -> None:
    from benchmarks.gpu.compiled import kernels

    for kernel in kernels():
        parameters = inspect.signature(kernel.function.fn).parameters.values()
        constants = {
            each.name for each in parameters if "constexpr" in str(each.annotation) and each.default is each.empty
        }
        assert constants
        assert constants <= {*kernel.constants}, kernel.name


def test_no_register_is_spilled_in_a_loop_and_tensor_cores_multiply() -> None:
    found = compiled(*FEW)
    assert all(found[name]["hgmma"] > 0 for name in ("attend a prompt", "linear, 2048 rows, gated"))
    products = ("attend one token", "linear, 16 rows", "linear, 4 chunks at once, dependent")
    assert all(found[name]["hmma"] > 0 for name in products)
    assert found["coded int8, 1 rows"]["imma"] > 0
    assert found["merge"]["read_at_once"] >= 3 * 8, "those of 8 chunks: sums, their peak and their weight"
    assert sum("early_reads" in each for each in found.values()) == 3
    assert sum(each["bytes"] for each in found.values()) < len(found) * (80 << 10), "80 KiB of a kernel on average"


@pytest.mark.long
@pytest.mark.timeout(0)
def test_the_same_is_so_of_every_kernel() -> None:
    found = compiled()
    assert all(found[f"attend a prompt{kind}"]["hgmma"] > 0 for kind in (*KINDS, " in chunks"))
    shared = [found[f"attend one token{each}"]["shared"] for each in ("", ", few programs")]
    assert shared[1] - shared[0] >= 64 << 10, "one more tile of keys and of values"
    assert found["merge"]["read_at_once"] >= 3 * 8, "those of 8 chunks: sums, their peak and their weight"
    assert found["linear, 4 chunks at once"]["hmma"] > 0
    single = [f"attend {what}{kind}" for what in ("one token", "a chunk") for kind in KINDS]
    assert all(found[name]["hmma"] > 0 for name in (*single, "linear, 16 rows", "linear, 32 rows, gated"))
    assert all(found[name]["hgmma"] > 0 for name in ("linear, 64 rows", "linear, 2048 rows, gated"))
    for name in ("persistent, 1 rows", "persistent, 16 rows"):  # a program attends without weights that it could await
        assert [min(each, 8) for each in found[name]["requested_before_waits"]] == [8, 0, 8, 8, 8]
    products = [name for name in found if name.startswith("coded")]
    assert len(products) == 29
    assert all(found[name]["imma"] > 0 for name in products)
    assert sum(each["bytes"] for each in found.values()) < len(found) * (80 << 10), "80 KiB of a kernel on average"
