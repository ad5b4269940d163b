"""Disaggregated prefill, beside one engine that does both: `python -m benchmarks.split --model PATH`.

Requests decode (64 → --output-len tokens), and long prompts (--prompt-len → 16) arrive among them, one every --period
seconds. Three servers take turns, repetition by repetition:

    plain    octavo serve --no-enable-chunked-prefill: a prompt is computed in one step
    chunked  octavo serve
    split    octavo serve --prefill 1 --decode 1

Gaps are those between tokens of the requests that decode; first tokens are those of the long prompts. Goodput is the
number of requests per second, of both kinds, whose first token comes within --first-token-limit seconds and 99 % of
whose gaps are within --gap-limit. Ratios are those of medians over the repetitions to `chunked`. `--picture FILE.svg`
draws the last repetition.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from benchmarks.drawing.chart import Panel, Series, render
from benchmarks.gaps import Asked, Server, Streamed, run, served
from octavo.cli.report import report
from octavo.simulate.report import Spread

_SHORT_PROMPT, _SHORT_OUTPUT = 64, 16


def mixture(num_decodes: int, output_len: int, num_prompts: int, prompt_len: int, period_s: float) -> list[Asked]:
    """Return requests that decode from the begin, and long prompts that arrive one by one."""
    decodes = [Asked(0.0, _SHORT_PROMPT, output_len)] * num_decodes
    return decodes + [Asked(period_s * (place + 1), prompt_len, _SHORT_OUTPUT) for place in range(num_prompts)]


def figures(
    load: Sequence[Asked], found: Sequence[Streamed], first_token_limit_s: float, gap_limit_s: float
) -> dict[str, float]:
    """Return milliseconds between tokens of short prompts, seconds to the first token of long ones, and rates."""
    pairs = list(zip(load, found, strict=True))
    gaps = {id(each): [b - a for a, b in zip(each.events_s, each.events_s[1:], strict=False)] for each in found}
    decoding = Spread.of([gap for asked, each in pairs if asked.input_len == _SHORT_PROMPT for gap in gaps[id(each)]])
    worst = max(gap for asked, each in pairs if asked.input_len == _SHORT_PROMPT for gap in gaps[id(each)])
    first = [each.events_s[0] - each.sent_s for asked, each in pairs if asked.input_len != _SHORT_PROMPT]
    total_s = max(each.events_s[-1] for each in found) - min(each.sent_s for each in found)
    good = [
        each
        for each in found
        if each.events_s[0] - each.sent_s <= first_token_limit_s and Spread.of(gaps[id(each)]).p99 <= gap_limit_s
    ]
    return {
        "gap_median_ms": 1e3 * decoding.p50,
        "gap_p99_ms": 1e3 * decoding.p99,
        "gap_worst_ms": 1e3 * worst,
        "first_token_median_s": statistics.median(first),
        "first_token_worst_s": max(first),
        "output_tokens_per_s": sum(each.output_len for each in load) / total_s,
        "goodput_per_s": len(good) / total_s,
        "good_share": len(good) / len(found),
    }


def picture(load: Sequence[Asked], streamed: dict[str, list[Streamed]]) -> str:
    """Return an SVG: the longest gap in each second over all that decode, and the first tokens of long prompts."""
    gaps, first = [], []
    for name, found in streamed.items():
        began = min(each.sent_s for each in found)
        longest: dict[int, float] = {}
        times: list[tuple[float, float]] = []
        for asked, each in zip(load, found, strict=True):
            if asked.input_len != _SHORT_PROMPT:
                times.append((asked.at_s, each.events_s[0] - each.sent_s))
                continue
            for before, after in zip(each.events_s, each.events_s[1:], strict=False):
                second = int(after - began)
                longest[second] = max(longest.get(second, 0.0), 1e3 * (after - before))
        gaps.append(Series(name, sorted(longest.items())))
        first.append(Series(name, sorted(times)))
    panels = [
        Panel("Longest gap between tokens", "seconds", "milliseconds", gaps, is_wide=True),
        Panel("First token of long prompts", "sent at second", "seconds", first, has_marks=True),
    ]
    return render("Long prompts among requests that decode", panels)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--serve", default="", help="further arguments of every octavo serve")
    parser.add_argument("--num-decodes", type=int, default=4)
    parser.add_argument("--output-len", type=int, default=200)
    parser.add_argument("--num-prompts", type=int, default=4)
    parser.add_argument("--prompt-len", type=int, default=1500)
    parser.add_argument("--period", type=float, default=4.0)
    parser.add_argument("--first-token-limit", type=float, default=6.0)
    parser.add_argument("--gap-limit", type=float, default=0.3)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--picture", type=Path)
    args = parser.parse_args()
    common = f"--model {args.model} {args.serve}"
    arrangements = {
        "chunked": "",
        "plain": f"--no-enable-chunked-prefill --max-num-batched-tokens {max(2048, args.prompt_len)}",
        "split": "--prefill 1 --decode 1",
    }
    load = mixture(args.num_decodes, args.output_len, args.num_prompts, args.prompt_len, args.period)
    runs: dict[str, list[dict[str, float]]] = {}
    last: dict[str, list[Streamed]] = {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="octavo-split-")))
        servers = [
            Server(name, stack.enter_context(served(f"{common} {words}", folder / f"{name}.log")).url)
            for name, words in arrangements.items()
        ]
        for server in servers:
            run(server, [Asked(0.0, _SHORT_PROMPT, 16), Asked(0.0, args.prompt_len, 16)], seed=-1)
        for repetition in range(args.repetitions):
            # there and back again: a machine that slows down slows down all of them
            for server in servers if repetition % 2 == 0 else reversed(servers):
                last[server.name] = run(server, load, seed=repetition)
                found = figures(load, last[server.name], args.first_token_limit, args.gap_limit)
                runs.setdefault(server.name, []).append(found)
                shown = ", ".join(f"{name} {value:,.4g}" for name, value in found.items())
                print(f"{server.name}: {shown}", file=sys.stderr)
    if args.picture is not None:
        args.picture.write_text(picture(load, last), encoding="utf-8")
    medians = {
        name: {key: statistics.median(each[key] for each in found) for key in found[0]} for name, found in runs.items()
    }
    base = medians["chunked"]
    ratios = {
        name: {key: value / base[key] for key, value in found.items() if base[key]} for name, found in medians.items()
    }
    report("split", {"arguments": vars(args) | {"picture": None}}, {"servers": medians, "ratios": ratios, "runs": runs})


if __name__ == "__main__":
    main()
