"""What the command line says about the model that ships with the package."""

from __future__ import annotations

import sys

from octavo.config.args import BUILTIN_MODEL, EngineArgs


def mention_demonstration_model(args: EngineArgs) -> None:
    """One line on stderr when the small model is used, so that nobody takes its answers for a real one's."""
    if args.model == BUILTIN_MODEL:
        print(
            f"{BUILTIN_MODEL} is a demonstration model of a few million parameters; give --model for a real one.",
            file=sys.stderr,
        )
