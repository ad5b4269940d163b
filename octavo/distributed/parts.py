"""Names of the parts of a model's weights that ranks have. Imports no torch."""

from __future__ import annotations


def part_name(rank: int, *, tensor: int, pipeline: int, reduce: str, whole_experts: bool = False) -> str:
    """Return the name of what `rank` has, the same for the same tensors; `reduce` says how tensor ranks combine, and
    `whole_experts` that each has some of the experts."""
    stages = f", {pipeline} stages" if pipeline > 1 else ""
    summed = ", summed" if tensor > 1 and reduce == "sum" else ""
    experts = ", whole experts" if tensor > 1 and whole_experts else ""
    return f"{rank} of {tensor * pipeline}{stages}{summed}{experts}"
