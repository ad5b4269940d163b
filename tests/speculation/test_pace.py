"""How often text is searched follows from what that takes and saves."""

from __future__ import annotations

from octavo.speculation.pace import SearchPace


class Clock:
    def __init__(self) -> None:
        self.time = 0.0

    def __call__(self) -> float:
        return self.time


def num_searches(pace: SearchPace, clock: Clock, num_steps: int, search_s: float, gain_s: float, step_s: float) -> int:
    count = 0
    for _ in range(num_steps):
        if pace.take_step():
            count += 1
            began, clock.time = clock.time, clock.time + search_s
            pace.note_spent(began)
            pace.note_searched(gain_s, step_s)
    return count


def test_searches_that_save_their_time_go_on() -> None:
    clock = Clock()
    pace = SearchPace(clock)
    assert num_searches(pace, clock, 500, search_s=1e-4, gain_s=2e-4, step_s=4e-4) == 500


def test_those_that_save_nothing_take_a_small_share_of_the_time() -> None:
    clock = Clock()
    pace = SearchPace(clock)
    assert num_searches(pace, clock, 32, search_s=1e-5, gain_s=0.0, step_s=4e-4) == 32
    assert 30 <= num_searches(pace, clock, 1000, search_s=1e-5, gain_s=0.0, step_s=4e-4) <= 34
    # beside steps that take long they go on, and none comes later than after 64 steps
    assert num_searches(pace, clock, 1000, search_s=1e-5, gain_s=0.0, step_s=0.05) >= 970
    assert num_searches(pace, clock, 6400, search_s=1.0, gain_s=0.0, step_s=4e-4) >= 100


def test_one_that_saves_much_is_followed_by_others() -> None:
    clock = Clock()
    pace = SearchPace(clock)
    num_searches(pace, clock, 1000, search_s=1e-4, gain_s=0.0, step_s=4e-4)
    while not num_searches(pace, clock, 1, search_s=1e-4, gain_s=0.01, step_s=4e-4):
        pass
    assert num_searches(pace, clock, 30, search_s=1e-4, gain_s=0.0, step_s=4e-4) >= 30


def test_a_clock_that_stands_still_never_rests() -> None:
    clock = Clock()
    assert num_searches(SearchPace(clock), clock, 500, search_s=0.0, gain_s=0.0, step_s=1.0) == 500
