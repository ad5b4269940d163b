"""`octavo simulate`: from options to a report."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import msgspec
import pytest

from octavo.cli.main import main
from octavo.scheduler.policies import POLICIES
from octavo.simulate.trace_file import read_trace
from octavo.simulate.traces import Trace, TraceRequest
from tests.cli.conftest import Command
from tests.fakes.engine import make_core, make_request, run
from tests.simulate.parts import make_costs, make_settings
from tests.simulate.test_recorded import record
from tests.simulate.test_replay import record_busy_run

SMALL = ("--num-requests", "30", "--input-len", "40")
FEW = (*SMALL, "--request-rate", "20", "--output-len", "10")


def test_a_report_goes_to_the_terminal_and_to_json(tmp_path: Path, command: Command) -> None:
    report, trace = tmp_path / "report.json", tmp_path / "trace.jsonl"
    files = ("--output", str(report), "--save-trace", str(trace))
    shown = command("simulate", *FEW, "--replicas", "2", "--router", "least-loaded", *files).out
    assert "h100/llama-3.1-8b: 16.1 GB of weights" in shown
    assert "30 generated requests, 20 a second, of 40 tokens and 10 of output on average" in shown
    assert "30 requests on 2 replicas" in shown
    (run,) = json.loads(report.read_text())["runs"]
    assert (run["num_requests"], run["num_failed"], run["num_replicas"]) == (30, 0, 2)
    assert [len(values) for values in run["percentiles"].values()] == [101] * 4
    # the trace that was saved is simulated to the same figures
    assert len(read_trace(trace)) == 30
    again = tmp_path / "again.json"
    options = ("--trace", str(trace), "--replicas", "2", "--router", "least-loaded", "--output", str(again))
    assert main(["simulate", *options]) == 0
    (same,) = json.loads(again.read_text())["runs"]
    assert {**same, "request_rate": 20.0} == run


def test_several_rates_are_several_runs(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    assert main(["simulate", *SMALL, "--request-rate", "5,50", "--output", str(report)]) == 0
    runs = json.loads(report.read_text())["runs"]
    assert [run["request_rate"] for run in runs] == [5.0, 50.0]
    assert runs[0]["latency_s"]["mean"] < runs[1]["latency_s"]["mean"]


def test_engine_options_reach_the_scheduler(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    small = ("--num-gpu-blocks-override", "80", "--max-model-len", "160", "--preemption-mode", "swap")
    options = ("--arrivals", "at-once", "--output-len", "80", "--output", str(report))
    assert main(["simulate", *SMALL, *small, *options]) == 0
    (run,) = json.loads(report.read_text())["runs"]
    assert run["num_preemptions"] > 0
    assert run["num_swapped_blocks"] > 0
    assert run["request_rate"] is None


def test_pools_turns_and_beams_are_options_too() -> None:
    pools = ("--replicas", "3", "--disaggregated", "1", "--turns", "3", "--think-s", "0.1", "--shared-prefix-len", "32")
    assert main(["simulate", *FEW, *pools]) == 0
    assert main(["simulate", *FEW, "--n", "3", "--beam-search"]) == 0
    assert main(["simulate", *FEW, "--n", "2", "--best-of", "3", "--replicas", "2", "--disaggregated", "1"]) == 0


def test_a_model_and_a_device_are_enough(command: Command) -> None:
    assert (
        "octavo-tiny on 2 × NVIDIA L4, 24 GB: 0.0104 GB of weights"
        in command("simulate", *FEW, "--model", "octavo-tiny", "--device", "l4", "--tensor-parallel-size", "2").out
    )


@pytest.mark.parametrize("policy", POLICIES)
def test_requests_that_cannot_be_served_are_counted_with_the_reason(policy: str, command: Command) -> None:
    senders = ("--num-tenants", "2", "--num-priorities", "3", "--first-token-deadline-s", "0.001")
    shown = command("simulate", *FEW, *senders, "--scheduling-policy", policy, "--prefill-tokens-per-s", "100").out
    assert "30 refused" in shown
    assert "the first was refused because first_token_deadline_s is 0.001" in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--router", "least-load"), 'Invalid value "least-load" for --router. Choose from: '),
        (("--replay", "run"), "--replay: a recording is replayed by a command of its own: octavo replay FILE"),
        (("--replay=run", "--svg", "x.svg"), "octavo replay FILE"),
        (("--svg", "x.svg"), "python -m benchmarks.draw FILE PICTURE.svg"),
        (("--cost-model", "abacus"), "cost_model is 'abacus', which is neither a file nor DEVICE/MODEL"),
        (("--cost-model", "l4/qwen3-14b"), "leaves no room for a KV block beside the weights"),
        (("--model", "m"), "model is given, but device is not; a model and a device go together"),
        (("--tensor-parallel-size", "2"), "tensor_parallel_size is given, but model is not"),
        (("--model", "m", "--device", "l4", "--cost-model", "l4/qwen3-4b"), "model and cost_model both say what steps"),
        (("--model", "octavo-tiny", "--device", "abacus"), "device is 'abacus', which is neither a file nor one of"),
        (("--trace", "nowhere"), "trace is 'nowhere', which cannot be read"),
        (("--trace", "t", "--request-rate", "1,2"), "request_rate is for generated requests, but trace is given"),
        (("--trace", "t", "--num-tenants", "2"), "num_tenants is for generated requests, but trace is given"),
        (("--recording", "r", "--trace", "t"), "of recording and trace only one can be given"),
        (("--recording", "nowhere"), "the recording 'nowhere' cannot be read"),
        (("--replicas", "0"), "replicas is 0, must be at least 1"),
        (("--processes", "0"), "processes is 0, must be at least 1"),
        (("--num-priorities", "0"), "num_priorities is 0, must be at least 1"),
        (("--first-token-deadline-s", "-1"), "first_token_deadline_s is -1.0, must be greater than 0"),
        (("--request-rate", "fast"), "request_rate is 'fast', expected a number"),
        (("--arrivals", "rush"), 'Invalid value "rush" for --arrivals. Choose from: "poisson"'),
        (("--disaggregated", "1"), "disaggregated is 1, must leave at least one of 1 replicas"),
        (("--disaggregated", "1", "--transfer-bytes-per-s", "0"), "transfer_bytes_per_s is 0.0, must be greater"),
        (("--max-num-seqs", "9999"), "max_num_batched_tokens is 2048, must be at least max_num_seqs"),
        (("--output", "/nowhere/x.json", *FEW), "output is '/nowhere/x.json', which cannot be written"),
    ],
)
def test_what_cannot_be_simulated_is_refused_with_a_reason(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", *arguments]) != 0
    assert message in capsys.readouterr().err


def test_a_recording_is_simulated_under_other_settings(tmp_path: Path, command: Command) -> None:
    record_busy_run(tmp_path / "run", depth=1)
    report = tmp_path / "report.json"
    options = ("--recording", str(tmp_path / "run"), "--output", str(report))
    shown = command("simulate", *options).out
    assert "As recorded, and" in shown
    assert "24 KV blocks of 4 tokens each" in shown
    assert json.loads(report.read_text())["runs"][0]["num_preemptions"] > 0
    assert (
        "400 KV blocks of 4 tokens each"
        in command("simulate", *options, "--num-gpu-blocks-override", "400", "--scheduling-policy", "priority").out
    )
    assert json.loads(report.read_text())["runs"][0]["num_preemptions"] == 0


def test_poor_fits_and_limits_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str], command: Command) -> None:
    costs = make_costs(step_s=0.1, prefill_token_s=0.01)
    settings = make_settings(max_num_batched_tokens=32, max_num_seqs=1)
    limited = dataclasses.replace(settings.scheduler, max_queued_requests=1)
    settings = msgspec.structs.replace(settings, scheduler=limited)
    # one by one: admission control lets all of them in
    requests = [TraceRequest(arrival_s=9.0 * i, num_prompt_tokens=5 + i, output_len=4) for i in range(9)]
    record(tmp_path / "run", settings, Trace(requests), costs)
    recording = ("--recording", str(tmp_path / "run"))
    shown = command("simulate", *recording).out
    assert "warning" not in shown
    assert "limits of the queue" not in shown
    slow = tmp_path / "slow.json"
    slow.write_bytes(msgspec.json.encode(make_costs(step_s=30.0)))
    assert main(["simulate", *recording, "--cost-model", str(slow)]) == 0
    assert (
        "limits of the queue, the recorded ones unless given here: max_queued_requests 1\n" in capsys.readouterr().out
    )
    assert (
        "limits of the queue"
        not in command("simulate", *recording, "--cost-model", str(slow), "--max-queued-requests", "50").out
    )
    slow.write_bytes(msgspec.json.encode(msgspec.structs.replace(costs, fit_error=0.21)))
    assert (
        "warning: half of the measured steps are off by more than 21%"
        in command("simulate", *recording, "--cost-model", str(slow)).out
    )


def test_what_given_settings_leave_without_effect_is_not_taken_from_a_recording(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: Command
) -> None:
    core = make_core(
        record_to=tmp_path / "run", policy="priority", priority_ageing=5.0, max_bypasses=2, preemption_mode="swap"
    )
    run(core, [make_request(f"r{number}", range(3 + number), max_tokens=4 + number) for number in range(12)])
    core.shutdown()
    recording = ("simulate", "--recording", str(tmp_path / "run"))
    others = ("--scheduling-policy", "fcfs", "--swap-space", "0", "--no-enable-chunked-prefill")
    assert "As recorded" in command(*recording, *others, "--max-num-batched-tokens", "200").out
    assert main([*recording, "--scheduling-policy", "fcfs", "--priority-ageing", "5"]) != 0
    assert "priority_ageing is 5.0, but has no effect" in capsys.readouterr().err
