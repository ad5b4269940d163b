"""Where the methods of speculation look for guesses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from octavo.config.schema import MODEL_METHODS, SpeculativeConfig
from octavo.speculation.predicted_output import PredictedOutput
from octavo.speculation.prompt_lookup import PromptLookup
from octavo.speculation.shared_outputs import SharedOutputs
from octavo.speculation.source import GuessSource

MakeSources = Callable[[SpeculativeConfig], tuple[GuessSource, ...]]

SOURCES: Final[Mapping[str, MakeSources]] = {
    "grammar": lambda config: (),
    "ngram": lambda config: (PredictedOutput(config), PromptLookup(config)),
    "suffix": lambda config: (PredictedOutput(config), PromptLookup(config, SharedOutputs())),
    **dict.fromkeys(MODEL_METHODS, lambda config: (PredictedOutput(config),)),
}
"""By method: where guesses are looked for, in this order, behind those that came back with results: what a form leaves
no choice of, and what a model guesses."""
