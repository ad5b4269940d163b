"""What a recorder does with its file; that a recording can be replayed is in tests/simulate/test_replay.py."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from octavo.config.schema import CacheConfig, SchedulerConfig
from octavo.core.cache_key import PLAIN, CacheKey
from octavo.core.cache_limits import CacheLimits
from octavo.core.messages import AbortRequests, AddRequests
from octavo.engine.recorder import Began, Pinned, Recorder, Unpinned
from octavo.errors import ConfigError
from octavo.scheduler.build import SchedulerSettings
from octavo.simulate.replay import read_recording
from tests.fakes.engine import make_core, make_request, run

SETTINGS = SchedulerSettings(
    cache=CacheConfig(dtype="float32"),
    scheduler=SchedulerConfig(max_model_len=16),
    limits=CacheLimits.of_one_group(4, 16),
)


def test_events_are_in_the_file_before_it_is_closed(tmp_path: Path) -> None:
    recorder = Recorder(str(tmp_path / "run"), SETTINGS, 2)
    recorder.write(AbortRequests(["a"]))
    assert list(read_recording(tmp_path / "run")) == [Began(SETTINGS, 2), AbortRequests(["a"])]
    recorder.close()
    recorder.close()


def test_a_file_that_cannot_be_written_is_an_error_of_the_argument(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="record_trace is .* cannot be written: No such file"):
        Recorder(str(tmp_path / "nowhere" / "run"), SETTINGS, 1)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, which Linux has")
def test_a_disk_that_is_full_at_the_start_is_an_error_of_the_argument() -> None:
    with pytest.raises(ConfigError, match="record_trace is '/dev/full', which cannot be written: No space left"):
        Recorder("/dev/full", SETTINGS, 1)


def test_an_engine_goes_on_without_its_recording(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    core = make_core(record_to=path)
    os.close(reader)  # from now on each write fails, and so does closing with what is left in the buffer
    with caplog.at_level(logging.WARNING):
        seen = run(core, [make_request("a", range(4), max_tokens=3)])
        core.shutdown()
    assert len(seen.token_ids["a"][0]) == 3
    (warning,) = caplog.messages
    assert str(path) in warning
    assert "Broken pipe" in warning


def test_salts_and_namespaces_are_not_in_the_file_but_which_are_the_same_is(tmp_path: Path) -> None:
    requests = [make_request(name, range(4)) for name in "abc"]
    for request, namespace in zip(requests, ("hush-1", "hush-1", None), strict=True):
        request.cache_namespace = namespace
    requests[0].cache_salt = "hush-2"
    key = CacheKey("hush-2", cache_namespace="hush-1")
    words = []
    for name in ("first", "second"):
        recorder = Recorder(str(tmp_path / name), SETTINGS, 1)
        for event in (AddRequests(requests), Pinned([1], key, 5.0), Unpinned([1], PLAIN)):
            recorder.write(event)
        recorder.close()
        assert b"hush" not in (tmp_path / name).read_bytes()
        _, added, pinned, unpinned = read_recording(tmp_path / name)
        assert isinstance(added, AddRequests)
        assert isinstance(pinned, Pinned)
        a, b, c = added.requests
        assert a.cache_key == pinned.cache_key
        assert (b.cache_namespace, b.cache_salt, c.cache_key) == (a.cache_namespace, None, PLAIN)
        assert unpinned == Unpinned([1], PLAIN)
        words.append((a.cache_namespace, a.cache_salt))
    assert words[0] != words[1]
    assert requests[0].cache_namespace == "hush-1"
