"""`octavo bench`: the figures add up and come with what a reader needs to trust them."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from octavo import LLM
from octavo.cli.bench import LoadOptions, _measure, is_plain_decode, medians_us, part_table
from octavo.cli.main import main
from octavo.core.messages import StepTimes
from octavo.core.step import BlockOps, ScheduledSequence, SchedulerOutput
from octavo.core.step_times import PartTime
from octavo.platform import Platform
from tests.cli.conftest import Command


def bench(command: Command, *arguments: str) -> dict[str, Any]:
    (line,) = command("bench", *arguments).out.splitlines()
    result: dict[str, Any] = json.loads(line)
    assert result["version"]
    assert result["cpu"]
    assert result["cores"] >= 1
    return result


def test_throughput_counts_the_tokens_of_its_requests(tiny_model: str, command: Command) -> None:
    result = bench(
        command,
        *("throughput", "--model", tiny_model, "--num-prompts", "3", "--input-len", "5", "--output-len", "4"),
        *("--repetitions", "3", "--max-num-seqs", "4"),
    )
    assert sorted(result["all_elapsed_s"])[1] == result["elapsed_s"]
    assert result["output_tokens_per_s"] * result["elapsed_s"] == pytest.approx(12, rel=1e-3)
    assert result["total_tokens_per_s"] * result["elapsed_s"] == pytest.approx(27, rel=1e-3)
    # what came from variables is told too: tests run with them
    assert result["arguments"] == {"model": tiny_model, "max_num_seqs": 4, "threads": 1, "swap_space": 0.0625}


def test_latency_tells_the_first_token_from_the_others(tiny_model: str, command: Command) -> None:
    result = bench(
        command,
        *("latency", "--model", tiny_model, "--input-len", "4", "--output-len", "5", "--repetitions", "1"),
        *("--max-num-seqs", "4"),
    )
    assert result["first_token_s"] + 4 * result["per_token_s"] == pytest.approx(result["elapsed_s"], rel=1e-3)


def test_a_breakdown_tells_parts_kernels_and_host_of_each_batch_size(tiny_model: str, command: Command) -> None:
    arguments = ("--input-len", "4", "--output-len", "12", "--repetitions", "1", "--max-num-seqs", "4")
    captured = command("bench", "latency", "--model", tiny_model, "--breakdown", "--batch-size", "1,3", *arguments)
    for line, size in zip(captured.out.splitlines(), (1, 3), strict=True):
        result = json.loads(line)
        assert result["batch_size"] == size
        step, parts = result["breakdown_us"]["step"], result["breakdown_us"]
        assert step["host"] > 0
        # without compiled kernels there is no clock in them
        assert (step["total"] > step["host"]) == (Platform.detect().native_module is not None)
        assert all(parts[name]["total"] > 0 for name in ("scheduling", "batch building", "model forward", "head"))
        assert max(row["total"] for row in parts.values()) == step["total"]
    assert "taking results in" in captured.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--batch-size", "1,x"), "batch_size is '1,x', expected whole numbers between commas"),
        (("--batch-size", "2,0"), "batch_size is 0, must be at least 1"),
        (("--breakdown", "--output-len", "3"), "output_len is 3, must be at least 8 with breakdown"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "latency", *arguments]) != 0
    assert message in capsys.readouterr().err


def test_startup_measures_a_process_of_its_own(tiny_model: str, command: Command) -> None:
    result = bench(command, "startup", "--model", tiny_model, "--repetitions", "1", "--max-num-seqs", "4")
    assert result["process_s"] > result["import_s"] + result["load_s"] + result["first_token_s"] > 0
    assert result["cpu_s"] > 0.1
    assert 50 < result["peak_rss_mib"] < 5000


def test_no_measurement_finds_the_prompts_of_an_earlier_one_in_the_cache(tiny_model: str) -> None:
    source = random.Random(0)
    with LLM(tiny_model, num_gpu_blocks_override=64) as llm:
        for output_len in (1, 3):
            _measure(llm, source, LoadOptions(input_len=40, output_len=output_len, repetitions=1), 1)
        assert llm.engine.stats.num_queried_tokens == 4 * 40
        # two random prompts may begin with the same token or two
        assert llm.engine.stats.num_cached_tokens < 8


def plan(num_seqs: int, num_tokens: int = 1) -> SchedulerOutput:
    rows = [
        ScheduledSequence(seq_id=index, epoch=0, start=4, num_tokens=num_tokens, num_samples=1)
        for index in range(num_seqs)
    ]
    return SchedulerOutput(step_id=1, new_sequences=[], rows=rows, finished_ids=[], block_ops=BlockOps())


def test_what_is_in_no_part_is_everything_else_and_other_steps_do_not_count() -> None:
    parts = {"model forward": PartTime(10_000, 8_000), "head": PartTime(4_000, 2_000)}
    plans = (plan(2, num_tokens=7), plan(2), plan(2), plan(1), plan(2))
    steps = [StepTimes(began_ns=20_000 * i, planned=[each], parts=parts) for i, each in enumerate(plans)]
    assert sum(is_plain_decode(step, 2) for step in steps) == 3
    medians = medians_us(steps, 2)
    assert {name: row["total"] for name, row in medians.items() if row["total"]} == {
        "model forward": 10,
        "head": 4,
        "everything else": 6,
        "step": 20,
    }
    assert medians["step"] == {"total": 20, "kernels": 10, "host": 10}
    assert "everything else" in part_table(medians)
