"""What a person may set about vectors and scores; a part of `args`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from octavo.config.fields import arg


@dataclass(frozen=True, kw_only=True)
class PoolingArgs:
    """Whether the model writes text, or makes vectors or scores of its prompts."""

    heading: ClassVar = "Vectors"

    runner: str = arg(
        "auto",
        "generate writes text, pooling makes vectors or scores; auto is pooling for encoders, classifiers and "
        "checkpoints with sentence-transformers' modules.json.",
        choices=("auto", "generate", "pooling"),
    )
    convert: str = arg(
        "auto",
        "What a pooling model makes: embed is vectors, classify is scores; auto takes what the checkpoint says.",
        choices=("auto", "none", "embed", "classify"),
    )
