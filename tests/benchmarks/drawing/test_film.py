"""A film shows what a recorded run did, and its pictures show the film."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from benchmarks.drawing.film import CACHED, EMPTY, Film, Frame, film
from benchmarks.drawing.raster import blocks_raster, picture, requests_raster, whole_picture
from octavo.errors import ConfigError
from tests.simulate.test_replay import record_busy_run


def test_every_row_of_every_step_is_in_the_film(tmp_path: Path) -> None:
    steps = record_busy_run(tmp_path / "run", 1)
    shown = film(tmp_path / "run")
    assert len(shown.frames) == len(steps)
    for frame, step in zip(shown.frames, steps, strict=True):
        assert any(row.num_tokens > 1 for row in step.rows) <= ("prompt" in frame.requests.values())
        assert ("decode" in frame.requests.values()) <= any(row.num_samples + row.num_candidates for row in step.rows)
        assert len(frame.device) == 24
        assert len(frame.host) == 12


def test_blocks_on_the_host_are_those_of_requests_that_are_swapped_out(tmp_path: Path) -> None:
    record_busy_run(tmp_path / "run", 1, preemption_mode="swap")
    shown = film(tmp_path / "run")
    swapped = [{n for n, state in frame.requests.items() if state == "swapped"} for frame in shown.frames]
    assert swapped != [set()] * len(swapped)
    for frame, out in zip(shown.frames, swapped, strict=True):
        assert {state.request for state in frame.host} - {EMPTY} == out
        on_device = {state.request for state in frame.device} - {EMPTY, CACHED}
        assert on_device == {n for n, state in frame.requests.items() if state not in ("waiting", "swapped")}


def test_shared_and_cached_blocks_are_told_apart(tmp_path: Path) -> None:
    record_busy_run(tmp_path / "run", 1)
    states = {
        (block.request >= 0, block.is_shared) for frame in film(tmp_path / "run").frames for block in frame.device
    }
    assert states == {(True, True), (True, False), (False, False)}


def test_a_film_begins_and_ends_where_it_is_told(tmp_path: Path) -> None:
    record_busy_run(tmp_path / "run", 1)
    whole, part = film(tmp_path / "run"), film(tmp_path / "run", first_step=11, num_steps=5)
    assert part.frames == whole.frames[10:15]
    assert ">12<" in picture(part, [requests_raster(part)])  # a mark of the axis
    with pytest.raises(ConfigError, match="num_steps is 0, must be at least 1"):
        film(tmp_path / "run", num_steps=0)
    for first_step in (0, -3):
        with pytest.raises(ConfigError, match=f"first_step is {first_step}, must be at least 1"):
            film(tmp_path / "run", first_step=first_step)
    with pytest.raises(ConfigError, match="has no step 100000"):
        film(tmp_path / "run", first_step=100_000)


def test_pictures_have_a_row_for_each_request_and_block_that_was_used(tmp_path: Path) -> None:
    record_busy_run(tmp_path / "run", 1, preemption_mode="swap")
    shown = film(tmp_path / "run")
    requests, blocks = requests_raster(shown), blocks_raster(shown)
    assert [row.label for row in requests.rows] == shown.names
    assert [row.label for row in blocks.rows] == [f"block {number}" for number in range(1, 25)]
    root = ElementTree.fromstring(whole_picture(shown))
    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"Requests", "Blocks of the device", "Blocks of the host", "is swapped out"} <= set(texts)


def test_a_later_part_has_rows_for_those_that_are_there_in_it(tmp_path: Path) -> None:
    record_busy_run(tmp_path / "run", 1)
    part = film(tmp_path / "run", first_step=30, num_steps=5)
    there = sorted({number for frame in part.frames for number in frame.requests})
    assert 0 < len(there) < len(part.names)
    assert [row.label for row in requests_raster(part).rows] == [part.names[number] for number in there]


@pytest.mark.parametrize(
    ("first_step", "num_steps", "marks"),
    [(1, 3, [0, 1, 2, 3]), (20, 4, [19, 20, 21, 22, 23]), (14, 20, [14, 16, 18, 20, 22, 24, 26, 28, 30, 32])],
)
def test_marks_of_the_axis_are_whole_steps(tmp_path: Path, first_step: int, num_steps: int, marks: list[int]) -> None:
    record_busy_run(tmp_path / "run", 1)
    part = film(tmp_path / "run", first_step=first_step, num_steps=num_steps)
    assert len(part.frames) == num_steps
    raster = requests_raster(part)._replace(rows=[], legend=[])
    root = ElementTree.fromstring(picture(part, [raster]))
    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert texts == ["Requests", *map(str, marks), "steps"]


def test_labels_tell_the_prompts_of_one_call_apart(tmp_path: Path) -> None:
    names = ["cmpl-ba93c1f0e2-0-77aa01", "cmpl-ba93c1f0e2-1-77aa02", "short", "twelve-chars"]
    one = Film(names, [Frame(dict.fromkeys(range(4), "waiting"), [], [])], 1)
    labels = [row.label for row in requests_raster(one).rows]
    assert labels == ["cmpl-ba…aa01", "cmpl-ba…aa02", "short", "twelve-chars"]
