"""What a recorder does with its file; that a recording can be replayed is in tests/simulate/test_replay.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo.config.schema import CacheConfig, SchedulerConfig
from octavo.engine.recorder import Aborted, Began, Recorder
from octavo.errors import ConfigError
from octavo.scheduler.build import SchedulerSettings
from octavo.simulate.replay import read_recording

SETTINGS = SchedulerSettings(
    cache=CacheConfig(dtype="float32"), scheduler=SchedulerConfig(max_model_len=16), num_blocks=4
)


def test_events_are_in_the_file_before_it_is_closed(tmp_path: Path) -> None:
    recorder = Recorder(str(tmp_path / "run"), SETTINGS, 2)
    recorder.write(Aborted(["a"]))
    assert list(read_recording(tmp_path / "run")) == [Began(SETTINGS, 2), Aborted(["a"])]
    recorder.close()
    recorder.close()


def test_a_file_that_cannot_be_written_is_an_error_of_the_argument(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="record_trace is .* cannot be written: No such file"):
        Recorder(str(tmp_path / "nowhere" / "run"), SETTINGS, 1)
