"""Of work that comes at once, the event loop does a little in each turn."""

from __future__ import annotations

import asyncio

import pytest

from octavo.server.http.turns import FewPerTurn


@pytest.mark.anyio
async def test_few_of_many_simultaneous_calls_are_made_in_each_turn_of_the_event_loop_in_order() -> None:
    loop, calls, made = asyncio.get_running_loop(), FewPerTurn(8), list[int]()
    for number in range(20):
        calls.add(loop, lambda number=number: made.append(number))  # type: ignore[misc]
    num_after_turns = [len(made)]
    while len(made) < 20:
        await asyncio.sleep(0)
        num_after_turns.append(len(made))
    assert num_after_turns[:3] == [8, 16, 20]
    assert made == list(range(20))
    for _ in range(2):
        await asyncio.sleep(0)
    calls.add(loop, lambda: made.append(20))
    assert made[-1] == 20
