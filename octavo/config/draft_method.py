"""The method that a checkpoint guesses with, where `speculative_config` names the model alone."""

from __future__ import annotations

import dataclasses
from typing import Any

from octavo.config import hub
from octavo.config.args import EngineArgs
from octavo.config.checkpoint import Checkpoint
from octavo.config.speculative_args import MODEL_METHODS


def with_method(args: EngineArgs) -> EngineArgs:
    """Return the arguments with the method in `speculative_config`; `args` where it is there, or no model is named.

    Raises ConfigError or CheckpointError for a model that cannot be found or read.
    """
    given: dict[str, Any] = args.speculative_config or {}
    if "method" in given or not isinstance(given.get("model"), str):
        return args
    draft = Checkpoint.open(hub.locate_named(args, given["model"], given.get("revision")))
    return dataclasses.replace(args, speculative_config={"method": _method_of(draft, given["model"]), **given})


def _method_of(draft: Checkpoint, given: str) -> str:
    architecture = draft.architecture
    for name, method in MODEL_METHODS.items():
        if architecture == method.architecture:
            return name
    marks = f"{architecture} {draft.values.get('speculators_model_type')}".lower()
    for name in ("dflash", "dspark"):
        if name in marks:
            return name
    if "eagle3" in marks or "peagle" in marks or draft.values.get("draft_vocab_size") is not None:
        return "eagle3"
    # the first heads have the architecture of their model
    return "eagle" if "eagle" in marks or "eagle-" in given.lower() else "draft_model"
