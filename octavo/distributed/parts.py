"""Names of the parts of a model's weights that ranks have. Imports no torch."""

from __future__ import annotations


def part_name(rank: int, *, tensor: int, pipeline: int, reduce: str, whole_experts: bool = False) -> str:
    """Return the name of the part that `rank` has, equal for equal tensors. reduce: how tensor ranks combine outputs.
    whole_experts: whether each of them has some of the experts, whole."""
    stages = f", {pipeline} stages" if pipeline > 1 else ""
    summed = ", summed" if tensor > 1 and reduce == "sum" else ""
    experts = ", whole experts" if tensor > 1 and whole_experts else ""
    return f"{rank} of {tensor * pipeline}{stages}{summed}{experts}"
