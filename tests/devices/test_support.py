"""What a device lacks is refused at start, by the name of the option that asks for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo import LLM
from octavo.devices import DEVICES
from octavo.devices.reference.device import ReferenceDevice
from octavo.devices.support import FEATURES
from octavo.errors import ConfigError
from tests.devices.cuda.interpreted import InterpretedCuda
from tests.fakes.byte_tokenizer import write_byte_tokenizer
from tests.fakes.checkpoints import make_checkpoint


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


def test_a_length_is_refused_with_the_one_to_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(DEVICES, "cuda", f"{InterpretedCuda.__module__}.{InterpretedCuda.__name__}")
    write_byte_tokenizer(make_checkpoint("deepseek_v32", tmp_path))
    with pytest.raises(ConfigError, match="computes the choice; set it to at most index_topk of config.json"):
        LLM(str(tmp_path), device="cuda", dtype="float32")  # leaving max_model_len out asks for the longest
