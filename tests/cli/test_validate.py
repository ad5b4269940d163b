"""`octavo bench validate`: loads on an engine beside their simulation."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from octavo.cli.main import main
from octavo.platform import Platform
from octavo.simulate.traces import TraceRequest
from tests.cli.conftest import Command
from tests.simulate.parts import make_costs

SMALL = ("--max-num-seqs", "4", "--max-model-len", "256", "--repetitions", "1")


def costs(tmp_path: Path) -> str:
    """A cost model by which an engine of the tests is about as fast as it is."""
    file = tmp_path / "costs.json"
    file.write_bytes(msgspec.json.encode(make_costs(step_s=2e-3, sequence_s=1e-4, prefill_token_s=1e-5)))
    return str(file)


def test_every_load_is_measured_and_predicted(tiny_model: str, tmp_path: Path, command: Command) -> None:
    options = ("--model", tiny_model, "--cost-model", costs(tmp_path), "--num-requests", "6", *SMALL)
    shown = command("bench", "validate", *options)
    loads = json.loads(shown.out)["loads"]
    assert list(loads) == [
        "burst",
        "poisson at half load",
        "poisson at 90 % load",
        "bursts at half load",
        "long prompts",
        "shared prefixes",
        "conversations",
    ]
    for figures in loads.values():
        assert min(figures["output tokens/s"]) > 0
    assert "throughput is predicted within" in shown.err


def test_a_trace_is_a_load(tiny_model: str, tmp_path: Path, command: Command) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_bytes(msgspec.json.encode(TraceRequest(num_prompt_tokens=9, output_len=5, n=2, output_lens=[5, 3])))
    options = ("--model", tiny_model, "--cost-model", costs(tmp_path), "--trace", str(file), *SMALL)
    assert list(json.loads(command("bench", "validate", *options).out)["loads"]) == ["trace"]
    assert (
        json.loads(command("bench", "validate", *options, "--processor-clock", "--threads", "1").out)["processor_clock"]
        is True
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--num-requests", "0"), "num_requests is 0, must be at least 1"),
        (("--trace", "nowhere"), "trace is 'nowhere', which cannot be read"),
        (("--cost-model", "nowhere.json"), "there is no such file"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    arguments: tuple[str, ...], message: str, tiny_model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "validate", "--model", tiny_model, *SMALL, *arguments]) != 0
    assert message in capsys.readouterr().err


@pytest.mark.skipif(Platform.detect().cores < 2, reason="a machine with one core has no second thread")
def test_the_processors_clock_is_for_one_thread(tiny_model: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--model", tiny_model, *SMALL, "--processor-clock", "--threads", "2")
    assert main(["bench", "validate", *options]) != 0
    assert "threads is 2, must be 1 with processor_clock" in capsys.readouterr().err
