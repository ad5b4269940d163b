"""`octavo models`: the families of models, and what each supports."""

from __future__ import annotations

import json
from importlib.resources import files
from textwrap import dedent

from octavo.cli.terminal import say
from octavo.config.explain import render_table


def families() -> int:
    """List the families of models with their caches, quantization and parallel ways. The table is of this version."""
    table = json.loads((files("octavo") / "models" / "families.json").read_text(encoding="utf-8"))
    rows = [("FAMILY", "READS", "CACHES", "QUANTIZATION", "PARALLEL", "ARCHITECTURES")]
    for name, row in table.items():
        rows.append(
            (name, *(", ".join(row[key]) for key in ("reads", "caches", "quantization", "parallel", "architectures")))
        )
    rows.append(
        ("any other", "text", "as its class", "int8, int4, int4-g128", "", "by transformers' class, proved at start")
    )
    say(dedent(render_table(rows)))
    return 0
