"""`octavo replay RECORDING`: replays a recorded run and checks that this version takes the same decisions."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from octavo.cli.options import heading
from octavo.cli.terminal import progress
from octavo.simulate.replay import Replay


def replay(
    recording: Annotated[
        str, Parameter(help="File that octavo serve --record-trace wrote.", group=heading("Simulation"))
    ],
    /,
) -> int:
    """Take the decisions of a recorded run once more; the exit code is 1 where one of them differs."""
    with progress("replaying") as on_read:
        result = Replay(recording, on_read).run()
    stats = result.stats
    print(
        f"{result.num_requests:,} requests, {result.num_steps:,} steps, {stats.num_generated_tokens:,} tokens, "
        f"{stats.num_preemptions:,} preemptions, {stats.num_cached_tokens:,} tokens found in the cache"
    )
    if result.first_difference is None:
        print("every step is the recorded one")
        return 0
    print(f"step {result.first_difference:,} is another than the recorded one: this version decides otherwise")
    return 1
