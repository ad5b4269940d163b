"""Steps that look like real ones, to warm up and to measure the largest step."""

from __future__ import annotations

from octavo.core.arithmetic import num_blocks_for
from octavo.core.sampling_params import SamplingParams
from octavo.core.step import BlockOps, NewSequence, ScheduledSequence, SchedulerOutput
from octavo.worker.worker import Worker

FULLEST = SamplingParams(
    temperature=0.8,
    top_p=0.95,
    top_k=200,
    min_p=1e-4,
    repetition_penalty=1.1,
    presence_penalty=0.1,
    logprobs=20,
    seed=0,
)
"""Parameters that need every stage of sampling."""


def dummy_step(worker: Worker, num_seqs: int, num_tokens: int, params: SamplingParams = FULLEST) -> SchedulerOutput:
    """`num_seqs` new sequences that together compute `num_tokens`, the remainder in the first; each samples once.

    Their ids are negative, so they meet no real ones. Blocks are given out from 1 on, and again from the start when
    there are too few: what the caches hold is lost.
    """
    assert 1 <= num_seqs <= num_tokens
    limits = worker.plan.cache
    each = num_tokens // num_seqs
    lengths = [num_tokens - each * (num_seqs - 1)] + [each] * (num_seqs - 1)
    new_sequences, rows = [], []
    given = 0
    for i, length in enumerate(lengths):
        count = num_blocks_for(length, limits.block_size)
        new_sequences.append(
            NewSequence(
                seq_id=-1 - i,
                index=0,
                epoch=0,
                token_ids=[0] * length,
                num_prompt_tokens=length,
                block_tables=[
                    [1 + block % group.num_blocks for block in range(given, given + count)] for group in limits.groups
                ],
                params=params,
            )
        )
        given += count
        rows.append(ScheduledSequence(seq_id=-1 - i, epoch=0, start=0, num_tokens=length, num_samples=1))
    return SchedulerOutput(step_id=-1, new_sequences=new_sequences, rows=rows, finished_ids=[], block_ops=BlockOps())


def run_dummy(worker: Worker, num_seqs: int, num_tokens: int) -> None:
    """Execute one such step and forget its sequences."""
    worker.submit(dummy_step(worker, num_seqs, num_tokens)).result()
    ids = [-1 - i for i in range(num_seqs)]
    worker.submit(
        SchedulerOutput(step_id=-1, new_sequences=[], rows=[], finished_ids=ids, block_ops=BlockOps())
    ).result()
