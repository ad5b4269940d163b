"""What a person may set in the place of what a checkpoint's files say; a part of `ModelArgs`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

from octavo.config.fields import Arg


@dataclass(frozen=True, kw_only=True)
class CheckpointArgs:
    """Values of `config.json` and `generation_config.json`."""

    heading: ClassVar = "Checkpoint"

    generation_config: Annotated[
        str,
        Arg(
            "Where sampling defaults come from: auto is the checkpoint's generation_config.json, none is octavo's own, "
            "anything else is a directory or file to read."
        ),
    ] = "auto"
    override_generation_config: Annotated[
        dict[str, Any],
        Arg('Sampling defaults in the place of those of generation_config, as JSON, such as {"temperature": 0.5}.'),
    ] = field(default_factory=dict)
    hf_overrides: Annotated[
        dict[str, Any],
        Arg(
            'Values in the place of those of the checkpoint\'s config.json, as JSON, such as {"rope_scaling": '
            '{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}}.'
        ),
    ] = field(default_factory=dict)
