"""Draws a simulation or a recorded run as SVG: `python -m benchmarks.draw FILE PICTURE.svg`.

FILE is the report of `octavo simulate --output FILE`, or a recording of `octavo serve --record-trace FILE`. A recording
is replayed; its picture shows what each request did in each step and which blocks it used. `--first-step` and
`--num-steps` choose a part of it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.drawing.film import film
from benchmarks.drawing.raster import whole_picture
from benchmarks.drawing.report_chart import report_chart
from octavo.errors import OctavoError


def main(words: Sequence[str] | None = None) -> int:
    """Draw one file and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--first-step", type=int, default=1, help="of a recording [1]")
    parser.add_argument("--num-steps", type=int, default=400, help="of a recording [400]")
    given = parser.parse_args(words)
    try:
        svg = _drawn(given.file, given.first_step, given.num_steps)
        given.picture.write_text(svg, encoding="utf-8")
    except (OctavoError, OSError) as error:
        print(f"benchmarks.draw: {error}", file=sys.stderr)
        return 1
    print(f"{given.picture}: {len(svg) // 1024} KiB")
    return 0


def _drawn(file: Path, first_step: int, num_steps: int) -> str:
    try:
        report = json.loads(file.read_bytes())
    except ValueError:
        return whole_picture(film(file, first_step, num_steps))
    return report_chart(report)


if __name__ == "__main__":
    sys.exit(main())
