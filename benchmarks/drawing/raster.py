"""Pictures of a film as SVG: a row for each request or block, a column for each step."""

from __future__ import annotations

import colorsys
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Final, NamedTuple
from xml.sax.saxutils import escape

from benchmarks.drawing.chart import ticks
from benchmarks.drawing.film import CACHED, EMPTY, BlockState, Film

_WIDTH: Final = 920
_LEFT: Final = 96
_RIGHT: Final = 16
_TOP: Final = 66
_BOTTOM: Final = 42
"""Of the picture, and what of it lies outside the cells."""
_GREY: Final = "#d2d2d2"
_MOST_LABELS: Final = 40
_MOST_CHARACTERS: Final = 12
"""Of a label, which fits beside the cells."""
_BEGIN: Final = 7
"""Of those, the ones in which a long label begins; the others are its end."""
_MEANINGS: Final = {
    "waiting": "waits",
    "prompt": "computes known tokens",
    "decode": "decodes",
    "idle": "runs, without a row in this step",
    "swapped": "is swapped out",
}


class Cell(NamedTuple):
    """How a state is drawn: a colour, and the share of the row's height that it fills."""

    colour: str
    height: float = 0.9


class Row(NamedTuple):
    """A label, and a cell for each step; None stays empty."""

    label: str
    cells: Sequence[Cell | None]


class Raster(NamedTuple):
    """Rows under a title; `legend` says what cells mean."""

    title: str
    rows: Sequence[Row]
    row_height: float
    legend: Sequence[tuple[str, Cell]]

    @property
    def height(self) -> float:
        return _TOP + self.row_height * len(self.rows) + _BOTTOM


def requests_raster(film: Film, title: str = "Requests") -> Raster:
    """What each request that was there did in each step."""
    there = {number for frame in film.frames for number in frame.requests}
    rows = [
        Row(_shortened(name), [_request_cell(number, frame.requests.get(number)) for frame in film.frames])
        for number, name in enumerate(film.names)
        if number in there
    ]
    states = {state for frame in film.frames for state in frame.requests.values()}
    legend = [
        (meaning, cell)
        for state, meaning in _MEANINGS.items()
        if state in states and (cell := _request_cell(0, state)) is not None
    ]
    return Raster(title, rows, max(2.0, min(18.0, 700 / max(1, len(rows)))), legend)


def blocks_raster(film: Film, title: str = "Blocks of the device", *, host: bool = False) -> Raster:
    """Who used each block of the device, or of the host, in each step; blocks that never held anything are left out."""
    columns = [frame.host if host else frame.device for frame in film.frames]
    ever_used = [block for block in range(len(columns[0])) if any(column[block].request != EMPTY for column in columns)]
    rows = [Row(f"block {block + 1}", [_block_cell(column[block]) for column in columns]) for block in ever_used]
    legend = [("used by a request, in its colour", Cell(_colour(0))), ("by several sequences", Cell(_dark(0)))]
    if any(state.request == CACHED for column in columns for state in column):
        legend.append(("not used, its content can be found again", Cell(_GREY)))
    return Raster(title, rows, max(2.0, min(12.0, 480 / max(1, len(rows)))), legend)


def picture(film: Film, rasters: Sequence[Raster]) -> str:
    """SVG: one under the other, over the same steps."""
    height = sum(raster.height for raster in rasters)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height:.0f}" width="{_WIDTH}" '
        'font-family="Helvetica, Arial, sans-serif" font-size="12" fill="#333">',
        '<rect width="100%" height="100%" fill="#fff"/>',
    ]
    y = 0.0
    for raster in rasters:
        parts += [f'<g transform="translate(0 {y:.1f})">', *_drawn(raster, len(film.frames), film.first_step), "</g>"]
        y += raster.height
    return "\n".join([*parts, "</svg>", ""])


def whole_picture(film: Film) -> str:
    """SVG: requests, blocks of the device, and blocks of the host where any was used."""
    rasters = [requests_raster(film), blocks_raster(film)]
    on_host = blocks_raster(film, "Blocks of the host", host=True)
    return picture(film, [*rasters, on_host] if on_host.rows else rasters)


def _request_cell(number: int, state: str | None) -> Cell | None:
    match state:
        case None:
            return None
        case "waiting":
            return Cell(_GREY, 0.3)
        case "swapped":
            return Cell(_pale(number), 0.3)
        case "idle":
            return Cell(_colour(number), 0.3)
        case "prompt":
            return Cell(_dark(number))
        case _:
            return Cell(_colour(number))


def _block_cell(state: BlockState) -> Cell | None:
    if state.request == EMPTY:
        return None
    if state.request == CACHED:
        return Cell(_GREY)
    return Cell(_dark(state.request) if state.is_shared else _colour(state.request))


def _drawn(raster: Raster, num_steps: int, first_step: int) -> list[str]:
    step_width = (_WIDTH - _LEFT - _RIGHT) / num_steps
    bottom = _TOP + raster.row_height * len(raster.rows)
    parts = [f'<text x="{_LEFT}" y="24" font-size="14" font-weight="bold">{escape(raster.title)}</text>']
    x = float(_LEFT)
    for meaning, cell in raster.legend:
        parts.append(_bar(x, 52 - 10 * cell.height / 2, 16, 10 * cell.height, cell.colour))
        parts.append(f'<text x="{x:.0f}" y="56" dx="21">{escape(meaning)}</text>')
        x += 46 + 6.3 * len(meaning)
    every = -(-len(raster.rows) // _MOST_LABELS)
    for place, row in enumerate(raster.rows):
        y = _TOP + place * raster.row_height
        if place % every == 0:
            middle = y + raster.row_height / 2 + 4
            parts.append(f'<text x="{_LEFT - 6}" y="{middle:.1f}" text-anchor="end">{escape(row.label)}</text>')
        for start, length, cell in _runs(row.cells):
            height = raster.row_height * cell.height
            top = y + (raster.row_height - height) / 2
            parts.append(_bar(_LEFT + start * step_width, top, length * step_width, height, cell.colour))
    parts.append(f'<line x1="{_LEFT}" y1="{bottom}" x2="{_WIDTH - _RIGHT}" y2="{bottom}" stroke="#999"/>')
    for tick in _ticks(first_step - 1, num_steps):
        at = f"{_LEFT + (tick - first_step + 1) * step_width:.1f}"
        parts.append(f'<line x1="{at}" y1="{bottom}" x2="{at}" y2="{bottom + 4}" stroke="#999"/>')
        parts.append(f'<text x="{at}" y="{bottom + 17}" text-anchor="middle">{tick}</text>')
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{bottom + 34}" text-anchor="middle">steps</text>')
    return parts


def _ticks(num_before: int, num_steps: int) -> range:
    """Return round numbers of steps that end within the picture; a tick stands at the end of its step."""
    first, second, *_ = ticks(0.0, num_steps, count=10)
    every = max(1, round(second - first))
    return range(-(-num_before // every) * every, num_before + num_steps + 1, every)


def _runs(cells: Sequence[Cell | None]) -> Iterator[tuple[int, int, Cell]]:
    """First step, length and cell of every run of equal cells."""
    start = 0
    for cell, run in groupby(cells):
        length = len(list(run))
        if cell is not None:
            yield start, length, cell
        start += length


def _bar(x: float, y: float, width: float, height: float, colour: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{colour}"/>'


def _shortened(name: str) -> str:
    """Begin and end: those of the prompts of one call begin alike."""
    return name if len(name) <= _MOST_CHARACTERS else f"{name[:_BEGIN]}…{name[_BEGIN + 1 - _MOST_CHARACTERS :]}"


def _colour(number: int) -> str:
    return _shade(number, 0.62)


def _dark(number: int) -> str:
    return _shade(number, 0.36)


def _pale(number: int) -> str:
    return _shade(number, 0.82)


def _shade(number: int, lightness: float) -> str:
    """The colour of a request: hues a golden section apart, so that neighbours differ."""
    red, green, blue = colorsys.hls_to_rgb((0.58 + number * 0.381966) % 1.0, lightness, 0.55)
    return f"#{round(red * 255):02x}{round(green * 255):02x}{round(blue * 255):02x}"
