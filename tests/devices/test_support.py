"""What a device lacks is refused at start, by the name of the option that asks for it."""

from __future__ import annotations

from typing import Any

import pytest

from octavo import LLM
from octavo.devices import DEVICES
from octavo.devices.support import FEATURES
from octavo.errors import ConfigError
from octavo.executor.executor import open_rank
from tests.devices.cuda.interpreted import NAME, InterpretedCuda


def test_cuda_lacks_nothing_that_has_no_name() -> None:
    assert InterpretedCuda.lacks.keys() <= FEATURES.keys()
    assert all(InterpretedCuda.lacks.values())


@pytest.mark.parametrize(
    ("settings", "option"),
    [
        ({"tensor_parallel_size": 2, "executor": "ray"}, "executor asks for ranks that Ray places"),
    ],
)
def test_what_a_gpu_cannot_do_is_refused(
    settings: dict[str, Any], option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(DEVICES, "cuda", NAME)
    # without the ranks beside it, which refuse the same
    monkeypatch.setattr("octavo.executor.ray.start_ray_ranks", lambda config, *_: open_rank(config))
    with pytest.raises(ConfigError, match=f"{option}.*, which the device cuda does not have"):
        LLM("octavo-tiny", device="cuda", dtype="float32", **settings)
