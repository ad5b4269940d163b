"""Results that whoever asks for them waits for."""

from __future__ import annotations

import pytest

from octavo.core.launched import LaunchedStep
from octavo.core.step import ModelRunnerOutput


def test_a_result_is_collected_once_and_so_is_an_error() -> None:
    collected: list[int] = []

    def collect() -> ModelRunnerOutput:
        collected.append(len(collected))
        if len(collected) == 2:
            raise RuntimeError("the GPU is lost")
        return ModelRunnerOutput(step_id=7, rows=[])

    def named(error: Exception) -> Exception:
        return OSError(f"rank 1: {error}")

    step = LaunchedStep(collect, named)
    assert not step.done()
    assert [step.result().step_id for _ in range(2)] == [7, 7]
    step = LaunchedStep(collect, named)
    for _ in range(2):
        with pytest.raises(OSError, match="rank 1: the GPU is lost"):
            step.result()
    assert len(collected) == 2
