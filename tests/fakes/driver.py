"""The driver of an engine that knows no model: it makes its tokens in steps of a millisecond.

Arguments: how it behaves ("well", "one-token-short", "refuses", "dies"), and a file that gets a line for each run.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

BEHAVIOUR, LOG = sys.argv[1], Path(sys.argv[2])
STEP_S = 0.001


class Engine:
    def __init__(self) -> None:
        print("this is not an answer")

    def run(self, prompts: list[list[int]], max_tokens: int) -> tuple[float, list[tuple[float, int, int]], float]:
        with LOG.open("a") as log:
            print(len(prompts), len(prompts[0]), max_tokens, file=log)
        is_first_token = len(prompts[0]) == 16
        if BEHAVIOUR == "dies" and not is_first_token:
            sys.exit("no more memory")
        if BEHAVIOUR == "refuses" and not is_first_token:
            raise ValueError("too many tokens")
        short = BEHAVIOUR == "one-token-short" and not is_first_token
        began = time.perf_counter()
        events = []
        for _ in range(max_tokens - short):
            time.sleep(STEP_S)
            events += [(time.perf_counter(), request, 1) for request in range(len(prompts))]
        return began, events, time.perf_counter()
