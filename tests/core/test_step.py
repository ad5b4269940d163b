"""Steps and their results as they travel between processes."""

from __future__ import annotations

import msgspec

from octavo.core.step import BlockOps, ModelRunnerOutput, RowOutput, ScheduledSequence, SchedulerOutput, TokenLogprobs


def test_what_drafts_and_connectors_add_survives_the_way_to_a_worker() -> None:
    rows = [ScheduledSequence(1, 0, 7, 3, 1, token_ids=(4,), drafts=(5, 6)), ScheduledSequence(2, 0, 3, 1, 1)]
    step = SchedulerOutput(
        step_id=1, new_sequences=[], rows=rows, finished_ids=[], block_ops=BlockOps(), connector=b"down"
    )
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(step), type=SchedulerOutput) == step
    assert step.num_tokens == 4
    results = [RowOutput(1, 0, [TokenLogprobs(token_id=5), TokenLogprobs(token_id=9)])]
    output = ModelRunnerOutput(step_id=1, rows=results)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(output), type=ModelRunnerOutput) == output
