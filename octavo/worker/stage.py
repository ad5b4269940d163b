"""The model of one pipeline stage among others, called like a whole model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from octavo.attention.metadata import IntermediateTensors, ModelInput
from octavo.devices.device import LanguageModel
from octavo.distributed.mesh import Mesh


class Stage:
    """Receives what the stage before sends, runs `model`, and sends what it returns to the next stage.

    Sending and receiving are not part of recorded steps: `received`, room for the tokens of the largest step, stays in
    its place, so a recording reads it again.
    """

    def __init__(self, model: LanguageModel, mesh: Mesh, received: IntermediateTensors | None) -> None:
        """received: None for the first stage."""
        self._model: Callable[[ModelInput], Any] = model
        self._mesh = mesh
        self._received = received
        self.compute_logits = model.compute_logits

    def __call__(self, batch: ModelInput) -> Any:
        """Return the last hidden states [tokens, hidden]; a stage that is not the last, what it sent."""
        mesh, stage = self._mesh, self._mesh.pipeline.rank
        if self._received is not None:
            num_tokens = len(batch.token_ids)
            hidden, residual = self._received
            received = IntermediateTensors(hidden[:num_tokens], None if residual is None else residual[:num_tokens])
            for part in received.parts:
                mesh.receive(part, stage - 1)
            batch = replace(batch, received=received)
        result = self._model(batch)
        if isinstance(result, IntermediateTensors):
            for part in result.parts:
                mesh.send(part, stage + 1)
        return result
