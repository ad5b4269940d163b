"""Prompts of one API request take turns with other requests."""

from __future__ import annotations

import msgspec
import pytest

from octavo.core.messages import EngineCoreRequest
from octavo.core.sequence import SequenceGroup
from octavo.engine.engine_core import EngineCore
from octavo.scheduler.fair_queueing import VirtualTime
from octavo.scheduler.policies import POLICIES
from tests.fakes.engine import make_core, make_request, run


def batch(name: str, size: int, num_tokens: int = 4) -> list[EngineCoreRequest]:
    return [make_request(f"{name}{number}", [number] * num_tokens, max_tokens=1) for number in range(size)]


def admitted(core: EngineCore) -> list[str]:
    """Ids in the order in which they came in."""
    entries = sorted(enumerate(core.scheduler.log.entries), key=lambda each: (each[1].step, each[0]))
    return [entry.request_id for _, entry in entries if entry.kind == "admitted"]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("enable_chunked_prefill", [True, False])
def test_a_request_does_not_wait_for_all_prompts_of_one_before_it(policy: str, enable_chunked_prefill: bool) -> None:
    core = make_core(
        max_num_seqs=2, max_num_batched_tokens=8, policy=policy, enable_chunked_prefill=enable_chunked_prefill
    )
    core.add_requests(batch("many", 12))
    core.step()
    core.add_request(make_request("single", range(30, 34), max_tokens=1))
    run(core)
    assert admitted(core).index("single") <= 3
    assert len(admitted(core)) == 13


def test_single_requests_keep_their_order() -> None:
    core = make_core(max_num_seqs=1)
    for number in (3, 1, 2, 5, 4):
        core.add_request(make_request(f"r{number}", range(number), max_tokens=1))
    run(core)
    assert admitted(core) == ["r3", "r1", "r2", "r5", "r4"]


def test_two_batches_share_by_prompt_tokens() -> None:
    core = make_core(max_num_seqs=1)
    core.add_requests(batch("short", 4, 4))
    core.add_requests(batch("long", 3, 8))
    run(core)
    assert admitted(core) == ["short0", "long0", "short1", "short2", "long1", "short3", "long2"]


def test_a_batch_keeps_a_share_however_many_others_come() -> None:
    turns = VirtualTime()
    requests = batch("many", 3, 8)
    second = SequenceGroup(requests[1], 1, 1, turns.starts(requests)[1])
    turns.note_admitted(SequenceGroup(requests[0], 0, 0, 0.0))
    for number in range(1, 100):
        request = make_request(str(number), range(8), max_tokens=1)
        group = SequenceGroup(request, 1 + number, 1 + number, turns.starts([request])[0])
        if group.virtual_start > second.virtual_start:
            break
        turns.note_admitted(group)
    assert number <= 17


def test_a_deadline_does_not_count_prompts_of_a_batch_that_come_after_it() -> None:
    core = make_core(max_num_seqs=1, prefill_tokens_per_s=1.0)
    core.add_requests(batch("many", 12))
    core.step()
    request = make_request("single", range(30, 34), max_tokens=1)
    core.add_request(msgspec.structs.replace(request, arrival_time=1.0, first_token_deadline_s=19.0))
    seen = run(core)
    assert seen.finals["single"].error is None
