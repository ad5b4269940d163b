"""How groups come onto the device, beyond what `test_scheduler.py` sees of it."""

from __future__ import annotations

import pytest

from octavo.core.sequence import Sequence
from octavo.scheduler.admission import common_prefix_length
from tests.fakes.engine import Collected, make_core, make_request, run, run_alone


@pytest.mark.parametrize(
    ("tokens", "length"),
    [
        ([[1, 2, 3, 4], [1, 2, 3, 5]], 3),
        ([[1, 2, 3, 4], [1, 2, 9, 4]], 2),
        ([[1, 2, 3, 4], [1, 2, 3, 4]], 3),
        ([[1, 2, 3, 4, 5], [1, 2, 3]], 2),
        ([[1, 2, 3], [1, 2, 3, 4, 5], [1, 7, 3]], 1),
    ],
)
def test_what_sequences_share_ends_before_the_last_token_of_each(tokens: list[list[int]], length: int) -> None:
    sequences = [Sequence(number, number, token_ids, 1) for number, token_ids in enumerate(tokens)]
    assert common_prefix_length(sequences) == length


def test_pins_go_when_nothing_runs_and_a_swapped_group_needs_their_blocks() -> None:
    core = make_core(
        num_blocks=8, num_host_blocks=16, preemption_mode="swap", policy="priority", max_num_seqs=1,
        max_num_batched_tokens=64,
    )  # fmt: skip
    request = make_request("low", range(17), max_tokens=4)
    request.priority = 5
    core.add_request(request)
    seen = Collected()
    seen.add(core.step().outputs)
    assert core.pin_prefix(list(range(17)), 1e9).num_cached_tokens == 16
    core.add_request(make_request("high", [40, 41], max_tokens=2))
    while len(core.scheduler.groups) > 1:
        seen.add(core.step().outputs)
    assert core.stats().num_preemptions_by_swap == 1
    run(core, collected=seen)
    assert core.scheduler.block_manager.pins.num_blocks == 0
    assert seen.token_ids["low"] == run_alone(request).token_ids["low"]


def test_who_is_swapped_in_has_room_for_its_lookahead_slots() -> None:
    core = make_core(
        num_blocks=9, num_lookahead_slots=4, num_host_blocks=40, preemption_mode="swap", enable_prefix_caching=False
    )
    requests = [make_request("a", [1], max_tokens=20), make_request("b", range(20, 28), max_tokens=12)]
    run(core, requests)
    entries = [(each.kind, each.because) for each in core.scheduler.log.entries if each.request_id == "b"]
    moved = next(because for kind, because in entries if kind == "swapped_in")
    blocked = next(because for kind, because in entries if kind == "blocked")
    # a block more than what it brings and its next token need
    assert (moved, blocked.split(" free ")[0]) == ("4 blocks", "needs 6")
    assert core.stats().num_preemptions == 1
