"""What each device computes with kernels of its own, and what it lacks: a page made from the code."""

from __future__ import annotations

from importlib import import_module
from typing import Final

from octavo.devices import DEVICES
from octavo.devices.device import Device
from octavo.devices.support import FEATURES
from octavo.ops.registry import implementations, operators

_TEXT = """\
<!-- Made by `python -m tools.reference docs/reference`; edit the devices in octavo/devices/__init__.py instead. -->
# Devices

`--device` chooses where a model runs; `auto` takes the first of {names} that can run here, and `octavo explain` says
why, and which implementation of each operator it takes. Operators without kernels of the device are torch's, which is
right and slow. A feature that a device lacks is refused at start, by name.
"""
_SHOWN: Final = {"native": "compiled", "triton": "Triton", "cublas": "cuBLAS"}
"""What a kernel is, by the name of its implementation; another name is shown as it is."""


def _class_of(name: str) -> type[Device]:
    module, _, class_name = DEVICES[name].rpartition(".")
    found: type[Device] = getattr(import_module(module), class_name)
    return found


def page() -> str:
    """Return the page."""
    names = list(DEVICES)
    lines = [_TEXT.format(names=", ".join(f"`{name}`" for name in names)), _row("feature", names), _rule(names)]
    for key, feature in FEATURES.items():
        reasons = [_class_of(name).lacks.get(key) for name in names]
        lines.append(
            _row(f"{feature.name} (`{feature.option}`)", [f"no: {each}" if each else "yes" for each in reasons])
        )
    exact = [_class_of(name).rows_are_exact for name in names]
    told = [
        "with `--batch-invariant`" if name == "cuda" else "yes" if own else "no"
        for name, own in zip(names, exact, strict=True)
    ]
    lines.append(_row("results do not depend on what runs beside", told))
    kernels = {name: _kernels(name) for name in names}
    lines += ["", _row("operators", names), _rule(names)]
    alike: dict[tuple[str, ...], list[str]] = {}
    for each in sorted(operators()):
        alike.setdefault(tuple(kernels[name].get(each, "torch") for name in names), []).append(f"`{each}`")
    lines += [_row(", ".join(listed), list(cells)) for cells, listed in alike.items()]
    return "\n".join(lines) + "\n"


def _kernels(name: str) -> dict[str, str]:
    """Return the kernels of a device by operator."""
    best = sorted(implementations(f"octavo.devices.{name}.ops"), key=lambda each: each.rank)
    return {each.operator: _SHOWN.get(each.name, each.name) for each in best}


def _row(head: str, cells: list[str]) -> str:
    return f"| {' | '.join([head, *cells])} |"


def _rule(names: list[str]) -> str:
    return "|" + "---|" * (1 + len(names))
