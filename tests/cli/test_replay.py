"""`octavo replay`: whether a recorded run is decided alike."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo.cli.main import main
from octavo.core.process import frames
from octavo.engine.recorder import Planned
from octavo.simulate.replay import read_recording
from tests.cli.conftest import Command
from tests.simulate.test_replay import record_busy_run


def test_a_recording_is_replayed(tmp_path: Path, command: Command) -> None:
    steps = record_busy_run(tmp_path / "run", depth=2)
    shown = command("replay", str(tmp_path / "run")).out
    assert f"25 requests, {len(steps):,} steps" in shown
    assert "every step is the recorded one" in shown


def test_another_decision_is_named_and_is_the_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record_busy_run(tmp_path / "run", depth=1)
    events = list(read_recording(tmp_path / "run"))
    third = [place for place, event in enumerate(events) if isinstance(event, Planned) and event.digest][2]
    events[third] = Planned(events[third].now, "0" * 16)  # type: ignore[union-attr]
    (tmp_path / "other").write_bytes(b"".join(map(frames.pack, events)))
    assert main(["replay", str(tmp_path / "other")]) == 1
    assert "step 3 is another than the recorded one" in capsys.readouterr().out


def test_a_file_that_is_no_recording_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", "nowhere"]) != 0
    assert "the recording 'nowhere' cannot be read" in capsys.readouterr().err


def test_the_recording_of_a_real_engine_is_replayed(tiny_model: str, tmp_path: Path, command: Command) -> None:
    from octavo import LLM, SamplingParams

    file = str(tmp_path / "run")
    llm = LLM(model=tiny_model, record_trace=file, max_num_seqs=4, num_gpu_blocks_override=12, swap_space=0.001)
    prompts = [[1 + i, *range(20, 50)] for i in range(6)]
    params = [SamplingParams(n=1 + i % 2, max_tokens=40, seed=i) for i in range(5)]
    llm.generate(prompts, [*params, SamplingParams(n=2, use_beam_search=True, max_tokens=20)], use_tqdm=False)
    stats = llm.engine.stats
    assert stats.num_preemptions > 0
    llm.engine.shutdown()
    shown = command("replay", file).out
    assert f"6 requests, {stats.num_steps} steps, {stats.num_generated_tokens} tokens" in shown
    assert "every step is the recorded one" in shown
