"""The time of decode steps by part: every moment counts once, and other steps do not count."""

from __future__ import annotations

from octavo.cli.breakdown import is_plain_decode, medians_us, table
from octavo.core.messages import StepTimes
from octavo.core.step import BlockOps, ScheduledSequence, SchedulerOutput
from octavo.core.step_times import PartTime


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
    assert "everything else" in table(medians)
