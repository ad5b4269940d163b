"""Draws the pictures of the design pages from real runs of the shipped model: `python -m benchmarks.pictures`.

Every run is recorded as `--record-trace` does, replayed, and drawn as `python -m benchmarks.draw` does.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.drawing.film import Film, film
from benchmarks.drawing.raster import Raster, blocks_raster, picture, requests_raster
from octavo import SamplingParams
from octavo.config.sources import engine_args
from octavo.engine.llm_engine import LLMEngine

FOLDER = Path(__file__).parents[1] / "docs" / "design"
STORY = (
    "Once upon a time there was a small octopus who lived in a library under the sea, and every day it read a book. "
)
PROMPTS = [
    STORY * 2,
    STORY * 2 + "One day",
    "The sun",
    "Why is the sky blue? " * 6,
    STORY + "But then",
    "A cat and a dog " * 5,
    "Two friends",
    STORY * 2 + "At night",
]
"""Some begin alike."""
PLAIN: list[tuple[str, dict[str, Any]]] = [(prompt, {"max_tokens": 40 - 2 * i}) for i, prompt in enumerate(PROMPTS)]
FORKS: list[tuple[str, dict[str, Any]]] = [
    (STORY, {"max_tokens": 40, "n": 3}),
    (STORY + "Then", {"max_tokens": 30, "n": 4, "use_beam_search": True}),
    ("The sun", {"max_tokens": 50}),
]
TIGHT = {"num_gpu_blocks_override": 20, "enable_prefix_caching": False}


def recorded(requests: Sequence[tuple[str, dict[str, Any]]], steps_apart: int = 0, **options: Any) -> Film:
    """What an engine with these options does with the requests, one every `steps_apart` steps."""
    with tempfile.TemporaryDirectory() as folder:
        recording = str(Path(folder) / "run")
        settings = {"max_num_batched_tokens": 48, "max_num_seqs": 16, "max_model_len": 192} | options
        engine = LLMEngine.from_args(engine_args({"model": "octavo-tiny", "record_trace": recording, **settings}))
        for number, (prompt, params) in enumerate(requests):
            engine.add_request(f"request {number}", prompt, SamplingParams(ignore_eos=True, **params))
            for _ in range(steps_apart):
                engine.step()
        while engine.has_unfinished_requests():
            engine.step()
        engine.shutdown()
        return film(recording)


def draw(name: str, film: Film, *rasters: Raster) -> None:
    svg = picture(film, rasters)
    (FOLDER / name).write_text(svg, encoding="utf-8")
    print(f"{name}: {len(svg) // 1024} KiB")


if __name__ == "__main__":
    continuous = recorded(PLAIN, steps_apart=3)
    draw(
        "requests-continuous.svg", continuous, requests_raster(continuous, "Default: prompts beside those that decode")
    )
    classic = recorded(PLAIN, steps_apart=3, enable_chunked_prefill=False, max_num_batched_tokens=192)
    draw("requests-classic.svg", classic, requests_raster(classic, "Classic: a step is all prompts or all decode"))
    again = recorded(PLAIN, preemption_mode="recompute", **TIGHT)
    draw("requests-recompute.svg", again, requests_raster(again, "20 blocks, preempted requests compute again"))
    swapped = recorded(PLAIN, preemption_mode="swap", **TIGHT)
    draw("requests-swap.svg", swapped, requests_raster(swapped, "20 blocks, preempted requests are swapped out"))
    on_host = blocks_raster(swapped, "Blocks of the host", host=True)
    draw("blocks-swap.svg", swapped, blocks_raster(swapped, "The 20 blocks of the device"), on_host)
    twice = recorded([*PLAIN, *PLAIN], num_gpu_blocks_override=40)
    draw("blocks-prefix-cache.svg", twice, blocks_raster(twice, "Eight prompts twice, in 40 blocks"))
    forks = recorded(FORKS)
    draw("blocks-forks.svg", forks, blocks_raster(forks, "Three samples, four beams, and a plain request"))
