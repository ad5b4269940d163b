"""A recorded run is decided once more in the same way."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from octavo.config.schema import CacheConfig, SchedulerConfig
from octavo.core.cache_limits import CacheLimits
from octavo.core.messages import CoreReady
from octavo.core.process import frames
from octavo.core.step import SchedulerOutput
from octavo.engine.engine_core import EngineCore
from octavo.engine.recorder import Began, Pinned, Planned, RecordedScheduler, Recorder, Unpinned
from octavo.errors import ConfigError
from octavo.scheduler.build import SchedulerSettings, build_scheduler
from octavo.scheduler.rates import PreemptionCosts
from octavo.simulate.replay import Replay, read_recording
from tests.fakes.accounting import check_scheduler
from tests.fakes.engine import make_request
from tests.fakes.executor import HashExecutor


def settings(preemption_mode: str = "auto") -> SchedulerSettings:
    return SchedulerSettings(
        cache=CacheConfig(dtype="float32", block_size=4, watermark=0.0),
        scheduler=SchedulerConfig(
            max_num_seqs=8,
            max_num_batched_tokens=16,
            target_step_ms=0.0,
            max_model_len=128,
            preemption_mode=preemption_mode,  # type: ignore[arg-type]
        ),
        limits=CacheLimits.of_one_group(24, 4, num_host_blocks=12, block_bytes=10),
        preemption_costs=PreemptionCosts(prefill_tokens_per_s=10.0, swap_bytes_per_s=8.0),
    )


def record_busy_run(
    path: Path, depth: int, preemption_mode: str = "auto", *, pins: bool = False
) -> list[SchedulerOutput]:
    """Forks, beams, aborts, stops and a pool that is too small, recorded to `path`. Answers the steps.

    With pins, prefixes are pinned before and after they are computed, and one is given up before its time.
    """
    chosen = settings(preemption_mode)
    readings = iter(range(10**9))
    executor = HashExecutor(4)
    recorder = Recorder(str(path), chosen, depth)
    core = EngineCore(
        executor,
        RecordedScheduler.around(build_scheduler(chosen), recorder),
        CoreReady(cache=chosen.limits, max_model_len=128, vocab_size=50, plan=""),
        max_steps_in_flight=depth,
        clock=lambda: next(readings) / 3,
        on_shutdown=recorder.close,
    )
    source = random.Random(depth)
    kinds: list[dict[str, object]] = [{}, {"n": 2}, {"n": 2, "best_of": 3}, {"n": 2, "use_beam_search": True}]
    for number in range(24):
        prompt = [source.randrange(3) for _ in range(source.randrange(1, 24))]
        core.add_request(make_request(f"r{number}", prompt, max_tokens=source.randrange(1, 14), **kinds[number % 4]))
        for _ in range(source.randrange(3)):
            core.step()
        if number % 7 == 3:
            core.abort_requests([f"r{number - 1}"])
        if number % 7 == 5:
            core.stop_sequence(f"r{number}", 0)
        if pins and number % 5 == 2:
            core.pin_prefix(prompt, 60.0, "other" if number == 7 else None)
        if pins and number in (3, 15):
            core.pin_prefix([0] * 8, 1e9)
        if pins and number == 9:
            assert core.call("unpin_prefix", [0] * 8)
    while core.has_unfinished():
        core.step()
    assert core.reset_prefix_cache()
    core.add_request(make_request("last", range(9)))
    while core.has_unfinished():
        core.step()
    assert pins or core.stats().num_preemptions > 0
    core.shutdown()
    return executor.steps


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("preemption_mode", ["auto", "recompute", "swap", "classic"])
def test_a_replay_plans_the_same_steps(tmp_path: Path, depth: int, preemption_mode: str) -> None:
    recorded = record_busy_run(tmp_path / "run", depth, preemption_mode)
    replay = Replay(tmp_path / "run")
    assert [step.step for step in replay.steps()] == recorded
    assert replay.num_requests == 25
    check_scheduler(replay.scheduler)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_replay_heeds_pins(tmp_path: Path, depth: int) -> None:
    without = record_busy_run(tmp_path / "without", depth)
    recorded = record_busy_run(tmp_path / "run", depth, pins=True)
    assert recorded != without, "the pins of this run change nothing"
    replay = Replay(tmp_path / "run")
    assert [step.step for step in replay.steps()] == recorded
    check_scheduler(replay.scheduler)
    # without the pins it goes another way
    events = [event for event in read_recording(tmp_path / "run") if not isinstance(event, Pinned | Unpinned)]
    (tmp_path / "other").write_bytes(b"".join(map(frames.pack, events)))
    assert Replay(tmp_path / "other").run().first_difference is not None


def test_a_replay_says_that_all_steps_are_the_same(tmp_path: Path) -> None:
    recorded = record_busy_run(tmp_path / "run", depth=1)
    result = Replay(tmp_path / "run").run()
    assert (result.num_steps, result.num_requests, result.first_difference) == (len(recorded), 25, None)


def test_a_replay_names_the_first_step_that_differs(tmp_path: Path) -> None:
    record_busy_run(tmp_path / "run", depth=1)
    events = list(read_recording(tmp_path / "run"))
    began = events[0]
    assert isinstance(began, Began)
    planned = [index for index, event in enumerate(events) if isinstance(event, Planned) and event.digest is not None]
    events[planned[4]] = Planned(0.0, "0" * 16)
    (tmp_path / "other").write_bytes(b"".join(map(frames.pack, events)))
    result = Replay(tmp_path / "other").run()
    assert (result.num_steps, result.first_difference) == (4, 5)


def test_a_recording_that_broke_off_is_replayed_as_far_as_it_goes(tmp_path: Path) -> None:
    recorded = record_busy_run(tmp_path / "run", depth=1)
    data = (tmp_path / "run").read_bytes()
    (tmp_path / "half").write_bytes(data[: len(data) // 2])
    result = Replay(tmp_path / "half").run()
    assert result.first_difference is None
    assert 0 < result.num_steps < len(recorded)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read"),
        (b"", "is not a recording; one is written by octavo serve --record-trace"),
        (b"\x01\x00\x00\x00\xff", "is not a recording, or is damaged at byte 0"),
        (frames.pack(Planned(0.0, None)), "does not begin with the settings"),
        (frames.pack(Began(settings(), 1, version=99)), "a recording of version 99"),
        (
            frames.pack({"type": "began", "settings": {"of": "an older octavo"}, "version": 3}),
            "a recording of version 3",
        ),
    ],
)
def test_what_is_no_recording_is_refused(tmp_path: Path, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / "file").write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        Replay(tmp_path / "file")


def test_the_progress_of_reading_a_recording_is_shown(tmp_path: Path) -> None:
    record_busy_run(tmp_path / "run", depth=1)
    shares: list[float] = []
    Replay(tmp_path / "run", shares.append).run()
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
