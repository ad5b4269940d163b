"""What a core works at is read by its front, and says when a step takes far too long."""

from __future__ import annotations

import os
import time

from octavo.engine.shared_work import SharedWork, longest_step_s


def test_a_step_is_overdue_only_far_beyond_what_it_should_take() -> None:
    work = SharedWork.create()
    seen_by_front = SharedWork(os.dup(work.descriptor))
    work.begin(step_s=10.0)
    now = time.monotonic()
    assert seen_by_front.overdue(now + 200) is None
    reason = seen_by_front.overdue(now + 300)
    assert reason is not None
    assert "300 s" in reason
    assert "10.0 s" in reason
    work.rest()
    assert seen_by_front.overdue(now + 10**9) is None
    seen_by_front.close()
    for _ in range(2):
        work.close()


def test_longest_step_goes_by_the_measured_rate_and_is_generous_before_there_is_one() -> None:
    assert longest_step_s(2048, 512.0) == 4.0
    assert longest_step_s(2048, None) > 100
