"""octavo beside another engine: they do the same work in turns, and what goes wrong with one of them is told."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.engine_process import EngineProcess, command_with_driver, process_tree
from benchmarks.peers import main, parse_command
from octavo.errors import ConfigError, EngineDeadError
from tests.fakes.byte_tokenizer import write_byte_tokenizer
from tests.fakes.checkpoints import make_checkpoint

FAKE = Path(__file__).parents[1] / "fakes" / "driver.py"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model")
    return str(write_byte_tokenizer(make_checkpoint("llama", path, vocab_size=300, max_position_embeddings=2048)))


def fake(tmp_path: Path, behaviour: str = "well") -> list[str]:
    return [sys.executable, str(FAKE), behaviour, str(tmp_path / "runs")]


def started(tmp_path: Path, words: list[str]) -> EngineProcess:
    return EngineProcess("fake", command_with_driver(words), tmp_path / "log")


def compare(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[dict[str, Any], str]:
    code = main([*arguments, "--max-num-seqs", "32", "--kv-cache-memory", "64MiB"])
    written = capsys.readouterr()
    assert code == 0, written.err
    (line,) = written.out.splitlines()
    return json.loads(line), written.err


def test_engines_do_the_same_work_side_by_side(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    against = "fake=" + " ".join(fake(tmp_path))
    result, table = compare(capsys, "--model", model, "--workloads", "A,E", "--repetitions", "2", "--against", against)
    runs = (tmp_path / "runs").read_text().splitlines()
    # the first token; then each workload: a warm-up, twice the real thing, E each time with its prefix once more
    assert runs == ["1 16 1", "1 128 4", "1 128 128", "1 128 128", "4 1056 4", *["16 1056 16"] * 4]
    sizes = {"max_num_seqs": 32, "kv_cache_memory": 64 << 20, "threads": 1, "swap_space": 0.0625}
    assert result["arguments"] == {"model": model, **sizes}
    assert list(result["engines"]) == ["octavo", "fake"]
    for engine in result["engines"].values():
        assert engine["cold_start_s"] >= engine["load_s"] > 0
        assert engine["peak_rss_mb"] >= engine["rss_after_load_mb"] > 0
        assert engine["workloads"]["A"]["shape"] == [1, 128, 128, 0]
        assert engine["workloads"]["A"]["out_tps"]["med"] > 0
        assert engine["workloads"]["E"]["warm_prefix_wall"]["max"] > 0
    # 1 ms asleep, and whatever else the machine does
    assert result["engines"]["fake"]["workloads"]["A"]["step_ms"]["min"] >= 1.0
    ours, theirs = (result["engines"][name]["workloads"]["A"]["decode_tps"]["med"] for name in ("octavo", "fake"))
    assert result["ratios"]["fake"]["A"]["decode_tps"] == pytest.approx(ours / theirs, rel=1e-4)
    assert "over fake" in table


def test_engines_that_cannot_do_a_workload_or_die_leave_the_others_their_figures(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    complaints = {
        "refuses": "ValueError: too many tokens",
        "one-token-short": "requests got [127] tokens, each was to get 128",
        "dies": "fake ended: no more memory",
    }
    against = [word for each in complaints for word in ("--against", f"{each}=" + " ".join(fake(tmp_path, each)))]
    result, table = compare(capsys, "--model", model, "--workloads", "A,C1", "--repetitions", "1", *against)
    assert [result["engines"]["octavo"]["workloads"][name]["reps"] for name in ("A", "C1")] == [1, 1]
    for name, complaint in complaints.items():
        assert result["engines"][name]["workloads"]["A"]["error"].startswith(complaint.replace("fake", name))
    assert result["engines"]["dies"]["workloads"]["C1"]["error"].startswith("dies ended: no more memory")
    assert "failed" in table


def test_an_engine_that_dies_is_told_with_its_last_words(tmp_path: Path) -> None:
    engine = started(tmp_path, fake(tmp_path, "dies"))
    with engine, pytest.raises(EngineDeadError, match="fake ended: no more memory"):
        engine.run([[1] * 8], 2)


def test_an_engine_that_does_not_start_is_told_with_its_last_words(tmp_path: Path) -> None:
    driver = tmp_path / "broken.py"
    driver.write_text("raise RuntimeError('no such model')")
    with (
        pytest.raises(EngineDeadError, match="fake ended: RuntimeError: no such model"),
        started(tmp_path, [sys.executable, str(driver)]),
    ):
        pass


def test_an_engine_whose_turn_it_is_not_does_nothing(tmp_path: Path) -> None:
    with started(tmp_path, fake(tmp_path)) as engine:
        (pid, *_) = process_tree(engine._process.pid)
        engine.pause()
        assert _state(pid) == "T"
        engine.resume()
        assert engine.run([[1] * 8], 2).error is None
    assert not Path(f"/proc/{pid}").exists()


def test_a_paused_engine_ends_with_its_block(tmp_path: Path) -> None:
    with started(tmp_path, fake(tmp_path)) as engine:
        pid = engine._process.pid
        engine.pause()
    assert not Path(f"/proc/{pid}").exists()


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_commands_have_a_name() -> None:
    assert parse_command("other=python a/b.py x 'y z'") == ("other", ["python", "a/b.py", "x", "y z"])
    assert parse_command("env A=B ./python a/b.py") == ("b", ["env", "A=B", "./python", "a/b.py"])
    with pytest.raises(ConfigError, match="is not a command: No closing quotation"):
        parse_command("python 'a.py")


def test_a_command_without_a_driver_is_refused() -> None:
    with pytest.raises(ConfigError, match="'python -m other' names no driver; give PYTHON DRIVER.py"):
        command_with_driver(["python", "-m", "other"])
    with pytest.raises(ConfigError, match="there is no driver missing.py"):
        command_with_driver(["python", "missing.py"])


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--repetitions", "0"), "repetitions is 0, must be at least 1"),
        (("--workloads", "Z"), "'Z' is not a workload"),
        (("--against", "octavo=python x.py"), "two engines are called octavo"),
        (("--against", "python -m other"), "names no driver"),
    ],
)
def test_bad_input_is_refused_before_anything_starts(
    arguments: tuple[str, ...], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 1
    written = capsys.readouterr()
    assert complaint in written.err
    assert "starting" not in written.err
