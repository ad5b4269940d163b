"""What a device lacks is refused at start, by the name of the option that asks for it."""

from __future__ import annotations

import pytest

from octavo import LLM
from octavo.devices import DEVICES
from octavo.devices.reference.device import ReferenceDevice
from octavo.devices.support import FEATURES
from octavo.errors import ConfigError
from tests.devices.cuda.interpreted import InterpretedCuda


class Lacking(InterpretedCuda):
    lacks = {"adapters": "its products have no addends"}


def test_devices_lack_nothing_that_has_no_name() -> None:
    for device in (InterpretedCuda, ReferenceDevice):
        assert device.lacks.keys() <= FEATURES.keys()
        assert all(device.lacks.values())


def test_what_a_device_lacks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DEVICES, "cuda", f"{__name__}.Lacking")
    with pytest.raises(ConfigError, match="enable_lora asks for adapters .*, which the device cuda does not have: its"):
        LLM("octavo-tiny", device="cuda", dtype="float32", enable_lora=True)
