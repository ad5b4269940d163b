"""How fast a response comes."""

from __future__ import annotations

from octavo.cli.pace import Pace


def paced(*counts: int) -> str:
    """A token count every half of a second, the first after one."""
    times = iter([0.0, *(1.0 + place / 2 for place in range(len(counts)))])
    pace = Pace(lambda: next(times))
    for count in counts:
        pace.note(count)
    return str(pace)


def test_the_rate_is_that_of_the_tokens_behind_the_first_ones() -> None:
    assert paced(1, 3, 4) == "4 tokens, the first after 1.00 s, then 3.0 per second"
    assert paced(2, 2, 4) == "4 tokens, the first after 1.00 s, then 4.0 per second"
    assert paced(1) == "1 tokens, the first after 1.00 s"
    assert paced() == paced(0) == "no tokens"
