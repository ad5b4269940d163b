"""Every example runs as it is and prints what it promises; none is longer than a page."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
PROMISES = {
    "chat.py": "> Who are you?",
    "evolve_weights.py": "round 3: ",
    "logprobs.py": "(rank 1)",
    "offline.py": "Once upon a time",
    "parallel_sampling.py": "[3]",
    "prefix_cache.py": "tokens were there (the next block is new)",
    "streaming.py": "2: ",
}


def test_every_example_is_run_here_and_fits_a_page() -> None:
    assert sorted(path.name for path in EXAMPLES.glob("*.py")) == sorted(PROMISES)
    for path in EXAMPLES.glob("*.py"):
        assert len(path.read_text(encoding="utf-8").splitlines()) <= 50


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(PROMISES))
def test_example_prints_what_it_promises(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    assert PROMISES[name] in capsys.readouterr().out
