"""Layers behind the last one that predict the token after the next one (MTP): DeepSeek V3, GLM-4.5 and relatives.

Source: https://arxiv.org/abs/2412.19437, section 2.2.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from octavo.attention.metadata import ModelInput
from octavo.config.checkpoint import Checkpoint
from octavo.distributed.mesh import Axis, Mesh
from octavo.errors import UnsupportedModel
from octavo.layers.elementwise import addition
from octavo.layers.embedding import LMHead
from octavo.layers.linear import ColumnLinear
from octavo.models.blocks import stream_norm
from octavo.models.config import DecoderConfig
from octavo.models.decoder import DecoderStack
from octavo.models.registry import ModelClass, resolve_model

_PLACES = "num_nextn_predict_layers"


class PredictionLayer(DecoderStack):
    """What a family's class becomes the first of its prediction layers with, as the base before it.

    Its input and its result are those of a `DraftHead`: the states are the model's last hidden states.
    """

    IGNORED = (*DecoderStack.IGNORED, r".*\.embed_tokens\.weight")

    @classmethod
    def read(cls, c: Checkpoint) -> DecoderConfig:
        config: DecoderConfig = super().read(c)
        count = config.num_layers
        return replace(
            config,
            num_layers=count + 1,
            tied=False,
            has_head=False,
            sparse=(*config.sparse, True) if config.sparse else (),
            windows=(*config.windows, None) if config.windows else (),
            ropes=(*config.ropes, config.ropes[-1]) if config.ropes else (),
        )

    def __init__(self, c: DecoderConfig, mesh: Mesh, *arguments: Any, **named: Any) -> None:
        super().__init__(c, mesh, *arguments, **named)
        self.norm = None
        self.add = addition()
        layer = self.layers[str(self.layer_range.start)]
        layer.enorm, layer.hnorm = stream_norm(c), stream_norm(c)
        layer.eh_proj = ColumnLinear(2 * c.hidden_size, c.hidden_size, Mesh.single())
        layer.shared_head = nn.Module()
        layer.shared_head.norm = stream_norm(c)
        layer.shared_head.head = LMHead(c.hidden_size, c.vocab_size, Mesh.single())
        self._lent: Any = None

    @property
    def received_size(self) -> int | None:
        return self.config.hidden_size

    def lend(self, model: DecoderStack) -> None:
        """Use the token embedding of the loaded model."""
        self._lent = (model.embed_tokens,)  # no part of this module

    def _embedded(self, batch: ModelInput) -> Tensor:
        assert batch.received is not None, "a prediction layer reads hidden states"
        if self._lent is None:  # a dry run
            return torch.empty(
                (len(batch.token_ids), self.config.hidden_size), dtype=batch.received.hidden.dtype, device="meta"
            )
        (embed,) = self._lent
        embedded: Tensor = embed(batch.token_ids)
        return embedded

    @property
    def _layer(self) -> Any:
        return self.layers[str(self.layer_range.start)]

    def owns(self, name: str) -> bool:
        return name.startswith(f"layers.{self.layer_range.start}.")

    def forward(self, batch: ModelInput) -> Tensor:
        """Return the stream behind the layer, [tokens, hidden]."""
        assert batch.received is not None
        layer = self._layer
        both = torch.cat((layer.enorm(self._embedded(batch)), layer.hnorm(batch.received.hidden)), 1)
        x, residual = layer(layer.eh_proj(both), None, batch)
        stream: Tensor = self.add(x, residual)
        return stream

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Return float32 logits [rows, tokens] behind streams of this layer, [rows, hidden]."""
        logits: Tensor = self._layer.shared_head.head(self._layer.shared_head.norm(hidden))
        return logits


def prediction_layer(c: Checkpoint) -> tuple[ModelClass, Mesh]:
    """Return the class of a checkpoint's first prediction layer, and the mesh whose rank has that layer alone.

    Raises UnsupportedModel for a checkpoint without such a layer.
    """
    family: Any = resolve_model(c, reads_images=False)
    count = c.optional_int(_PLACES) or 0
    if not count or not issubclass(family, DecoderStack):
        raise UnsupportedModel(
            f"{c.origin(_PLACES)}: {_PLACES} is {count}, expected at least 1: method mtp guesses with the layers that "
            "a model has for it, and this one has none; take another method"
        )
    made: Any = type(f"{family.__name__}Prediction", (PredictionLayer, family), {})
    num_layers = c.positive("num_hidden_layers")
    return made, Mesh(pipeline=Axis(num_layers, num_layers + 1))
